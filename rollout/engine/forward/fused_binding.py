"""Addresses of a model's parameters for the fused forward, after verifying that the model computes what its family does."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import activations, pytorch_utils
from transformers.integrations import moe

from rollout.engine.forward.families import FAMILIES, Family
from rollout.engine.forward.fused_checks import PEFT_LORA, Checks, Unfusable, address, is_of, require
from rollout.engine.forward.model_support import AttentionCall, ModelLayout
from rollout.engine.forward.rotary_tables import rotary_numbers, rotary_tables
from rollout.engine.kernels.cpu_attention import MAX_GROUP
from rollout.engine.kernels.cpu_forward import Activation, Adapter, Experts, Layer, Linear, Model, Norm, NormKind
from rollout.engine.memory.kv_cache import KVCache

_DTYPES = (torch.float32, torch.bfloat16)
_NORMS = ("before_attention", "after_attention", "before_mlp", "after_mlp")


class Bound:
    """Addresses of everything that the C++ forward reads.

    Args:
        exact: refuse what exact mode has no training forward for.

    Attributes:
        causal_lm: the …ForCausalLM, out of PEFT's wrappers.
        dtype: of its parameters.

    Raises:
        Unfusable, Replaced, AttributeError: why the C++ forward does not compute what this model does.
    """

    def __init__(self, model: Any, layout: ModelLayout, cache: KVCache, *, exact: bool = False) -> None:
        self._checks = Checks()
        self._exact = exact
        self._layout = layout
        for name in ("linear", "silu", "embedding", "softmax", "layer_norm", "dropout", "gelu"):
            self._checks.originals.function(nn.functional, name)
        self.causal_lm: Any = self._without_lora(model)
        self._family = self._family_of(self.causal_lm)
        self._epsilons: set[float] = set()
        self._activations: set[Activation] = set()
        self._widths: list[int] = []
        self._experts: list[Experts] = []
        self._ranks = [0]
        self._bind(self.causal_lm, cache)
        self._checks.seal()

    def reads(self, cache: KVCache) -> bool:
        """Whether the KV pool is unmoved and a quick check finds no change of the model."""
        return (
            cache.layer(0)[0].data_ptr() == self._pool and self._checks.hold() and self._buffers_now() == self._buffers
        )

    def reach(self, length: int) -> None:
        """Extend the cosine and sine tables to `length` positions, by the module's own rotary embedding."""
        for layer_type, layers in self._rotated.items():
            tables = self._tables.get(layer_type)
            if tables is not None and len(tables[0]) >= length:
                continue
            wanted = max(length, min(4096, 2 * length))
            tables = self._tables[layer_type] = rotary_tables(self._rotary, self.dtype, wanted, layer_type)
            for layer in layers:
                layer.cosines, layer.sines = (table.data_ptr() for table in tables)

    # --- the model ------------------------------------------------------------------------------------------------

    def _bind(self, model: Any, cache: KVCache) -> None:
        family, names, layout, read = self._family, self._family.names, self._layout, self._checks.originals.value
        plain = self._checks.plain
        plain(model, "lm_head", names.decoder)
        decoder = getattr(model, names.decoder)
        require(is_of(decoder, f"{family.name}{names.decoder_class}"), "its decoder is of another class")
        learned = () if family.rotary is not None else ("wpe",)
        rotary = ("rotary_emb",) if family.rotary is not None else ()
        plain(decoder, names.embedding, names.layers, names.final_norm, *rotary, *learned, *family.dropouts[0])
        self._dropouts(decoder, family.dropouts[0])
        embedding, layers = getattr(decoder, names.embedding), getattr(decoder, names.layers)
        require(type(layers) is nn.ModuleList, "its layers are no plain list")
        self._embedding(embedding)
        self.dtype = embedding.weight.dtype
        require(self.dtype in _DTYPES, f"its dtype is {self.dtype}")
        require(layout.kv_dtype == self.dtype == cache.dtype, "its KV cache has another dtype")
        self.narrow = int(self.dtype == torch.bfloat16)
        self._rotary = getattr(decoder, "rotary_emb", None)
        if self._rotary is not None:
            plain(self._rotary)
        _require_known_attention(model.config, layout)
        require(
            read(model.config, "num_hidden_layers") == len(layers), "its configuration leaves out some of its layers"
        )
        first = getattr(layers[0], names.attention)
        self._scaling = read(first, "scaling")
        require(isinstance(self._scaling, float), "its attention layers have no scaling")
        self._softcap = layout.calls[0].softcap
        self._pool = cache.layer(0)[0].data_ptr()
        self._layers = (Layer * len(layers))()
        self._rotated: dict[str | None, list[Layer]] = {}
        self._tables: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        for index, layer in enumerate(layers):
            self._fill(self._layers[index], layer, index, cache)
        self._scaled = embedding if family.scaled_embedding else None
        self._buffers = self._buffers_now()
        norm, head = self._norm(getattr(decoder, names.final_norm)), self._linear(model.lm_head, lora=False)[0]
        require(head.bias is None, "its head has a bias")
        require(len(self._epsilons) == 1, "its norms have several epsilons")
        require(len(self._activations) == 1, "its layers have several activations")
        self.model = Model(
            layers=ctypes.addressof(self._layers),
            embedding=address(embedding, "weight", self.dtype),
            head=head.weight,
            positions=self._positions(decoder.wpe) if learned else None,
            norm=norm,
            count=len(layers),
            hidden=embedding.weight.shape[1],
            heads=layout.calls[0].num_heads,
            kv_heads=layout.layers[0].num_kv_heads,
            head_dim=layout.layers[0].head_dim,
            vocabulary=model.lm_head.weight.shape[0],
            inner=max(self._widths),
            experts=max((each.count for each in self._experts), default=0),
            chosen=max((each.chosen for each in self._experts), default=0),
            rank=max(self._ranks),
            norm_kind=family.norm,
            norm_whole=family.query_norm == "whole",
            rotary_kind=family.rotary or 0,
            rotary_dim=self._rotary_dim(),
            rotary_wide=self.narrow and family.rotary_wide,
            activation=self._activations.pop(),
            epsilon=self._epsilons.pop(),
            scaling=self._scaling,
            embedding_scale=1.0 if self._scaled is None else float(self._scaled.embed_scale.to(self.dtype)),
            softcap=self._softcap or 0.0,
            final_softcap=(read(model.config, "final_logit_softcapping") or 0.0) if family.capped_logits else 0.0,
        )

    def _family_of(self, model: Any) -> Family:
        family = next((each for each in FAMILIES if is_of(model, each.name + each.names.causal_lm)), None)
        if family is None:
            known = ", ".join(each.name for each in FAMILIES)
            raise Unfusable(f"{type(model).__name__} is of none of the families that it serves: {known}")
        if self._exact and not family.exact:
            served = ", ".join(each.name for each in FAMILIES if each.exact)
            raise Unfusable(f"exact mode has training forwards for {served}, not for {family.name}")
        return family

    def _buffers_now(self) -> tuple[object, ...]:
        """Where the buffers are that numbers were computed from, and their versions."""
        found: list[object] = []
        for layer_type in self._rotated:
            frequencies, scaling = rotary_numbers(self._rotary, layer_type)
            found += [frequencies.data_ptr(), frequencies._version, scaling]
        if self._scaled is not None:
            found += [self._scaled.embed_scale.data_ptr(), self._scaled.embed_scale._version]
        return tuple(found)

    def _rotary_dim(self) -> int:
        sizes = {2 * len(rotary_numbers(self._rotary, layer_type)[0]) for layer_type in self._rotated}
        if not sizes:
            return 0
        require(len(sizes) == 1, "its layers rotate different shares of a head")
        size = sizes.pop()
        require(size <= self._layout.layers[0].head_dim, f"its rotary embedding is wider ({size}) than a head")
        return size

    def _embedding(self, embedding: Any) -> None:
        kind = f"{self._family.name}TextScaledWordEmbedding"
        known = is_of(embedding, kind) if self._family.scaled_embedding else type(embedding) is nn.Embedding
        require(known, f"its embedding is {type(embedding).__name__}")
        self._checks.plain(embedding)
        self._checks.originals.methods(nn.Embedding, "forward")
        require(embedding.max_norm is None, "its embedding has a max_norm")

    def _positions(self, embedding: Any) -> int:
        require(
            type(embedding) is nn.Embedding and embedding.max_norm is None, "its positions are no plain nn.Embedding"
        )
        self._checks.plain(embedding)
        return address(embedding, "weight", self.dtype)

    # --- a layer --------------------------------------------------------------------------------------------------

    def _fill(self, out: Layer, layer: Any, index: int, cache: KVCache) -> None:
        """Write the addresses of one decoder layer into `out`."""
        family, names = self._family, self._family.names
        require(is_of(layer, f"{family.name}{names.layer}"), "a layer is of another class")
        norms = [name for name in family.norms if name is not None]
        self._checks.plain(layer, names.attention, "mlp", *norms, *family.dropouts[1])
        self._dropouts(layer, family.dropouts[1])
        for place, name in zip(_NORMS, family.norms, strict=True):
            if name is not None:
                setattr(out, place, self._norm(getattr(layer, name)))
        self._fill_attention(out, getattr(layer, names.attention), cache)
        if family.experts and is_of(layer.mlp, f"{family.name}SparseMoeBlock"):
            self._fill_experts(out, layer.mlp)
        else:
            self._fill_mlp(out, layer.mlp)
        if family.rotary is not None:
            layer_type = None
            if family.rotary_by_type:
                layer_type = self._checks.originals.value(layer.self_attn.config, "layer_types")[index]
            self._rotated.setdefault(layer_type, []).append(out)

    def _fill_attention(self, out: Layer, attention: Any, cache: KVCache) -> None:
        family, names = self._family, self._family.names
        require(is_of(attention, f"{family.name}Attention"), "an attention layer is of another class")
        norms = () if family.query_norm == "none" else ("q_norm", "k_norm")
        self._checks.plain(attention, *names.qkv, names.output, *norms, *family.dropouts[2])
        self._dropouts(attention, family.dropouts[2])
        index = self._layout.layer_of.get(attention)
        if index is None:
            raise Unfusable("an attention layer was replaced after the engine was built")
        shape, call = self._layout.layers[index], self._layout.calls[index]
        sizes = [heads * shape.head_dim for heads in (call.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        out.query, out.key, out.value = self._linears(attention, names.qkv, sizes)
        (out.output,) = self._linear(getattr(attention, names.output))
        if norms:
            out.query_norm, out.key_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
        self._require_numbers(attention, shape.head_dim, call)
        keys, values = cache.layer(index)
        out.keys, out.values, out.window = keys.data_ptr(), values.data_ptr(), call.window or 0

    def _require_numbers(self, attention: Any, head_dim: int, call: AttentionCall) -> None:
        """Check that a layer's numbers equal those of the layout."""
        read, family = self._checks.originals.value, self._family
        require(read(attention, "scaling") == self._scaling, "its attention layers scale their scores differently")
        require(read(attention, "head_dim") == head_dim, "the head size of a layer was changed")
        place = {"none": None, "config": attention.config, "attention": attention}[family.window]
        window = None if place is None else read(place, "sliding_window")
        require(window == call.window, "the window of a layer was changed")
        softcap = read(attention, "attn_logit_softcapping") if family.capped_scores else None
        require(softcap == self._softcap, "the cap of a layer's scores was changed")

    def _fill_mlp(self, out: Layer, mlp: Any) -> None:
        family, names = self._family, self._family.names
        require(is_of(mlp, f"{family.name}MLP"), "an MLP is of another class")
        self._checks.plain(mlp, *names.gate_up, names.down, names.activation, *family.dropouts[3])
        self._dropouts(mlp, family.dropouts[3])
        self._activation(getattr(mlp, names.activation))
        (out.down,) = self._linear(getattr(mlp, names.down))
        first = self._base(getattr(mlp, names.gate_up[0]))
        rows = int(first.weight.shape[1 if _is_conv(first) else 0])
        out.inner = rows // 2 if family.gated and len(names.gate_up) == 1 else rows
        wide = self._linears(mlp, names.gate_up, [out.inner] * (1 + family.gated))
        out.up = wide[-1]
        if family.gated:
            out.gate = wide[0]
        self._widths.append(out.inner)

    def _fill_experts(self, out: Layer, block: Any) -> None:
        family, read = self._family, self._checks.originals.value
        self._checks.plain(block, "gate", "experts")
        router, experts = block.gate, block.experts
        require(
            is_of(router, f"{family.name}TopKRouter") and is_of(experts, f"{family.name}Experts"),
            "a mixture's parts are of other classes",
        )
        self._checks.plain(router)
        self._checks.plain(experts, "act_fn")
        self._activation(experts.act_fn)
        self._require_known_experts(experts)
        count, chosen = read(router, "num_experts"), read(router, "top_k")
        require(
            read(experts, "num_experts") == count == len(experts.down_proj), "a layer leaves out some of its experts"
        )
        normalised = True if family.shares_wide else read(router, "norm_topk_prob")
        out.experts = Experts(
            address(router, "weight", self.dtype), address(experts, "gate_up_proj", self.dtype),
            address(experts, "down_proj", self.dtype), count, chosen, experts.down_proj.shape[2],
            bool(normalised), family.shares_wide,
        )  # fmt: skip
        self._experts.append(out.experts)
        self._widths.append(chosen * out.experts.inner)

    def _require_known_experts(self, experts: Any) -> None:
        """Check that transformers' own functions compute a layer's experts, in the layout that the C++ forward reads."""
        originals = self._checks.originals
        layout = {name: originals.value(experts, name) for name in ("is_transposed", "has_bias", "_is_expert_parallel")}
        wrong = [name for name, value in layout.items() if value]
        require(not wrong, f"the experts of a layer have {', '.join(wrong)}")
        require(
            experts.has_gate and experts.is_concatenated, "the experts of a layer have no gate, or an interleaved one"
        )
        originals.function(moe, "_default_apply_gate")
        require(
            originals.value(type(experts), "_apply_gate") is moe._default_apply_gate, "the gate of experts was replaced"
        )
        way = originals.value(experts.config, "_experts_implementation")
        if way in ("grouped_mm", "batched_mm"):
            originals.function(moe, f"{way}_experts_forward")
            known = getattr(moe, f"{way}_experts_forward")
            require(originals.item(moe.ALL_EXPERTS_FUNCTIONS, way) is known, f"the experts' {way} was replaced")
        else:
            require(way in (None, "eager"), f"its experts run by {way}")

    # --- parts ----------------------------------------------------------------------------------------------------

    def _norm(self, module: Any) -> Norm:
        kind = self._family.norm
        known = (
            type(module) is nn.LayerNorm
            if kind is NormKind.LAYER_NORM
            else is_of(module, f"{self._family.name}RMSNorm")
        )
        require(known, "a norm is of another class")
        self._checks.plain(module)
        if kind is NormKind.RMS_OF_ONE_PLUS_WEIGHT:
            self._checks.originals.methods(type(module), "_norm")
        older = kind in (NormKind.RMS, NormKind.RMS_ROUNDED_ONCE)
        self._epsilons.add(self._checks.originals.value(module, "variance_epsilon" if older else "eps"))
        weight = address(module, "weight", self.dtype)
        biased = kind is NormKind.LAYER_NORM and module.bias is not None
        return Norm(weight, address(module, "bias", self.dtype) if biased else None)

    def _activation(self, module: Any) -> None:
        self._checks.plain(module)
        if type(module) in (nn.SiLU, activations.SiLUActivation):
            self._activations.add(Activation.SILU)
            return
        if type(module) is activations.GELUTanh:
            function = self._checks.originals.value(module, "act")
            plain = isinstance(function, partial) and function.func is nn.functional.gelu and not function.args
            require(plain and function.keywords == {"approximate": "tanh"}, "its GELU is not torch's")
        else:
            require(type(module) is activations.NewGELUActivation, f"its activation is {type(module).__name__}")
        self._activations.add(Activation.GELU_TANH)

    def _dropouts(self, module: Any, names: tuple[str, ...]) -> None:
        for name in names:
            dropout = getattr(module, name)
            require(type(dropout) is nn.Dropout, f"{name} is {type(dropout).__name__}")
            self._checks.plain(dropout)

    def _linears(self, parent: Any, names: tuple[str, ...], sizes: list[int]) -> list[Linear]:
        """Projections with `sizes` columns, from a module each or from one in which they are packed."""
        if len(names) == 1:
            return self._linear(getattr(parent, names[0]), *sizes)
        return [self._linear(getattr(parent, name), size)[0] for name, size in zip(names, sizes, strict=True)]

    def _linear(self, module: Any, *sizes: int, lora: bool = True) -> list[Linear]:
        """The projections packed in a module, of `sizes` columns; without sizes one of all columns."""
        base = self._base(module)
        adapter = Adapter() if base is module else self._adapter(module, lora=lora)
        conv = _is_conv(base)
        require(conv or type(base) is nn.Linear, f"a projection is {type(base).__name__}, not nn.Linear")
        self._checks.plain(base)
        weight, width = address(base, "weight", self.dtype), self.dtype.itemsize
        bias = None if base.bias is None else address(base, "bias", self.dtype)
        depth, columns = base.weight.shape if conv else base.weight.shape[::-1]
        require(sum(sizes or (columns,)) == columns, "a projection has another size than its layer")
        found, start = [], 0
        for size in sizes or (columns,):
            part = Linear(
                weight + start * width * (1 if conv else depth), None if bias is None else bias + start * width,
                columns if conv else 0, adapter,
            )  # fmt: skip
            if adapter.down is not None:
                part.adapter.up = adapter.up + start * adapter.rank * (4 if adapter.wide else width)
            found.append(part)
            start += size
        return found

    def _base(self, module: Any) -> Any:
        return module.base_layer if is_of(module, "Linear", PEFT_LORA) else module

    def _adapter(self, module: Any, *, lora: bool) -> Adapter:
        """The active adapter of a LoRA layer; all zeros: it has none."""
        originals = self._checks.originals
        self._checks.unhooked(module)
        for name in ("_disable_adapters", "_active_adapter"):
            originals.value(module, name)
        require(not module.merged, "LoRA is merged into a projection")
        active = [] if module.disable_adapters else [name for name in module.active_adapters if name in module.lora_A]
        if not active:
            return Adapter()
        require(lora and not self._exact, "LoRA acts in a projection" if self._exact else "LoRA acts in its head")
        require(len(active) == 1, f"the adapters {', '.join(active)} act together")
        (name,) = active
        require(not module.lora_variant, "an adapter is a variant of LoRA")
        dropout, down, up = module.lora_dropout[name], module.lora_A[name], module.lora_B[name]
        require(type(dropout) in (nn.Identity, nn.Dropout), "an adapter's dropout is of another class")
        for each in (dropout, down, up):
            self._checks.plain(each)
        require(type(down) is type(up) is nn.Linear and down.bias is None is up.bias, "an adapter is no plain LoRA")
        dtype = down.weight.dtype
        require(dtype in (torch.float32, self.dtype), f"an adapter's dtype is {dtype}")
        self._ranks.append(down.weight.shape[0])
        return Adapter(
            address(down, "weight", dtype), address(up, "weight", dtype), down.weight.shape[0],
            originals.item(module.scaling, name), bool(self.narrow and dtype == torch.float32),
        )  # fmt: skip

    def _without_lora(self, model: Any) -> Any:
        """The model inside PEFT's LoRA wrappers, which only forward calls."""
        if not (is_of(model, "PeftModel", "peft.") or is_of(model, "PeftModelForCausalLM", "peft.")):
            return model
        self._checks.plain(model, "base_model")
        require(is_of(model.base_model, "LoraModel", PEFT_LORA), "its adapters are not LoRA")
        self._checks.plain(model.base_model, "model")
        return model.base_model.model


def _is_conv(module: Any) -> bool:
    return type(module) is pytorch_utils.Conv1D


def _require_known_attention(config: Any, layout: ModelLayout) -> None:
    """Refuse attention variants that the C++ forward does not compute."""
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        require(
            each.get("rope_type", "default") not in ("dynamic", "longrope"),
            "its rotary embedding changes with the length",
        )
    shape, call = layout.layers[0], layout.calls[0]
    require(all(each == shape for each in layout.layers), "its layers differ in shape")
    require(shape.value_dim == shape.head_dim and shape.head_dim % 2 == 0, f"its head size is {shape.head_dim}")
    same = (call.num_heads, call.scaling, call.softcap, None, False)
    require(
        all((each.num_heads, each.scaling, each.softcap, each.chunk, each.sinks) == same for each in layout.calls),
        "its attention layers differ, or have chunks or sinks",
    )
    require(call.num_heads <= MAX_GROUP * shape.num_kv_heads, f"more than {MAX_GROUP} query heads share a KV head")
