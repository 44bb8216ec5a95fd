"""The guard of an engine's weights, which gathers and releases them and detects changes that were not announced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.weights.base import Weights
from rollout.engine.weights.fingerprints import Fingerprints
from rollout.engine.weights.source import fully_sharded_since, refuse_sharded_since, weights_of
from rollout.errors import ConfigError, EngineStateError, WeightsChangedError

ANNOUNCE = (
    "call attach(optimizer, manager) of trainer_hooks.optimizer once, which announces every step, or "
    "manager.weights_updated() after each change"
)
"""The part of error messages that says how a trainer announces that the weights have changed."""


class WeightsGuard:
    """The weights of one engine: their source, and fingerprints (a sample of every tensor) of the last announced version.

    Args:
        given: the model that the trainer passed, perhaps wrapped.
        config: the engine's configuration.
        locked: function that returns a context manager, inside which the engine runs no step.

    Attributes:
        model: the Hugging Face model that the optimizer updates, without wrappers.
        training_device: device of the model when its source was chosen; the trainer expects batches on this device.
        rebuild_due: whether FSDP2 has sharded the weights since the engine was built.

    Raises:
        UnsupportedModelError: the weights cannot be gathered, or the requested copy cannot be made.
    """

    def __init__(
        self, given: nn.Module, config: InferenceConfig, locked: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._given = given
        self._config = config
        self._locked = locked
        self.rebuild_due = False
        self._choose_source()

    def _choose_source(self) -> None:
        config = self._config
        self.source: Weights = weights_of(
            self._given,
            dtype=dtype_named(config.inference_dtype),
            device=None if config.inference_device is None else _device(config.inference_device),
        )
        self.model = self.source.trained
        first = next(self.model.parameters())
        self.training_device, self._dtype = first.device, first.dtype
        checked = config.advanced.weight_fingerprints == "sampled"
        self._fingerprints = Fingerprints(self.source.tensors) if checked else None
        self._are_known = False

    def sharded_since(self) -> bool:
        """Return whether FSDP2 has sharded the model since the engine was built; if so, switch to a new weight source."""
        if fully_sharded_since(self.source):
            with self._locked():
                self._choose_source()
                self.rebuild_due = True
        return self.rebuild_due

    def gather(self) -> None:
        """Gather or copy the current weights. If they are sharded over the ranks, every rank must call this."""
        with self._locked():
            self.source.gather()

    def release(self) -> None:
        """Restore the model for training. A rank may call this without the other ranks, and more than once."""
        with self._locked():
            self.source.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the weights for the steps in the `with` block. If they are sharded, every rank must enter the block."""
        if self.source.collective and self.source.ready:
            yield
            return
        self.gather()
        try:
            yield
        finally:
            self.release()

    def changed(self) -> None:
        """Register an announced update: drop gathered and copied weights, and take fingerprints of the current weights."""
        self.source.changed()
        self._take_fingerprints()

    def resized(self, vocabulary: int) -> int | None:
        """Return the current size of the model's vocabulary, or None if it still equals `vocabulary`."""
        now = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        return None if now == vocabulary else now

    def check(self, version: int, vocabulary: int) -> None:
        """Compare the weights with their fingerprints.

        The first call takes the fingerprints, because a checkpoint may be loaded after the engine is built.

        Args:
            version: the policy version, quoted in error messages.
            vocabulary: size of the model's vocabulary when the engine was built.

        Raises:
            WeightsChangedError: weights have changed since the last announced update. The message names them.
            EngineStateError: since the engine was built, the weights were sharded, or their device, dtype or vocabulary
                size has changed.
        """
        refuse_sharded_since(self.source)
        self._refuse_moved()
        if (now := self.resized(vocabulary)) is not None:
            raise EngineStateError(
                f"{type(self.model).__name__} had a vocabulary of {vocabulary} tokens when the rollout was built, and has "
                f"{now}: build another after resize_token_embeddings() (RolloutManager.generate follows it by itself, where "
                "the module samples and no copy of it; DynamicInferenceEngine by engine.rebuild())"
            )
        if self._fingerprints is None:
            return
        with self._locked():
            if not self._are_known:
                if not self.source.collective:
                    # Discard the source's copy, if it has one: building the engine may have filled it (to verify the
                    # model) before a checkpoint was loaded.
                    self.source.changed()
                self._take_fingerprints()
            changed = self._fingerprints.changed()
        if changed:
            raise WeightsChangedError(
                f"{_some(changed)} changed since policy version {version} without a step of an attached optimizer: "
                f"{ANNOUNCE}, or undo the change; "
                "InferenceConfig(advanced=Advanced(weight_fingerprints='off')) checks nothing",
                tuple(changed),
            )

    def refuse_scattered(self) -> None:
        """Raise `EngineStateError` if the weights are sharded, because one rank alone cannot gather them."""
        if self.source.collective:
            raise EngineStateError(
                f"{type(self.model).__name__} has its weights spread over the ranks, where no step can run: generate by "
                "RolloutManager, which gathers them, or step inside `with engine.guard.whole():` on every rank"
            )

    def _refuse_moved(self) -> None:
        if self.source.sampled is not self.model or self.source.collective:
            return
        first = next(self.model.parameters())
        if (first.dtype, first.device) != (self._dtype, self.training_device):
            raise EngineStateError(
                f"{type(self.model).__name__} was {self._dtype} on {self.training_device} when the rollout was built, and "
                f"is {first.dtype} on {first.device}: build it after model.to(), accelerator.prepare or Trainer(...), which "
                "move the model, or undo that (InferenceConfig.inference_dtype samples with a copy of another dtype)"
            )

    def _take_fingerprints(self) -> None:
        if self._fingerprints is not None:
            self._fingerprints.take()
            self._are_known = True


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the torch dtype with this name, such as `torch.float32` for "float32". A `name` of None gives None."""
    return None if name is None else getattr(torch, name)


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    # Catch AssertionError as well: torch raises it if it was built without CUDA.
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        reason = str(exc).partition("\n")[0]
        raise ConfigError(
            f"InferenceConfig.inference_device={name!r}: must be a device that torch has here, such as 'cpu' or 'cuda:0', "
            f"or None ({reason})"
        ) from exc


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
