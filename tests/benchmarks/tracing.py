"""Cost of a trace: rollouts with and without one in alternating rounds, the recorder's own time per step, and the
coordinator's for its decisions.

    python -m tests.benchmarks.tracing [--rounds 8] [--json FILE]

A round is 4 prompts of 8 samples on a model of 40 M parameters in float32 on two threads. The ratio of two rounds is as
noisy as the machine; the recorder's time per step over the mean time of a step is not. The coordinator keeps its latest
decisions always, for a trace that asks for them: `decisions_share` is that of its core's time per request, without sockets,
where it is largest (`tests.benchmarks.core_alone`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import rollout
from rollout.config import InferenceConfig
from rollout.distributed.coordinator.core.dispatch import ScheduleRecord
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from rollout.tracing import recorder
from tests.benchmarks import core_alone
from tests.benchmarks.coordinator import CORE_LOADS
from tests.benchmarks.echo import Load

REPEATS = 20_000
RANKS, REQUESTS = 16, 3000
"""Of the coordinator's core."""


def measure(rounds: int) -> dict[str, float]:
    """Seconds and shares, by name."""
    torch.manual_seed(0)
    shape = Qwen2Config(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=32_000, max_position_embeddings=2048,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(shape)
    config = InferenceConfig(kv_cache_blocks=4096, max_requests=64, verify_model=False, enable_prefix_caching=False)
    with RolloutManager(model, None, config) as manager, tempfile.TemporaryDirectory() as folder:
        _generate(manager)
        steps = manager.engine.stats()["steps"]
        off, on = [], []
        for _ in range(rounds):
            off.append(_generate(manager))
            with rollout.trace(Path(folder) / "round.json"):
                on.append(_generate(manager))
        each = statistics.median(off) / ((manager.engine.stats()["steps"] - steps) / 2 / rounds)
        recording, looking = _per_step(manager)
    kept, share = max((_decisions(load) for load in CORE_LOADS), key=lambda found: found[1])
    return {
        "round_off_s": statistics.median(off),
        "round_on_s": statistics.median(on),
        "ratio_median": statistics.median(b / a for a, b in zip(off, on, strict=True)),
        "step_s": each,
        "recorder_s_per_step": recording,
        "recorder_share_on": recording / each,
        "recorder_share_off": looking / each,
        "decisions_s_per_request": kept,
        "decisions_share": share,
    }


def _generate(manager: RolloutManager) -> float:
    start = time.perf_counter()
    manager.generate(
        [[5 + index] * 32 for index in range(4)], SamplingParams(n=8, max_tokens=48, ignore_eos=True), progress=False
    )
    return time.perf_counter() - start


def _per_step(manager: RolloutManager) -> tuple[float, float]:
    """Seconds of the recorder's calls of one step, and of those of a step without a recorder."""
    engine, active = manager.engine, recorder.start("benchmark")
    step, scheduler = engine.last_step, engine.context.scheduler
    assert step is not None
    start = time.perf_counter()
    for _ in range(REPEATS):
        log = engine.tap.log
        assert log is not None
        log.step_begins(scheduler)
        log.step_reached()
        log.step_reached()
        log.step_ends(step, scheduler)
    recording = (time.perf_counter() - start) / REPEATS
    recorder.stop(active)
    start = time.perf_counter()
    for _ in range(REPEATS):
        assert engine.tap.log is None
    return recording, (time.perf_counter() - start) / REPEATS


def _decisions(load: Load) -> tuple[float, float]:
    """Seconds per request in which the core keeps its decisions, and their share of the core's."""
    job = core_alone.Job(RANKS, load)
    core_alone.run(job, REQUESTS)
    history, spent = job.core._history, 0.0
    turn_ends = history.turn_ends

    def timed(assigned: Sequence[ScheduleRecord], now: float) -> None:
        nonlocal spent
        start = time.perf_counter()
        turn_ends(assigned, now)
        spent += time.perf_counter() - start

    history.turn_ends = timed  # type: ignore[method-assign]
    seconds = core_alone.run(job, REQUESTS)
    return spent / REQUESTS, spent / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(2)
    found = measure(options.rounds)
    for name, value in found.items():
        print(f"{name:22} {value:.6g}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
