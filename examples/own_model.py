"""A model of your own, which no engine knows: attention whose heads are gated by the token that asks.

    python examples/own_model.py

The engine calls the module itself, so a new layer needs no kernel, no conversion and no registration. A model must be a
`PreTrainedModel`, go through transformers' attention interface, and take `position_ids`, `logits_to_keep` and keyword
arguments: `rollout.inspect(model)` lists what is present and what is missing. The model learns from its own samples to
alternate between even and odd tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import rollout
from rollout.algorithms import group_advantages, masked_mean

VOCABULARY, PROMPT, TOKENS, SAMPLES = 24, 4, 8, 8


class GatedAttention(nn.Module):
    """Attention whose heads are gated by a function of the token that asks."""

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer, config.head_dim
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.num_attention_heads)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, angles: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        """[B, T, hidden] → the same."""
        query, key, value = self.qkv(hidden).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        query, key = apply_rotary_pos_emb(query, key, *angles)
        # The engine's attention, inside of its forwards; otherwise the configured one.
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, ALL_ATTENTION_FUNCTIONS["sdpa"]
        )
        # Batches are padded on the right, where a causal query does not look, so no mask is needed.
        heads, _ = attention(self, query, key, value, None, scaling=self.head_dim**-0.5, **kwargs)
        return self.out((heads * self.gate(hidden).sigmoid()[..., None]).flatten(2))


class GatedModel(PreTrainedModel):
    """A causal language model of gated attention and MLPs."""

    config_class = LlamaConfig
    base_model_prefix = ""
    _supports_sdpa = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        width, layers = config.hidden_size, range(config.num_hidden_layers)
        self.embed = nn.Embedding(config.vocab_size, width)
        self.rotary = LlamaRotaryEmbedding(config)
        self.attention = nn.ModuleList(GatedAttention(config, layer) for layer in layers)
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in layers
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in layers for _ in range(2))
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> CausalLMOutput:
        """Logits of the positions that `logits_to_keep` names: an index tensor, or the last so many; 0: all."""
        kwargs.pop("attention_mask", None)
        hidden = self.embed(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        angles = self.rotary(hidden, position_ids)
        for index, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            hidden = hidden + attention(self.norms[2 * index](hidden), angles, **kwargs)
            hidden = hidden + mlp(self.norms[2 * index + 1](hidden))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.head(hidden[:, kept]))

    def get_output_embeddings(self) -> nn.Module:
        """The module that reads the last hidden states."""
        return self.head


def train(model: GatedModel, manager: rollout.RolloutManager, optimizer: AdamW, steps: int) -> float:
    """Repeat: sample, reward, one policy gradient step. Returns the mean reward of the last batch."""
    for number in range(1, steps + 1):
        prompts = torch.randint(VOCABULARY, (16, PROMPT)).tolist()
        batch = manager.generate(prompts, n=SAMPLES, max_tokens=TOKENS, ignore_eos=True, progress=False)
        alternates = batch.input_ids.diff(dim=1) % 2 == 1
        rewards = (alternates & batch.response_mask[:, 1:]).sum(1) / TOKENS
        with manager.suspended():
            advantages = group_advantages(rewards, batch.group_ids)
            logprobs, mask = batch.logprobs_of(model), batch.response_mask
            difference = (logprobs - batch.logprobs)[mask].abs().max().item()
            loss = -masked_mean(logprobs * advantages[:, None], mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if number % 5 == 0:
            print(f"step {number:>3}  reward {rewards.mean():.2f}  largest difference of a log-prob {difference:.0e}")
    return rewards.mean().item()


def main() -> None:
    """Inspect the model, then train it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only see that it runs: a few steps")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}
    model = GatedModel(LlamaConfig(vocab_size=VOCABULARY, **sizes))
    print(rollout.inspect(model))
    optimizer = AdamW(model.parameters(), lr=3e-3)
    with rollout.init(model, optimizer=optimizer, kv_cache_memory_gb=0.05) as manager:
        print(f"reward of the last step: {train(model, manager, optimizer, 10 if options.quick else 30):.2f}")


if __name__ == "__main__":
    main()
