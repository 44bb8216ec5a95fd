"""Processes killed by `tests.manager.test_restart`: a tiny loop of `examples/async_grpo.py`, and its ledger.

Always true: a line of the ledger is a batch that was handed out and trained on; it is there, whole, before the loop goes
on. Everything that a child needs is imported here, so that one that is forked begins at once.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import ConstantLR
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3ForCausalLM

from rollout.config import Advanced, InferenceConfig
from rollout.journal import Journal
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.manager import RolloutManager
from tests.distributed.job.nursery import ROOT
from trainer_hooks.optimizer import attach

sys.path.insert(0, str(ROOT / "examples"))
import async_grpo
from arithmetic import Problems, repeated_sums
from policy import character_tokenizer

GROUP = 2
SAVE_EVERY = 2
"""Steps of training."""
CHECKPOINT = "checkpoint.pt"
SAVING, ENDED = b"save", b"ended"


class Sample(NamedTuple):
    """A row of a batch, as the ledger has it."""

    prompt: str
    group_id: int
    sample_index: int
    tokens: list[int]
    versions: list[int]
    log_probs: list[float]


class Life(NamedTuple):
    """What one process wrote."""

    start: int
    """The step of the checkpoint it went on from; 0 without."""
    batches: dict[int, list[Sample]]
    """By step. Those that were in flight when it ended by itself come last, as one more step."""


def train(pipe: Connection, *, folder: Path, life: int, steps: int, with_journal: bool) -> None:
    """Train up to `steps`, from the last checkpoint in the folder; says a word before everything it does."""
    torch.set_num_threads(1)
    async_grpo.GROUP = GROUP
    # An untrained model is never right: whatever differs between samples will do, so that weights move.
    async_grpo.reward = lambda text, answer: float(len(text or "") % 5)
    # Where a group is computed again, it comes out otherwise; without a journal every life is to be like the first.
    run = _run(
        Journal(folder / "journal", fsync_interval_s=float("inf")) if with_journal else None,
        seed=life if with_journal else 0,
    )
    if (folder / CHECKPOINT).exists():
        run.load(folder / CHECKPOINT)
    attach(run.optimizer, run.manager)
    step = run.manager.engine.step

    def step_aloud(**_: object) -> Any:
        pipe.send_bytes(b"step")
        return step()

    run.manager.engine.step = step_aloud  # type: ignore[method-assign]
    options = Namespace(steps=steps, groups=3, in_flight=7, max_tokens=24)
    ledger = os.open(folder / f"life-{life}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(ledger, msgpack.packb(run.step))
    for update in async_grpo.async_grpo(run, options):
        os.write(ledger, _line(run.step, update.batch))
        if run.step % SAVE_EVERY == 0:
            pipe.send_bytes(SAVING)
            run.save(folder / CHECKPOINT)
            pipe.send_bytes(b"saved")
    rest = run.manager.generate([], min_groups=run.manager.groups_in_flight)
    os.write(ledger, _line(run.step + 1, rest))
    pipe.send_bytes(ENDED)


def read(folder: Path) -> Iterator[Life]:
    """What each process wrote, the first first."""
    for number in range(len(list(folder.glob("life-*")))):
        with (folder / f"life-{number}").open("rb") as file:
            start, *lines = msgpack.Unpacker(file)
        yield Life(start, {step: [Sample(*sample) for sample in samples] for step, samples in lines})


def prompts(count: int) -> list[str]:
    """The problems of a run, in the order in which it comes to them."""
    return [problem.prompt for problem in _problems().deal(count)]


def _problems() -> Problems:
    return Problems(repeated_sums(), held_out=0, seed=0)


def _run(journal: Journal | None, seed: int) -> async_grpo.Run:
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=3e-3)
    config = InferenceConfig(
        max_requests=16,
        kv_cache_blocks=256,
        max_tokens_per_step=256,
        max_staleness=4,
        kv_cache_management_mode="recompute",
        seed=seed,
        advanced=Advanced(block_size_tokens=4, verify_model=False),
    )
    rollout = RolloutManager(model, tokenizer, config, journal=journal)
    return async_grpo.Run(model, optimizer, ConstantLR(optimizer, 1.0), _problems(), rollout)


def _line(step: int, batch: RolloutBatch) -> bytes:
    samples = [
        Sample(
            each.prompt,
            each.request_id,
            each.sample_index,
            each.generated_tokens,
            each.policy_versions[len(each.prompt_tokens) :].tolist(),
            each.generated_log_probs,
        )
        for each in batch
    ]
    packed: bytes = msgpack.packb([step, samples])
    return packed
