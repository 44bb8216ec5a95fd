"""A whole step of TRL's GRPOTrainer, sampled by the engine (with and without prefix trees) or by transformers.

    python -m tests.benchmarks.trl_step --models 10m-float32 100m-bfloat16 --rounds 2

A step takes 2 prompts of 256 tokens and 8 samples of each, which end at random: three in ten reach the limit of 128 tokens.
All samples are trained in one forward, without gradient checkpointing and without importance weights, so that every peer
does the same work. Peers have the same weights and prompts and alternate, each round in its own process. Memory is the peak
of that process less what it held before the model was made: weights, gradients, optimizer, KV cache, activations.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout import Advanced, InferenceConfig, RolloutManager
from tests.benchmarks import tables
from tests.benchmarks.common import finish, in_process, medians, parse, peak_of, quiet_transformers, turns
from tests.benchmarks.subject import make_subject
from trainer_hooks.trl import attach

PEERS = ("ours", "trees", "generate", "cb")
AT_THE_LIMIT = 0.3
CB_BLOCK = 256


class Clock(TrainerCallback):
    """Seconds of every step, its sampling included, and of the sampling alone."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.sampling: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the step."""
        self.steps.append(time.perf_counter() - self._began)

    def watch(self, trainer: GRPOTrainer) -> None:
        """Note how long the trainer's sampling takes."""
        generate = trainer._generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return generate(*args, **kwargs)
            finally:
                self.sampling.append(time.perf_counter() - began)

        trainer._generate = timed


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token i is the word `i`; the last one ends a text."""
    words = Tokenizer(WordLevel({str(token): token for token in range(vocab)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token=str(vocab - 1))


def make_prompts(vocab: int, count: int, tokens: int) -> Dataset:
    """Random prompts, the same in every process."""
    ids = torch.randint(1, vocab // 2, (count, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    return Dataset.from_list([{"prompt": " ".join(map(str, prompt))} for prompt in ids])


def train(options: argparse.Namespace, folder: str) -> dict[str, float]:
    """Train with one peer: median seconds of a step and of the sampling in it, and the mean length of a completion."""
    samples, longest = options.prompts * options.group, options.prompt_tokens + options.new_tokens
    subject = make_subject(*options.model.split("-"), longest, Path(folder))
    # If a share p of the vocabulary ends a text, a share (1 - p)^n of the completions reaches the limit n.
    ends = max(1, round(subject.vocab * (1 - AT_THE_LIMIT ** (1 / options.new_tokens))))
    subject.model.generation_config.eos_token_id = list(range(subject.vocab - ends, subject.vocab))
    clock, lengths = Clock(), list[int]()

    def score(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        lengths.extend(map(len, completion_ids))
        return [float(ids[0] % 7) for ids in completion_ids]

    cb_blocks = samples * (-(-longest // CB_BLOCK) + 1)
    config = GRPOConfig(
        output_dir=folder, seed=options.seed, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, max_steps=options.steps + 1, per_device_train_batch_size=samples,
        num_generations=options.group, learning_rate=1e-6, max_completion_length=options.new_tokens,
        gradient_checkpointing=False, vllm_importance_sampling_correction=False,
        use_transformers_continuous_batching=options.peer == "cb",
        # Its default takes half of the memory for the cache, again in every step.
        transformers_continuous_batching_config={"num_blocks": cb_blocks} if options.peer == "cb" else None,
    )  # fmt: skip
    prompts = make_prompts(subject.vocab, options.prompts * (options.steps + 1), options.prompt_tokens)
    tokenizer = make_tokenizer(subject.vocab)
    trainer = GRPOTrainer(
        subject.model, score, args=config, train_dataset=prompts, processing_class=tokenizer, callbacks=[clock]
    )
    trainer.remove_callback(PrinterCallback)
    clock.watch(trainer)
    if options.peer in ("ours", "trees"):
        blocks = samples * (-(-longest // Advanced.block_size_tokens) + 1)
        manager = RolloutManager(
            subject.model, tokenizer, InferenceConfig(kv_cache_blocks=blocks, max_requests=samples, seed=options.seed)
        )
        attach(trainer, manager, tree=options.peer == "trees")
    trainer.train()
    return {
        "seconds": statistics.median(clock.steps[1:]), "sampling": statistics.median(clock.sampling[1:]),
        "mean length": statistics.mean(lengths),
    }  # fmt: skip


def measured(options: argparse.Namespace) -> dict[str, float]:
    """Figures of one peer in this process, and its peak memory in MB."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    found: dict[str, float] = {}
    with quiet_transformers(), tempfile.TemporaryDirectory(prefix="trl-step-") as folder:
        peak = peak_of(lambda: found.update(train(options, folder)))
    return found | {"MB": peak}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, save."""
    options = parse(
        __doc__, arguments, models={"default": ["10m-float32", "100m-bfloat16"], "help": "size and dtype"},
        peers={"default": list(PEERS), "choices": PEERS}, prompts={"default": 2, "help": "of a step"},
        group={"default": 8, "help": "samples of a prompt, at least 2"}, prompt_tokens=256,
        new_tokens={"default": 128, "help": "most of a completion"},
        steps={"default": 1, "help": "timed in each round, after one that is not"}, rounds=2, cell=None,
    )  # fmt: skip
    if options.cell:
        print(json.dumps(measured(options)))
        return
    sizes = {name: getattr(options, name) for name in ("prompts", "group", "prompt_tokens", "new_tokens", "steps")}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model in options.models:
        rounds: dict[str, list[dict[str, float]]] = {peer: [] for peer in options.peers}
        for seed, peer in turns(options.peers, options.rounds):
            rounds[peer].append(in_process("trl_step", model=model, peer=peer, seed=seed, **sizes))
            print(model, peer, rounds[peer][-1], flush=True)
        found[model] = {peer: medians(each) for peer, each in rounds.items()}
    finish(options.json, found, tables.trl_step(found))


if __name__ == "__main__":
    main()
