"""A step of TRL's GRPOTrainer with our rollout, with TRL's own generation, and with its continuous batching, in one run.

    python -m tests.benchmarks.trl_step --size 10m --prompts 4 --group 8 --new-tokens 128 --rounds 3

Every peer has a trainer of its own with the same weights and prompts; rounds alternate. In `even`, all completions are of
full length; in `tail`, they end at random, three in ten of them at the limit. `ours` does the work that the others do;
`ours, corrected` also weighs the loss by the log-probs of sampling, for which TRL runs one forward more. Quote ratios.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout import Advanced, InferenceConfig, RolloutManager
from tests.benchmarks import report
from tests.benchmarks.common import parse, quiet_transformers, save, settle
from tests.benchmarks.field import Measured, Rules, alternate
from tests.benchmarks.ledger import Cell, Key, Ledger
from tests.benchmarks.subject import Subject, make_subject
from trainer_hooks.trl import attach

PEERS = ("ours", "ours, corrected", "generate", "cb")
CASES = ("even", "tail")
AT_THE_LIMIT = 0.3
CB_BLOCK = 256


class StepClock(TrainerCallback):
    """Seconds of every optimizer step, its generation included."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: list[float] = []
        self._device = device
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """A step begins."""
        settle(self._device)
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """It is done."""
        settle(self._device)
        self.seconds.append(time.perf_counter() - self._start)


def timed(function: Callable[..., Any], into: list[float], device: torch.device) -> Callable[..., Any]:
    """The same function, which notes how long it takes."""

    def call(*args: Any, **kwargs: Any) -> Any:
        settle(device)
        start = time.perf_counter()
        result = function(*args, **kwargs)
        settle(device)
        into.append(time.perf_counter() - start)
        return result

    return call


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Token i is the word `i`; the last one ends a text."""
    words = Tokenizer(WordLevel({str(token): token for token in range(vocab)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token=str(vocab - 1))


class TrlStep:
    """One model and its prompts, stepped by a fresh trainer each time."""

    def __init__(self, size: str, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._longest = options.prompt_tokens + options.new_tokens
        self._size = size
        self._device = torch.device(options.device)
        self._measured: Counter[tuple[str, str]] = Counter()

    def measure(self, case: str, peer: str) -> Measured:
        """Median seconds of a step, and of the generation in it; every round of a peer draws other lengths."""
        self._measured[case, peer] += 1
        seed = self._measured[case, peer]
        subject = make_subject(self._size, "float32", self._longest, self._folder, self._device)
        ends = subject.vocab - self._ends(subject.vocab) if case == "tail" else subject.vocab - 1
        subject.model.generation_config.eos_token_id = list(range(ends, subject.vocab))
        tokenizer = make_tokenizer(subject.vocab)
        rollout = self._rollout(subject, tokenizer, seed) if peer.startswith("ours") else None
        clock, generating, lengths = StepClock(self._device), list[float](), list[int]()

        def score(completion_ids: list[list[int]], **columns: Any) -> list[float]:
            lengths.extend(map(len, completion_ids))
            return [float(ids[0] % 7) for ids in completion_ids]

        trainer = GRPOTrainer(
            subject.model, score, args=self._config(peer, seed), train_dataset=self._prompts(subject.vocab),
            processing_class=tokenizer, callbacks=[clock],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        if rollout is not None:
            attach(trainer, rollout)
        trainer._generate = timed(trainer._generate, generating, self._device)
        trainer.train()
        if rollout is not None:
            rollout.close()
        notes = {"generate": statistics.median(generating[1:]), "mean length": statistics.mean(lengths)}
        return Measured({"seconds": statistics.median(clock.seconds[1:])}, notes)

    def _ends(self, vocab: int) -> int:
        # With p of the vocabulary ending a text, (1 - p)^n of the completions come to the limit n.
        return max(1, round(vocab * (1 - AT_THE_LIMIT ** (1 / self._options.new_tokens))))

    def _rollout(self, subject: Subject, tokenizer: PreTrainedTokenizerFast, seed: int) -> RolloutManager:
        samples = self._options.prompts * self._options.group
        blocks = samples * (-(-self._longest // Advanced.block_size_tokens) + 1)
        config = InferenceConfig(
            kv_cache_blocks=blocks, max_requests=samples, seed=seed, advanced=Advanced(verify_model=False)
        )
        return RolloutManager(subject.model, tokenizer, config)

    def _config(self, peer: str, seed: int) -> GRPOConfig:
        options, samples = self._options, self._options.prompts * self._options.group
        blocks = samples * (-(-self._longest // CB_BLOCK) + 1)
        return GRPOConfig(
            output_dir=str(self._folder / "trainer"), seed=seed, use_cpu=self._device.type == "cpu", bf16=False,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, max_steps=options.steps + 1,
            per_device_train_batch_size=samples, num_generations=options.group, learning_rate=1e-6,
            max_completion_length=options.new_tokens, gradient_checkpointing=False,
            vllm_importance_sampling_correction=peer != "ours", use_transformers_continuous_batching=peer == "cb",
            # Its default takes half of the memory for the cache, anew in every step.
            transformers_continuous_batching_config={"num_blocks": blocks} if peer == "cb" else None,
        )  # fmt: skip

    def _prompts(self, vocab: int) -> Dataset:
        options, generator = self._options, torch.Generator().manual_seed(0)
        count = options.prompts * (options.steps + 1)
        ids = torch.randint(1, vocab - 1, (count, options.prompt_tokens), generator=generator).tolist()
        return Dataset.from_list([{"prompt": " ".join(map(str, prompt))} for prompt in ids])


def run(options: argparse.Namespace, ledger: Ledger, folder: Path) -> None:
    """Everybody in every case, turn by turn."""
    progress = Console(stderr=True, highlight=False)
    rules = Rules(options.rounds, options.limit, partial(progress.print, markup=False))
    step = TrlStep(options.size, options, folder)
    for case in options.cases:
        samples = options.prompts * options.group
        key = Key(options.size, "float32", "trl step", f"{case}, {samples} x {options.new_tokens} tokens", "seconds")
        row = ledger.row(key, "s", reference=next(iter(options.peers)))
        row.cells = {peer: Cell() for peer in options.peers}
        alternate({"seconds": row}, {peer: partial(step.measure, case, peer) for peer in options.peers}, rules)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, save. Returns the exit status: 130 after Ctrl-C."""
    options = parse(
        __doc__, arguments, size="10m", device="cpu", cases={"default": list(CASES), "choices": CASES},
        peers={"default": list(PEERS), "choices": PEERS}, prompts={"default": 4, "help": "per step"},
        group={"default": 8, "help": "completions of each, at least 2"}, prompt_tokens=64,
        new_tokens={"default": 128, "help": "most of a completion"},
        steps={"default": 2, "help": "timed in each round, after one that is not"}, rounds=3, limit=300.0,
    )  # fmt: skip
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning)
    ledger, status = Ledger(), 0
    try:
        with quiet_transformers(), tempfile.TemporaryDirectory(prefix="trl-step-") as folder:
            run(options, ledger, Path(folder))
    except KeyboardInterrupt:
        status = 130
    report.show(Console(width=None if sys.stdout.isatty() else 140), ledger, [])
    asked = {name: value for name, value in vars(options).items() if name != "json"}
    machine = {"platform": platform.platform(), "threads": torch.get_num_threads()}
    save(options.json, {"options": asked, "machine": machine, "rows": ledger.as_list()})
    return status


if __name__ == "__main__":
    sys.exit(main())
