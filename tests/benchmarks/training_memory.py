"""Peak memory and processor time of one forward and backward over long completions.

    python -m tests.benchmarks.training_memory

Memory is the peak of resident memory of a process for this measurement alone, above what it held before. Time is the
processor's, with one thread, and so hardly depends on what else runs. A Qwen3 of 4 layers of width 256 in float32: 4 million
parameters and the embeddings. A method that needs more than 10 GB is not measured further.

`--shape group`: 8 samples of a prompt of 512 tokens, with whole logits and without, by 2 layers of width 64, which leave
the memory to the logits. `forked`: an episode whose template drops earlier thinking, so that every turn is a row; seconds
are medians of alternating rounds. `search`: an agent that tries 8 branches at each of its last turns.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollout import RolloutBatch, SamplingParams
from rollout.manager.batch.tree import PackedTree, pack_tree
from rollout.requests.request import DynamicInferenceRequest
from rollout.state import FinishReason, Status
from tests.benchmarks.common import alternating, finish, in_process, parse, peak_of
from trainer_hooks.tree import attach

PROMPT, ROWS, BRANCHES, LIMIT, ROUNDS = 512, 8, 8, 10 << 30, 3


def model_of(vocabulary: int, width: int, layers: int) -> PreTrainedModel:
    """With gradients, which a training step has from the second one on."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 64, head_dim=32, max_position_embeddings=1 << 16,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def batch_of(rows: Sequence[tuple[list[int], list[int]]], samples: int = 1) -> RolloutBatch:
    """A batch of prompts and completions, so many of a prompt."""
    requests = [
        DynamicInferenceRequest(
            request_id=index // samples, sample_index=index % samples, prompt_tokens=prompt, generated_tokens=completion,
            generated_log_probs=[-10.4] * len(completion), sampling_params=SamplingParams(max_tokens=len(completion)),
            status=Status.COMPLETED, finish_reason=FinishReason.LENGTH,
        )
        for index, (prompt, completion) in enumerate(rows)
    ]  # fmt: skip
    return RolloutBatch.from_requests(requests, policy_version=0, pad_token_id=0)


def words(vocabulary: int) -> Callable[[int], list[int]]:
    """Random tokens, so many."""
    generator = torch.Generator().manual_seed(0)
    return lambda count: torch.randint(1, vocabulary, (count,), generator=generator).tolist()


