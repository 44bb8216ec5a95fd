"""Race of this engine against `generate`, and vLLM, for each family of decoders that the fused CPU forward serves.

    python -m tests.benchmarks.families --vllm-python V/bin/python
    python -m tests.benchmarks.families --families gemma2 mixtral --scale 0.25 --rounds 3

16 sequences of 256 + 256 tokens, about 10 M parameters in bfloat16, peers in alternation, threads as torch has them. Quote
ratios, or what there is of the machine's floor. `llama, lora` has live adapters (r = 16) in every projection, which vLLM is
not given.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.utils import logging

from tests.benchmarks import tables
from tests.benchmarks.common import finish, parse
from tests.benchmarks.field import Field, Rules
from tests.benchmarks.ledger import Row
from tests.benchmarks.remote import Interpreters
from tests.benchmarks.subject import SIZES, Subject
from tests.benchmarks.workloads import Room, Scale, steady

PEERS = ("ours", "generate", "vllm")
MIXTURE = {"intermediate_size": 256, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""Heads of layers with a gated delta rule: as wide together as those of attention, and three of four layers have it."""
COMMON = {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "llama": lambda size: LlamaConfig(**size),
    "qwen3": lambda size: Qwen3Config(**size),
    "gemma2": lambda size: Gemma2Config(**size, sliding_window=128, query_pre_attn_scalar=size["head_dim"]),
    "gemma3": lambda size: Gemma3TextConfig(**size, sliding_window=128, query_pre_attn_scalar=size["head_dim"]),
    "olmo2": lambda size: Olmo2Config(**size),
    "olmo3": lambda size: Olmo3Config(**size, sliding_window=128),
    "phi3": lambda size: Phi3Config(**size),
    "glm": lambda size: GlmConfig(**size),
    "glm4": lambda size: Glm4Config(**size),
    "qwen3_moe": lambda size: Qwen3MoeConfig(
        **size | {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
    ),
    "qwen3_5": lambda size: Qwen3_5TextConfig(**size, **DELTA),
    "qwen3_next": lambda size: Qwen3NextConfig(
        **size, **DELTA, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2, shared_expert_intermediate_size=256
    ),
    "mixtral": lambda size: MixtralConfig(**size | MIXTURE, num_local_experts=8),
    "gpt2": lambda size: GPT2Config(
        n_embd=size["hidden_size"], n_layer=size["num_hidden_layers"], n_head=size["num_attention_heads"],
        vocab_size=size["vocab_size"], n_positions=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "llama, lora": lambda size: LlamaConfig(**size),
}  # fmt: skip


def make_model(family: str, size: str) -> PreTrainedModel:
    """Random weights in bfloat16."""
    torch.manual_seed(0)
    config = CONFIGS[family](COMMON | SIZES[size])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model  # type: ignore[no-any-return]


def make_subject(family: str, size: str, folder: Path) -> Subject:
    """A model and a folder that holds it, without adapters."""
    model = make_model(family, size)
    where = folder / f"{family}-{size}"
    model.save_pretrained(where)
    if family.endswith("lora"):
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = LoraConfig(r=16, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        model = get_peft_model(model, config).eval()
    return Subject(f"{size}, {family}", "bfloat16", model, where)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it and print the table."""
    options = parse(
        __doc__, arguments, families={"default": list(CONFIGS), "choices": list(CONFIGS)},
        peers={"default": list(PEERS), "choices": PEERS}, size="10m", rounds=3, scale=1.0, vllm_python=None,
    )  # fmt: skip
    logging.set_verbosity_error()
    rules = Rules(options.rounds, 120.0, partial(print, file=sys.stderr))
    measured: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for family in options.families:
            subject = make_subject(family, options.size, Path(folder))
            (workload,) = steady(SIZES[options.size]["vocab_size"], Scale(options.scale), [16])
            peers = [name for name in options.peers if name != "vllm" or not family.endswith("lora")]
            room = Room.of([workload])
            with Field(subject, peers, room, Interpreters(options.vllm_python, None), rules) as field:
                key = (options.size, subject.dtype, family, workload.case)
                rows = {metric: Row(*key, metric) for metric in workload.metrics}
                measured += rows.values()
                field.race(workload, rows)
    found = {"threads": torch.get_num_threads(), "rows": [row.as_dict() for row in measured]}
    finish(options.json, found, tables.families(found))
    print(*tables.problems(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
