"""Triton forward of a decoder on CUDA, over the module's own parameters: the twin of the C++ one.

What it may stand in for is decided as for that (`fused_binding.Bound`), before every step; models with recurrent layers run
their own forward. Matrix products are torch's, on the module's parameters where they lie; between them run the kernels of
`triton_layers` and the paged attention: of Llama thirteen kernels a layer instead of some fifty-six. Values are rounded
where the module rounds them. An eager step and a captured one run the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from rollout.engine.forward.chunk_state import ChunkInputs
from rollout.engine.forward.cuda_layers import Layer, Mixture, Mlp, layers_of, norm_of, projected
from rollout.engine.forward.decode_kernels import TritonDecode
from rollout.engine.forward.decode_state import DecodeInputs
from rollout.engine.forward.fused_binding import Bound
from rollout.engine.forward.fused_checks import Unfusable, bypassed
from rollout.engine.forward.fused_forward import BoundForward
from rollout.engine.forward.model_support import AttentionCall, ModelLayout
from rollout.engine.forward.rotary_tables import rotary_numbers
from rollout.engine.kernels import triton_experts, triton_layers
from rollout.engine.kernels.cpu_forward import Activation, Experts, RotaryKind
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import PagedAttention, Rules
from rollout.engine.kernels.triton_experts import ExpertSizes
from rollout.engine.kernels.triton_layer_trial import LayerSizes, failure
from rollout.engine.kernels.triton_layers import Norms, Place, TritonLayers
from rollout.engine.memory.buffers import upload_together
from rollout.engine.memory.kv_cache import KVCache


class _Attention(Protocol):
    """Attention of one step."""

    def slots(self, layer: int) -> Tensor:
        """[P] int32 or int64 slot mapping of a layer; negative: not written."""

    def place(self, layer: int) -> Place:
        """Where K and V of a layer lie."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        """[P, H, D] of queries [P, H, D] over K and V that are written, the step's own among them."""


@dataclass(frozen=True, eq=False)
class _Eager:
    cache: KVCache
    groups: list[tuple[Tensor, PagedAttention]]
    """Slot mapping and attention of each group of layers."""

    def slots(self, layer: int) -> Tensor:
        return self.groups[self.cache.group_of(layer)][0]

    def place(self, layer: int) -> Place:
        return Place(*self.cache.layer(layer), None)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        _, attention = self.groups[self.cache.group_of(layer)]
        return attention(query, key, value, *self.cache.layer(layer), **rules_of(call))


@dataclass(frozen=True, eq=False)
class _Captured:
    inputs: DecodeInputs | ChunkInputs
    kernels: TritonDecode

    def slots(self, layer: int) -> Tensor:
        return self.kernels.slots(layer, self.inputs)

    def place(self, layer: int) -> Place:
        return self.kernels.place(layer)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        return self.kernels.attend(layer, self.inputs, query, **rules_of(call))


def rules_of(call: AttentionCall) -> Rules:
    """What the attention of a layer is asked for."""
    return {"scaling": call.scaling, "window": call.window, "softcap": call.softcap}


