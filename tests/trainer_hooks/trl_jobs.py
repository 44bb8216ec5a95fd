"""Small trainers of TRL for the tests, and the job of `test_trl_hook` on two ranks: DDP, or FSDP2 when training begins."""

from __future__ import annotations

import os
from typing import Any

import datasets
import trl
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Trainer

from tests.models import make_model, make_tokenizer
from tests.rollouts import make_rollout
from trainer_hooks.trl import attach

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
PROMPTS = ["abc", "hello there", "xy", "12345"]
OPTIONS: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
    "max_steps": 2, "learning_rate": 0.02, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 100.0,
}  # fmt: skip
"""Options of every configuration."""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """`make_tokenizer` with a chat template."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    return tokenizer


def logged(trainer: Any, name: str) -> list[float]:
    """Values of a metric in the trainer's log."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def _sharding(create: Any) -> Any:
    # accelerate has FSDP2 for GPUs only; told that it is on, it shards over gloo as it would there.
    def create_accelerator_and_postprocess(self: Trainer) -> None:
        create(self)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        for shared in (PartialState, AcceleratorState):
            shared._shared_state["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        self.is_fsdp_enabled = True

    return create_accelerator_and_postprocess


def trains(rank: int, folder: str, algorithm: str, sharded: bool) -> dict[str, Any]:
    """The README's two lines, and the wrapper after them."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    if sharded:
        Trainer.create_accelerator_and_postprocess = _sharding(Trainer.create_accelerator_and_postprocess)
    model, tokenizer = make_model("llama"), make_tokenizer()
    config = getattr(trl, f"{algorithm}Config")(
        **OPTIONS, output_dir=folder, ddp_backend="gloo", per_device_train_batch_size=4, num_generations=4,
        max_completion_length=6, gradient_checkpointing=False, beta=0.0,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    trainer = getattr(trl, f"{algorithm}Trainer")(
        model, lambda completion_ids, **_: [float(ids[0] % 5) for ids in completion_ids],
        args=config, train_dataset=data, processing_class=tokenizer,
    )  # fmt: skip
    with make_rollout(trainer.model, tokenizer) as manager:
        attachment = attach(trainer, manager, fallback="raise")
        trainer.train()
        version = manager.policy_version
    return {
        "version": version,
        "steps": attachment.steps,
        "sharded": any(isinstance(each, DTensor) for each in model.parameters()),
        "grad_norm": logged(trainer, "grad_norm"),
        "difference": max(logged(trainer, "rollout/logprob_diff_max"), default=0.0),
    }
