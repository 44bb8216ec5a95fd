"""Small Trainers with a model of a few thousand weights on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from rollout.sampling_params import SamplingParams
from tests.distributed.job.rank_jobs import Sample, samples
from tests.models import make_model

TEXTS = [
    {"input_ids": row, "labels": row}
    for row in torch.randint(3, 97, (64, 8), generator=torch.Generator().manual_seed(0)).tolist()
]


def tiny() -> PreTrainedModel:
    """Smaller still, for tests that do not look at what is sampled."""
    return make_model("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16)


def small() -> PreTrainedModel:
    """One whose samples are looked at; its configuration can be saved, as that of `the_model` cannot."""
    return make_model("llama", num_hidden_layers=2)


class Watching(TrainerCallback):
    """Writes down the version and the weights after every step of a Trainer; has the rollout sample before it."""

    def __init__(self, manager: Any, samples: bool = False) -> None:
        self.manager = manager
        self.samples = samples
        self.versions: list[int] = []
        self.made: list[Sample] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.samples:
            params = SamplingParams(max_tokens=6)
            self.made += samples(self.manager.generate(["short"], params, min_groups=1, progress=False))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.versions.append(self.manager.policy_version)


def a_trainer(model: PreTrainedModel, folder: str | Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    """Says nothing, saves nothing, reports to nobody, unless told otherwise."""
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(output_dir=str(folder), **(defaults | options))
    return Trainer(model, args, train_dataset=TEXTS, eval_dataset=TEXTS[:2], callbacks=list(callbacks))
