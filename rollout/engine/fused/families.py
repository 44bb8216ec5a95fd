"""Parts of each family's decoder layers, for the fused forward: one row of a table per family.

A row names modules and numbers of transformers' classes; `Bound` verifies all of them in a given model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollout.engine.kernels.cpu_forward import NormKind, RotaryKind


@dataclass(frozen=True)
class Names:
    """Names of a family's modules. Names of classes are appended to the family's name."""

    causal_lm: str = "ForCausalLM"
    """The class of the whole model."""
    decoder: str = "model"
    inner: str = ""
    """Decoder inside of `decoder`, which is then a model of text and images."""
    decoder_class: str = "Model"
    embedding: str = "embed_tokens"
    positions: str = "wpe"
    """The module of learned positions, if there is no rotary embedding."""
    layers: str = "layers"
    layer: str = "DecoderLayer"
    """The class of a layer."""
    final_norm: str = "norm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """One name: queries, keys and values are packed in this order."""
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """One name: gate and up are packed in this order; in an MLP without a gate, up alone."""
    down: str = "down_proj"
    activation: str = "act_fn"


@dataclass(frozen=True)
class Family:
    """Parts of the layers of one family of decoders."""

    name: str
    """The first part of the names of its classes."""
    names: Names = Names()
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    """Norms before and after attention, before and after the MLP. The residual is added after the second and fourth."""
    norm: NormKind = NormKind.RMS
    query_norm: Literal["none", "head", "whole"] = "none"
    """Norm of queries and keys: of each head, or of all heads together."""
    gated_attention: bool = False
    """Whether each head's queries are packed with a gate of its outputs."""
    delta: Literal["none", "split", "interleaved"] = "none"
    """Packing of the projections of layers with a gated delta rule instead of attention; `none`: no such layers."""
    gated: bool = True
    """Whether the MLP has a gate."""
    experts: bool = False
    """Whether the MLPs of layers may be mixtures of experts."""
    shared_expert: bool = False
    """Whether all positions go through one more expert with a gate."""
    shares_wide: bool = False
    """Whether the weights of the chosen experts stay float32."""
    rotary: RotaryKind | None = RotaryKind.HALVES
    """The kind of rotary embedding. None: learned positions."""
    rotary_by_type: bool = False
    """Whether layers of different types have their own rotary tables."""
    scaled_embedding: bool = False
    window: Literal["none", "config", "attention"] = "none"
    """The object that holds a layer's window."""
    capped_scores: bool = False
    capped_logits: bool = False
    dropouts: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), (), ())
    """Dropouts in decoder, layer, attention and MLP, which do nothing in a rollout."""
    exact: bool = False
    """Whether exact mode has a training forward for this family."""


_GPT2 = Names(
    causal_lm="LMHeadModel", decoder="transformer", embedding="wte", layers="h", layer="Block", final_norm="ln_f",
    attention="attn", qkv=("c_attn",), output="c_proj", gate_up=("c_fc",), down="c_proj", activation="act",
)  # fmt: skip
_TEXT = Names(decoder_class="TextModel")
_TEXT_AND_IMAGES = Names(causal_lm="ForConditionalGeneration", inner="language_model", decoder_class="TextModel")
_PACKED_MLP = Names(gate_up=("gate_up_proj",), activation="activation_fn")
_PACKED = Names(qkv=("qkv_proj",), gate_up=("gate_up_proj",), activation="activation_fn")
_AROUND_BOTH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_AFTER_BOTH = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")


def _qwen_hybrid(name: str, names: Names, delta: Literal["split", "interleaved"], *, experts: bool) -> Family:
    return Family(name, names, norm=NormKind.RMS_OF_ONE_PLUS_WEIGHT, query_norm="head", gated_attention=True, delta=delta,
                  experts=experts, shared_expert=experts)  # fmt: skip


FAMILIES = (
    Family("Llama", exact=True),
    Family("Mistral", window="config", exact=True),
    Family("Qwen2", window="attention", exact=True),
    Family("Qwen3", query_norm="head", window="attention", exact=True),
    Family("Qwen3Moe", query_norm="head", window="attention", experts=True),
    _qwen_hybrid("Qwen3Next", Names(), "interleaved", experts=True),
    _qwen_hybrid("Qwen3_5", _TEXT, "split", experts=False),
    _qwen_hybrid("Qwen3_5", _TEXT_AND_IMAGES, "split", experts=False),
    _qwen_hybrid("Qwen3_5Moe", _TEXT, "split", experts=True),
    _qwen_hybrid("Qwen3_5Moe", _TEXT_AND_IMAGES, "split", experts=True),
    Family("Mixtral", window="config", experts=True, shares_wide=True),
    Family("Gemma2", norms=_AROUND_BOTH, norm=NormKind.RMS_OF_ONE_PLUS_WEIGHT, scaled_embedding=True,
           window="attention", capped_scores=True, capped_logits=True),
    Family("Gemma3", names=_TEXT, norms=_AROUND_BOTH, norm=NormKind.RMS_OF_ONE_PLUS_WEIGHT, query_norm="head",
           scaled_embedding=True, window="attention", rotary_by_type=True, capped_logits=True),
    Family("Olmo2", norms=_AFTER_BOTH, norm=NormKind.RMS_ROUNDED_ONCE, query_norm="whole"),
    Family("Olmo3", norms=_AFTER_BOTH, norm=NormKind.RMS_ROUNDED_ONCE, query_norm="whole",
           rotary_by_type=True, window="attention"),
    Family("Phi3", names=_PACKED, window="config",
           dropouts=((), ("resid_attn_dropout", "resid_mlp_dropout"), (), ())),
    Family("Glm", names=_PACKED_MLP, rotary=RotaryKind.PAIRS),
    Family("Glm4", names=_PACKED_MLP, rotary=RotaryKind.PAIRS,
           norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")),
    Family("GPT2", names=_GPT2, norms=("ln_1", None, "ln_2", None), norm=NormKind.LAYER_NORM, gated=False, rotary=None,
           dropouts=(("drop",), (), ("attn_dropout", "resid_dropout"), ("dropout",))),
)  # fmt: skip
