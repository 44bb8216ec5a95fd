"""Draws `docs/step.png`: slots, KV memory and policy version over a few steps of a training loop, as they were.

python -m tests.benchmarks.loop_picture docs/step.png
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

from rollout import InferenceConfig, RolloutManager, SamplingParams
from tests.benchmarks.subject import make_subject
from trainer_hooks.optimizer import attach

STEPS, PROMPTS, GROUP, ENOUGH = 3, 6, 4, 4
COLOURS = ("#2f6fb0", "#e4902e", "#4a9d6e", "#8a63b8")
INK, FAINT, TRAIN = "#222222", "#9aa0a6", "#f6ead0"


class Seen(NamedTuple):
    """The notes of an observer of the loop, in seconds and MiB."""

    rows: list[tuple[float, float, int, int]]
    """(begin, end, request number, policy version) of a call of the engine and a sample that runs after it."""
    memory: list[tuple[float, float, float]]
    """(second, KV on the device, on the host)."""
    trained: list[tuple[float, float]]
    """(begin, end) of the training part of every step."""


def watch(folder: Path) -> Seen:
    """Run a small loop with samples of very different lengths, most groups of which end within a step."""
    subject = make_subject("10m", "float32", 512, folder)
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-4)
    config = InferenceConfig(kv_cache_memory_gb=0.05, max_requests=PROMPTS * GROUP)
    rng = np.random.default_rng(0)
    seen = Seen([], [], [])
    with RolloutManager(subject.model, None, config) as manager:
        attach(optimizer, manager)
        started = time.perf_counter()

        def now() -> float:
            return time.perf_counter() - started

        def look() -> None:
            stats = manager.engine.stats()
            seen.memory.append((now(), stats["kv_device_bytes"] / 2**20, stats["kv_host_bytes"] / 2**20))

        step = manager.engine.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            ended = step(*args, **kwargs)
            for sequence in manager.engine.context.scheduler.active():
                number = sequence.record.request_id * GROUP + sequence.record.sample_index
                seen.rows.append((begun, now(), number, manager.policy_version))
            look()
            return ended

        manager.engine.step = watched  # type: ignore[method-assign]
        for _ in range(STEPS):
            prompts = [rng.integers(3, subject.vocab, 64).tolist() for _ in range(PROMPTS)]
            lengths = [*rng.integers(100, 200, ENOUGH).tolist(), 400, 300]
            params = [SamplingParams(n=GROUP, max_tokens=length, ignore_eos=True) for length in lengths]
            batch = manager.generate(prompts, params, min_groups=ENOUGH, progress=False)
            begun = now()
            with manager.suspended():
                look()
                train(subject.model, optimizer, batch)
                look()
            look()
            seen.trained.append((begun, now()))
        manager.abort(range(STEPS * PROMPTS))
    return seen


def train(model: Any, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """One update from one sample of each group, so that training does not fill the picture."""
    ids, mask = batch.input_ids[::GROUP], batch.attention_mask[::GROUP]
    logprobs = model(ids, attention_mask=mask).logits[:, :-1].float().log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    loss = -(chosen - batch.logprobs[::GROUP, 1:]).exp()[batch.response_mask[::GROUP, 1:]].mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def draw(seen: Seen, path: Path) -> None:
    """Two panels over one clock: a line per running sample coloured by version, and the KV memory."""
    mpl.use("Agg")
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
                         "axes.edgecolor": FAINT, "text.color": INK, "axes.labelcolor": INK})  # fmt: skip
    figure = Figure(figsize=(10, 4.6), dpi=130, layout="constrained")
    slots, memory = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    for axes in (slots, memory):
        for begin, end in seen.trained:
            axes.axvspan(begin, end, color=TRAIN, lw=0)
    begins, ends, numbers, versions = (np.array(column) for column in zip(*seen.rows, strict=True))
    for version in np.unique(versions):
        chosen = versions == version
        # Edges close the seams between calls.
        slots.barh(numbers[chosen], (ends - begins)[chosen], 1.0, begins[chosen], lw=0.6,
                   color=(colour := COLOURS[int(version) % len(COLOURS)]), edgecolor=colour,
                   label=f"sampled under version {int(version)}")  # fmt: skip
    for begin, end in seen.trained:
        slots.text((begin + end) / 2, numbers.max() + 1.5, "train", ha="center", fontsize=9)
    slots.set_ylabel("sample")
    slots.set_xlim(left=0)
    slots.set_ylim(-1, numbers.max() + 4)
    slots.legend(loc="lower right", frameon=False, fontsize=9)
    clock, device, host = (np.array(column) for column in zip(*seen.memory, strict=True))
    memory.step(clock, device, where="post", color=COLOURS[0], label="KV on the device")
    memory.step(clock, host, where="post", color=COLOURS[1], label="KV on the host (live blocks only)")
    memory.set_ylabel("MiB")
    memory.set_xlabel("seconds")
    memory.legend(loc="upper center", bbox_to_anchor=(0.5, 1.25), ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw(watch(Path(folder)), Path(sys.argv[1]))
