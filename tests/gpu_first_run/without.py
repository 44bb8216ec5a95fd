"""Stage `without`: steps with every part of the captured path, and with each of them switched off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rollout.engine.forward.cuda_switches import SWITCHES, VARIABLE
from tests.gpu_first_run.findings import Run
from tests.gpu_first_run.speed import decode_steps


def without(run: Run) -> None:
    """Decode steps of 8 prompts with 8 samples each, and of prompts of their own, without one part after the other."""
    size = run.sizes[0]
    model = run.model(size)
    cases = ((64, 1024, 8), (64, 1024, 1)) if run.cuda else ((2, 16, 2),)
    for batch, context, samples in cases:
        for part in ("", *SWITCHES) if run.cuda else ("",):
            with switched_off(part):
                label = f"{samples} samples a prompt, " + (f"without {part}" if part else "with all parts")
                decode_steps(run, model, size, batch, context, label, samples=samples)


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
