"""Stage `fused`: the Triton forward beside the module's own, in truth and in speed."""

from __future__ import annotations

import numpy as np
import torch
from transformers import PreTrainedModel

from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.exactness import CHUNKED, captured_prefill, logprob_errors, require_chunks
from tests.gpu_first_run.findings import Run, captured, prompts
from tests.gpu_first_run.speed import CASES, decode_steps


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
