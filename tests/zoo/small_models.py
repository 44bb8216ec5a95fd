"""Small random models of every causal architecture of the installed transformers.

Nothing here is about one architecture but `PARTICULAR`: sizes are found by their names in the default configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.models import VOCAB, spread_logits

ARCHITECTURES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
WINDOW = 24
"""The size of every window: more than the tokens that an engine is verified with."""
MAX_PARAMETERS = 20_000_000

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "max_position_embeddings": 256, "is_decoder": True,
    # other names of the same
    "d_model": 64, "n_embd": 64, "emb_dim": 64, "dim": 64, "embedding_size": 64, "word_embed_proj_dim": 64,
    "decoder_hidden_size": 64, "hidden_size_global": 64, "backbone_hidden_size": 64, "n_layer": 4, "n_layers": 4,
    "num_layers": 4, "decoder_layers": 4, "num_decoder_layers": 4, "encoder_layers": 1, "num_encoder_layers": 1,
    "n_head": 4, "n_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_kv_heads": 2,
    "kv_n_heads": 2, "num_attention_groups": 2, "num_query_groups": 2, "d_head": 16, "attention_head_dim": 16,
    "kv_channels": 16, "d_kv": 16, "query_pre_attn_scalar": 16, "rotary_dim": 8, "n_positions": 256, "n_ctx": 256,
    "max_seq_len": 256, "n_inner": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "d_ff": 96, "dff": 96,
    "dim_feedforward": 96, "ffn_hidden_size": 96, "intermediate_size_mlp": 96, "mlp_hidden_size": 96,
    # mixtures of experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_topk": 2, "moe_top_k": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32, "expert_intermediate_size": 32,
    "dense_intermediate_size": 96, "ffn_intermediate_size": 96, "prefix_dense_intermediate_size": 96,
    "shared_intermediate_size": 32,
    "shared_experts_intermediate_size": 32, "first_k_dense_replace": 1, "num_dense_layers": 1, "zero_expert_num": 1,
    # low-rank and sparse attention: fewer keys are chosen than a prompt has
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "o_lora_rank": 16, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "indexer_n_heads": 2,
    "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
    "index_block_size": 8, "index_topk_blocks": 2,
    # state spaces and other recurrences
    "state_size": 8, "ssm_state_size": 8, "num_heads": 8, "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_n_groups": 1, "n_mamba_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_expand": 2,
    "mamba_d_ssm": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "lru_width": 64, "attention_hidden_size": 64, "time_step_rank": 8, "mamba_dt_rank": 8,
    "chunk_size": 8, "qk_dim_factor": 0.5, "n_groups": 1,
    # per-layer inputs, hashed n-grams
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0,
    "global_head_dim": 16, "num_global_key_value_heads": 2, "ngram_vocab_size_base": 100, "split_ngram_parts": 1,
    "encoder_hash_byte_group_vocab": 100,
}  # fmt: skip
"""Small values of a configuration's attributes, wherever they are found."""

PARTICULAR: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "reformer": {"axial_pos_shape": (16, 16), "axial_pos_embds_dim": (32, 32)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 8, "attention_head_dim": 32, "attention_hidden_size": 128},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "attention_head_dim": 32, "attention_hidden_size": 128},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further attributes of single architectures; a dictionary under the name of a part is for that part."""


def small_config(architecture: str) -> PreTrainedConfig:
    """A configuration of a model of a few thousand parameters, every window of which is `WINDOW` tokens.

    Raises: whatever the configuration's own checks raise.
    """
    kind = CONFIG_MAPPING[architecture]
    return kind(**_shrunk(kind(), PARTICULAR.get(architecture, {})))


def _shrunk(config: PreTrainedConfig, particular: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            inner = _shrunk(value, particular.get(name, {}))
            options[name] = type(value)(**inner)
        elif name in SMALL:
            options[name] = SMALL[name]
        elif _is_window(name, value):
            options[name] = WINDOW
        elif name == "use_sliding_window":
            options[name] = True
        elif name == "max_window_layers":
            options[name] = 2
    if "qk_rope_head_dim" in options:
        # Rotary tables are made for `head_dim`, and only that part of a low-rank head is rotated; no heads share.
        options["head_dim"] = options["qk_rope_head_dim"]
        options["num_key_value_heads"] = SMALL["num_attention_heads"]
    for alias, name in getattr(config, "attribute_map", {}).items():
        if alias in SMALL and name not in SMALL:
            options.pop(name, None)
            options[alias] = SMALL[alias]
    parts = {name for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
    return options | {name: value for name, value in particular.items() if name not in parts}


def _is_window(name: str, value: Any) -> bool:
    named = "window" in name and "layers" not in name and "use_" not in name
    return named and (value is None or (isinstance(value, int) and not isinstance(value, bool)))


def build(architecture: str) -> PreTrainedModel:
    """A random model of it, in training mode, whose logits are spread out so that greedy choices are not ties.

    Raises:
        ValueError: it is not small.
        Exception: whatever building it raises.
    """
    config = small_config(architecture)
    with torch.device("meta"):
        count = AutoModelForCausalLM.from_config(config).num_parameters()
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count:,} parameters: shrinking missed some size")
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    spread_logits(model)
    return model.float().train()
