"""Small random Hugging Face models of every tested architecture, and a character tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import SkipTest

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
"""Layers of the gated delta rule beside one of attention."""

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),
    "llama": lambda: LlamaConfig(**SMALL),
    "qwen2": lambda: Qwen2Config(**SMALL),
    "gemma3": lambda: Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gemma2": lambda: Gemma2Config(**SMALL, head_dim=16, sliding_window=8, query_pre_attn_scalar=16,
                                   attn_logit_softcapping=2.0),
    "mistral": lambda: MistralConfig(**SMALL, sliding_window=8),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2,
                                        moe_intermediate_size=32),
    "qwen3_next": lambda: Qwen3NextConfig(**SMALL, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                                          linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
                                          num_experts_per_tok=2, moe_intermediate_size=32,
                                          shared_expert_intermediate_size=32,
                                          layer_types=["linear_attention", "full_attention", "linear_attention"]),
    "falcon_h1": lambda: FalconH1Config(**SMALL, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16,
                                        mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8),
    "lfm2": lambda: Lfm2Config(**SMALL, conv_L_cache=3, layer_types=["conv", "full_attention", "conv"]),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=512, bos_token_id=1,
                               eos_token_id=2, pad_token_id=0),
    "gpt_oss": lambda: GptOssConfig(**SMALL, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2,
                                    rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
}  # fmt: skip
"""Architectures of every kind of attention, state and MLP; many tests run all of them."""

MORE_CONFIGS: dict[str, Callable[[], Any]] = {
    "olmo2": lambda: Olmo2Config(**SMALL),
    "olmo3": lambda: Olmo3Config(**SMALL, sliding_window=8,
                                 layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "phi3": lambda: Phi3Config(**SMALL, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                         "partial_rotary_factor": 0.5}),
    "glm": lambda: GlmConfig(**SMALL, head_dim=16, attention_bias=True),
    "glm4": lambda: Glm4Config(**SMALL, head_dim=16),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SMALL, **DELTA),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**SMALL, **DELTA, num_experts=4, num_experts_per_tok=2,
                                                moe_intermediate_size=32, shared_expert_intermediate_size=48),
    "mixtral": lambda: MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip
"""Other arrangements of the same parts, for the fused forward."""


RECURRENT_CACHE = hasattr(transformers.Cache, "get_conv_state")


def require_recurrent_cache() -> None:
    """Skip the test where transformers has no cache protocol for recurrent layers."""
    if not RECURRENT_CACHE:
        raise SkipTest(
            f"transformers {transformers.__version__} has no cache protocol for recurrent layers: 5.21 has it"
        )


RECURRENT = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe", "falcon_h1", "lfm2"})


def make_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A random model whose logits are spread out, so that greedy choices are not ties.

    Raises:
        SkipTest: this version of transformers has no cache protocol for its recurrent layers.
    """
    if name in RECURRENT:
        require_recurrent_cache()
    torch.manual_seed(seed)
    config = (CONFIGS | MORE_CONFIGS)[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    # Up to 5.20 transformers gives Gemma 2 sdpa, which leaves its soft-capping out.
    options = {"attn_implementation": "eager"} if name == "gemma2" else {}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    spread_logits(model)
    return model.train()


def spread_logits(model: PreTrainedModel) -> None:
    """Make weights and attention sinks so large that greedy choices are not ties."""
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            elif path.endswith("sinks"):
                parameter.normal_(std=2.0)


def scale_weights(model: PreTrainedModel, factor: float) -> None:
    """Change every weight in place, as an optimizer would."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, ids below VOCAB, with pad, bos and eos."""
    characters = [chr(code) for code in range(32, 126)]
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {char: index + 3 for index, char in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def greedy(model: PreTrainedModel, prompt: list[int], new_tokens: int, **options: Any) -> list[int]:
    """`model.generate`'s greedy continuation, never stopping early."""
    model.eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0,
        **options,
    )  # fmt: skip
    model.train()
    return out[0, len(prompt) :].tolist()


def trainer_logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1] log-prob of each token after the first, by the trainer's own forward, fp32."""
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float()
    model.train(training)
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:], device=logits.device)[:, None])[:, 0]


class _InFloat64(TorchFunctionMode):
    """Makes float64 of what a module's code takes for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def float64_logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - 1] float64 log-prob of each token after the first, computed in float64 throughout: the judge of two
    float32 forwards that differ where the model is ill-conditioned."""
    wide = copy.deepcopy(model).double().eval()
    # The grouped products of experts have no float64.
    wide.set_experts_implementation("eager")
    with torch.no_grad(), _InFloat64():
        logits = wide(torch.tensor([tokens]), use_cache=False).logits[0]
    assert logits.dtype == torch.float64
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
