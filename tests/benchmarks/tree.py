"""Training on a batch of groups: padded, packed without sharing, and as prefix trees; alone and as a part of the whole step.

    taskset -c 0,1 python -m tests.benchmarks.tree

8 prompts of 512 tokens, 8 samples of each, lengths log-normal around 128 up to 1,024; a Qwen3 of 108 M parameters in
float32, trained under bfloat16 autocast, sampled from in bfloat16. Each method takes up to as many tokens at a time (padding
included, rows sorted by length, trees of whole groups), accumulates gradients, and has logits of completions only. A round
samples a batch and trains on it by every method, each followed by an optimizer step. Peak memory is that of a process that
trains once, above what it held before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollout import Advanced, InferenceConfig, PackedTree, RolloutBatch, RolloutManager, SamplingParams
from rollout.manager.batch.tree import pack_tree
from rollout.requests.request import DynamicInferenceRequest
from rollout.state import FinishReason, Status
from tests.benchmarks.common import parse, save
from tests.benchmarks.subject import SIZES
from tests.benchmarks.workloads import Scale, Workload, grpo
from trainer_hooks.optimizer import attach as attach_optimizer
from trainer_hooks.tree import attach

SAMPLES = 8
"""Of a prompt."""

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
        chosen = logits.gather(2, ids[:, first:, None]).squeeze(2) - logits.logsumexp(2)
        yield some, torch.nn.functional.pad(chosen, (first, batch.input_ids.shape[1] - longest))


def packed(model: PreTrainedModel, batch: RolloutBatch, tokens: int) -> Passes:
    """The same kernel on rows that share nothing."""
    vocab, real = int(model.config.vocab_size), batch.attention_mask.bool()
    own = batch.input_ids + vocab * torch.arange(len(batch))[:, None]
    wanted = real & (torch.arange(real.shape[1]) >= batch.prompt_lengths[:, None])
    for some in of_similar_length(batch, tokens):
        alone = pack_tree(own[some], real[some], wanted[some], some)
        yield some, _of_tree(model, replace(alone, input_ids=alone.input_ids % vocab))


def tree(model: PreTrainedModel, batch: RolloutBatch, tokens: int) -> Passes:
    """Every prompt once."""
    for one in batch.trees(tokens):
        yield one.rows, _of_tree(model, one)


def _of_tree(model: PreTrainedModel, one: PackedTree) -> Tensor:
    return one.logprobs_of(model)


METHODS: dict[str, Callable[[PreTrainedModel, RolloutBatch, int], Passes]] = {
    "padded": padded, "packed": packed, "tree": tree,
}  # fmt: skip


def made_up(workload: Workload, vocabulary: int) -> RolloutBatch:
    """A batch of the workload's shape, without sampling."""
    (turn,) = workload.turns
    generator = torch.Generator().manual_seed(0)
    requests = [
        DynamicInferenceRequest(
            request_id=index // SAMPLES, sample_index=index % SAMPLES, prompt_tokens=list(prompt),
            sampling_params=SamplingParams(max_tokens=length),
            generated_tokens=torch.randint(0, vocabulary, (length,), generator=generator).tolist(),
            generated_log_probs=[-10.4] * length, status=Status.COMPLETED, finish_reason=FinishReason.LENGTH,
        )
        for index, (prompt, length) in enumerate(zip(turn.prompts, turn.lengths, strict=True))
    ]  # fmt: skip
    return RolloutBatch.from_requests(requests, policy_version=0, pad_token_id=0)


class Step:
    """A model with its optimizer, trained by any of the methods."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = Qwen3Config(**SIZES[options.size], max_position_embeddings=4096, tie_word_embeddings=True)
        self._options = options
        self.model = Qwen3ForCausalLM(config).train()
        if options.checkpointing:
            self.model.gradient_checkpointing_enable()
        self.optimizer = AdamW(self.model.parameters(), lr=1e-6)
        attach(self.model)
        self.vocabulary = config.vocab_size
        self.workload: Workload = next(iter(grpo(config.vocab_size, Scale(options.scale), ())))
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def train(self, method: str, batch: RolloutBatch) -> dict[str, float]:
        """Seconds of forward and backward, the gradient's norm, and the loss; steps the optimizer."""
        start, total = time.perf_counter(), 0.0
        self.optimizer.zero_grad()
        advantages = torch.linspace(-1, 1, len(batch))[:, None]
        count = batch.response_mask.sum()
        passes = METHODS[method](self.model, batch, self._options.tokens)
        while True:
            with self._autocast():
                rows, logprobs = next(passes, (None, None))
            if rows is None:
                break
            ratio = (logprobs - batch.logprobs[rows]).exp()
            loss = -(ratio * advantages[rows] * batch.response_mask[rows]).sum() / count
            loss.backward()
            total += loss.item()
            del logprobs, ratio, loss
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()
        self.optimizer.step()
        return {"seconds": time.perf_counter() - start, "loss": total, "gradient norm": norm}

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self._options.dtype == "bfloat16" else nullcontext()


