"""Parameters and numbers of decoder layers for the Triton forward, found in a verified model by the row of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.engine.forward.families import Family
from rollout.engine.forward.fused_binding import Bound
from rollout.engine.forward.fused_parts import active_adapters, base_of, is_conv
from rollout.engine.forward.model_support import AttentionCall, ModelLayout
from rollout.engine.kernels import triton_experts
from rollout.engine.kernels.cpu_forward import Activation
from rollout.engine.kernels.triton_layers import HeadNorms, NormWeights, TritonLayers


class Adapter(NamedTuple):
    """An active LoRA adapter (arXiv 2106.09685) of a projection."""

    down: Tensor
    """[rank, columns in]."""
    up: Tensor
    """[columns out, rank]."""
    scaling: float


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear layer, called with [P, columns in]."""

    weight: Tensor
    """[columns out, columns in]; turned round if `transposed`."""
    bias: Tensor | None
    transposed: bool
    adapter: Adapter | None

    def __call__(self, x: Tensor, kernels: TritonLayers) -> Tensor:
        """[P, columns out], rounded where torch and PEFT round."""
        out = linear(x, self.weight.t() if self.transposed else self.weight, self.bias)
        if self.adapter is None:
            return out
        down, up, scaling = self.adapter
        return kernels.add_scaled(out, linear(linear(x.to(down.dtype), down), up), scaling)


@dataclass(frozen=True, eq=False)
class Mlp:
    """The MLP of a decoder layer."""

    gate_up: tuple[Projection, ...]
    """One: gate and up are packed, or there is no gate."""
    down: Projection
    gated: bool

    def __call__(self, x: Tensor, kernels: TritonLayers, activation: Activation) -> Tensor:
        """[P, H] of [P, H]."""
        gate, *up = projected(x, self.gate_up, 1 + self.gated, kernels)
        return self.down(kernels.activate(gate, up[0] if up else None, activation), kernels)


@dataclass(frozen=True, eq=False)
class Mixture:
    """A mixture of experts in place of an MLP; its router is the module's own."""

    router: nn.Module
    gate_up: Tensor
    """[experts, 2 * I, H]."""
    down: Tensor
    """[experts, H, I]."""

    def __call__(self, x: Tensor, activation: Activation, record: Callable[[Tensor], None] | None) -> Tensor:
        """[P, H] of [P, H].

        Args:
            record: gets the experts [P, k] of each position; None: they are not recorded.
        """
        _, shares, chosen = self.router.forward(x)
        if record is not None:
            record(chosen)
        return triton_experts.load()(x, shares, chosen, self.gate_up, self.down, activation)


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer."""

    norms: tuple[NormWeights | None, ...]
    """Before and after attention, before and after the MLP; None: there is none."""
    qkv: tuple[Projection, ...]
    """One: queries, keys and values are packed."""
    output: Projection
    head_norms: HeadNorms | None
    whole_norms: tuple[NormWeights, NormWeights] | None
    """Of all heads of queries together, and of keys."""
    mlp: Mlp | Mixture
    tables: str | None
    """Type of layer whose cosines and sines it has; None: all layers have the same."""
    index: int
    """Of its K and V in the cache."""
    call: AttentionCall

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Those that may have an adapter."""
        mlp = () if isinstance(self.mlp, Mixture) else (*self.mlp.gate_up, self.mlp.down)
        return *self.qkv, self.output, *mlp


def projected(
    x: Tensor, projections: tuple[Projection, ...], parts: int | list[int], kernels: TritonLayers
) -> list[Tensor]:
    """[P, columns out] each of `parts`, of a projection each or cut out of one in which they are packed.

    Args:
        parts: their sizes, or the number of equal ones.
    """
    if len(projections) > 1:
        return [each(x, kernels) for each in projections]
    packed = projections[0](x, kernels)
    return list(packed.chunk(parts, -1) if isinstance(parts, int) else torch.split(packed, parts, -1))


def layers_of(bound: Bound, layout: ModelLayout) -> list[Layer]:
    """The layers of a verified model."""
    family, layers = bound.family, getattr(bound.decoder, bound.family.names.layers)
    return [_layer(layer, index, family, layout) for index, layer in enumerate(layers)]


def norm_of(module: Any) -> NormWeights:
    """The parameters of a norm."""
    return NormWeights(module.weight, getattr(module, "bias", None))


def _layer(layer: Any, index: int, family: Family, layout: ModelLayout) -> Layer:
    names = family.names
    attention = getattr(layer, names.attention)
    place = layout.layer_of[attention]
    head_norms = whole_norms = None
    if family.query_norm == "head":
        head_norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight)
    elif family.query_norm == "whole":
        whole_norms = norm_of(attention.q_norm), norm_of(attention.k_norm)
    return Layer(
        norms=tuple(None if name is None else norm_of(getattr(layer, name)) for name in family.norms),
        qkv=tuple(_projection(getattr(attention, name)) for name in names.qkv),
        output=_projection(getattr(attention, names.output)),
        head_norms=head_norms,
        whole_norms=whole_norms,
        mlp=_mlp(layer.mlp, family),
        tables=attention.config.layer_types[index] if family.rotary_by_type else None,
        index=place,
        call=layout.calls[place],
    )


def _mlp(mlp: Any, family: Family) -> Mlp | Mixture:
    names = family.names
    if family.experts and hasattr(mlp, "experts"):
        return Mixture(mlp.gate, mlp.experts.gate_up_proj, mlp.experts.down_proj)
    gate_up = tuple(_projection(getattr(mlp, name)) for name in names.gate_up)
    return Mlp(gate_up, _projection(getattr(mlp, names.down)), family.gated)


def _projection(module: Any) -> Projection:
    base, adapter = base_of(module), None
    if base is not module and (active := active_adapters(module)):
        (name,) = active
        adapter = Adapter(module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]))
    return Projection(base.weight, base.bias, is_conv(base), adapter)
