"""Interface of a weight source, and the scaffold of sources that gather sharded weights."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from rollout.engine.weights.fingerprints import local_part, persistent_tensors


class Weights:
    """The weights an engine samples with; this class reads the trainer's own tensors in place.

    Attributes:
        trained: the unwrapped Hugging Face model that the optimizer steps.
        sampled: the module whose forward the engine runs.
        collective: whether `gather` is a collective call.
        fixed_addresses: whether the tensors of `sampled` keep their addresses when the weights change.
        tensor_parallel_mesh: one-dimensional device mesh of the ranks that hold the other shards of every layer and compute
            each forward together with this one; None: this rank computes alone.
        expert_parallel_mesh: one-dimensional device mesh of the ranks that exchange tokens inside each layer, each with
            its own batches; None: no layer does.
    """

    collective = False
    fixed_addresses = True
    expert_parallel_mesh: Any = None

    def __init__(self, trained: nn.Module, tensor_parallel_mesh: Any = None) -> None:
        self.trained = self.sampled = trained
        self.tensor_parallel_mesh = tensor_parallel_mesh

    @property
    def spread(self) -> bool:
        """Whether the weights are spread over the ranks, each of which holds a part."""
        return self.collective or self.tensor_parallel_mesh is not None

    @property
    def ready(self) -> bool:
        """Whether `sampled` holds whole, current weights."""
        return True

    def gather(self) -> None:
        """Make `sampled` whole and current; no-op when `ready`."""

    def release(self) -> None:
        """Restore `trained` for training. Local and idempotent, even after an interrupted forward."""

    def changed(self) -> None:
        """Mark gathered or copied weights stale after an update."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Yield name and local part of every parameter and persistent buffer of `trained`; tied tensors under each name."""
        return [(name, local_part(tensor)) for name, tensor in persistent_tensors(self.trained)]


class GatheredWeights(Weights):
    """Weights that are sharded over the ranks, but whole between `gather` and `release`."""

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