def group(say: Callable[[int], list[int]], tokens: int, *_: int) -> RolloutBatch:
    """Samples of one prompt, with so many completion tokens together."""
    prompt = say(PROMPT)
    return batch_of([(prompt, say(tokens // ROWS)) for _ in range(ROWS)])


def search(say: Callable[[int], list[int]], tokens: int, turns: int, forks: int) -> RolloutBatch:
    """Turns of so many tokens. One of the 8 branches of a turn is continued."""
    trained = history = say(PROMPT)
    rows = []
    for turn in range(turns):
        tried = [say(tokens) for _ in range(BRANCHES if turn >= turns - forks else 1)]
        if len(tried) > 1:
            rows.append((trained, history[len(trained) :] + tried[0]))
            rows += [(history, branch) for branch in tried[1:]]
            trained = history + tried[-1]
        history = history + tried[-1]
    return batch_of(rows)


def forked(say: Callable[[int], list[int]], tokens: int, turns: int, *_: int) -> RolloutBatch:
    """Turns of so many tokens, half of which, the thinking, no later turn has in its prompt."""
    history, rows = say(PROMPT), []
    for _ in range(turns):
        thought, answer = say(tokens // 2), say(tokens // 2)
        rows.append((history, thought + answer))
        history = history + answer
    return batch_of(rows)


SHAPES: dict[str, Callable[..., RolloutBatch]] = {"group": group, "forked": forked, "search": search}


def gathered(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs by plain torch."""
    return logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)


def apart(batch: RolloutBatch, vocabulary: int, rows: Tensor | slice = slice(None)) -> PackedTree:
    """Rows end to end, for the attention of trees."""
    numbers = torch.arange(len(batch))[rows]
    own = batch.input_ids[rows] + vocabulary * numbers[:, None]
    alone = pack_tree(own, batch.attention_mask[rows].bool(), batch.response_mask[rows], numbers)
    return replace(alone, input_ids=alone.input_ids % vocabulary)


def whole_tree(model: PreTrainedModel, tree: PackedTree) -> Tensor:
    """Log-probs of a tree by whole logits."""
    before, token = tree.predictors[tree.wanted], tree.input_ids[0][tree.nodes[tree.wanted]]
    keep, place = before.unique(return_inverse=True)
    return gathered(model(**tree.inputs, logits_to_keep=keep).logits[0][place], token)


def whole_rows(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """Log-probs of padded rows by whole logits of their completions."""
    first = int(batch.prompt_lengths.min())
    keep = torch.arange(first - 1, batch.input_ids.shape[1] - 1)
    inputs = {**batch.model_inputs(), "logits_to_keep": keep, "use_cache": False}
    return gathered(model(**inputs).logits, batch.input_ids[:, first:]) * batch.response_mask[:, first:]


def by_trl(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """TRL's fused head on padded rows."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    labels = batch.input_ids.masked_fill(~batch.response_mask, -100)
    found: Tensor = model(**batch.model_inputs(), labels=labels, fused_lm_head=True).log_probs
    return found


def along(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """Segment by segment; the last value is what is left to differentiate."""
    for _, scores in batch.paths(model, 1024):
        scores.logprobs.sum().backward()
    return torch.zeros((), requires_grad=True)


def one_by_one(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """Row by row, for the attention of trees: nothing is shared, in the memory of the longest row."""
    for row in range(len(batch)):
        batch.logprobs_of(model, batch.tree(slice(row, row + 1))).sum().backward()
    return torch.zeros((), requires_grad=True)


METHODS: dict[str, Callable[[PreTrainedModel, RolloutBatch], Tensor]] = {
    "trl": by_trl,
    "padded, whole": whole_rows,
    "padded": lambda model, batch: batch.logprobs_of(model),
    "packed, whole": lambda model, batch: whole_tree(model, apart(batch, model.config.vocab_size)),
    "packed": lambda model, batch: apart(batch, model.config.vocab_size).logprobs_of(model),
    "tree, whole": lambda model, batch: whole_tree(model, batch.tree()),
    "tree": lambda model, batch: batch.logprobs_of(model, batch.tree()),
    "paths": along,
    "rows": one_by_one,
    "one path": lambda model, batch: batch.logprobs_of(model, batch.tree(slice(len(batch) - 1, None))),
}
OF_SHAPE = {"group": [*METHODS][:7], "forked": ["rows", "tree"], "search": ["tree", "paths", "one path"]}


def measure(methods: list[str], shape: str, vocabulary: int, tokens: int, turns: int, forks: int) -> dict[str, Any]:
    """Measure the peak and seconds of one method, or the seconds of several, here; count tokens of rows and tree."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    model = model_of(vocabulary, *((64, 2) if shape == "group" else (256, 4)))
    attach(model)

    def train(method: str, batch: RolloutBatch) -> float:
        start = time.process_time()
        METHODS[method](model, batch).sum().backward()
        return time.process_time() - start

    # Libraries and threads start with a small batch.
    train(methods[0], group(words(vocabulary), 2 * ROWS))
    batch = SHAPES[shape](words(vocabulary), tokens, turns, forks)
    found: dict[str, Any] = {"rows": int(batch.attention_mask.sum()), "tree": len(batch.tree())}
    if len(methods) > 1:
        rounds = alternating({method: partial(train, method, batch) for method in methods}, ROUNDS)
        return found | {"seconds": {method: statistics.median(each) for method, each in rounds.items()}}
    seconds: list[float] = []
    return found | {"MB": peak_of(lambda: seconds.append(train(*methods, batch))), "seconds": seconds[0]}


def within_limit(**cell: Any) -> dict[str, Any] | None:
    """`measure` in a process of its own; None: it takes too much memory."""
    try:
        found: dict[str, Any] | None = in_process("training_memory", **cell)
    except RuntimeError as exc:
        if "allocate" not in str(exc):
            raise
        found = None
    print(*cell.values(), found, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(
        __doc__, arguments, shape={"default": "group", "choices": list(SHAPES)},
        tokens={"default": [8192, 32768], "help": "of all completions; of a turn"},
        vocabularies={"default": [32768, 151936], "help": "sizes"}, turns={"default": [1], "help": "of an episode"},
        forks={"default": 1, "help": "last turns of a search, which branch"}, cell=None,
    )  # fmt: skip
    torch.set_num_threads(1)
    if options.cell:
        print(json.dumps(measure(**json.loads(options.cell))))
        return
    methods, found = OF_SHAPE[options.shape], []
    for vocabulary in options.vocabularies:
        for turns in options.turns:
            for tokens in options.tokens:
                sizes = {"vocabulary": vocabulary, "turns": turns, "tokens": tokens}
                cell = sizes | {"shape": options.shape, "forks": options.forks}
                peaks = {method: within_limit(methods=[method], **cell) for method in methods}
                timed = within_limit(methods=methods, **cell) if options.shape == "forked" else None
                found.append(sizes | {"peaks": peaks, "timed": timed})
    finish(options.json, found)


if __name__ == "__main__":
    main()
