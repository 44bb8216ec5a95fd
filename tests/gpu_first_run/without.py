"""Stage `without`: steps with every part of the captured path, and with each of them switched off."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from transformers import PreTrainedModel

from rollout.engine.forward.cuda_switches import SWITCHES, VARIABLE
from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.findings import Run, captured, prompts
from tests.gpu_first_run.speed import decode_steps

CASES: dict[str, tuple[str, list[int], int]] = {
    "one long row of 64": ("parts", [512] * 63 + [8192], 0),
    "a prompt in every step": ("chunks", [1024] * 32, 512),
    "a prompt of 300 tokens in every step": ("chunks", [1024] * 32, 300),
    "a prompt of 1,100 tokens in every step": ("chunks", [1024] * 32, 1100),
}
"""Name → part that matters, tokens of the prompts that decode, tokens of the prompt that each step begins."""


def without(run: Run) -> None:
    """Decode steps of 8 prompts with 8 samples each, without one part after the other; then cases in which one matters."""
    size = run.sizes[0]
    model = run.model(size)
    batch, context, samples = (64, 1024, 8) if run.large else (2, 36, 2)
    for part in ("", *SWITCHES) if run.cuda else ("",):
        with switched_off(part):
            label = f"{samples} samples a prompt, " + (f"without {part}" if part else "with all parts")
            decode_steps(run, model, size, batch, context, label, samples=samples)
    for case, (part, lengths, arriving) in CASES.items() if run.large else [("small", ("chunks", [16, 9], 5))]:
        for off in ("", part):
            with switched_off(off):
                _steps(run, model, case, off, lengths, arriving)


def _steps(run: Run, model: PreTrainedModel, case: str, off: str, lengths: Sequence[int], arriving: int) -> None:
    """Time steps in which prompts of these lengths decode, and one of `arriving` tokens begins."""
    count, rest = (40, 200) if run.large else (3, 20)
    options = {"kv_cache_memory_gb": 20 if run.large else 0.05, "max_requests": 128, "max_tokens_per_step": 2048,
               "verify_model": False, "enable_prefix_caching": False}  # fmt: skip
    with run.engine(model, **options) as engine:
        for seed, length in enumerate(lengths):
            (prompt,) = prompts(model, 1, length, length, seed)
            engine.add_request(prompt, SamplingParams(max_tokens=rest, ignore_eos=True))
        scheduler, times = engine.context.scheduler, []
        arrivals = prompts(model, 2 * count, arriving, arriving, len(lengths)) if arriving else [[]] * 2 * count
        with engine.installation:
            while scheduler.waiting or scheduler.prefilling:
                engine.step()
            for prompt in arrivals:
                if prompt:
                    engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
                run.wait()
                start = time.perf_counter()
                engine.step()
                run.wait()
                times.append(time.perf_counter() - start)
        # The first half captures.
        step = statistics.median(times[count:])
        run.say("step", case=case, without=off, ms=step * 1e3, most_ms=max(times[count:]) * 1e3, **captured(engine))


@contextmanager
def switched_off(part: str) -> Iterator[None]:
    """A block in which engines are built without a part of `SWITCHES`; empty: with all."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = part
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
