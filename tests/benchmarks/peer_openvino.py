"""OpenVINO GenAI behind JSON: runs in an interpreter of its own, started by `remote.py`.

The model is exported from the folder the race has saved; weights keep their number format, activations have the same. Its
cache of prefixes cannot be emptied, so `forget` opens a new pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from optimum.intel import OVModelForCausalLM
from serve import serve

END = 0
"""An end must be named, and is ignored."""

engine: Any = None
open_engine: Callable[[], Any]


def load(folder: str, dtype: str, sequences: int, kv_gb: int, threads: int, **others: int) -> dict[str, Any]:
    """Export the model unless it is there, and open it; versions."""
    global open_engine
    exported = Path(folder) / "openvino"
    if not exported.exists():
        model = OVModelForCausalLM.from_pretrained(folder, export=True, compile=False, load_in_8bit=False)
        model.save_pretrained(exported)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = kv_gb, sequences
    scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2048, True
    precision = {"float32": "f32", "bfloat16": "bf16"}[dtype]
    hints = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, "INFERENCE_NUM_THREADS": threads}
    open_engine = lambda: genai.ContinuousBatchingPipeline(exported, scheduler, "CPU", hints)  # noqa: E731
    forget()
    return {"versions": {"openvino-genai": genai.__version__, "openvino": openvino.__version__}}


def generate(prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Seconds of all requests, and the completions."""
    start = time.perf_counter()
    handles = []
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        options = genai.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=2**31 - 1, top_p=1.0, max_new_tokens=length, ignore_eos=True,
            logprobs=1, eos_token_id=END, stop_token_ids={END}, rng_seed=number,
        )  # fmt: skip
        handles.append(engine.add_request(number, openvino.Tensor(np.array([prompt], np.int64)), options))
    while engine.has_non_finished_requests():
        engine.step()
    replies = [handle.read_all()[0] for handle in handles]
    return {
        "seconds": time.perf_counter() - start,
        "completions": [list(reply.generated_ids) for reply in replies],
        "logprobs": sum(len(reply.generated_log_probs) for reply in replies),
    }


def forget() -> dict[str, Any]:
    """Open a pipeline with an empty cache, and let it run once."""
    global engine
    engine = None
    engine = open_engine()
    generate([[1, 2, 3, 4]] * 2, [2, 2])
    return {}


if __name__ == "__main__":
    serve({"load": load, "generate": generate, "forget": forget})
