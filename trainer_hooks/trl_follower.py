"""A TRL trainer callback that hooks the optimizer, logs the rollout's metrics, and saves its state in checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

from transformers import TrainerState

from rollout import RolloutManager
from rollout.state import Mode
from trainer_hooks.optimizer import Attachment
from trainer_hooks.transformers import RolloutCallback

Log = bool | Collection[str]


class Follower(RolloutCallback):
    """A `RolloutCallback` that runs before the callbacks that report logs, and can resume without a rollout state file."""

    def __init__(self, manager: RolloutManager, mode: Mode, log: Log, checkpoint: bool) -> None:
        super().__init__(manager, mode=mode, log=log, checkpoint=checkpoint)
        self._latest: Attachment | None = None

    @property
    def steps(self) -> int:
        return 0 if self._latest is None else self._latest.steps

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        self._latest = self.attachment

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # Add metrics to training logs only, not to evaluation logs or the final summary.
        if self._log and logs is not None and "loss" in logs:
            self._join(logs, state)

    def _resume(self, args: Any, state: Any) -> None:
        if self.manager.policy_version:
            # Load nothing: only a new manager can load a state, and this one has already been used in a training run.
            return
        file = self._file_to_resume(args, state)
        if file is not None and file.saved_by_anybody:
            file.load(self.manager)
            return
        self.manager.engine.weights_updated(state.global_step)
        warnings.warn(
            f"the trainer is at step {state.global_step}, and there is no state of the rollout next to the trainer's "
            f"in {', '.join(map(str, self._folders(args, state)))}: the policy version continues from "
            f"{state.global_step}, and random streams start from the seed. If another folder has it, give the trainer "
            "RolloutCallback(manager, resume_from_checkpoint=FOLDER) before attaching",
            stacklevel=2,
        )


def follow(trainer: Any, manager: RolloutManager, mode: Mode, log: Log, checkpoint: bool, undo: ExitStack) -> Follower:
    """Return a `Follower`. Add it to a trainer without a `RolloutCallback` for `manager`; closing `undo` removes it."""
    follower, handler = Follower(manager, mode, log, checkpoint), trainer.callback_handler
    # Do not add a callback if the caller's own RolloutCallback already follows the trainer for this manager.
    if any(getattr(callback, "manager", None) is manager for callback in handler.callbacks):
        return follower

    def unfollow() -> None:
        follower.detach()
        handler.callbacks = [each for each in handler.callbacks if each is not follower]

    # Put the callback first, so that reporters receive the rollout's metrics too. Make a new list, because the handler
    # iterates over the old one if this runs inside a callback.
    handler.callbacks = [follower, *handler.callbacks]
    undo.callback(unfollow)
    if trainer.optimizer is not None:
        state = trainer.state if trainer.is_in_train else TrainerState()
        follower.on_train_begin(trainer.args, state, trainer.control, optimizer=trainer.optimizer)
    return follower
