"""Logs metrics of a training run to Weights & Biases on one axis, the trainer's step.

wandb is imported when a logger is built, not before. A logger never asks anything: a user who is not logged in gets an
offline run, which `wandb sync` uploads later.
"""

from __future__ import annotations

import html
import netrc
import os
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from rollout.metrics import LOGGED, unknown_name

if TYPE_CHECKING:
    from rollout.manager.batch import RolloutBatch

STEP = "train/step"
"""The axis of everything logged."""

SAMPLE_COLUMNS = ("step", "text", "reward", "length", "finish_reason", "mean_staleness", "by_version")

AGES = ("#ffffff", "#fdf3d0", "#fbdf9d", "#f7b96f", "#ee8a5c", "#d95f5f")
"""Background of tokens sampled 0, 1, 2 … weight updates ago; the last is for all that are older."""


class WandbLogger:
    """One wandb run, with the axes defined. Also a context manager that finishes it.

    A run that is active in this process already is joined, not replaced, and left open by `finish()`.

    Args:
        project: where the run belongs.
        config: what the run was started with.
        directory: where the run's files go, in a folder `wandb`. None: the current directory.
        name: of the run. None: wandb invents one.
        mode: "online", "offline" or "disabled". None: WANDB_MODE where it is set and not empty; else online if the user
            is logged in (WANDB_API_KEY, netrc, wandb's settings), and offline if not.

    Raises:
        ValueError: `mode` is unknown, or it is "online" and nobody is logged in.
    """

    def __init__(
        self,
        project: str,
        *,
        config: Mapping[str, Any] | None = None,
        directory: str | os.PathLike[str] | None = None,
        name: str | None = None,
        mode: str | None = None,
    ) -> None:
        import wandb

        self._wandb = wandb
        self._owns_run = wandb.run is None
        if wandb.run is None:
            if directory is not None:
                Path(directory).mkdir(parents=True, exist_ok=True)
            self.run = wandb.init(
                project=project, config=dict(config or {}), dir=directory, name=name, mode=self._choose_mode(mode)
            )
        else:
            self.run = wandb.run
            self.run.config.update(dict(config or {}), allow_val_change=True)
        self.run.define_metric(STEP)
        for axis in ("train/*", "rollout/*", "samples/*"):
            self.run.define_metric(axis, step_metric=STEP)

    def log(self, step: int, *metrics: Mapping[str, Any]) -> None:
        """One point on the axis: the dicts together. Scalars may be numbers, numpy or torch scalars.

        Raises:
            KeyError: a name under `rollout/` is not in the table of `rollout.metrics`.
            ValueError: two dicts bring the same name, or one brings the axis itself.
        """
        point: dict[str, Any] = {STEP: step}
        for part in metrics:
            for name, value in part.items():
                if name.startswith("rollout/") and name not in LOGGED:
                    raise unknown_name(name, LOGGED)
                if name in point:
                    raise ValueError(
                        f"{name} comes twice in step {step}: every name is logged once; rename one of the two"
                    )
                point[name] = value.item() if hasattr(value, "item") else value
        self.run.log(point)

    def samples(
        self,
        step: int,
        batch: RolloutBatch,
        rewards: Sequence[float] | Any,
        *,
        rows: int = 8,
        tokenizer: Any = None,
    ) -> None:
        """Log a table of sample rollouts, worst to best, and a histogram of all completion lengths.

        The column `by_version` is the completion in HTML: tokens that one version of the weights has sampled stand
        together, on a ground that is the darker the older they are (`AGES`).

        Args:
            step: on the axis.
            batch: N samples.
            rewards: one number per sample: a sequence, array or tensor [N].
            rows: how many samples the table shows, spread evenly over the ranking by reward.
            tokenizer: what `by_version` is decoded with. None: token ids.

        Raises:
            ValueError: the number of rewards is not N.
        """
        reward = _numbers(rewards)
        if reward.shape != (len(batch),):
            raise ValueError(f"rewards of shape {reward.shape} for {len(batch)} samples: give one number per sample")
        if not len(batch):
            return
        lengths = _numbers(batch.response_lengths)
        staleness = _mean_staleness(batch)
        ranking = np.argsort(reward, kind="stable")
        chosen = ranking[np.unique(np.linspace(0, len(batch) - 1, min(rows, len(batch))).round().astype(int))]
        table = [
            [
                step,
                _text(batch, i),
                float(reward[i]),
                int(lengths[i]),
                batch.finish_reasons[i],
                float(staleness[i]),
                self._wandb.Html(_by_version(batch, i, tokenizer), inject=False),
            ]
            for i in chosen.tolist()
        ]
        self.run.log(
            {
                STEP: step,
                "samples/table": self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=table),
                "samples/completion_length": self._wandb.Histogram(lengths.tolist()),
            }
        )

    def finish(self, exit_code: int = 0) -> None:
        """End the run if it is ours. Harmless when repeated."""
        if self._owns_run:
            self.run.finish(exit_code=exit_code)

    def __enter__(self) -> WandbLogger:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code=0 if exc is None else 1)

    def _choose_mode(self, mode: str | None) -> Literal["online", "offline", "disabled"]:
        chosen = mode if mode is not None else os.environ.get("WANDB_MODE") or None
        if chosen == "disabled":
            return "disabled"
        if chosen == "offline":
            return "offline"
        if chosen not in (None, "online"):
            raise ValueError(f"mode={chosen!r}: must be 'online', 'offline', 'disabled' or None")
        if self._logged_in():
            return "online"
        if chosen is None:
            return "offline"
        raise ValueError("mode='online', but nobody is logged in: run `wandb login` first, or use mode='offline'")

    def _logged_in(self) -> bool:
        if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return True
        settings = self._wandb.setup().settings
        return bool(settings.api_key) or _in_netrc(urlsplit(settings.base_url).netloc)


