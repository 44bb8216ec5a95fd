"""Processes killed by `tests.manager.test_restart`: a tiny asynchronous training loop, and its ledger.

Always true: a line of the ledger is a batch that was handed out and trained on; it is there, whole, before the loop goes
on. Everything that a child needs is imported here, so that one that is forked begins at once.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import torch
from torch.optim import AdamW
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3ForCausalLM

from rollout.config import Advanced, InferenceConfig
from rollout.journal import Journal
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from trainer_hooks.optimizer import attach

GROUP = 2
SAVE_EVERY = 2
"""Steps of training."""
CHECKPOINT = "checkpoint.pt"
SAVING, ENDED = b"save", b"ended"


class Sample(NamedTuple):
    """A row of a batch, as the ledger has it."""

    prompt: str
    """Its token ids as text."""
    group_id: int
    sample_index: int
    tokens: list[int]
    versions: list[int]
    log_probs: list[float]


class Life(NamedTuple):
    """The records that one process wrote."""

    start: int
    """The step of the checkpoint it went on from; 0 without."""
    batches: dict[int, list[Sample]]
    """Samples by step. Those in flight when the process ended by itself come last, as one more step."""


def train(pipe: Connection, *, folder: Path, life: int, steps: int, with_journal: bool) -> None:
    """Train up to `steps`, from the last checkpoint in the folder; says a word before everything it does."""
    torch.set_num_threads(1)
    # Where a group is computed again, it comes out otherwise; without a journal every life is to be like the first.
    run = _run(
        Journal(folder / "journal") if with_journal else None,
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
    ledger = os.open(folder / f"life-{life}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(ledger, msgpack.packb(run.step))
    while run.step < steps:
        batch = run.train()
        os.write(ledger, _line(run.step, batch))
        if run.step % SAVE_EVERY == 0:
            pipe.send_bytes(SAVING)
            run.save(folder / CHECKPOINT)
            pipe.send_bytes(b"saved")
    rest = run.manager.generate([], min_groups=run.manager.groups_in_flight)
    os.write(ledger, _line(run.step + 1, rest))
    pipe.send_bytes(ENDED)


@dataclass
class Run:
    """Everything that a checkpoint contains."""

    model: Qwen3ForCausalLM
    optimizer: AdamW
    manager: RolloutManager
    step: int = 0
    asked: int = 0
    """Number of prompts drawn so far."""

    def train(self) -> RolloutBatch:
        """Keep seven groups in flight, train once on those that have finished, and return them."""
        missing = 7 - self.manager.groups_in_flight
        prompts_now, self.asked = [_prompt(self.asked + number) for number in range(missing)], self.asked + missing
        batch = self.manager.generate(prompts_now, SamplingParams(n=GROUP, max_tokens=24), min_groups=3, progress=False)
        # An untrained model is never right: whatever differs between samples will do, so that weights move.
        rewards = batch.response_lengths % 5 - 2.0
        with self.manager.suspended():
            logits = self.model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
            logprobs = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None]).squeeze(-1)
            self.optimizer.zero_grad()
            (-(rewards[:, None] * logprobs)[batch.response_mask[:, 1:]].mean()).backward()
            self.optimizer.step()
        self.step += 1
        return batch

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically: a kill during the write keeps the previous one."""
        torch.save(
            {"step": self.step, "asked": self.asked, "model": self.model.state_dict(),
             "optimizer": self.optimizer.state_dict(), "rollout": self.manager.state_dict()},
            path.with_suffix(".unfinished"),
        )  # fmt: skip
        path.with_suffix(".unfinished").replace(path)

    def load(self, path: Path) -> None:
        """Load a checkpoint, including the groups in flight."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.manager.load_state_dict(state["rollout"])
        self.step, self.asked = state["step"], state["asked"]


def read(folder: Path) -> Iterator[Life]:
    """Yield the records of each process, the first process first."""
    for number in range(len(list(folder.glob("life-*")))):
        with (folder / f"life-{number}").open("rb") as file:
            start, *lines = msgpack.Unpacker(file)
        yield Life(start, {step: [Sample(*sample) for sample in samples] for step, samples in lines})


def prompts(count: int) -> list[str]:
    """The prompts of a run, in the order in which it comes to them."""
    return [str(_prompt(number)) for number in range(count)]


def _prompt(number: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(3, 20) for _ in range(dice.randint(4, 9))]


def _run(journal: Journal | None, seed: int) -> Run:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=20, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    config = InferenceConfig(
        max_requests=16,
        kv_cache_blocks=256,
        max_tokens_per_step=256,
        max_staleness=4,
        kv_cache_management_mode="recompute",
        seed=seed,
        advanced=Advanced(block_size_tokens=4, verify_model=False),
    )
    return Run(model, AdamW(model.parameters(), lr=3e-3), RolloutManager(model, None, config, journal=journal))


def _line(step: int, batch: RolloutBatch) -> bytes:
    samples = [
        Sample(
            str(each.prompt_tokens),
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
