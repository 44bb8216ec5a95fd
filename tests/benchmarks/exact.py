"""Price of exact mode: sampling and a training step in exact and plain mode, alternating on the same weights.

    nice -n -15 python -m tests.benchmarks.exact --size 100m --dtype bfloat16

`sampling`: n samples of several prompts. `training`: forward, log-probs and backward over these samples, all of one length,
so that neither side has padding. `ragged`: the same with lengths from a quarter to the whole, padded for both; exact mode
skips padding. Ratios are exact / plain, medians over rounds; `differs`: the largest difference between the rollout's
log-probs and the trainer's in either mode.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from rollout import InferenceConfig, RolloutBatch, RolloutManager, SamplingParams, exact
from tests.benchmarks import tables
from tests.benchmarks.common import finish, parse, seconds
from tests.benchmarks.subject import Subject, make_subject

MODES = ("plain", "exact")
Found = dict[str, dict[str, list[float]]]


def around(mode: str, model: nn.Module) -> AbstractContextManager[object]:
    """Return the context in which the trainer's forward runs."""
    return exact(model) if mode == "exact" else nullcontext()


def logprobs_of(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """[N, T - 1] of each token after the first."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def train(mode: str, model: nn.Module, ids: Tensor, mask: Tensor) -> None:
    """Forward and backward, the gradients dropped."""
    with around(mode, model):
        (logprobs_of(model, ids, mask) * mask[:, 1:]).mean().backward()
    model.zero_grad()


def difference(mode: str, model: nn.Module, batch: RolloutBatch) -> float:
    """Largest absolute difference of a response token's log-prob."""
    with around(mode, model), torch.no_grad():
        found = logprobs_of(model, batch.input_ids, batch.attention_mask)
    return float((found - batch.logprobs[:, 1:])[batch.response_mask[:, 1:]].abs().max())


def measure(subject: Subject, prompts: int, samples: int, tokens: int, rounds: int) -> tuple[Found, dict[str, float]]:
    """Seconds of every round by work and mode, and the largest difference by mode."""
    model = subject.model.train()
    generator = torch.Generator().manual_seed(0)
    half = tokens // 2
    questions = torch.randint(3, subject.vocab, (prompts, half), generator=generator).tolist()
    params = SamplingParams(n=samples, max_tokens=tokens - half, ignore_eos=True, seed=0)
    ragged = torch.ones(prompts * samples, tokens, dtype=torch.int64)
    for row, length in enumerate(torch.linspace(tokens // 4, tokens, len(ragged)).long()):
        ragged[row, length:] = 0
    blocks = 2 * prompts * samples * (tokens // 16 + 2)
    managers = {
        mode: RolloutManager(
            model,
            None,
            InferenceConfig(kv_cache_blocks=blocks, exact=mode == "exact", enable_prefix_caching=False),
        )
        for mode in MODES
    }
    found: Found = {work: {mode: [] for mode in MODES} for work in ("sampling", "training", "ragged")}
    differs = {}
    for number in range(rounds + 1):
        for mode, manager in managers.items():
            kept: list[RolloutBatch] = []

            def sample(manager: RolloutManager = manager, kept: list[RolloutBatch] = kept) -> None:
                kept.append(manager.generate(questions, params, progress=False))

            taken = {"sampling": seconds(sample)}
            (batch,) = kept
            ids, whole = batch.input_ids, batch.attention_mask
            for work, mask in (("training", whole), ("ragged", ragged)):

                def step(mode: str = mode, ids: Tensor = ids, mask: Tensor = mask) -> None:
                    train(mode, model, ids, mask)

                taken[work] = seconds(step)
            differs[mode] = difference(mode, model, batch)
            if number:
                for work, each in taken.items():
                    found[work][mode].append(each)
    for manager in managers.values():
        manager.close()
    return found, differs


def main(arguments: Sequence[str] | None = None) -> None:
    """One model, one line per work."""
    options = parse(
        __doc__, arguments, size="100m", dtype="float32", prompts=4, samples={"default": 4, "help": "of each prompt"},
        tokens={"default": 256, "help": "of a prompt and its completion, half each"}, rounds=5,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        subject = make_subject(options.size, options.dtype, options.tokens, Path(folder))
        seconds, differs = measure(subject, options.prompts, options.samples, options.tokens, options.rounds)
    found = {"seconds": seconds, "differs": differs}
    finish(options.json, found, tables.exact(found))


if __name__ == "__main__":
    main()
