"""Speculative decoding beside plain decoding, in turns on the same weights, requests and seeds.

    nice -n -15 python -m tests.benchmarks.speculation --size 100m --dtype bfloat16

No trained model is at hand, so a random one is made to repeat itself: its attention's output projections are zero, and
so are the embeddings of all but `WORDS` tokens. The whole forward is computed, but the next token depends on the last one
alone, and at low temperatures it is one of few. The temperature sets how predictable it is: `80%` is the mean
probability of the likeliest next token, and so about the share of drafts that can be accepted.

`single`: one sequence of 512 + 512 tokens whose prompt is text of the model itself, as where it edits a file. `grpo`: two
epochs of 8 prompts of 512 tokens, 8 samples each, with lengths log-normal around 128 and one of 1,024; the second epoch is
timed, and `tail` is its last part, after nine tenths of the samples have ended. `first`: the same without an earlier
epoch. `unfriendly`: 1, 4, 16 and 64 sequences of random tokens, none of them predictable. Ratios are plain / speculative
seconds, medians over rounds (above 1: speculation is faster). That both sample the same tokens is checked in every round.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedModel

from rollout import Advanced, InferenceConfig, SamplingParams
from rollout.engine.engine import DynamicInferenceEngine
from tests.benchmarks.common import parse, save
from tests.benchmarks.subject import make_subject
from tests.benchmarks.workloads import Scale, grpo

MODES = {"plain": False, "speculative": True}
PREDICTABLE = (0.95, 0.8, 0.6)
WORDS = 512


@dataclass(frozen=True)
class Work:
    """Requests of one measurement: prompts and lengths, one each per sequence."""

    name: str
    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    temperature: float
    epochs: int = 1
    """Only the last one is timed."""


@dataclass
class Figures:
    """Of one work and mode, one value per round."""

    whole: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)
    """Seconds after nine tenths of the sequences have ended."""
    tokens: list[list[int]] = field(default_factory=list)
    """Of the last round."""
    accepted: float = 0.0
    """Mean accepted tokens per draft."""
    drafted: float = 0.0
    """Draft tokens per generated token."""


def made_repetitive(model: PreTrainedModel) -> None:
    """Zero the attention's output projections and the embeddings beyond `WORDS`."""
    with torch.no_grad():
        model.model.embed_tokens.weight[WORDS:].zero_()
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()


@torch.no_grad()
def temperature_for(model: PreTrainedModel, predictable: float) -> float:
    """Temperature at which the likeliest next token has this probability in the mean, over a sampled sequence."""
    generator = torch.Generator().manual_seed(0)
    low, high = 1e-3, 1.0
    for _ in range(12):
        middle = (low * high) ** 0.5
        token, shares = torch.randint(0, WORDS, (16, 1), generator=generator), []
        for step in range(24):
            chances = (model(input_ids=token, use_cache=False).logits[:, -1].float() / middle).softmax(-1)
            if step >= 8:
                shares.append(float(chances.amax(-1).mean()))
            token = torch.multinomial(chances, 1, generator=generator)
        low, high = (middle, high) if statistics.mean(shares) > predictable else (low, middle)
    return (low * high) ** 0.5


def own_text(model: PreTrainedModel, temperature: float, length: int) -> list[int]:
    """Tokens sampled from the model."""
    engine = DynamicInferenceEngine(
        model, None, InferenceConfig(kv_cache_blocks=length // 16 + 2, advanced=Advanced(verify_model=False))
    )
    params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=temperature, seed=99)
    return engine.generate([[1]], params)[0].generated_tokens


