"""Cost of a trace: rollouts with and without one in alternating rounds, and the recorder's own time per step.

    python -m tests.benchmarks.tracing [--rounds 8] [--json FILE]

A round is 4 prompts of 8 samples on a model of 40 M parameters in float32 on two threads. The ratio of two rounds is as
noisy as the machine; the recorder's time per step over the mean time of a step is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import rollout
from rollout.config import InferenceConfig
from rollout.engine.stepper import traced_numbers
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from rollout.tracing import recorder

REPEATS = 20_000


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
    return {
        "round_off_s": statistics.median(off),
        "round_on_s": statistics.median(on),
        "ratio_median": statistics.median(b / a for a, b in zip(off, on, strict=True)),
        "step_s": each,
        "recorder_s_per_step": recording,
        "recorder_share_on": recording / each,
        "recorder_share_off": looking / each,
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
    step, scheduler = engine.parts.stepper.last, engine.context.scheduler
    assert step is not None
    start = time.perf_counter()
    for _ in range(REPEATS):
        log = engine.tap.log
        assert log is not None
        log.step_begins(0)
        log.step_reached()
        log.step_reached()
        log.step_ends(traced_numbers(step, scheduler))
    recording = (time.perf_counter() - start) / REPEATS
    recorder.stop(active)
    start = time.perf_counter()
    for _ in range(REPEATS):
        assert engine.tap.log is None
    return recording, (time.perf_counter() - start) / REPEATS


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