def _in_netrc(host: str) -> bool:
    named = os.environ.get("NETRC")
    files = [Path(named)] if named else [Path("~/.netrc"), Path("~/_netrc")]
    for file in files:
        try:
            if netrc.netrc(file.expanduser()).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _numbers(values: Any) -> NDArray[np.float64]:
    return np.asarray(values.detach().double().cpu() if hasattr(values, "detach") else values, dtype=np.float64)


def _mean_staleness(batch: RolloutBatch) -> NDArray[np.float64]:
    # Of the completion, not of the response mask: a sample masked out for its age is the one worth looking at.
    position = np.arange(batch.input_ids.shape[1])
    start = _numbers(batch.prompt_lengths)[:, None]
    length = _numbers(batch.response_lengths)
    inside = (position >= start) & (position < start + length[:, None])
    total: NDArray[np.float64] = (_numbers(batch.policy_staleness) * inside).sum(axis=1)
    return total / np.maximum(length, 1)


def _by_version(batch: RolloutBatch, index: int, tokenizer: Any) -> str:
    sample = batch[index]
    start, end = len(sample.prompt_tokens), len(sample.prompt_tokens) + len(sample.generated_tokens)
    versions = batch.policy_versions[index, start:end].tolist()
    spans, begin = [], 0
    for version, run in groupby(versions):
        tokens = sample.generated_tokens[begin : begin + len(list(run))]
        begin += len(tokens)
        age = max(0, batch.policy_version - version)
        told = f"version {version}, {age} update{'s' * (age != 1)} ago, {len(tokens)} token{'s' * (len(tokens) != 1)}"
        text = " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)
        spans.append(
            f'<span style="background:{AGES[min(age, len(AGES) - 1)]}" title="{told}">{html.escape(text)}</span>'
        )
    between = " " if tokenizer is None else ""
    return f'<div style="font-family:monospace;white-space:pre-wrap">{between.join(spans)}</div>'


def _text(batch: RolloutBatch, index: int) -> str:
    text = batch.texts[index]
    return text if text is not None else " ".join(map(str, batch[index].generated_tokens))
