"""Training on a batch of groups: padded, packed without sharing, and as prefix trees.

    taskset -c 0,1 python -m tests.benchmarks.tree

8 prompts of 512 tokens, 8 samples of each, lengths log-normal around 128 up to 1,024; a Qwen3 of 108 M parameters in
float32, trained under bfloat16 autocast. Each method takes up to as many tokens at a time (padding included, rows sorted by
length, trees of whole groups), accumulates gradients, and has logits of completions only. Methods alternate, each pass
followed by an optimizer step. Peak memory is that of a process that trains once, above what it held before.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from rollout import RolloutBatch
from tests.benchmarks import tables
from tests.benchmarks.common import alternating, finish, in_process, medians, parse, peak_of, seconds
from tests.benchmarks.subject import make_subject
from tests.benchmarks.training_memory import apart, batch_of, gathered, words
from tests.benchmarks.workloads import Scale, grpo
from trainer_hooks.tree import attach

SAMPLES = 8
"""The number of samples of a prompt."""

Passes = Iterator[tuple[Tensor, Tensor]]
"""(rows [n], log-probs [n, T]), forward by forward."""


def of_similar_length(batch: RolloutBatch, tokens: int) -> Iterator[Tensor]:
    """Rows, shortest first, as many at a time as fit into `tokens` with their padding."""
    lengths = (batch.prompt_lengths + batch.response_lengths).tolist()
    some: list[int] = []
    for row in sorted(range(len(batch)), key=lengths.__getitem__):
        if some and (len(some) + 1) * lengths[row] > tokens:
            yield torch.tensor(some)
            some = []
        some.append(row)
    yield torch.tensor(some)


def padded(model: PreTrainedModel, batch: RolloutBatch, tokens: int) -> Passes:
    """Rows of similar length side by side, logits of their completions only."""
    first = int(batch.prompt_lengths.min())
    for some in of_similar_length(batch, tokens):
        longest = int(batch.attention_mask[some].sum(1).max())
        ids, mask = batch.input_ids[some, :longest], batch.attention_mask[some, :longest]
        keep = torch.arange(first - 1, longest - 1)
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep, use_cache=False).logits.float()
        yield (
            some,
            torch.nn.functional.pad(gathered(logits, ids[:, first:]), (first, batch.input_ids.shape[1] - longest)),
        )


def packed(model: PreTrainedModel, batch: RolloutBatch, tokens: int) -> Passes:
    """The kernel of trees on rows that share nothing."""
    for some in of_similar_length(batch, tokens):
        yield some, apart(batch, int(model.config.vocab_size), some).logprobs_of(model)


def tree(model: PreTrainedModel, batch: RolloutBatch, tokens: int) -> Passes:
    """Every prompt once."""
    for one in batch.trees(tokens):
        yield one.rows, one.logprobs_of(model)


METHODS: dict[str, Callable[[PreTrainedModel, RolloutBatch, int], Passes]] = {
    "padded": padded, "packed": packed, "tree": tree,
}  # fmt: skip


def trainer_of(options: argparse.Namespace) -> tuple[RolloutBatch, Callable[[str], None]]:
    """A batch, and the training step of a model on it by one of the methods."""
    model = make_subject(options.size, "float32", 4096, Path()).model.train()
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    attach(model)
    optimizer = AdamW(model.parameters(), lr=1e-6)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    (turn,) = next(iter(grpo(model.config.vocab_size, Scale(options.scale), ()))).turns
    say = words(model.config.vocab_size)
    batch = batch_of([(list(p), say(length)) for p, length in zip(turn.prompts, turn.lengths, strict=True)], SAMPLES)
    advantages, count = torch.linspace(-1, 1, len(batch))[:, None], batch.response_mask.sum()

    def train(method: str) -> None:
        optimizer.zero_grad()
        passes = METHODS[method](model, batch, options.tokens)
        while True:
            with torch.autocast("cpu", torch.bfloat16) if options.dtype == "bfloat16" else nullcontext():
                rows, logprobs = next(passes, (None, None))
            if rows is None or logprobs is None:
                break
            ratio = (logprobs - batch.logprobs[rows]).exp()
            (-(ratio * advantages[rows] * batch.response_mask[rows]).sum() / count).backward()
            del logprobs, ratio
        optimizer.step()

    return batch, train


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parse(
        __doc__, arguments, size="100m", dtype={"default": "bfloat16", "help": "of the autocast"},
        tokens={"default": 4096, "help": "per forward, at most"}, rounds=3, scale=1.0,
        checkpointing={"default": False, "help": "of gradients"}, cell=None,
    )  # fmt: skip
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if options.cell:
        print(peak_of(partial(trainer_of(options)[1], options.method)) * 10**6 // 2**20)
        return
    # First, while this process holds little.
    asked = {name: getattr(options, name) for name in ("size", "dtype", "tokens", "scale", "checkpointing")}
    peaks = {method: in_process("tree", **asked, method=method) for method in METHODS}
    batch, train = trainer_of(options)

    def timed(method: str) -> dict[str, float]:
        return {"train seconds": seconds(lambda: train(method))}

    rounds = alternating({method: partial(timed, method) for method in METHODS}, options.rounds)
    tokens = {
        "padded": sum(
            len(some) * int(batch.attention_mask[some].sum(1).max())
            for some in of_similar_length(batch, options.tokens)
        ),
        "packed": int(batch.attention_mask.sum()),
        "tree": sum(map(len, batch.trees(options.tokens))),
    }
    results: dict[str, Any] = {
        method: medians(rounds[method]) | {"tokens": tokens[method], "peak MiB": peaks[method]} for method in METHODS
    }
    finish(options.json, results, tables.tree(results))


if __name__ == "__main__":
    main()
