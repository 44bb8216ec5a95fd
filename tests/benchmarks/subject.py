"""Benchmark model shared by all peers: random weights of Qwen3 shape, in this process and in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024},
    "10m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8192},
    "100m": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768},
    "1500m": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
              "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 65536},
    # These are the sizes of Qwen3 0.6B and 8B.
    "600m": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
}  # fmt: skip
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Subject:
    """One model of the race."""

    size: str
    dtype: str
    model: PreTrainedModel
    where: Path
    """The path of `folder`, which may not be written yet."""

    @property
    def folder(self) -> Path:
        """Holds `config.json` and `model.safetensors`; written when it is first asked for."""
        if not (self.where / "config.json").exists():
            self.model.save_pretrained(self.where)
        return self.where

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def vocab(self) -> int:
        """Token ids lie below this."""
        return int(self.model.config.vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers that attend."""
        config = self.model.config
        kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        attending = sum("linear" not in kind for kind in kinds)
        return int(2 * attending * heads * size * self.model.dtype.itemsize)


def make_subject(size: str, dtype: str, longest: int, folder: Path, device: torch.device | str = "cpu") -> Subject:
    """Make the weights where they are used, to be saved under `folder`; the model takes sequences of `longest` tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SIZES[size], max_position_embeddings=max(4096, longest), tie_word_embeddings=size != "8b", dtype=dtype
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    return Subject(size, dtype, model, folder / f"{size}-{dtype}")
