"""Common parts of the stages: models of Qwen3's shapes with random weights, engines of them, and the file of findings."""

from __future__ import annotations

import gc
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from rollout.engine.engine import DynamicInferenceEngine
from tests.configs import engine_config

FINDINGS = "findings.jsonl"
HEAD_DIM = 128
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 1000},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 151936},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 151936},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 151936},
}  # fmt: skip
"""Qwen3's, and one for a test of this script."""
SPREAD = 5.0
"""Scale of the embedding: logits as far apart as a trained model's, so that greedy choices are no ties."""


@dataclass(eq=False)
class Run:
    """One call of the script."""

    device: torch.device
    out: Path
    sizes: tuple[str, ...]

    @property
    def cuda(self) -> bool:
        """Whether it runs on a GPU. Otherwise sizes are small, and stages have no time limit."""
        return self.device.type == "cuda"

    def say(self, what: str, **found: Any) -> None:
        """Print one finding, and append it to the file."""
        say(self.out, what, **found)

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def say_memory(self, at: str) -> None:
        """Memory that torch has allocated and reserved, that the driver has given away, and the process's."""
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if not self.cuda:
            self.say("memory", at=at, resident_gib=gib(resident))
            return
        self.wait()
        free, total = torch.cuda.mem_get_info(self.device)
        self.say(
            "memory", at=at, allocated_gib=gib(torch.cuda.memory_allocated(self.device)),
            reserved_gib=gib(torch.cuda.memory_reserved(self.device)), driver_used_gib=gib(total - free),
            resident_gib=gib(resident),
        )  # fmt: skip

    def model(self, size: str, dtype: torch.dtype = torch.bfloat16, layers: int | None = None) -> PreTrainedModel:
        """Random weights of Qwen3's shape, in training mode; `layers`: fewer than it has."""
        shape = SHAPES[size] | ({} if layers is None else {"num_hidden_layers": layers})
        tied = size != "8b"
        config = Qwen3Config(**shape, head_dim=HEAD_DIM, max_position_embeddings=40960, tie_word_embeddings=tied)
        torch.manual_seed(0)
        with self.device:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(SPREAD)
            if not tied:
                model.lm_head.weight.mul_(SPREAD)
        model.generation_config.eos_token_id = None
        model.train()
        return model

    @contextmanager
    def engine(self, model: PreTrainedModel, **options: Any) -> Iterator[DynamicInferenceEngine]:
        """An engine for the length of a block, whose memory is free afterwards."""
        engine = DynamicInferenceEngine(model, None, engine_config(**options))
        try:
            yield engine
        finally:
            engine.pause()
            engine.stop()
            self.collect()

    def collect(self) -> None:
        """Free what is not used any more."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


def say(out: Path, what: str, **found: Any) -> None:
    """Print one finding as a line of JSON, and append it to `findings.jsonl` in `out`."""
    line = json.dumps({"what": what} | found, default=str)
    print(line, flush=True)
    with (out / FINDINGS).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def gib(size: float) -> float:
    """Bytes as GiB, rounded."""
    return round(size / 2**30, 3)


def prompts(model: PreTrainedModel, count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of `shortest` to `longest` tokens."""
    rng = np.random.default_rng(seed)
    vocabulary = model.config.vocab_size
    return [rng.integers(10, vocabulary, int(rng.integers(shortest, longest + 1))).tolist() for _ in range(count)]


def captured(engine: DynamicInferenceEngine) -> dict[str, Any]:
    """How many graphs the engine has captured, or why none."""
    graphs = engine.controller.runner.graphs
    if graphs is None:
        return {"graphs": 0, "why_not": "no CUDA device, Triton, or fixed addresses"}
    counts = {"graphs": len(graphs.captured)}
    return counts | {"why_not": graphs.why_not, "graph_gib": gib(graphs.graph_bytes)}
