"""Job of `test_trl_hook`: a GRPOTrainer that shards its model by FSDP2 when training begins."""

from __future__ import annotations

import os
from typing import Any

import datasets
import trl
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer

from tests.models import make_model, make_tokenizer
from tests.rollouts import make_rollout
from trainer_hooks.trl import attach


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


def trains_sharded(rank: int, folder: str) -> dict[str, Any]:
    """The README's two lines, and FSDP2 after them."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", TRL_EXPERIMENTAL_SILENCE="1"
    )
    Trainer.create_accelerator_and_postprocess = _sharding(Trainer.create_accelerator_and_postprocess)
    model, tokenizer = make_model("llama"), make_tokenizer()
    config = trl.GRPOConfig(
        output_dir=folder, use_cpu=True, ddp_backend="gloo", bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_steps=1, max_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
        learning_rate=0.02, optim="sgd", gradient_checkpointing=False,
    )  # fmt: skip
    data = datasets.Dataset.from_list([{"prompt": prompt} for prompt in ("abc", "hello", "xy", "12345")])
    trainer = trl.GRPOTrainer(
        model, lambda completion_ids, **_: [float(ids[0] % 5) for ids in completion_ids],
        args=config, train_dataset=data, processing_class=tokenizer,
    )  # fmt: skip
    with make_rollout(trainer.model, tokenizer) as manager:
        attach(trainer, manager)
        trainer.train()
        version, sharded = manager.policy_version, any(isinstance(each, DTensor) for each in model.parameters())
    names = ("rollout/logprob_diff_max", "grad_norm")
    logged = {name: [log[name] for log in trainer.state.log_history if name in log] for name in names}
    return {"version": version, "sharded": sharded} | logged
