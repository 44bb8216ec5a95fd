"""Verdicts on small models: whether an engine's results equal the model's own, each in a separate process."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rollout.errors import UnsupportedModelError
from tests.engines import greedily, make_engine, token_ids
from tests.models import greedy, trainer_logprobs
from tests.zoo.small_models import build

ROOT = Path(__file__).parents[2]
LENGTHS = (1, 9, 30, 61)
NEW_TOKENS = 12
TOLERANCE = 1e-4

EQUAL, REFUSED, NOT_BUILT, WRONG, ERROR, LATE = "equal", "refused", "not built", "WRONG", "ERROR", "LATE"
FAILURES = (WRONG, ERROR, LATE)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one architecture."""

    architecture: str
    outcome: str
    detail: str
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the architecture is neither equal nor raises a named error."""
        return self.outcome in FAILURES


def judge(architecture: str) -> Verdict:
    """Build it, serve it, compare."""
    start = time.perf_counter()

    def verdict(outcome: str, detail: str) -> Verdict:
        return Verdict(architecture, outcome, " ".join(detail.split()), time.perf_counter() - start)

    try:
        model = build(architecture)
        own = [trainer_logprobs(model, token_ids(length + 1, length)) for length in LENGTHS]
    except Exception as exc:  # noqa: BLE001 - whatever transformers raises when it builds or runs a model of its own
        return verdict(NOT_BUILT, f"{type(exc).__name__}: {exc}")
    if not all(bool(each.isfinite().all()) for each in own):
        return verdict(NOT_BUILT, "its own log-probs are not finite")
    try:
        return verdict(*_compared(model))
    except UnsupportedModelError as exc:
        return verdict(REFUSED, str(exc))
    except Exception as exc:  # noqa: BLE001 - that is what is looked for
        where = "; ".join(
            f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in traceback.extract_tb(exc.__traceback__)[-3:]
        )
        return verdict(ERROR, f"{type(exc).__name__}: {exc} ({where})")


def _compared(model: PreTrainedModel) -> tuple[str, str]:
    """Outcome and detail of a model that is served.

    Raises:
        UnsupportedModelError: it is refused.
    """
    engine = make_engine(
        model, max_tokens_per_step=23, max_sequence_length=128, verify_model=True, kv_cache_blocks=128
    )  # fmt: skip
    worst, of_own, of_engine, cached = 0.0, 0.0, 0.0, []
    exact = copy.deepcopy(model).double()
    requests = engine.generate([token_ids(length, length) for length in LENGTHS], greedily(NEW_TOKENS))
    for request in requests:
        tokens = request.prompt_tokens + request.generated_tokens
        reference = trainer_logprobs(model, tokens)[len(request.prompt_tokens) - 1 :]
        log_probs = torch.tensor(request.generated_log_probs)
        worst = max(worst, float((reference - log_probs).abs().max()))
        if worst > TOLERANCE:
            judge64 = trainer_logprobs(exact, tokens)[len(request.prompt_tokens) - 1 :]
            of_own = max(of_own, float((reference - judge64).abs().max()))
            of_engine = max(of_engine, float((log_probs - judge64).abs().max()))
        if request.generated_tokens == greedy(model, request.prompt_tokens, NEW_TOKENS):
            continue
        if request.generated_tokens != greedy(model, request.prompt_tokens, NEW_TOKENS, use_cache=False):
            return (
                WRONG,
                f"tokens differ from generate's after {len(request.prompt_tokens)} tokens (log-probs: {worst:.1e})",
            )
        cached.append(len(request.prompt_tokens))
    if not worst <= TOLERANCE and not of_engine <= of_own:
        return WRONG, f"log-probs differ from the model's own by {worst:.3g}"
    with engine.installation:
        runner = engine.controller.runner
        fused = runner.fused is not None and runner.fused.ready(runner.installation.module_epoch)
    notes = [f"log-probs within {worst:.1e}"] + ["fused"] * fused
    if of_own:
        notes.append(f"of those in float64 the engine's are off by {of_engine:.1e}, the model's own by {of_own:.1e}")
    if cached:
        notes.append(
            f"after prompts of {cached} tokens generate's own cache gives other tokens than generate without it"
        )
    return EQUAL, ", ".join(notes)


def survey(architectures: Sequence[str], jobs: int, deadline_s: float) -> Iterator[Verdict]:
    """Judge each in a process of its own, in the order in which they end."""
    with ThreadPoolExecutor(jobs) as threads:
        for judged in as_completed([threads.submit(_apart, name, deadline_s) for name in architectures]):
            yield judged.result()


def _apart(architecture: str, deadline_s: float) -> Verdict:
    command = [sys.executable, "-m", "tests.zoo.verdicts", architecture]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        return Verdict(architecture, LATE, f"nothing after {deadline_s:g} s", deadline_s)
    if done.returncode:
        return Verdict(architecture, ERROR, f"the process ended with {done.returncode}")
    return Verdict(**json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps(vars(judge(sys.argv[1]))))