def in_groups(batch: RolloutBatch) -> RolloutBatch:
    """Samples of a prompt as one group: with a forced length of its own, each was a request of its own."""
    grouped = (
        replace(request, request_id=row // SAMPLES, sample_index=row % SAMPLES) for row, request in enumerate(batch)
    )
    return RolloutBatch.from_requests(
        list(grouped), policy_version=batch.policy_version, pad_token_id=batch.pad_token_id
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each method in rounds that alternate, and of the rollout before them."""
    # First, while this process holds little.
    peaks = {method: _peak_of(options, method) for method in options.methods}
    step = Step(options)
    (turn,) = step.workload.turns
    config = InferenceConfig(
        kv_cache_blocks=step.workload.kv_tokens // 16 + 128,
        inference_dtype="bfloat16" if options.dtype == "bfloat16" else None,
        advanced=Advanced(verify_model=False),
    )
    params = [SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0) for length in turn.lengths]
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in options.methods}
    generated = []
    with RolloutManager(step.model, None, config) as rollout, attach_optimizer(step.optimizer, rollout):
        for number in range(options.rounds):
            start = time.perf_counter()
            batch = rollout.generate([list(prompt) for prompt in turn.prompts], params, progress=False)
            generated.append(time.perf_counter() - start)
            batch = in_groups(batch)
            with rollout.suspended():
                for method in options.methods if number % 2 == 0 else reversed(options.methods):
                    seen[method].append(step.train(method, batch))
                    print(method, {name: round(value, 4) for name, value in seen[method][-1].items()}, flush=True)
    tokens = {
        "padded": sum(
            len(some) * int(batch.attention_mask[some].sum(1).max())
            for some in of_similar_length(batch, options.tokens)
        ),
        "packed": int(batch.attention_mask.sum()),
        "tree": sum(map(len, batch.trees(options.tokens))),
    }
    rollout_s = statistics.median(generated)
    return {"rollout seconds": rollout_s} | {
        method: {
            "train seconds": (seconds := statistics.median(each["seconds"] for each in seen[method])),
            "step seconds": rollout_s + seconds,
            "tokens": tokens[method],
            "peak MiB": peaks[method],
        }
        for method in options.methods
    }


def _peak_of(options: argparse.Namespace, method: str) -> int:
    """MiB above what a process held before, at the peak of one training pass over the batch."""
    asked = [f"--{name}={getattr(options, name)}" for name in ("size", "dtype", "tokens", "scale")]
    command = [sys.executable, "-m", "tests.benchmarks.tree", *asked, "--peak", method]
    if options.checkpointing:
        command.append("--checkpointing")
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak(options: argparse.Namespace) -> int:
    """See `_peak_of`, in this process."""
    step = Step(options)
    batch = made_up(step.workload, step.vocabulary)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = _resident("VmRSS")
    step.train(options.peak, batch)
    return (_resident("VmHWM") - before) // 1024


def _resident(field: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    options = parse(
        __doc__, arguments, size="100m", dtype={"default": "bfloat16", "help": "of the autocast"},
        tokens={"default": 4096, "help": "per forward, at most"}, rounds=3, scale=1.0,
        methods={"default": list(METHODS), "choices": list(METHODS)},
        checkpointing={"default": False, "help": "of gradients"},
        peak={"default": None, "choices": list(METHODS), "help": "only print the peak memory of one method, in MiB"},
    )  # fmt: skip
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if options.peak:
        print(peak(options))
        return
    results = measure(options)
    reference = results[options.methods[0]]
    print(f"rollout {results['rollout seconds']:.1f} s")
    for method in options.methods:
        each = results[method]
        print(
            f"{method:8} {each['tokens']:7,} tokens  train {each['train seconds']:6.1f} s "
            f"({reference['train seconds'] / each['train seconds']:.2f}x)  step {each['step seconds']:6.1f} s "
            f"({reference['step seconds'] / each['step seconds']:.2f}x)  peak {each['peak MiB']:,} MiB"
        )
    save(options.json, results)


if __name__ == "__main__":
    main()
