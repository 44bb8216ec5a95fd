"""A logger of a training run's metrics to Weights & Biases, all plotted over the trainer's step.

wandb is imported when a logger is constructed. A logger never prompts for a login. Without one, the run is offline, and
`wandb sync` uploads it later.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollout.observe.metric_table import LOGGED, unknown_name
from rollout.observe.page import colored
from rollout.observe.run_log import version_runs

if TYPE_CHECKING:
    from rollout.manager.batch.batch import RolloutBatch

STEP = "train/step"
"""The name of the metric that is the x-axis of all others: the trainer's step."""

SAMPLE_COLUMNS = ("step", "text", "reward", "length", "finish_reason", "mean_staleness", "by_version")


class WandbLogger:
    """A logger of metrics and samples to a wandb run, over the trainer's step. As a context manager, it finishes the run.

    If a run is already active in this process, that run is used, and `finish()` leaves it open.

    Args:
        project: wandb project of the run.
        config: configuration logged with the run.
        directory: folder in which wandb creates its folder `wandb` for the run's files. If None, the current directory.
        name: name of the run. If None, wandb chooses one.
        mode: "online", "offline" or "disabled". If None, the variable WANDB_MODE if it is set and not empty; else "online"
            if the user is logged in, and "offline" if not.

    Raises:
        ValueError: `mode` is "online" without a login.
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
        """Log the dicts `metrics` as one point at `step`. Their values are numbers, or numpy or torch scalars.

        Raises:
            KeyError: a name under `rollout/` is not in the table of `rollout.observe.metric_table`.
            ValueError: a name occurs twice, or equals the name of the metric on the x-axis.
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

        The column `by_version` shows the completion as HTML, with each token's age as its background colour.

        Args:
            batch: the batch of N samples.
            rewards: one number per sample, as a sequence, array or tensor [N].
            rows: number of samples in the table, spread evenly over the ranking by reward.
            tokenizer: tokenizer that decodes tokens for `by_version`. If None, token ids are shown.

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
                self._wandb.Html(
                    '<div style="font-family:monospace;white-space:pre-wrap">'
                    f"{colored(version_runs(batch, i, tokenizer), batch.policy_version)}</div>",
                    inject=False,
                ),
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

    def report(self, step: int, page: str | os.PathLike[str]) -> None:
        """Log the page that `rollout.report` has written, including the page's pictures and samples."""
        content = Path(page).read_text(encoding="utf-8")
        self.run.log({STEP: step, "samples/report": self._wandb.Html(content, inject=False)})

    def finish(self, exit_code: int = 0) -> None:
        """Finish the run if this logger started it. Idempotent."""
        if self._owns_run:
            self.run.finish(exit_code=exit_code)

    def __enter__(self) -> WandbLogger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish(exit_code=0 if exc[0] is None else 1)

    def _choose_mode(self, mode: str | None) -> Any:
        chosen = mode or os.environ.get("WANDB_MODE") or None
        if chosen not in (None, "online"):
            return chosen
        if self._wandb.login(prompt=False, verify=False):
            return "online"
        if chosen is None:
            return "offline"
        raise ValueError("mode='online', but there is no login: run `wandb login` first, or use mode='offline'")


def _numbers(values: Any) -> NDArray[np.float64]:
    return np.asarray(values.detach().double().cpu() if hasattr(values, "detach") else values, dtype=np.float64)


def _mean_staleness(batch: RolloutBatch) -> NDArray[np.float64]:
    # Include tokens outside the response mask, so that samples that were masked out for staleness count too.
    position = np.arange(batch.input_ids.shape[1])
    start = _numbers(batch.prompt_lengths)[:, None]
    length = _numbers(batch.response_lengths)
    inside = (position >= start) & (position < start + length[:, None])
    total: NDArray[np.float64] = (_numbers(batch.policy_staleness) * inside).sum(axis=1)
    return total / np.maximum(length, 1)


def _text(batch: RolloutBatch, index: int) -> str:
    text = batch.texts[index]
    return text if text is not None else " ".join(map(str, batch[index].generated_tokens))
