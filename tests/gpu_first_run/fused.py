"""Stages `fused` and `families`: the Triton forward beside the module's own, in truth and in speed."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch
from transformers import PreTrainedModel

from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.exactness import CHUNKED, captured_prefill, logprob_errors, require_chunks
from tests.gpu_first_run.findings import Run, captured, prompts
from tests.gpu_first_run.speed import CASES, decode_steps
from tests.models import make_model

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma2", "gemma3", "olmo2", "olmo3", "phi3", "glm",
    "glm4", "gpt2",
)  # fmt: skip
"""Those of the Triton forward, as `tests.models` names them."""


def fused(run: Run) -> None:
    """Log-probs of samples against the trainer's forward, and decode steps, with the fused forward and without it."""
    captures = []
    for dtype in (torch.bfloat16, torch.float32):
        model = run.model(run.sizes[0], dtype)
        for on in (True, False):
            captures.append(_truth(run, model, on=on))
        del model
        run.collect()
    for size in run.sizes:
        model = run.model(size)
        batch, context = CASES[0] if run.large else (2, 16)
        for on in (True, False):
            decode_steps(run, model, size, batch, context, f"bf16, fused_forward={on}", fused_forward=on)
        del model
        run.collect()
    model = run.model(run.sizes[0], torch.float32)
    batch, context = CASES[0] if run.large else (2, 16)
    for on in (True, False):
        label = f"fp32, autocast_dtype, fused_forward={on}"
        decode_steps(run, model, run.sizes[0], batch, context, label, autocast_dtype="bfloat16", fused_forward=on)
    require_chunks(run, captures)


def families(run: Run) -> None:
    """Log-probs of samples of every family against the trainer's forward, in bfloat16, of small models; and with LoRA."""
    shape = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    if run.rehearsed:
        shape = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
        }
    left = []
    for name in FAMILIES if run.cuda else FAMILIES[:1]:
        model = make_model(name, dtype=torch.bfloat16, **shape).to(run.device).train()
        left += _samples(run, model, name)
        if name == "llama" and find_spec("peft"):
            peft = import_module("peft")
            config = peft.LoraConfig(r=16, lora_dropout=0.1, init_lora_weights=False, target_modules="all-linear")
            left += _samples(run, peft.get_peft_model(model, config), f"{name}, LoRA")
        del model
        run.collect()
    if left and run.cuda:
        raise RuntimeError(f"their own forward runs: {'; '.join(left)}")


def _samples(run: Run, model: PreTrainedModel, name: str) -> list[str]:
    """Why the fused forward does not run; empty: it does."""
    left = []
    params = SamplingParams(max_tokens=32 if run.large else 4, ignore_eos=True, seed=5)
    for on in (True, False):
        with run.engine(model, fused_forward=on, kv_cache_memory_gb=1 if run.large else 0.1) as engine:
            done = engine.generate(prompts(model, 8 if run.large else 2, 5, 60, seed=1), params)
            found = np.concatenate([logprob_errors(run, model, request) for request in done])
            why = engine.controller.runner.why_not_fused()
            run.say(
                "log-probs, family", family=name, fused_forward=on, why_not_fused=why, **captured(engine),
                mean=found.mean(), p99=np.quantile(found, 0.99), max=found.max(), tokens=len(found),
            )  # fmt: skip
            if on and why is not None:
                left.append(f"{name}: {why}")
    return left


def _truth(run: Run, model: PreTrainedModel, *, on: bool) -> bool:
    """Whether chunks of prompts were captured."""
    asked = prompts(model, 16 if run.large else 2, 5, 500 if run.large else 40, seed=1)
    params = SamplingParams(max_tokens=64 if run.large else 4, ignore_eos=True, seed=5)
    with run.engine(model, fused_forward=on, kv_cache_memory_gb=8 if run.large else 0.1, **CHUNKED) as engine:
        done = engine.generate(asked, params)
        found = np.concatenate([logprob_errors(run, model, request) for request in done])
        errors = {"mean": found.mean(), "p99": np.quantile(found, 0.99), "max": found.max(), "tokens": len(found)}
        why = engine.controller.runner.why_not_fused()
        kind = {"dtype": str(model.dtype), "fused_forward": on, "why_not_fused": why}
        run.say("log-probs, fused", **kind, **captured(engine), **errors)
        return captured_prefill(run, engine, model, asked, params, **kind)
