"""The log of a training run, `<folder>/run.jsonl`: metrics, rewards, staleness and some samples, one line per step.

The samples are the slowest and the most stale. `read_log` skips a line that a crash has cut off. `report` turns the log into
`report.html`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import ConfigError

FILE = "run.jsonl"
LONGEST_TEXT = 4000
"""The maximum number of characters logged per prompt, and per run of tokens that one policy version sampled."""


class RunLog:
    """A writer that appends the steps of one run to `<folder>/run.jsonl`.

    Args:
        folder: folder of the run, which is created if needed. If it has a log, new steps are appended.
        title: title of the report. If empty, the title is the name of the folder.
        samples: how many of the slowest samples, and of the most stale samples, are logged per step.

    Raises:
        ConfigError: the folder cannot be created, or the file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], *, title: str = "", samples: int = 2) -> None:
        if type(samples) is not int or samples < 0:
            raise ConfigError(f"RunLog(samples={samples!r}): must be an integer of at least 0")
        self.folder = Path(folder)
        self._samples = samples
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._append({"title": title or self.folder.name})
        except OSError as exc:
            raise ConfigError(f"RunLog({str(folder)!r}): cannot be written: {exc}") from exc

    def step(
        self,
        number: int,
        metrics: Mapping[str, float],
        *,
        batch: Any = None,
        rewards: Sequence[float] | Any = None,
        tokenizer: Any = None,
    ) -> None:
        """Append one training step's line to the log.

        Args:
            number: number of the step.
            metrics: the step's `manager.metrics()`, and any further numbers.
            batch: the step's `RolloutBatch`, from which staleness and samples are logged. If None, neither is logged.
            rewards: one number per sample of the batch, as a sequence, array or tensor of N elements.
            tokenizer: tokenizer that decodes the samples' tokens. If None, token ids are logged.

        Raises:
            ValueError: there are rewards without a batch, or not one reward per sample.
            OSError: the file cannot be written.
        """
        row: dict[str, Any] = {"step": int(number), "metrics": {k: _number(v) for k, v in metrics.items()}}
        reward = None if rewards is None else flat_array(rewards)
        if reward is not None:
            if batch is None or reward.size != len(batch):
                count = "no batch" if batch is None else f"{len(batch)} samples"
                raise ValueError(f"{reward.size} rewards for {count}: give the batch, and one reward per sample")
            if reward.size:
                low, high = np.percentile(reward, [10, 90])
                row["reward"] = [float(reward.mean()), float(low), float(high)]
        if batch is not None and len(batch):
            row |= _of_batch(batch, reward, tokenizer, self._samples)
        self._append(row)

    def _append(self, row: dict[str, Any]) -> None:
        with open(self.folder / FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_log(folder: str | os.PathLike[str]) -> tuple[str, list[dict[str, Any]]]:
    """Return a run's title and, for each step, the last line logged for it; raise `ConfigError` if there is no step."""
    path = Path(folder) / FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{str(path)!r}: cannot be read: {exc}; rollout.RunLog writes it") from exc
    title, steps = "", {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        if isinstance(row.get("title"), str):
            title = row["title"]
        if isinstance(row.get("step"), int) and isinstance(row.get("metrics"), dict):
            steps[row["step"]] = row
    if not steps:
        raise ConfigError(f"{str(path)!r}: holds no step; RunLog.step() appends them")
    return title, [steps[number] for number in sorted(steps)]


def _of_batch(batch: Any, reward: NDArray[np.float64] | None, tokenizer: Any, count: int) -> dict[str, Any]:
    response = batch.response_mask.cpu().numpy()
    staleness = batch.policy_staleness.cpu().numpy()
    ages = np.bincount(np.maximum(staleness[response], 0)).tolist()
    worst = np.where(response, staleness, -1).max(axis=1)
    seconds = np.array([-1.0 if each.latency is None else each.latency for each in batch.requests])
    chosen: dict[int, list[str]] = {}
    for index in np.argsort(-seconds, kind="stable")[:count].tolist():
        chosen.setdefault(index, []).append("slowest")
    for index in np.argsort(-worst, kind="stable")[:count].tolist():
        if worst[index] > 0:
            chosen.setdefault(index, []).append("most stale")
    return {"ages": ages, "samples": [_sample(batch, i, why, reward, tokenizer) for i, why in chosen.items()]}


def _sample(
    batch: Any, index: int, why: list[str], reward: NDArray[np.float64] | None, tokenizer: Any
) -> dict[str, Any]:
    request = batch.requests[index]
    runs = [[version, count, text[:LONGEST_TEXT]] for version, count, text in version_runs(batch, index, tokenizer)]
    told = request.prompt
    if told is None:
        ids = request.prompt_tokens
        told = " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))
    return {
        "why": why, "group": request.request_id, "sample": request.sample_index, "seconds": request.latency,
        "ttft": request.ttft, "finish": batch.finish_reasons[index], "version": batch.policy_version,
        "reward": None if reward is None else _number(reward[index]), "prompt": told[:LONGEST_TEXT], "runs": runs,
    }  # fmt: skip


def version_runs(batch: Any, index: int, tokenizer: Any) -> list[tuple[int, int, str]]:
    """Return (version, number of tokens, text) of each run of completion tokens that one policy version sampled.

    Without a tokenizer the text has the token ids, with a space after each.
    """
    request = batch.requests[index]
    prompt, runs, begin = len(request.prompt_tokens), [], 0
    versions = batch.policy_versions[index, prompt : prompt + len(request.generated_tokens)].tolist()
    for version, run in groupby(versions):
        tokens = request.generated_tokens[begin : begin + len(list(run))]
        begin += len(tokens)
        text = "".join(f"{token} " for token in tokens) if tokenizer is None else str(tokenizer.decode(tokens))
        runs.append((version, len(tokens), text))
    return runs


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def flat_array(values: Any) -> NDArray[np.float64]:
    """Convert a number, sequence, array or torch tensor (on any device, of any dtype) to a flat float64 array."""
    # Convert tensors with their own methods: numpy cannot read them on a device, in bfloat16 or with a gradient. Detect
    # them without isinstance, because this module avoids importing torch.
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)