class CudaForward(BoundForward):
    """The Triton forward of one model.

    Args:
        cache: holds K and V.
        attention: makes the attention of an eager step.
        decode: attention of captured steps; None: none is captured.
    """

    by_kernels = True
    """See `DecodeForward`."""

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        cache: KVCache,
        attention: Callable[[PagedRows], PagedAttention],
        decode: TritonDecode | None,
    ) -> None:
        super().__init__(model, layout, cache)
        self._attention = attention
        self._decode = decode
        self._layers: list[Layer] = []
        self._products: torch.dtype | None = None
        self.numbers: tuple[float, ...] = ()
        """What a captured step has fixed beside addresses of the module's own parameters."""

    def ready(self, module_epoch: int) -> bool:
        """See `BoundForward.ready`."""
        kind = self._layout.device.type
        products = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if products != self._products:
            self._products, self._module_epoch = products, -1
        return super().ready(module_epoch)

    def run(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        states: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Logits [len(keep), V]; see `BoundForward`."""
        groups = rows.groups()
        tokens, positions, kept, *slots = upload_together(
            (np.maximum(ids, 0), rows.positions, keep, *(each.slots for each in groups)), self._layout.device
        )
        attention = [self._attention(each) for each in groups]
        return self._logits(tokens, positions, _Eager(self._cache, list(zip(slots, attention, strict=True))), kept)

    def decode(self, inputs: DecodeInputs | ChunkInputs) -> Tensor:
        """Logits of a step that can be captured, [B, V] or at `keep`: everything that changes is read from `inputs` and the
        cache."""
        assert self._decode is not None
        cached = torch.is_autocast_cache_enabled()
        # A graph that keeps casts of the weights would hold a copy of the model, and of the weights of now.
        torch.set_autocast_cache_enabled(False)
        try:
            return self._logits(inputs.ids, inputs.positions, _Captured(inputs, self._decode), inputs.keep)
        finally:
            torch.set_autocast_cache_enabled(cached)

    def release(self) -> None:
        """There is nothing to release: the caching allocator keeps what a step needs."""

    def _bypassed(self) -> str | None:
        return bypassed(self._layout.device, self._products)

    def _kv_dtype(self) -> torch.dtype | None:
        return self._products

    def _take(self, bound: Bound) -> None:
        family, fixed, layout = bound.family, bound.model, self._layout
        if family.gated_attention:
            raise Unfusable(f"the Triton forward does not compute the attention of {family.name}")
        # transformers' grouped products leave autocast aside.
        if self._products not in (None, bound.dtype) and (bound.dtype != torch.float32 or bound.mixtures):
            kind = "experts" if bound.mixtures else "parameters"
            raise Unfusable(f"its {bound.dtype} {kind} run under an autocast to {self._products}")
        names, model, decoder = family.names, bound.causal_lm, bound.decoder
        self._layers = layers_of(bound, layout)
        self._mixtures = [layer.mlp for layer in self._layers if isinstance(layer.mlp, Mixture)]
        self._embedding, self._head = getattr(decoder, names.embedding).weight, model.lm_head.weight
        self._final = norm_of(getattr(decoder, names.final_norm))
        self._learned = getattr(decoder, names.positions).weight if family.rotary is None else None
        self._rotary = getattr(decoder, "rotary_emb", None)
        self._rotary_kind = family.rotary or RotaryKind.HALVES
        self._norms = Norms(family.norm, fixed.epsilon)
        self._activation = Activation(fixed.activation)
        self._embedding_scale, self._softcap = fixed.embedding_scale, fixed.final_softcap
        self._kernels: TritonLayers = triton_layers.load()
        self.numbers = self._fixed(bound.mixtures)
        shape, call = layout.layers[0], layout.calls[0]
        sizes = LayerSizes(
            fixed.hidden, fixed.inner, call.num_heads, shape.num_kv_heads, shape.head_dim, family.norm,
            any(layer.norms[1] or layer.norms[3] for layer in self._layers), family.query_norm == "head",
            fixed.rotary_dim, bool(fixed.rotary_wide), self._rotary_kind, self._activation, family.gated,
            fixed.rank > 0, bound.dtype, layout.device,
        )  # fmt: skip
        why = failure(sizes)
        for each in bound.mixtures:
            experts = ExpertSizes(
                fixed.hidden, each.inner, each.chosen, family.shares_wide, self._activation, bound.dtype, layout.device
            )
            why = why or triton_experts.failure(experts)
        if why is not None:
            raise Unfusable(why)

    def _fixed(self, mixtures: list[Experts]) -> tuple[float, ...]:
        calls = [layer.call for layer in self._layers]
        types = dict.fromkeys(layer.tables for layer in self._layers)
        scalings = [] if self._rotary is None else [rotary_numbers(self._rotary, each)[1] for each in types]
        adapters = [each.adapter for layer in self._layers for each in layer.projections if each.adapter is not None]
        return (
            self._norms.epsilon, self._embedding_scale, self._softcap, self._activation, *scalings,
            *(number for each in mixtures for number in (each.chosen, each.normalised)),
            *(number or 0 for call in calls for number in (call.scaling, call.window, call.softcap)),
            # Which of the adapters of a projection acts is known by where it lies.
            *(number for each in adapters for number in (each.scaling, each.down.data_ptr())),
        )  # fmt: skip

    def _logits(self, ids: Tensor, positions: Tensor, step: _Attention, keep: Tensor | None) -> Tensor:
        kernels, norms = self._kernels, self._norms
        hidden = self._embedded(ids, positions)
        # Under autocast the residual stream stays in the dtype of the parameters, and torch casts weights as for the module.
        narrow = self._products or hidden.dtype
        tables = self._tables(hidden, positions)
        delta = after = None
        for layer in self._layers:
            before, after_attention, before_mlp, after_mlp = layer.norms
            hidden, normed = kernels.add_norm(hidden, delta, after, before, norms, narrow)
            delta = layer.output(self._attended(layer, normed, tables[layer.tables], step), kernels)
            hidden, normed = kernels.add_norm(hidden, delta, after_attention, before_mlp, norms, narrow)
            delta, after = self._through_mlp(layer, normed), after_mlp
        _, normed = kernels.add_norm(hidden, delta, after, self._final, norms, narrow)
        logits = linear(normed if keep is None else normed.index_select(0, keep), self._head)
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    def _through_mlp(self, layer: Layer, normed: Tensor) -> Tensor:
        """[P, H]."""
        if isinstance(layer.mlp, Mlp):
            return layer.mlp(normed, self._kernels, self._activation)
        record = None if self.record is None else partial(self.record, self._mixtures.index(layer.mlp))
        return layer.mlp(normed, self._activation, record)

    def _embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """[P, H]."""
        hidden = embedding(ids, self._embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        return hidden if self._learned is None else hidden + embedding(positions, self._learned)

    def _tables(self, hidden: Tensor, positions: Tensor) -> dict[str | None, tuple[Tensor, Tensor] | None]:
        """Cosines and sines [P, R] for each type of layers; None: there is no rotary embedding."""
        found: dict[str | None, tuple[Tensor, Tensor] | None] = {None: None}
        for layer in self._layers:
            if self._rotary is not None and found.get(layer.tables) is None:
                types = () if layer.tables is None else (layer.tables,)
                cosines, sines = self._rotary(hidden, positions[None], *types)
                found[layer.tables] = cosines[0].contiguous(), sines[0].contiguous()
        return found

    def _attended(self, layer: Layer, normed: Tensor, tables: tuple[Tensor, Tensor] | None, step: _Attention) -> Tensor:
        """[P, H * D], before the output projection."""
        shape, kernels = self._layout.layers[layer.index], self._kernels
        heads = (layer.call.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        query, key, value = projected(normed, layer.qkv, [each * shape.head_dim for each in heads], kernels)
        if layer.whole_norms is not None:
            query, key = (
                kernels.add_norm(each, None, None, norm, self._norms, each.dtype)[1]
                for each, norm in zip((query, key), layer.whole_norms, strict=True)
            )
        query, key, value = (each.view(len(each), -1, shape.head_dim) for each in (query, key, value))
        query, key = kernels.rotate_and_write(
            query, key, value, layer.head_norms, self._norms, tables, self._rotary_kind, step.place(layer.index),
            step.slots(layer.index),
        )  # fmt: skip
        return step.attend(layer.index, query, key, value, layer.call).flatten(1)
