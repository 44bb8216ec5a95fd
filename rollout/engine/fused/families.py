"""A table of the model families that the fused forward pass computes, with the parts of their decoder layers.

An entry names the modules and options of a family's classes in transformers. `Bound` checks that a model matches its entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollout.engine.kernels.cpu_forward import NormKind, RotaryKind


@dataclass(frozen=True)
class Names:
    """The names of a family's modules and classes. Class names are given without the prefix `Family.name`."""

    causal_lm: str = "ForCausalLM"
    """The class of the whole model."""
    decoder: str = "model"
    inner: str = ""
    """The attribute of `decoder` that holds the text decoder, if `decoder` also processes images; otherwise empty."""
    decoder_class: str = "Model"
    embedding: str = "embed_tokens"
    positions: str = "wpe"
    """The module of learned position embeddings, used only if the family has no rotary embedding."""
    layers: str = "layers"
    layer: str = "DecoderLayer"
    """The class of a decoder layer."""
    final_norm: str = "norm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """The modules of the query, key and value projections, or one module that computes all three in this order."""
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """The modules of the gate and up projections, or one module that computes both, or only `up` if there is no gate."""
    down: str = "down_proj"
    activation: str = "act_fn"


@dataclass(frozen=True)
class Family:
    """The structure and the options of one family of decoders."""

    name: str
    """The prefix that the family's class names share, such as "Llama"."""
    names: Names = Names()
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm", None, "post_attention_layernorm", None,
    )  # fmt: skip
    """The norms before and after attention, and before and after the MLP; None for a norm that the family lacks. Residual
    connections join after the second and after the fourth norm."""
    norm: NormKind = NormKind.RMS
    query_norm: Literal["none", "head", "whole"] = "none"
    """The normalisation of queries and keys: none, each head by itself (`head`), or all heads together (`whole`)."""
    gated_attention: bool = False
    """Whether the query projection also computes, for each head, a gate that multiplies the head's output."""
    delta: Literal["none", "split", "interleaved"] = "none"
    """The packing of the projections in gated delta rule layers, which replace attention; `none` without such layers."""
    gated: bool = True
    """Whether the MLP has a gate."""
    experts: bool = False
    """Whether the MLPs of layers may be mixtures of experts."""
    shared_expert: bool = False
    """Whether a mixture of experts also has a gated expert that processes every position."""
    shares_wide: bool = False
    """Whether the router's weights for the chosen experts stay in float32."""
    rotary: RotaryKind | None = RotaryKind.HALVES
    """The kind of rotary embedding, or None for learned position embeddings."""
    rotary_by_type: bool = False
    """Whether each layer type has its own rotary tables."""
    scaled_embedding: bool = False
    window: Literal["none", "config", "attention"] = "none"
    """The object whose `sliding_window` is a layer's window: the config or the attention module; `none` without windows."""
    capped_scores: bool = False
    capped_logits: bool = False
    dropouts: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...]] = ((), (), (), ())
    """The names of the dropout modules in the decoder, a layer, the attention and the MLP. Sampling disables them."""
    exact: bool = False
    """Whether exact mode (training with the engine's arithmetic) supports this family."""


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
