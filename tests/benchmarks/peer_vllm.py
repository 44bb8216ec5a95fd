"""vLLM's CPU build behind JSON: runs in an interpreter of its own, started by `remote.py`."""

from __future__ import annotations

import time
from typing import Any

from serve import serve

engine: Any = None


def load(folder: str, dtype: str, sequences: int, longest: int, **others: int) -> dict[str, Any]:
    """Build the engine and let it generate once; its versions."""
    global engine
    import torch
    import vllm

    engine = vllm.LLM(
        model=folder, dtype=dtype, max_model_len=longest, max_num_seqs=sequences, enable_prefix_caching=True,
        generation_config="vllm", skip_tokenizer_init=True, disable_log_stats=True, seed=0,
    )  # fmt: skip
    return {"versions": {"vllm": vllm.__version__, "torch": torch.__version__}}


def generate(prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Seconds around `LLM.generate`, and the completions."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=1.0, max_tokens=n, min_tokens=n, ignore_eos=True, logprobs=0, detokenize=False)
        for n in lengths
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = engine.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    samples = [output.outputs[0] for output in outputs]
    return {
        "seconds": seconds,
        "completions": [list(sample.token_ids) for sample in samples],
        "logprobs": sum(len(sample.logprobs) for sample in samples),
    }


def forget() -> dict[str, Any]:
    """Empty the prefix cache."""
    if not engine.reset_prefix_cache():
        raise RuntimeError("the prefix cache is still in use")
    return {}


if __name__ == "__main__":
    serve({"load": load, "generate": generate, "forget": forget})
