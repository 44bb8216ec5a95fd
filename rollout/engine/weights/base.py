"""The interface of a weight source, and the base class of sources that gather sharded weights."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from rollout.engine.weights.fingerprints import local_part, persistent_tensors


class Weights:
    """A source of the weights that an engine samples with. This base class uses the trainer's own tensors in place.

    Attributes:
        trained: the unwrapped Hugging Face model that the optimizer updates.
        sampled: the module whose `forward` the engine runs.
        collective: whether `gather` is a collective call, which every rank must make.
        fixed_addresses: whether the tensors of `sampled` keep their addresses when the weights change.
        tensor_parallel_mesh: one-dimensional device mesh of the ranks that hold the shards of every layer and compute each
            forward pass together. If None, this rank computes alone.
        expert_parallel_mesh: one-dimensional device mesh of the ranks that exchange tokens inside each layer, each with
            its own batches. If None, no layer exchanges tokens.
    """

    collective = False
    fixed_addresses = True
    expert_parallel_mesh: Any = None

    def __init__(self, trained: nn.Module, tensor_parallel_mesh: Any = None) -> None:
        self.trained = self.sampled = trained
        self.tensor_parallel_mesh = tensor_parallel_mesh

    @property
    def spread(self) -> bool:
        """Whether the weights are split over several ranks, so that each rank stores only a part of them."""
        return self.collective or self.tensor_parallel_mesh is not None

    @property
    def ready(self) -> bool:
        """Whether `sampled` holds the current weights, gathered if they are sharded."""
        return True

    def gather(self) -> None:
        """Gather or copy the current weights into `sampled`, unless the source is `ready` already."""

    def release(self) -> None:
        """Restore `trained` for training, even after an interrupted forward pass. Ranks need not call this together."""

    def changed(self) -> None:
        """Drop or invalidate gathered and copied weights, because `trained` has changed."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the name and this rank's part of every parameter and persistent buffer of `trained`.

        A tied tensor is listed under each of its names.
        """
        return [(name, local_part(tensor)) for name, tensor in persistent_tensors(self.trained)]


class GatheredWeights(Weights):
    """Weights that are sharded over the ranks. Between `gather` and `release`, each rank holds all of them."""

    collective = True
    fixed_addresses = False
    _release: ExitStack | None = None

    @property
    def ready(self) -> bool:
        return self._release is not None

    def gather(self) -> None:
        if not self.ready:
            self.release()
            with ExitStack() as undo:
                self._gather(undo)
                self._release = undo.pop_all()

    def release(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release.close()

    def changed(self) -> None:
        self.release()

    def _gather(self, undo: ExitStack) -> None:
        raise NotImplementedError
