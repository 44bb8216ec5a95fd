"""Integration with Hugging Face accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attach(accelerator, rollout)        the policy version counts the steps of every optimizer that steps the policy
    accelerator.save_state(folder)      carries what every rank has in flight
    accelerator.load_state(folder)      and goes on with it, in a job of the same size

Ranks do not speak to each other here: each saves and loads its own part, whenever accelerate asks it to.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from rollout.requests.codec import INT, decode_fields
from rollout.state import Mode
from trainer_hooks import optimizer as optimizer_hook
from trainer_hooks.optimizer import Attachment
from trainer_hooks.rank_state import RankFile, SavedRollout


class AcceleratorAttachment:
    """An Accelerator tied to a rollout, until `detach()` or the end of the `with` block. Built by `attach`.

    Attributes:
        accelerator: the one given.
        rollout: what its optimizers tell.
        optimizers: one attachment per torch optimizer that steps the policy.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        rollout: SavedRollout,
        optimizers: tuple[Attachment, ...],
        checkpoint: bool,
    ) -> None:
        self.accelerator = accelerator
        self.rollout = rollout
        self.optimizers = optimizers
        self._saved = _Saved(accelerator, rollout) if checkpoint else None

    @property
    def steps(self) -> int:
        """Steps that changed the weights since the attachment, of all optimizers together."""
        return sum(each.steps for each in self.optimizers)

    def log(self, step: int, *metrics: Mapping[str, Any]) -> None:
        """Give the rollout's metrics since the last call, and those given, to the Accelerator's trackers as one point.

        Call it on every rank, as often as the training loop logs. Names are those of `rollout.metrics`; accelerate
        hands on those of the main process, which are that rank's own.

        Args:
            step: of the trainer: the axis.
            metrics: numbers, numpy or torch scalars by name.

        Raises:
            ValueError: two dicts bring the same name.
        """
        point: dict[str, Any] = {}
        for part in (self.rollout.metrics(), *metrics):
            for name, value in part.items():
                if name in point:
                    raise ValueError(
                        f"{name} comes twice in step {step}: every name is logged once; rename one of the two"
                    )
                point[name] = value.item() if hasattr(value, "item") else value
        self.accelerator.log(point, step=step)

    def detach(self) -> None:
        """Take the hooks off, and the rollout out of `save_state` and `load_state`. Harmless when repeated."""
        for each in self.optimizers:
            each.detach()
        if self._saved is not None:
            self._saved.remove()

    def __enter__(self) -> AcceleratorAttachment:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(
    accelerator: Accelerator,
    rollout: SavedRollout,
    *,
    mode: Mode = None,
    checkpoint: bool = True,
) -> AcceleratorAttachment:
    """Let the optimizers of `accelerator` count the policy version of `rollout`, and its checkpoints carry it.

    Needs: `accelerator.prepare` has been called with the optimizer, and `rollout` was built of the module that it was
    given (DDP and mixed precision keep its parameters; FSDP2 puts its own in their place, in the same module). Build
    the rollout after `prepare` where there are several ranks, for it is `Accelerator()` that makes the process group.

    Changes: the hooks of `trainer_hooks.optimizer` on each torch optimizer that steps parameters of `rollout.model`; a
    critic's optimizer is left alone, and two that step the policy count two versions per round. Accumulated
    micro-batches and steps that a GradScaler skips do not count. Nothing is logged unless `log` is called.

    With `checkpoint`, `accelerator.save_state` also writes `custom_checkpoint_<i>.pkl` (how many ranks, and the policy
    version; `<i>` counts the registered objects) and `custom_checkpoint_<i>_rank_<r>_of_<n>.msgpack` on every rank (its
    requests in flight, with tokens, versions and random streams). Call it between two `generate` calls. `load_state`
    needs as many registered objects as were saved, in the same order, and a fresh rollout; it loads this one after the
    weights.

    Args:
        accelerator: whose optimizers count.
        rollout: what samples with the weights they step.
        mode: what becomes of the KV cache at each step. None: what the rollout is configured to do.
        checkpoint: False: `save_state` and `load_state` know nothing of the rollout.

    Returns:
        The attachment, which logs and counts the steps; `detach()` undoes it.

    Raises:
        TypeError: `accelerator` is none.
        ConfigError: `mode` is no `KVCacheManagementMode`.
        ValueError: no optimizer is prepared yet, none steps a parameter of `rollout.model`, or one is attached to this
            rollout already. Nothing is attached then.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator={accelerator!r}: must be an accelerate.Accelerator; see trainer_hooks.optimizer")
    with ExitStack() as undo:
        attached = [
            undo.enter_context(optimizer_hook.attach(each, rollout, mode=mode))
            for each in _optimizers_of(accelerator, rollout)
        ]
        attachment = AcceleratorAttachment(accelerator, rollout, tuple(attached), checkpoint)
        undo.pop_all()
    return attachment


def _optimizers_of(accelerator: Accelerator, rollout: SavedRollout) -> list[Any]:
    # accelerate has no public list of what it has prepared.
    prepared = list(accelerator._optimizers)
    if not prepared:
        raise ValueError(
            "this Accelerator has prepared no optimizer yet: call accelerator.prepare(model, optimizer) first, then "
            "attach(accelerator, rollout)"
        )
    ours = {id(parameter) for parameter in rollout.model.parameters()}
    found = [each for each in prepared if not ours.isdisjoint(optimizer_hook.stepped_parameters(each))]
    if not found:
        raise ValueError(
            f"none of the {len(prepared)} optimizers that this Accelerator has prepared steps a parameter of the "
            f"{type(rollout.model).__name__} that samples: build the rollout of the very module that was given to "
            "accelerator.prepare with its optimizer, not of a copy of it"
        )
    return found


class _Saved:
    """What accelerate saves and loads as a registered object, on every rank its own part.

    accelerate keeps the `state_dict()` of the main process only. It is the common part here; each rank's own is a file
    that a hook writes before, when the folder is known. Loading goes the other way: the hook tells the folder, and
    `load_state_dict()`, which accelerate calls when the weights are there, reads this rank's file.
    """

    def __init__(self, accelerator: Accelerator, rollout: SavedRollout) -> None:
        self._accelerator = accelerator
        self._rollout = rollout
        self._folder = ""
        self._handles = [
            accelerator.register_save_state_pre_hook(self._before_save),
            accelerator.register_load_state_pre_hook(self._before_load),
        ]
        accelerator.register_for_checkpointing(self)

    def remove(self) -> None:
        """Be registered no more."""
        for handle in self._handles:
            handle.remove()
        objects = self._accelerator._custom_objects
        objects[:] = [each for each in objects if each is not self]

    def state_dict(self) -> dict[str, int]:
        """What all ranks have in common."""
        return {"ranks": self._accelerator.num_processes, "policy_version": self._rollout.policy_version}

    def load_state_dict(self, state: Any) -> None:
        """Load this rank's file."""
        common = decode_fields("custom_checkpoint", state, {"ranks": INT, "policy_version": INT})
        self._file().load(self._rollout, common["policy_version"])

    def _before_save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        self._folder = output_dir
        self._file().write(self._rollout)

    def _before_load(self, models: list[Any], input_dir: str) -> None:
        self._folder = input_dir

    def _file(self) -> RankFile:
        (index,) = [index for index, each in enumerate(self._accelerator._custom_objects) if each is self]
        accelerator = self._accelerator
        stem = f"custom_checkpoint_{index}"
        without = f"take {stem}.pkl out of the folder and attach(..., checkpoint=False)"
        return RankFile(Path(self._folder), stem, accelerator.process_index, accelerator.num_processes, without)
