"""GRPO with TRL's own trainer: a small Qwen3 learns to add, in under three minutes on a laptop's CPU.

    python examples/trl_grpo.py --seed 0

The problem is that of `grpo.py`, the loop is TRL's. Two marked lines make its GRPOTrainer sample with the rollout instead
of transformers, and correct its loss by the sampling log-probs. Sampling options, lengths and group size come from
GRPOConfig.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from arithmetic import Problem, Problems, reward, sums
from datasets import Dataset
from policy import character_tokenizer, small_model, warm_up
from report import Report, Step
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollout import InferenceConfig, RolloutManager
from trainer_hooks.trl import attach
from trainer_hooks.wandb import WandbLogger

GROUP = 8
MAX_TOKENS = 32
EPOCHS = 2
ROWS = 64


def config(options: argparse.Namespace) -> GRPOConfig:
    """A round is one generation and two updates from it; each round is one line of the log."""
    return GRPOConfig(
        output_dir=str(options.out), seed=options.seed, use_cpu=not torch.cuda.is_available(), bf16=False,
        num_generations=GROUP, max_completion_length=MAX_TOKENS, num_iterations=EPOCHS,
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=options.prompts * GROUP // ROWS,
        max_steps=EPOCHS * options.rounds, learning_rate=options.lr, adam_beta2=0.99, warmup_steps=5 * EPOCHS,
        epsilon=0.2, epsilon_high=0.28, vllm_importance_sampling_mode="token_truncate", gradient_checkpointing=False,
        eval_strategy="steps", eval_steps=EPOCHS * options.every, num_generations_eval=1,
        per_device_eval_batch_size=options.held_out,
        logging_steps=EPOCHS, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip


def dataset(problems: list[Problem]) -> Dataset:
    """Return a dataset for TRL: a column of prompts; other columns go to the reward function."""
    return Dataset.from_list([{"prompt": problem.prompt, "answer": problem.answer} for problem in problems])


def is_right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The reward function, as TRL calls it."""
    return list(map(reward, completions, answer))


class Rows(TrainerCallback):
    """Turns the trainer's log into rows of the report, and points on wandb's axis."""

    def __init__(self, report: Report, logger: WandbLogger) -> None:
        self.held_out: list[float] = []
        self._report = report
        self._logger = logger
        self._round: dict[str, float] = {}

    def on_log(self, args: GRPOConfig, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """A round's log comes first; that of the exam after it, if there is one."""
        if "eval_reward" in logs:
            self.held_out.append(logs["eval_reward"])
            self._round["held_out"] = logs["eval_reward"]
        elif "loss" in logs:
            self._round = dict(logs)

    def on_step_begin(self, args: GRPOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """The round before has been logged and examined."""
        if "loss" in self._round:
            self._row(state.global_step // EPOCHS)
        self._round = {}

    on_train_end = on_step_begin

    def _row(self, number: int) -> None:
        logs, held_out = self._round, self._round.get("held_out")
        metrics = {name: value for name, value in logs.items() if name.startswith("rollout/")}
        tokens = int(metrics["rollout/generated_tokens"])
        # The second update of a round trains on what the policy before the first one has sampled.
        staleness = torch.arange(EPOCHS).repeat_interleave(tokens)
        points = {"train/reward": logs["reward"], "train/loss": logs["loss"], "train/held_out": held_out}
        ratio = logs["sampling/importance_sampling_ratio/mean"]
        self._logger.log(number, points, {"train/importance_ratio": ratio}, metrics)
        self._report.row(
            number, Step(logs["reward"], logs["loss"], staleness, tokens), held_out, metrics, f"{ratio:.4f}"
        )


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--rounds", type=int, default=40, help=f"of GRPO: one generation, {EPOCHS} updates")
    parser.add_argument("--prompts", type=int, default=48, help=f"per round, {GROUP} samples each")
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate of GRPO")
    parser.add_argument("--warm-up", type=float, default=0.3, help="loss that ends the supervised steps before it")
    parser.add_argument("--every", type=int, default=5, help="rounds between two looks at the held-out problems")
    parser.add_argument("--held-out", type=int, default=512, help="problems kept for that")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/trl_grpo"), help="folder of the picture and of wandb's files"
    )
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small rounds")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.prompts, options.warm_up, options.every, options.held_out = 3, 8, 3.0, 1, 64
    return options


def main() -> None:
    """Train from random weights and draw the plot."""
    started = time.perf_counter()
    options = parse_options()
    os.environ.setdefault("WANDB_SILENT", "true")
    tokenizer = character_tokenizer()
    model = small_model(tokenizer, max_length=64, seed=options.seed)
    problems = Problems(sums(), held_out=options.held_out, seed=options.seed)
    report = Report(f"TRL: a small Qwen3 learns to add (seed {options.seed})", options.out, extra="ratio")
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 64)
    with WandbLogger("rollout-trl", config=vars(options), directory=options.out) as logger:
        rows = Rows(report, logger)
        trainer = GRPOTrainer(
            model, is_right, args=config(options), processing_class=tokenizer, callbacks=[rows],
            train_dataset=dataset(problems.train), eval_dataset=dataset(problems.held_out),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        manager = RolloutManager(model, tokenizer, InferenceConfig(seed=options.seed))  # changed: the first line,
        attach(trainer, manager)  # and the second
        trainer.evaluate()
        report.say(f"{lessons} supervised steps: held-out {rows.held_out[0]:.2f}")
        trainer.train()
        report.say(f"wandb: {logger.run.url or logger.run.dir}")
    report.say(f"picture: {report.picture(f'seed-{options.seed}')}")
    report.say(f"held-out, sampled {rows.held_out[0]:.2f} → {rows.held_out[-1]:.2f}")
    report.say(f"{manager.policy_version} updates, {time.perf_counter() - started:.0f} s in all")
    manager.close()


if __name__ == "__main__":
    main()
