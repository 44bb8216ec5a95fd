"""Integration with Hugging Face accelerate.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attach(accelerator, manager)        the policy version counts the steps of every optimizer of the policy
    accelerator.save_state(folder)      also saves the requests in flight of every rank
    accelerator.load_state(folder)      restores them, in a job of the same size

The ranks do not communicate: each rank saves and loads its own file when accelerate calls the hooks.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from rollout.requests.codec import INT, decode_fields
from rollout.state import Mode
from trainer_hooks import optimizer as optimizer_hook
from trainer_hooks.optimizer import Attachment
from trainer_hooks.rank_state import RankFile

if TYPE_CHECKING:
    from rollout import RolloutManager


class AcceleratorAttachment:
    """An Accelerator's hooks for a rollout, active until `detach()` or the end of the `with` block. Created by `attach`.

    Attributes:
        accelerator: the Accelerator.
        manager: the manager that the hooks notify.
        optimizers: the attachments, one for each torch optimizer that steps the policy.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        manager: RolloutManager,
        optimizers: tuple[Attachment, ...],
        checkpoint: bool,
    ) -> None:
        self.accelerator = accelerator
        self.manager = manager
        self.optimizers = optimizers
        self._saved = _Saved(accelerator, manager) if checkpoint else None

    @property
    def steps(self) -> int:
        """The number of steps since `attach` that changed the weights, summed over all optimizers."""
        return sum(each.steps for each in self.optimizers)

    def detach(self) -> None:
        """Remove the optimizer hooks, and exclude the rollout from `save_state` and `load_state`. Idempotent."""
        for each in self.optimizers:
            each.detach()
        if self._saved is not None:
            self._saved.remove()

    def __enter__(self) -> AcceleratorAttachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()


def attach(
    accelerator: Accelerator,
    manager: RolloutManager,
    *,
    mode: Mode = None,
    checkpoint: bool = True,
) -> AcceleratorAttachment:
    """Hook the optimizers of `accelerator` to raise the policy version of `manager`, and add the manager to checkpoints.

    Requires: `accelerator.prepare` has been called with the optimizer, and `manager` was constructed with the module that
    was passed to `prepare`. DDP and mixed precision keep the module's parameters; FSDP2 replaces them inside the same
    module. On several ranks, construct the manager after `prepare`, because `Accelerator()` creates the process group.

    Changes: adds the hooks of `trainer_hooks.optimizer` to each torch optimizer that steps parameters of `manager.model`.
    If several optimizers step the policy, every step of each raises the version.

    With `checkpoint`, `accelerator.save_state` also writes `custom_checkpoint_<i>.pkl` and, on every rank,
    `custom_checkpoint_<i>_rank_<r>_of_<n>.msgpack` with the rank's requests in flight. Call `save_state` between two
    `generate` calls. `load_state` requires a new manager, and the same registered objects in the same order as when saving.

    Args:
        accelerator: the Accelerator whose optimizers are hooked.
        manager: the manager that samples with the weights that these optimizers step.
        mode: handling of the KV cache at each step. If None, the manager's configured mode.
        checkpoint: whether `save_state` and `load_state` include the manager.

    Returns:
        The attachment; `detach()` removes the hooks.

    Raises:
        TypeError: `accelerator` is not an `accelerate.Accelerator`.
        ConfigError: `mode` is not a `KVCacheManagementMode`.
        ValueError: no optimizer is prepared yet, no optimizer steps a parameter of `manager.model`, or an optimizer is
            already attached to this rollout. Nothing is attached then.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"accelerator of type {type(accelerator).__name__}: must be an accelerate.Accelerator, attach(accelerator, "
            "manager); without one: from trainer_hooks.optimizer import attach; attach(optimizer, manager)"
        )
    with ExitStack() as undo:
        attached = [
            undo.enter_context(optimizer_hook.attach(each, manager, mode=mode))
            for each in _optimizers_of(accelerator, manager)
        ]
        attachment = AcceleratorAttachment(accelerator, manager, tuple(attached), checkpoint)
        undo.pop_all()
    return attachment


def _optimizers_of(accelerator: Accelerator, manager: RolloutManager) -> list[Any]:
    # Read a private attribute, because accelerate has no public list of prepared optimizers.
    prepared = list(accelerator._optimizers)
    ours = {id(parameter) for parameter in manager.model.parameters()}
    found = [each for each in prepared if not ours.isdisjoint(optimizer_hook.stepped_parameters(each))]
    if not found:
        raise ValueError(
            f"none of the {len(prepared)} optimizers that this Accelerator has prepared steps a parameter of the "
            f"{type(manager.model).__name__} that samples: call accelerator.prepare(model, optimizer) first, and build the "
            "manager of that very module, not of a copy of it"
        )
    return found


class _Saved:
    """An object registered with accelerate that saves and loads one rank's state.

    accelerate saves the `state_dict()` of the main process only, so it contains the state common to all ranks. Pre-hooks on
    saving and loading receive the checkpoint folder. On saving, the hook writes this rank's own file. On loading, it
    records the folder; accelerate then loads the weights and calls `load_state_dict()`, which reads this rank's file.
    """

    def __init__(self, accelerator: Accelerator, manager: RolloutManager) -> None:
        self._accelerator = accelerator
        self._rollout = manager
        self._folder = ""
        self._handles = [
            accelerator.register_save_state_pre_hook(self._before_save),
            accelerator.register_load_state_pre_hook(self._before_load),
        ]
        accelerator.register_for_checkpointing(self)

    def remove(self) -> None:
        """Unregister this object and its save and load hooks from the Accelerator."""
        for handle in self._handles:
            handle.remove()
        objects = self._accelerator._custom_objects
        objects[:] = [each for each in objects if each is not self]

    def state_dict(self) -> dict[str, int]:
        """Return the state common to all ranks: the number of ranks and the policy version."""
        return {"ranks": self._accelerator.num_processes, "policy_version": self._rollout.policy_version}

    def load_state_dict(self, state: Any) -> None:
        """Load this rank's file, and check its policy version against that in `state`, the saved result of `state_dict`."""
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
