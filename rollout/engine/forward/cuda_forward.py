"""Triton forward of a Llama-like decoder on CUDA, over the module's own parameters: the twin of the C++ one.

What it may stand in for is decided as for that (`fused_binding.Bound`), before every step. Matrix products are torch's, on
the module's parameters where they lie; between them run the kernels of `triton_layers` and the paged attention: thirteen
kernels a layer instead of some fifty-six, rounded where the module rounds. An eager step and a captured one run the same
code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from rollout.engine.forward.chunk_state import ChunkInputs
from rollout.engine.forward.decode_kernels import TritonDecode
from rollout.engine.forward.decode_state import DecodeInputs
from rollout.engine.forward.fused_binding import Bound
from rollout.engine.forward.fused_checks import Unfusable, bypassed
from rollout.engine.forward.fused_forward import BoundForward
from rollout.engine.forward.model_support import AttentionCall, ModelLayout
from rollout.engine.kernels import triton_layers
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import PagedAttention
from rollout.engine.kernels.triton_layers import HeadNorms, LayerSizes, Place, TritonLayers
from rollout.engine.memory.buffers import upload_together
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.weights.autocast_copies import AutocastCopies

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class _Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class _Layer:
    input_norm: Tensor
    post_norm: Tensor
    head_norms: HeadNorms | None
    qkv: tuple[_Linear, _Linear, _Linear]
    output: _Linear
    gate: _Linear
    up: _Linear
    down: _Linear
    index: int
    """Of its K and V in the cache."""
    call: AttentionCall


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
        return attention(query, key, value, *self.cache.layer(layer), scaling=call.scaling, window=call.window)


@dataclass(frozen=True, eq=False)
class _Captured:
    inputs: DecodeInputs | ChunkInputs
    kernels: TritonDecode

    def slots(self, layer: int) -> Tensor:
        return self.kernels.slots(layer, self.inputs)

    def place(self, layer: int) -> Place:
        return self.kernels.place(layer)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        return self.kernels.attend(layer, self.inputs, query, scaling=call.scaling, window=call.window)


class CudaForward(BoundForward):
    """The Triton forward of one model.

    Args:
        cache: holds K and V.
        attention: makes the attention of an eager step.
        decode: attention of captured steps; None: none is captured.
        copies: read in the place of weights that autocast casts; None: they are cast in every step.
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
        copies: AutocastCopies | None = None,
    ) -> None:
        # What exact mode has a training forward for is what this computes too: no live adapters, four families.
        super().__init__(model, layout, cache, exact=True)
        self._attention = attention
        self._decode = decode
        self._copies = copies
        self._layers: list[_Layer] = []
        self._products: torch.dtype | None = None
        self.numbers: tuple[float, ...] = ()
        """What a captured step has fixed beside addresses of parameters: epsilon, and scale and window of each layer."""

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
        model, layout = bound.causal_lm, self._layout
        if (name := type(model).__name__.removeprefix("FSDP")) not in FAMILIES:
            raise Unfusable(f"the Triton forward serves {', '.join(FAMILIES)}, not {name}")
        if self._products not in (None, bound.dtype) and bound.dtype != torch.float32:
            raise Unfusable(f"its {bound.dtype} parameters run under an autocast to {self._products}")
        decoder = model.model
        self._epsilon: float = decoder.norm.variance_epsilon
        self._layers = [_layer(layer, layout) for layer in decoder.layers]
        self._embedding, self._norm, self._head = decoder.embed_tokens.weight, decoder.norm.weight, model.lm_head.weight
        self._rotary = decoder.rotary_emb
        self._kernels: TritonLayers = triton_layers.load()
        calls = [layer.call for layer in self._layers]
        self.numbers = (self._epsilon, *(number for call in calls for number in (call.scaling, call.window or 0)))
        shape, first = layout.layers[0], self._layers[0]
        sizes = LayerSizes(
            self._norm.shape[0], first.gate.weight.shape[0], calls[0].num_heads, shape.num_kv_heads, shape.head_dim,
            first.head_norms is not None, bound.dtype, layout.device,
        )  # fmt: skip
        if (why := triton_layers.failure(sizes)) is not None:
            raise Unfusable(why)

    def _logits(self, ids: Tensor, positions: Tensor, step: _Attention, keep: Tensor | None) -> Tensor:
        kernels, epsilon = self._kernels, self._epsilon
        hidden = embedding(ids, self._embedding)
        # Under autocast the residual stream stays in the dtype of the parameters, and torch casts weights as for the module.
        narrow = self._products or hidden.dtype
        cosines, sines = (each[0].contiguous() for each in self._rotary(hidden, positions[None]))
        delta = None
        for layer in self._layers:
            hidden, normed = kernels.add_norm(hidden, delta, layer.input_norm, epsilon, narrow)
            delta = self._product(self._attended(layer, normed, cosines, sines, step), layer.output)
            hidden, normed = kernels.add_norm(hidden, delta, layer.post_norm, epsilon, narrow)
            gate, up = self._product(normed, layer.gate), self._product(normed, layer.up)
            delta = self._product(kernels.silu_times(gate, up), layer.down)
        _, normed = kernels.add_norm(hidden, delta, self._norm, epsilon, narrow)
        return self._product(normed if keep is None else normed.index_select(0, keep), _Linear(self._head, None))

    def _product(self, x: Tensor, each: _Linear) -> Tensor:
        """x [P, K] through a linear layer."""
        if self._copies is None or self._products is None:
            return linear(x, *each)
        weight, bias = (part if part is None else self._copies.cast(part, self._products) for part in each)
        assert weight is not None
        return linear(x, weight, bias)

    def _attended(self, layer: _Layer, normed: Tensor, cosines: Tensor, sines: Tensor, step: _Attention) -> Tensor:
        """[P, H * D], before the output projection."""
        dim = self._layout.layers[layer.index].head_dim
        query, key, value = (self._product(normed, each).view(len(normed), -1, dim) for each in layer.qkv)
        query, key = self._kernels.rotate_and_write(
            query, key, value, layer.head_norms, self._epsilon, cosines, sines, step.place(layer.index),
            step.slots(layer.index),
        )  # fmt: skip
        return step.attend(layer.index, query, key, value, layer.call).flatten(1)


def _layer(layer: Any, layout: ModelLayout) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    index = layout.layer_of[attention]
    norms = HeadNorms(attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    query, key, value, output = (_linear(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    return _Layer(
        layer.input_layernorm.weight, layer.post_attention_layernorm.weight, norms, (query, key, value), output,
        _linear(mlp.gate_proj), _linear(mlp.up_proj), _linear(mlp.down_proj), index, layout.calls[index],
    )  # fmt: skip


def _linear(module: Any) -> _Linear:
    # Disabled LoRA layers are looked through.
    module = getattr(module, "base_layer", module)
    return _Linear(module.weight, module.bias)
