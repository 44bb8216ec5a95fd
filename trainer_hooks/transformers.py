"""Integration with the Hugging Face Trainer.

    training begins   on_train_begin     attaches the optimizer; restores the rollout if the run is resumed
    a step            (torch's hooks)    raises the policy version if the weights were updated
    logs              on_log             adds the rollout's metrics
    checkpoint        on_save            saves the requests in flight of every rank
    training ends     on_train_end       removes the hooks

The callback returns no `TrainerControl`, so it does not change what the Trainer does next.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rollout.observe.metric_table import LOGGED, unknown_name
from rollout.state import Mode
from trainer_hooks.optimizer import Attachment, attach
from trainer_hooks.rank_state import RankFile

if TYPE_CHECKING:
    from rollout import RolloutManager

STEM = "rollout"
"""The prefix of the rollout's files in a checkpoint folder."""
STATE_FILE = "trainer_state.json"
"""The name of the Trainer's own state file in a checkpoint folder."""


class RolloutCallback(TrainerCallback):  # type: ignore[misc]
    """A Trainer callback for a rollout: `trainer.add_callback(RolloutCallback(manager))`, or in the Trainer's `callbacks`.

    Requires: `manager` was constructed with the model object that the Trainer has, after the Trainer's constructor has
        moved it to the device. The Trainer creates its optimizer when training begins, so the hooks are added then. If the
        Trainer shards the model by FSDP2, `manager` must be a RolloutManager, whose next `generate` adapts to the sharding;
        with other kinds of sharding, that `generate` raises an error.

    Changes: hooks the Trainer's torch optimizer during training (`trainer_hooks.optimizer`). If `load_best_model_at_end`
    loads weights, the version rises by one.

    With `log`, the metrics since the Trainer last logged a training loss are added to `state.log_history` and to the `logs`
    that later callbacks get. If the Trainer reports to wandb, they are also added to this process's run, under their own
    names. Other reporters are called before user callbacks. To give them the metrics, use
    `trainer.callback_handler.callbacks.insert(0, callback)`. The main process logs its own metrics.

    With `checkpoint`, every rank adds the file `rollout_rank_<r>_of_<n>.msgpack`, with its requests in flight, to the
    Trainer's checkpoint folder. `train(resume_from_checkpoint=...)` restores them, which requires a new manager and the
    same number of ranks.

    After an exception in training, the Trainer calls no callbacks, so the hooks stay until the next `train()`, `detach()`,
    or the end of a `with callback:` block around `train()`.

    Args:
        manager: the manager that samples with the weights that the Trainer trains.
        mode: handling of the KV cache at each step. If None, the manager's configured mode.
        log: whether to log metrics, or the names of the metrics to log.
        checkpoint: whether checkpoints include the rollout.
        resume_from_checkpoint: checkpoint folder. Needed only if the Trainer resumes from a folder that is neither
            `args.resume_from_checkpoint` nor in `args.output_dir`: the Trainer does not pass that folder to callbacks.

    Attributes:
        attachment: the attachment to the optimizer during training, and None otherwise.
    """

    def __init__(
        self,
        manager: RolloutManager,
        *,
        mode: Mode = None,
        log: bool | Collection[str] = True,
        checkpoint: bool = True,
        resume_from_checkpoint: str | Path | None = None,
    ) -> None:
        self.manager = manager
        self.attachment: Attachment | None = None
        self._mode = mode
        self._log = _checked(log)
        self._checkpoint = checkpoint
        self._resume_from = resume_from_checkpoint

    def detach(self) -> None:
        """Remove the hooks from the optimizer. Idempotent."""
        if self.attachment is not None:
            self.attachment.detach()
        self.attachment = None

    def __enter__(self) -> RolloutCallback:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    # --- events -------------------------------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: object = None,
        **kwargs: Any,
    ) -> None:
        """Attach to the Trainer's optimizer. If the Trainer resumes, restore the rollout from its checkpoint.

        Raises:
            TypeError, ConfigError, ValueError: see `trainer_hooks.optimizer.attach`; or the checkpoint is not found.
            FileNotFoundError, SerializationError, EngineStateError: see `RankFile.load`. Nothing is attached then.
        """
        self.detach()
        attachment = attach(optimizer, self.manager, mode=self._mode)
        try:
            if self._checkpoint and state.global_step > 0:
                self._resume(args, state)
        except BaseException:
            attachment.detach()
            raise
        self.attachment = attachment

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the rollout's metrics since the previous log to `logs`, and report them as the class docstring describes."""
        if not self._log or self.attachment is None or logs is None or "loss" not in logs:
            return
        metrics = self._join(logs, state)
        if state.is_world_process_zero and "wandb" in args.report_to:
            # Log to wandb directly, because the Trainer's own callback would rename the metrics to train/rollout/...
            wandb = sys.modules.get("wandb")
            if wandb is not None and wandb.run is not None:
                wandb.log(metrics | {"train/global_step": state.global_step})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add this rank's state file to the checkpoint."""
        if self._checkpoint and self.attachment is not None:
            _file(_folder_of(args, state), args).write(self.manager)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks. Raise the policy version if the Trainer has loaded the best model."""
        if self.attachment is not None and args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.manager.weights_updated()
        self.detach()

    # --- internals ----------------------------------------------------------------------------------------------

    def _join(self, logs: dict[str, Any], state: TrainerState) -> dict[str, float]:
        """Add the selected metrics to `logs` and to the last entry of the Trainer's log history. Return the metrics."""
        metrics = self.manager.metrics()
        if isinstance(self._log, frozenset):
            metrics = {name: value for name, value in metrics.items() if name in self._log}
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)
        return metrics

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        file = self._file_to_resume(args, state)
        if file is None:
            raise ValueError(
                f"the Trainer resumes at step {state.global_step}, and none of "
                f"{[str(each) for each in self._folders(args, state)]} is the checkpoint it has read: pass "
                "RolloutCallback(manager, resume_from_checkpoint=FOLDER), or checkpoint=False to begin with nothing in "
                "flight and policy version 0"
            )
        file.load(self.manager)

    def _file_to_resume(self, args: TrainingArguments, state: TrainerState) -> RankFile | None:
        """Return this rank's state file in the folder that the Trainer resumes from, or None if the folder is not found."""
        found = (folder for folder in self._folders(args, state) if _is_checkpoint_of(folder, state))
        return next((_file(folder, args) for folder in found), None)

    def _folders(self, args: TrainingArguments, state: TrainerState) -> list[Path]:
        named = [each for each in (self._resume_from, args.resume_from_checkpoint) if isinstance(each, str | Path)]
        return [*map(Path, named), _folder_of(args, state)]


def _checked(log: bool | Collection[str]) -> bool | frozenset[str]:
    if isinstance(log, bool):
        return log
    chosen = frozenset([log] if isinstance(log, str) else log)
    for name in sorted(chosen.difference(LOGGED)):
        raise unknown_name(name, LOGGED)
    return chosen


def _folder_of(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _file(folder: Path, args: TrainingArguments) -> RankFile:
    return RankFile(folder, STEM, args.process_index, args.world_size)


def _is_checkpoint_of(folder: Path, state: TrainerState) -> bool:
    path = folder / STATE_FILE
    return path.is_file() and _identity(TrainerState.load_from_json(str(path))) == _identity(state)


def _identity(state: TrainerState) -> str:
    # Compare logs as text, because a NaN loss is not equal to itself.
    return json.dumps([state.global_step, state.epoch, state.total_flos, state.log_history], sort_keys=True)
