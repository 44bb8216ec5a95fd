"""Experts of a mixture on CUDA: two Triton products of rows grouped by expert, on the module's parameters where they lie.

transformers' own ways to compute them wait for the device, read a copy of the weights per token, or serve bfloat16 alone;
these kernels serve every dtype that a model has, and can be captured in a CUDA graph. Which experts a position goes through
is the router's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from rollout.engine.kernels.cpu_forward import Activation
from rollout.engine.kernels.triton_paged import device_of, power_of_two
from rollout.engine.kernels.triton_trial import TOLERANCES

_LEAST_ROWS, _MOST_ROWS = 16, 64
"""Of a block: what a matrix instruction takes, and what leaves room for two sums in registers."""
_COLUMNS, _DEPTH_BYTES = 64, 128


class TritonExperts:
    """The compiled kernels. Inputs are contiguous."""

    def __init__(self, kernels: _Kernels) -> None:
        self._kernels = kernels

    def __call__(
        self, hidden: Tensor, shares: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
    ) -> Tensor:
        """Sum over a position's experts of share * down(activation(gate) * up): [P, H], in the dtype of `hidden`.

        Args:
            hidden: [P, H].
            shares, chosen: [P, k] of each position's experts, and which they are, int64.
            gate_up: [E, 2 * I, H], gate before up.
            down: [E, H, I].
        """
        count, width = hidden.shape
        if not count:
            return torch.empty_like(hidden)
        experts, inner, most = len(down), down.shape[2], chosen.shape[1]
        choices = count * most
        ordered, order = chosen.flatten().sort(stable=True)
        begins = torch.searchsorted(ordered, torch.arange(experts + 1, device=hidden.device), out_int32=True)
        rows = min(_MOST_ROWS, max(_LEAST_ROWS, power_of_two(-(-choices // experts))))
        blocks = choices // rows + min(experts, choices)
        made = hidden.new_empty(choices, inner)
        out = hidden.new_empty(choices, width, dtype=torch.promote_types(hidden.dtype, shares.dtype))
        sizes = {
            "count": experts, "padded_count": power_of_two(experts), "width": width, "inner": inner, "rows": rows,
            "columns": _COLUMNS, "depth": _DEPTH_BYTES // hidden.element_size(), "num_warps": 4,
        }  # fmt: skip
        with device_of(hidden):
            self._kernels.gate_and_up[(blocks, -(-inner // _COLUMNS))](
                hidden, gate_up, order, begins, made, chosen=most, gelu=activation is Activation.GELU_TANH, **sizes
            )
            self._kernels.shared_down[(blocks, -(-width // _COLUMNS))](made, down, order, begins, shares, out, **sizes)
        return out.view(count, most, width).sum(1).to(hidden.dtype)


@dataclass(frozen=True, eq=False)
class _Kernels:
    gate_and_up: Any
    shared_down: Any


@cache
def load() -> TritonExperts:
    """The kernels, not compiled yet.

    Raises:
        ImportError: there is no Triton.
    """
    jit = import_module("triton").jit
    device_code = import_module("rollout.engine.kernels.triton_expert_kernels")
    return TritonExperts(_Kernels(jit(device_code.gate_and_up), jit(device_code.shared_down)))


# --- trial ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertSizes:
    """What the kernels are compiled for."""

    width: int
    inner: int
    """Of an expert."""
    chosen: int
    wide: bool
    """Whether shares are float32."""
    activation: Activation
    dtype: torch.dtype
    device: torch.device


@cache
def failure(sizes: ExpertSizes) -> str | None:
    """How the kernels fail, or differ from plain torch; None: they work."""
    generator, experts, count = torch.Generator().manual_seed(0), sizes.chosen + 1, 5

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(sizes.device, sizes.dtype)

    try:
        gate_up = drawn(experts, 2 * sizes.inner, sizes.width, scale=sizes.width**-0.5)
        down = drawn(experts, sizes.width, sizes.inner, scale=sizes.inner**-0.5)
        chosen = torch.rand(count, experts, generator=generator).topk(sizes.chosen)[1].to(sizes.device)
        hidden, shares = drawn(count, sizes.width), drawn(count, sizes.chosen, scale=sizes.chosen**-0.5)
        shares = shares.float() if sizes.wide else shares
        found = load()(hidden, shares, chosen, gate_up, down, sizes.activation)
        expected = mixed(hidden, shares, chosen, gate_up, down, sizes.activation)
        error = float((found.float() - expected.float()).abs().max())
    except Exception as exc:  # noqa: BLE001 - compiler, driver or arithmetic may fail in any way
        return f"Triton's experts do not work: {type(exc).__name__}: {exc}".partition("\n")[0]
    return None if error <= 2 * TOLERANCES[sizes.dtype] else f"Triton's experts differ from plain torch by {error:.3g}"


def mixed(
    hidden: Tensor, shares: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, activation: Activation
) -> Tensor:
    """What `TritonExperts` computes, expert by expert in plain torch: the reference for the kernels."""
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in range(len(down)):
        position, place = torch.where(chosen == expert)
        gate, up = linear(hidden[position], gate_up[expert]).chunk(2, -1)
        made = (gelu(gate, approximate="tanh") if activation is Activation.GELU_TANH else silu(gate)) * up
        out.index_add_(0, position, (linear(made, down[expert]) * shares[position, place, None]).float())
    return out.to(hidden.dtype)
