"""Log-probs of a GRPO batch by the engine and by a padded forward of the same module.

    taskset -c 0,1 python -m tests.benchmarks.score

8 prompts of 512 tokens, 8 samples of each, lengths log-normal around 128 up to 1,024, under a Qwen3 of 108 M parameters. The
padded forward computes logits of completions only, then log-softmax and gather, a few rows at a time: in the order of the
batch, as trainers do, or sorted by length. The engine scores with an empty prefix cache. Medians of alternating rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollout import InferenceConfig, RolloutBatch, RolloutManager
from tests.benchmarks.common import alternating, parse, save, seconds
from tests.benchmarks.subject import SIZES
from tests.benchmarks.tree import made_up, of_similar_length
from tests.benchmarks.workloads import Scale, grpo


def as_it_comes(rows: int) -> Callable[[RolloutBatch, int], Iterator[Tensor]]:
    """So many rows at a time, in order."""
    return lambda batch, tokens: iter(torch.arange(len(batch)).split(rows))


@torch.no_grad()
def padded(model: PreTrainedModel, batch: RolloutBatch, parts: Iterator[Tensor]) -> Tensor:
    """[N, T] by `log_softmax` and gather, part by part."""
    found = torch.zeros_like(batch.logprobs)
    first = int(batch.prompt_lengths.min())
    for some in parts:
        longest = int(batch.attention_mask[some].sum(1).max())
        ids, mask = batch.input_ids[some, :longest], batch.attention_mask[some, :longest]
        keep = torch.arange(first - 1, longest - 1)
        logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep, use_cache=False).logits
        found[some, first:longest] = logits.float().log_softmax(-1).gather(2, ids[:, first:, None])[..., 0]
    return found * batch.response_mask


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    options = parse(
        __doc__, arguments, size="100m", dtype="float32", scale=1.0, rounds=3,
        tokens={"default": 8192, "help": "padded tokens of one forward"},
        rows={"default": 8, "help": "rows of one forward, as they come"},
    )  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES[options.size], max_position_embeddings=4096, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    batch = made_up(next(iter(grpo(config.vocab_size, Scale(options.scale), ()))), config.vocab_size)
    blocks = 4 * -(-batch.input_ids.numel() // 16)
    manager = RolloutManager(
        model, None, InferenceConfig(kv_cache_blocks=blocks, max_sequence_length=batch.input_ids.shape[1])
    )

    def scored() -> Tensor:
        manager.engine.flush_prefix_cache()
        return manager.score(batch).logprobs

    methods: dict[str, Callable[[], Tensor]] = {
        "padded, as it comes": lambda: padded(model, batch, as_it_comes(options.rows)(batch, 0)),
        "padded, sorted": lambda: padded(model, batch, of_similar_length(batch, options.tokens)),
        "score": scored,
    }
    results: dict[str, Tensor] = {}
    timed = {
        name: partial(seconds, lambda name=name, run=run: results.update({name: run()}))
        for name, run in methods.items()
    }
    taken = alternating(timed, options.rounds)
    unpadded = int(batch.attention_mask.sum())
    print(f"{batch!r}: {unpadded} tokens, {batch.input_ids.numel()} padded; {options.size} {options.dtype}")
    best = statistics.median(taken["score"])
    differs = {name: (each - results["score"]).abs().max().item() for name, each in results.items()}
    for name, each in taken.items():
        middle = statistics.median(each)
        print(f"{name:22} {middle:8.2f} s   {middle / best:5.1f} x   largest difference {differs[name]:.1e}")
    manager.close()
    save(options.json, {"seconds": taken, "differs": max(differs.values())})


if __name__ == "__main__":
    main()
