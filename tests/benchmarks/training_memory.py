"""Peak memory and processor time of one forward and backward over long completions, each in a process of its own.

    python -m tests.benchmarks.training_memory

8 samples of a prompt of 512 tokens, with whole logits and without. `--agent`: a search with 8 branches at every turn, one of
which continues. `--forked`: an episode of 2 to 16 turns, each of which is a row.

A Qwen3 of 4 layers of width 256 in float32. Memory is the peak of resident memory above what the process held before. Time
is the processor's, with one thread: a thread that waits for another one, on a busy machine for long, counts as busy.
`trl`: TRL's fused head on padded rows.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollout import RolloutBatch, SamplingParams
from rollout.manager.batch.tree import PackedTree, pack_tree
from rollout.requests.request import DynamicInferenceRequest
from rollout.state import FinishReason, Status
from tests.benchmarks.common import parse, save
from trainer_hooks.tree import attach

PROMPT, ROWS, TURN = 512, 8, 8


def model_of(vocabulary: int) -> PreTrainedModel:
    """10 M parameters and the embeddings, trained once so that gradients are there."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=1 << 16, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def batch_of(rows: Sequence[tuple[list[int], list[int]]]) -> RolloutBatch:
    """A batch of prompts and completions."""
    requests = [
        DynamicInferenceRequest(
            request_id=index, prompt_tokens=prompt, generated_tokens=completion,
            generated_log_probs=[-5.0] * len(completion), sampling_params=SamplingParams(max_tokens=len(completion)),
            status=Status.COMPLETED, finish_reason=FinishReason.LENGTH,
        )
        for index, (prompt, completion) in enumerate(rows)
    ]  # fmt: skip
    return RolloutBatch.from_requests(requests, policy_version=0, pad_token_id=0)


def words(vocabulary: int) -> Callable[[int], list[int]]:
    """Random tokens, so many."""
    generator = torch.Generator().manual_seed(0)
    return lambda count: torch.randint(1, vocabulary, (count,), generator=generator).tolist()


def group(vocabulary: int, tokens: int) -> RolloutBatch:
    """Samples of one prompt, with so many completion tokens together."""
    say = words(vocabulary)
    prompt = say(PROMPT)
    return batch_of([(prompt, say(tokens // ROWS)) for _ in range(ROWS)])


def search(vocabulary: int, turns: int, tokens: int) -> RolloutBatch:
    """An agent that tries 8 branches at every turn and goes on with the last of them."""
    say = words(vocabulary)
    history, rows = say(PROMPT), []
    for _ in range(turns):
        tried = [say(tokens) for _ in range(TURN)]
        rows += [(history, branch) for branch in tried]
        history = history + tried[-1]
    return batch_of(rows)


def forked(vocabulary: int, turns: int, tokens: int) -> RolloutBatch:
    """An episode whose template drops the thinking of earlier turns: half of a turn, its answer, stays."""
    say = words(vocabulary)
    history, rows = say(PROMPT), []
    for _ in range(turns):
        thought, answer = say(tokens // 2), say(tokens // 2)
        rows.append((history, thought + answer))
        history = history + answer
    return batch_of(rows)


def gathered(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probs by plain torch."""
    return logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)


def apart(batch: RolloutBatch, vocabulary: int) -> PackedTree:
    """Rows end to end, for the attention of trees."""
    real = batch.attention_mask.bool()
    own = batch.input_ids + vocabulary * torch.arange(len(batch))[:, None]
    alone = pack_tree(own, real, batch.response_mask)
    return replace(alone, input_ids=alone.input_ids % vocabulary)


def whole_tree(model: PreTrainedModel, tree: PackedTree) -> Tensor:
    """Log-probs of a tree by whole logits."""
    logits = model(**tree.inputs).logits[0]
    return gathered(logits[tree.predictors], tree.input_ids[0, tree.predicted])


def whole_rows(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """Log-probs of padded rows by whole logits of their completions."""
    first = int(batch.prompt_lengths.min())
    keep = torch.arange(first - 1, batch.input_ids.shape[1] - 1)
    inputs = {**batch.model_inputs(), "logits_to_keep": keep, "use_cache": False}
    return gathered(model(**inputs).logits, batch.input_ids[:, first:]) * batch.response_mask[:, first:]


def by_trl(model: PreTrainedModel, batch: RolloutBatch) -> Tensor:
    """TRL's fused head."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model)
    labels = batch.input_ids.masked_fill(~batch.response_mask, -100)
    found: Tensor = model(**batch.model_inputs(), labels=labels, fused_lm_head=True).log_probs
    return found


def along(model: PreTrainedModel, batch: RolloutBatch, limit: int = 1024) -> Tensor:
    """Segment by segment; the last value is what is left to differentiate."""
    for _, scores in batch.paths(model, limit):
        scores.logprobs.sum().backward()
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
    "one path": lambda model, batch: batch.logprobs_of(model, batch.tree(slice(len(batch) - 1, None))),
}


def resident(field: str) -> int:
    """KiB of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(method: str, kind: str, vocabulary: int, size: int, tokens: int) -> str:
    """MB and seconds of one method in this process."""
    model = model_of(vocabulary)
    attach(model)
    # Libraries and threads start with a small batch.
    METHODS[method](model, group(vocabulary, 2 * ROWS)).sum().backward()
    batch = {"group": lambda: group(vocabulary, tokens), "search": lambda: search(vocabulary, size, tokens),
             "forked": lambda: forked(vocabulary, size, tokens)}[kind]()  # fmt: skip
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts here
    before, start = resident("VmRSS"), time.process_time()
    METHODS[method](model, batch).sum().backward()
    return f"{(resident('VmHWM') - before) // 1000} {time.process_time() - start:.2f} {len(batch.tree())}"


def in_process(*cell: Any) -> list[float] | None:
    """`measure` in a process of its own; None: the machine has too little memory."""
    command = [sys.executable, "-m", "tests.benchmarks.training_memory", "--cell", "|".join(map(str, cell))]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    return [float(word) for word in ended.stdout.split()[-3:]] if ended.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(
        __doc__, arguments, tokens={"default": [8192, 32768], "help": "of all completions, or of a turn"},
        vocabularies={"default": [32768, 151936], "help": "sizes"}, turns={"default": [2, 4, 8, 16], "help": "of agents"},
        agent={"default": False, "help": "train a search"}, forked={"default": False, "help": "train forked histories"},
        methods={"default": None, "nargs": "+", "choices": list(METHODS)},
        cell={"default": None, "help": "measure one here"},
    )  # fmt: skip
    torch.set_num_threads(1)
    if options.cell:
        method, kind, *numbers = options.cell.split("|")
        print(measure(method, kind, *map(int, numbers)))
        return
    kind = "search" if options.agent else "forked" if options.forked else "group"
    defaults = {
        "search": ["packed", "tree", "paths", "one path"],
        "forked": ["packed", "tree"],
        "group": [*METHODS][:7],
    }
    found = {}
    for vocabulary in options.vocabularies:
        for size in options.turns if kind != "group" else [0]:
            for tokens in options.tokens:
                for method in options.methods or defaults[kind]:
                    cell = (method, kind, vocabulary, size, tokens)
                    found["|".join(map(str, cell))] = values = in_process(*cell)
                    print(*cell, values, flush=True)
    save(options.json, found)


if __name__ == "__main__":
    main()
