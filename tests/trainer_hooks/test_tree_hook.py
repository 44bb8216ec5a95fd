"""Tests of training on trees: the padded batch's gradients, under checkpointing, autocast, LoRA, DDP, FSDP2, HF Trainer."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from tests.models import make_model
from tests.ranks import run_together
from tests.trainer_hooks import tree_jobs
from tests.trees import distance, gradient, in_float64, loss_of, make_batch, padded_logprobs, tree_logprobs
from trainer_hooks.tree import attach


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing_the_recomputation_sees_the_tree_too(reentrant):
    model, batch = make_model("gemma3"), make_batch()
    right = gradient(in_float64(model), batch, padded_logprobs)
    attach(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert distance(gradient(model, batch, tree_logprobs), right) < 1e-5


def test_under_bfloat16_autocast_the_tree_is_as_near_to_float64_as_the_padded_batch():
    model, batch = make_model("qwen3"), make_batch()
    right = gradient(in_float64(model), batch, padded_logprobs)
    attach(model)

    def under_autocast(logprobs_of):
        def logprobs(model, batch):
            with torch.autocast("cpu", torch.bfloat16):
                return logprobs_of(model, batch)

        return distance(gradient(model, batch, logprobs), right)

    padded, tree = under_autocast(padded_logprobs), under_autocast(tree_logprobs)
    assert 1e-4 < tree < 1.5 * padded


@pytest.mark.parametrize("first", ["adapters", "tree"])
def test_adapters_get_the_padded_batchs_gradients(first):
    peft = pytest.importorskip("peft")
    model, batch = make_model("qwen2"), make_batch()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    if first == "tree":
        attach(model)
    adapted = peft.get_peft_model(model, config)
    if first == "adapters":
        attach(adapted)
    right = gradient(in_float64(adapted), batch, padded_logprobs)
    assert 0 < len(right) < 20_000, "the adapters' alone"
    assert distance(gradient(adapted, batch, tree_logprobs), right) < 1e-5


@pytest.mark.distributed
def test_on_two_ranks_with_checkpointing_averaged_gradients_are_the_padded_batchs(nursery):
    mine, other = run_together(nursery, 2, tree_jobs.gradients)
    assert mine == other
    assert set(mine) == {"DDP", "accelerate", "FSDP2"}
    for wrapper, found in mine.items():
        assert distance(torch.tensor(found["tree"]), torch.tensor(found["padded"])) < 1e-5, wrapper


class TreeTrainer(Trainer):
    """The snippet of docs/how-to/trainers.md, with a loss of the tests."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        packed = inputs["batch"].tree()
        return loss_of(packed.logprobs_of(model))


class Batches(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int):
        return make_batch(seed=index)


def test_hf_trainer_steps_as_with_the_padded_batch(tmp_path):
    class PaddedTrainer(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss_of(padded_logprobs(model, inputs["batch"]))

    outcomes = []
    for kind in (PaddedTrainer, TreeTrainer):
        model = make_model("qwen3", num_hidden_layers=1)
        if kind is TreeTrainer:
            attach(model)
        args = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", max_steps=2, gradient_accumulation_steps=2,
            per_device_train_batch_size=1, learning_rate=0.1, optim="sgd", max_grad_norm=100.0, logging_steps=1,
            disable_tqdm=True, remove_unused_columns=False, gradient_checkpointing=True,
        )  # fmt: skip
        trainer = kind(model, args, train_dataset=Batches(), data_collator=lambda rows: {"batch": rows[0]})
        trainer.train()
        outcomes.append([(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log])
    assert len(outcomes[0]) == 2
    assert outcomes[1] == [pytest.approx(each, rel=1e-4) for each in outcomes[0]]
