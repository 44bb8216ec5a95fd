"""Scope of exact mode: models of the fused forward without adapters, by C++ kernels on a CPU and Triton's on CUDA."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.fused.fused_binding import Bound
from rollout.engine.kernels import cpu_exact, triton_exact
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.models.originals import Unfusable, bypassed
from rollout.errors import UnsupportedModelError


class ExactKernels(Protocol):
    """Operations whose bits per row depend on that row alone; see `cpu_exact` and `triton_exact`."""

    def require(self, device: torch.device, vocabulary: int) -> None:
        """Raise `UnsupportedModelError` unless the kernels run on `device`, for a vocabulary of this size."""

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor | None = None, total: int = 0
    ) -> Tensor:
        """x [P, K] times weight [N, K] transposed, plus bias [N]."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Normalised rows of x [..., W], times weight [W]."""

    def rotate(self, x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [P, H, D]."""

    def silu_times(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: NDArray[np.int64],
        positions: Tensor,
        scaling: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Causal attention of packed sequences, and the log-sums that a backward without recomputation needs, or None."""


BY_DEVICE: dict[str, ExactKernels] = {"cpu": cpu_exact, "cuda": triton_exact}
"""Type of device → its kernels."""


def kernels_on(device: torch.device) -> ExactKernels:
    """The kernels of a device, not tried out; see `require`.

    Raises:
        UnsupportedModelError: it has none.
    """
    found = BY_DEVICE.get(device.type)
    if found is None:
        raise UnsupportedModelError(f"exact mode runs on a CPU or a CUDA device, and the model is on {device}")
    return found


def bound_exactly(model: nn.Module, layout: ModelLayout, cache: KVCache) -> Bound:
    """A model in its present state, verified as the fused forward verifies it.

    Raises:
        Unfusable, AttributeError: why exact mode does not compute what it does.
    """
    bound = Bound(model, layout, cache, exact=True)
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise Unfusable("it holds PEFT adapters")
    return bound


def why_not_exact(model: nn.Module, layout: ModelLayout, cache: KVCache) -> str | None:
    """Why exact mode refuses a model in its present state, on its device; None: it serves it."""
    try:
        kernels_on(layout.device).require(layout.device, layout.vocab_size)
        bound_exactly(model, layout, cache)
    except (UnsupportedModelError, Unfusable, AttributeError) as exc:
        return str(exc)
    return bypassed(layout.device)
