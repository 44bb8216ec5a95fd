"""Gathers and releases an engine's weights, and detects unannounced changes."""

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
"""The text for messages: how a trainer announces that the weights have changed."""


class WeightsGuard:
    """The weights of one engine: their source, and the fingerprints of their last announced content.

    Args:
        locked: holds the engine at a step boundary.

    Attributes:
        model: the Hugging Face model the optimizer steps, without its wrappers.
        training_device: device of the model when its source was chosen; the trainer expects batches there.
        rebuild_due: whether FSDP2 has sharded the weights since the engine was built.

    Raises:
        UnsupportedModelError: see `weights_of`.
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
        """Return whether FSDP2 has sharded this rank's weights since the engine was built; if so, choose a new source."""
        if fully_sharded_since(self.source):
            with self._locked():
                self._choose_source()
                self.rebuild_due = True
        return self.rebuild_due

    def gather(self) -> None:
        """Make the weights whole and current. If they are spread over the ranks, every rank calls it."""
        with self._locked():
            self.source.gather()

    def release(self) -> None:
        """Restore the weights for the trainer. Local; harmless when repeated."""
        with self._locked():
            self.source.release()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the weights, so that steps can run in the block. Every rank enters it if each has a part."""
        if self.source.collective and self.source.ready:
            yield
            return
        self.gather()
        try:
            yield
        finally:
            self.release()

    def changed(self) -> None:
        """Follow an announced update: drop gathered and copied weights, and fingerprint the current content."""
        self.source.changed()
        self._take_fingerprints()

    def resized(self, vocabulary: int) -> int | None:
        """Return the size of the model's vocabulary; None: still `vocabulary`."""
        now = int(self.model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
        return None if now == vocabulary else now

    def check(self, version: int, vocabulary: int) -> None:
        """Compare the weights with their fingerprints. The first call takes them, because a checkpoint may be loaded before
        it.

        Args:
            version: the policy version, for the message.
            vocabulary: size of the model's vocabulary when the engine was built.

        Raises:
            WeightsChangedError: weights have changed since the last update; the message names them.
            EngineStateError: after the engine was built, the weights were sharded, moved to another device or dtype, or got
                another vocabulary.
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
                    # Discard a copy of the weights, if any: building the engine may have filled it (to verify the
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
        """Raise `EngineStateError` if the weights are sharded, because every rank must take part in gathering them."""
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
    """Return `torch.float32` for "float32"; None for None."""
    return None if name is None else getattr(torch, name)


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    # Catch AssertionError as well, which a torch without CUDA raises.
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        reason = str(exc).partition("\n")[0]
        raise ConfigError(
            f"InferenceConfig.inference_device={name!r}: must be a device that torch has here, such as 'cpu' or 'cuda:0', "
            f"or None ({reason})"
        ) from exc


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