def workloads(model: PreTrainedModel, temperatures: dict[float, float], scale: Scale) -> Iterator[Work]:
    """All measurements."""
    vocab = model.config.vocab_size
    rng = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return rng.integers(0, vocab, (count, scale.tokens(length))).tolist()

    (turn,) = next(iter(grpo(vocab, scale, ()))).turns
    for predictable, temperature in temperatures.items():
        prompt = own_text(model, temperature, scale.tokens(512))
        yield Work(f"single, {predictable:.0%}", [prompt], [scale.tokens(512)], temperature)
        yield Work(f"grpo, {predictable:.0%}", turn.prompts, turn.lengths, temperature, epochs=2)
    middle = PREDICTABLE[len(PREDICTABLE) // 2]
    yield Work(f"grpo, {middle:.0%}, first", turn.prompts, turn.lengths, temperatures[middle])
    for count in (1, 4, 16, 64):
        yield Work(f"unfriendly, {count}", prompts(count, 64), [scale.tokens(256)] * count, 1.0)


def run(model: PreTrainedModel, work: Work, mode: str, seed: int, figures: Figures) -> None:
    """One round."""
    need = sum(-(-(len(prompt) + length) // 16) + 1 for prompt, length in zip(work.prompts, work.lengths, strict=True))
    config = InferenceConfig(kv_cache_blocks=need + 64, speculation=MODES[mode], advanced=Advanced(verify_model=False))
    engine = DynamicInferenceEngine(model, None, config)
    for epoch in range(work.epochs):
        ended: dict[int, list[int]] = {}
        first = epoch * len(work.prompts)
        for index, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            params = SamplingParams(
                max_tokens=length, ignore_eos=True, temperature=work.temperature, seed=seed * 10**6 + first + index
            )
            engine.add_request(list(prompt), params, request_id=first + index)
        start = tail = time.perf_counter()
        with engine.installation:
            while engine.has_unfinished:
                for record in engine.step():
                    ended[record.request_id] = record.merge().generated_tokens
                    if len(ended) == -(-9 * len(work.prompts) // 10):
                        tail = time.perf_counter()
    now = time.perf_counter()
    figures.whole.append(now - start)
    figures.tail.append(now - tail)
    figures.tokens = [ended[number] for number in sorted(ended)]
    stats = engine.stats()
    figures.accepted = stats["draft_tokens_accepted"] / max(1, stats["drafts"])
    figures.drafted = stats["draft_tokens"] / stats["generated_tokens"]


def measure(model: PreTrainedModel, work: Work, rounds: int) -> dict[str, Figures]:
    """Figures by mode; the modes take turns, and every second round begins with the other one.

    Raises:
        AssertionError: the modes sampled different tokens.
    """
    found = {mode: Figures() for mode in MODES}
    for number in range(rounds):
        for mode in itertools.chain(MODES if number % 2 else reversed(MODES)):
            run(model, work, mode, number, found[mode])
        assert found["plain"].tokens == found["speculative"].tokens, f"{work.name}: speculation changed the tokens"
    return found


def report(console: Console, work: Work, found: dict[str, Figures]) -> None:
    """One line."""
    plain, ours = found["plain"], found["speculative"]
    line = f"{work.name:<24} {statistics.median(plain.whole):7.2f} s → {statistics.median(ours.whole):7.2f} s "
    line += f"{ratio(plain.whole, ours.whole):5.2f}×"
    if len(work.prompts) >= 10 and max(work.lengths) > min(work.lengths):
        line += f"   tail {ratio(plain.tail, ours.tail):5.2f}×"
    console.print(
        f"{line}   drafted {ours.drafted:.2f} per token, accepted {ours.accepted:.1f} per draft", highlight=False
    )


def ratio(plain: Sequence[float], ours: Sequence[float]) -> float:
    """Median over rounds of plain / speculative."""
    return statistics.median(a / b for a, b in zip(plain, ours, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    args = parse(
        __doc__, arguments, size="100m", dtype="bfloat16", rounds=3, threads=2, scale=1.0,
        only={"default": "", "help": "works whose name contains this"},
    )  # fmt: skip
    results: dict[str, dict[str, float]] = {}
    torch.set_num_threads(args.threads)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        model = make_subject(args.size, args.dtype, 2048, Path(folder)).model
    made_repetitive(model)
    temperatures = {each: temperature_for(model, each) for each in PREDICTABLE}
    for work in workloads(model, temperatures, Scale(args.scale)):
        if args.only in work.name:
            found = measure(model, work, args.rounds)
            report(console, work, found)
            results[work.name] = {
                "ratio": ratio(found["plain"].whole, found["speculative"].whole),
                "tail": ratio(found["plain"].tail, found["speculative"].tail),
                "accepted": found["speculative"].accepted,
            }
    save(args.json, results)


if __name__ == "__main__":
    main()
