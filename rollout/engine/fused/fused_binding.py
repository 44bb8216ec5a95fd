"""The parameter addresses for the fused forward pass, and checks that a model matches its family's entry in `families`."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import nn

from rollout.engine.fused.families import FAMILIES, Family
from rollout.engine.fused.fused_parts import Parts, base_of, is_conv, rotary_tables
from rollout.engine.kernels.cpu_attention import MAX_GROUP
from rollout.engine.kernels.cpu_forward import DeltaNet, Experts, Layer, Model, Norm
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.models.model_support import AttentionCall, ModelLayout
from rollout.engine.models.originals import PEFT_LORA, Checks, Unfusable, address, is_of, require

_DTYPES = (torch.float32, torch.bfloat16)
_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")


class Bound:
    """The addresses of everything in a model that the C++ forward pass reads.

    Args:
        exact: whether to reject models that exact mode (training with the engine's arithmetic) does not support.
        states: pool of recurrent states, or None if the model has no recurrent layers or they are not supported.

    Attributes:
        causal_lm: the model, without PEFT's wrappers.
        decoder: the module that holds the layers.
        mixtures: the mixtures of experts, in layer order.

    Raises:
        Unfusable, AttributeError: the C++ forward pass cannot compute this model. The message gives the reason.
    """

    def __init__(
        self, model: Any, layout: ModelLayout, cache: KVCache, *, exact: bool = False, states: StatePool | None = None
    ) -> None:
        self._checks = Checks()
        self._exact = exact
        self._states = states
        self._layout = layout
        for name in ("linear", "silu", "embedding", "softmax", "layer_norm", "dropout", "gelu"):
            self._checks.function(nn.functional, name)
        self.causal_lm: Any = self._without_lora(model)
        self.family = self._family_of(self.causal_lm)
        self._widths: list[int] = []
        self.mixtures: list[Experts] = []
        self._bind(self.causal_lm, cache)

    def reads(self, cache: KVCache) -> bool:
        """Return whether the collected addresses still point into the current KV cache and state pool."""
        return self._pools_now(cache) == self._pools

    def reach(self, length: int) -> None:
        """Extend the cosine and sine tables to at least `length` positions, with the module's own rotary embedding."""
        for layer_type, layers in self._rotated.items():
            tables = self._tables[layer_type]
            if len(tables[0]) < length:
                wanted = max(length, min(4096, 2 * length))
                tables = self._tables[layer_type] = rotary_tables(self._rotary, self.dtype, wanted, layer_type)
            elif layers[0].cosines == tables[0].data_ptr():
                continue
            for layer in layers:
                layer.cosines, layer.sines = (table.data_ptr() for table in tables)

    # --- reading the model ----------------------------------------------------------------------------------------

    def _bind(self, model: Any, cache: KVCache) -> None:
        family, names = self.family, self.family.names
        self._checks.plain(model, "lm_head", names.decoder)
        decoder, config = getattr(model, names.decoder), model.config.get_text_config()
        if names.inner:
            require(is_of(decoder, f"{family.name}Model"), "its model of text and images is of another class")
            self._checks.plain(decoder, "visual", names.inner)
            decoder = getattr(decoder, names.inner)
        require(is_of(decoder, f"{family.name}{names.decoder_class}"), "its decoder is of another class")
        places = (names.positions if family.rotary is None else "rotary_emb",)
        self.decoder: Any = decoder
        self._checks.plain(decoder, names.embedding, names.layers, names.final_norm, *places, *family.dropouts[0])
        self._embedding(getattr(decoder, names.embedding), cache)
        self._parts = Parts(self._checks, family, self.dtype, exact=self._exact)
        self._parts.dropouts(decoder, family.dropouts[0])
        layers = getattr(decoder, names.layers)
        require(type(layers) is nn.ModuleList, "its layers are not a plain list")
        attention = next(filter(None, (getattr(layer, names.attention, None) for layer in layers)), None)
        require(attention is not None, "it has no attention layers")
        self._attention_in_common(config, attention, len(layers))
        self._pools = self._pools_now(cache)
        self._layers = (Layer * len(layers))()
        self._rotated: dict[str | None, list[Layer]] = {}
        for index, layer in enumerate(layers):
            self._fill(self._layers[index], layer, index, cache)
        self._rotary = getattr(decoder, "rotary_emb", None)
        if self._rotary is not None:
            self._checks.plain(self._rotary)
        self._tables = {kind: rotary_tables(self._rotary, self.dtype, 1, kind) for kind in self._rotated}
        norm = self._parts.norm(getattr(decoder, names.final_norm))
        (head,) = self._parts.linear(model.lm_head, lora=False)
        require(head.bias is None, "its head has a bias")
        positions = self._positions(getattr(decoder, names.positions)) if family.rotary is None else None
        self.model = self._model(model, norm, head.weight, positions)

    def _model(self, model: Any, norm: Norm, head: int, positions: int | None) -> Model:
        family, layout = self.family, self._layout
        require(len(self._parts.epsilons) == 1, "its norms have several epsilons")
        require(len(self._parts.activations) == 1, "its layers have several activations")
        rotary_dim, rotary_wide = self._rotation()
        final_softcap = model.config.final_logit_softcapping if family.capped_logits else None
        return Model(
            layers=ctypes.addressof(self._layers),
            embedding=address(self._embedded, "weight", self.dtype),
            head=head,
            positions=positions,
            norm=norm,
            count=len(self._layers),
            hidden=self._embedded.weight.shape[1],
            heads=layout.calls[0].num_heads,
            kv_heads=layout.layers[0].num_kv_heads,
            head_dim=layout.layers[0].head_dim,
            vocabulary=model.lm_head.weight.shape[0],
            inner=max(self._widths),
            experts=max((each.count for each in self.mixtures), default=0),
            chosen=max((each.chosen for each in self.mixtures), default=0),
            rank=max(self._parts.ranks),
            norm_kind=family.norm,
            norm_whole=family.query_norm == "whole",
            gated=family.gated_attention,
            delta_width=max(map(_delta_width, self._layers)),
            delta_values=max(each.delta.value_heads * each.delta.value_dim for each in self._layers),
            shared=family.shared_expert,
            rotary_kind=family.rotary or 0,
            rotary_dim=rotary_dim,
            rotary_wide=rotary_wide,
            activation=self._parts.activations.pop(),
            epsilon=self._parts.epsilons.pop(),
            scaling=self._scaling,
            embedding_scale=float(self._embedded.embed_scale.to(self.dtype)) if family.scaled_embedding else 1.0,
            softcap=self._softcap or 0.0,
            final_softcap=final_softcap or 0.0,
        )

    def _family_of(self, model: Any) -> Family:
        served = [each for each in FAMILIES if each.exact or not self._exact]
        family = next((each for each in served if is_of(model, each.name + each.names.causal_lm)), None)
        if family is None:
            mode = "exact mode" if self._exact else "the fused forward"
            known = ", ".join(each.name for each in served)
            raise Unfusable(f"{type(model).__name__} is none of the families of {mode}: {known}")
        return family

    def _pools_now(self, cache: KVCache) -> tuple[int, ...]:
        """Return the addresses and sizes of the KV cache and state pool, which determine where each layer's part is."""
        found = cache.layer(0)[0].data_ptr(), cache.num_blocks
        if self._states is None:
            return found
        return *found, self._states.state(self._states.shapes[0].key).data_ptr(), self._states.num_blocks

    def _rotation(self) -> tuple[int, bool]:
        """Return the number of rotated elements per head, and whether the tables have a wider dtype than the model."""
        found = {(table.shape[1], table.dtype) for tables in self._tables.values() for table in tables}
        if not found:
            return 0, False
        require(len(found) == 1, "its layers rotate differently")
        ((size, dtype),) = found
        require(size <= self._layout.layers[0].head_dim, f"its rotary embedding is wider ({size}) than a head")
        require(dtype in (self.dtype, torch.float32), f"its rotary tables are {dtype}")
        return size, dtype != self.dtype

    def _embedding(self, embedding: Any, cache: KVCache) -> None:
        kind = f"{self.family.name}TextScaledWordEmbedding"
        known = is_of(embedding, kind) if self.family.scaled_embedding else type(embedding) is nn.Embedding
        require(known, f"its embedding is {type(embedding).__name__}")
        self._checks.plain(embedding)
        self._checks.methods(nn.Embedding, "forward")
        require(embedding.max_norm is None, "its embedding has a max_norm")
        self._embedded = embedding
        self.dtype = embedding.weight.dtype
        require(self.dtype in _DTYPES, f"its dtype is {self.dtype}")
        require(self._layout.kv_dtype == cache.dtype == self.dtype, "its KV cache has another dtype")
        self.narrow = int(self.dtype == torch.bfloat16)

    def _attention_in_common(self, config: Any, first: Any, count: int) -> None:
        _require_known_attention(config, self._layout)
        require(config.num_hidden_layers == count, "its configuration leaves out some of its layers")
        self._scaling = first.scaling
        require(isinstance(self._scaling, float), "its attention layers have no scaling")
        self._softcap = self._layout.calls[0].softcap

    def _positions(self, embedding: Any) -> int:
        require(
            type(embedding) is nn.Embedding and embedding.max_norm is None, "its positions are not a plain nn.Embedding"
        )
        self._checks.plain(embedding)
        return address(embedding, "weight", self.dtype)

    # --- reading a layer ------------------------------------------------------------------------------------------

    def _fill(self, out: Layer, layer: Any, index: int, cache: KVCache) -> None:
        family, names = self.family, self.family.names
        require(is_of(layer, f"{family.name}{names.layer}"), "a layer is of another class")
        norms = [name for name in family.norms if name is not None]
        mixer = "linear_attn" if family.delta != "none" and hasattr(layer, "linear_attn") else names.attention
        self._checks.plain(layer, mixer, "mlp", *norms, *family.dropouts[1])
        self._parts.dropouts(layer, family.dropouts[1])
        for place, name in zip(_NORMS, family.norms, strict=True):
            if name is not None:
                setattr(out, place, self._parts.norm(getattr(layer, name)))
        if mixer != names.attention:
            if self._states is None:
                raise Unfusable("it has recurrent layers, which only the C++ forward on a CPU computes")
            out.delta, out.output = self._parts.delta_net(getattr(layer, mixer), index, self._states)
        else:
            self._fill_attention(out, getattr(layer, mixer), cache)
        if family.experts and is_of(layer.mlp, f"{family.name}SparseMoeBlock"):
            out.experts = self._parts.experts(layer.mlp)
            self.mixtures.append(out.experts)
            self._widths.append(out.experts.chosen * out.experts.inner)
            if family.shared_expert:
                self._fill_mlp(out, layer.mlp.shared_expert)
                (out.shared_gate,) = self._parts.linear(layer.mlp.shared_expert_gate, 1)
        else:
            self._fill_mlp(out, layer.mlp)
        if family.rotary is not None and mixer == names.attention:
            layer_type = layer.self_attn.config.layer_types[index] if family.rotary_by_type else None
            self._rotated.setdefault(layer_type, []).append(out)

    def _fill_attention(self, out: Layer, attention: Any, cache: KVCache) -> None:
        family, names = self.family, self.family.names
        require(is_of(attention, f"{family.name}Attention"), "an attention layer is of another class")
        norms = () if family.query_norm == "none" else ("q_norm", "k_norm")
        self._checks.plain(attention, *names.qkv, names.output, *norms, *family.dropouts[2])
        self._parts.dropouts(attention, family.dropouts[2])
        index = self._layout.layer_of.get(attention)
        if index is None:
            raise Unfusable("an attention layer was replaced after the engine was built")
        shape, call = self._layout.layers[index], self._layout.calls[index]
        wide = call.num_heads * (1 + family.gated_attention)
        sizes = [heads * shape.head_dim for heads in (wide, shape.num_kv_heads, shape.num_kv_heads)]
        out.query, out.key, out.value = self._parts.linears(attention, names.qkv, sizes)
        (out.output,) = self._parts.linear(getattr(attention, names.output))
        if norms:
            out.query_norm, out.key_norm = self._parts.norm(attention.q_norm), self._parts.norm(attention.k_norm)
        self._require_numbers(attention, shape.head_dim, call)
        keys, values = cache.layer(index)
        out.keys, out.values = keys.data_ptr(), values.data_ptr()
        out.window = call.window or 0

    def _require_numbers(self, attention: Any, head_dim: int, call: AttentionCall) -> None:
        family = self.family
        require(attention.scaling == self._scaling, "its attention layers scale their scores differently")
        require(attention.head_dim == head_dim, "the head size of a layer was changed")
        place = {"none": None, "config": attention.config, "attention": attention}[family.window]
        require(getattr(place, "sliding_window", None) == call.window, "the window of a layer was changed")
        softcap = attention.attn_logit_softcapping if family.capped_scores else None
        require(softcap == self._softcap, "the cap of a layer's scores was changed")

    def _fill_mlp(self, out: Layer, mlp: Any) -> None:
        family, names = self.family, self.family.names
        require(is_of(mlp, f"{family.name}MLP"), "an MLP is of another class")
        self._checks.plain(mlp, *names.gate_up, names.down, names.activation, *family.dropouts[3])
        self._parts.dropouts(mlp, family.dropouts[3])
        self._parts.activation(getattr(mlp, names.activation))
        (out.down,) = self._parts.linear(getattr(mlp, names.down))
        first = base_of(getattr(mlp, names.gate_up[0]))
        rows = int(first.weight.shape[1 if is_conv(first) else 0])
        out.inner = rows // 2 if family.gated and len(names.gate_up) == 1 else rows
        wide = self._parts.linears(mlp, names.gate_up, [out.inner] * (1 + family.gated))
        out.up = wide[-1]
        if family.gated:
            out.gate = wide[0]
        self._widths.append(out.inner)

    def _without_lora(self, model: Any) -> Any:
        """Return the model inside PEFT's LoRA wrappers, if any. The wrappers only pass calls through."""
        if not (is_of(model, "PeftModel", "peft.") or is_of(model, "PeftModelForCausalLM", "peft.")):
            return model
        self._checks.plain(model, "base_model")
        require(is_of(model.base_model, "LoraModel", PEFT_LORA), "its adapters are not LoRA")
        self._checks.plain(model.base_model, "model")
        return model.base_model.model


def _delta_width(layer: Layer) -> int:
    """Return the number of outputs per position of a gated delta rule layer's projections; 0 for any other layer."""
    delta: DeltaNet = layer.delta
    keys, values = int(delta.key_heads * delta.key_dim), int(delta.value_heads * (delta.value_dim + 1))
    return 2 * (keys + values)


def _require_known_attention(config: Any, layout: ModelLayout) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        require(
            each.get("rope_type", "default") not in ("dynamic", "longrope"),
            "its rotary embedding changes with the length",
        )
    shape, call = layout.layers[0], layout.calls[0]
    require(all(each == shape for each in layout.layers), "its layers differ in shape")
    require(shape.value_dim == shape.head_dim and shape.head_dim % 2 == 0, f"its head size is {shape.head_dim}")
    same = (call.num_heads, call.scaling, call.softcap, False)
    require(
        all((each.num_heads, each.scaling, each.softcap, each.sinks) == same for each in layout.calls),
        "its attention layers differ, or have sinks",
    )
    require(call.num_heads <= MAX_GROUP * shape.num_kv_heads, f"more than {MAX_GROUP} query heads share a KV head")
