"""Tests of TRL's trainers other than GRPOTrainer: their `model.generate` runs on the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout.errors import ConfigError
from rollout.manager.manager import RolloutManager
from tests.models import make_model, make_tokenizer
from tests.rollouts import assert_nothing_leaked, make_rollout
from trainer_hooks.trl import attach
from trainer_hooks.trl_generate import TrlGenerateAttachment

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from tests.trainer_hooks.trl_jobs import OPTIONS, PROMPTS, chat_tokenizer, logged  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:trl")

STEPS = 3


def reward(completions: list[str], **others: Any) -> list[float]:
    """How many different characters a completion has, so that samples of a prompt differ."""
    return [float(len(set(str(each)))) for each in completions]


def prompts(**columns: Any) -> Any:
    return datasets.Dataset.from_list([{"prompt": prompt} | columns for prompt in PROMPTS])


def chats() -> Any:
    return datasets.Dataset.from_list([
        {"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": "right"}]} for each in PROMPTS
    ])  # fmt: skip


def policy(make: Make, seed: int = 0) -> Any:
    """A model from a folder, from which some trainers load their reference."""
    model = make_model("qwen3", seed=seed, num_hidden_layers=1)
    # As long as there are layers: else it cannot be saved.
    model.config.layer_types = model.config.layer_types[:1]
    folder = make.folder / f"model {seed}"
    model.save_pretrained(folder)
    make.tokenizer.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def _byte_level(chat_template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of characters, like `make_tokenizer`, in the form that GOLD requires."""
    names = ["<pad>", "<s>", "</s>", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", *map(chr, range(33, 123))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, chat_template=chat_template, padding_side="left"
    )


SHORT = {"max_completion_length": 8}
LONG = {"max_length": 64}
TRAINERS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "rloo": ("trl", "RLOO", SHORT | {"num_generations": 2, "beta": 0.0}, "reward"),
    "online_dpo": ("trl.experimental.online_dpo", "OnlineDPO", LONG | {"max_new_tokens": 8}, "reward reference"),
    "gkd": ("trl.experimental.gkd", "GKD", LONG | {"max_new_tokens": 8, "lmbda": 1.0}, "teacher chats"),
    "distillation": ("trl", "Distillation", SHORT, "teacher"),
    "sdft": ("trl.experimental.sdft", "SDFT", SHORT | {"num_generations": 2, "distillation_topk": 20}, "context"),
    "sdpo": ("trl.experimental.sdpo", "SDPO", SHORT | {"num_generations": 2}, "reward context"),
    "a2po": ("trl.experimental.a2po", "A2PO", SHORT | {"num_value_samples": 2}, "reward"),
    "gold": ("trl.experimental.gold", "GOLD", SHORT | LONG | {"lmbda": 1.0}, "teacher chats bytes"),
    "iw_opd": ("trl.experimental.iw_opd", "IWOPD", SHORT, "teacher chats"),
}  # fmt: skip
"""Module, prefix of the classes, configuration, and what the trainer is given besides."""


def build(name: str, make: Make, **options: Any) -> Any:
    module, prefix, configured, given = TRAINERS[name]
    if "bytes" in given:
        make.tokenizer = _byte_level(make.tokenizer.chat_template)
    args = make(getattr(import_module(module), f"{prefix}Config"), **(configured | options))
    models = [policy(make), policy(make, 1)] if "teacher" in given else [policy(make)]
    others: dict[str, Any] = {"reward_funcs": reward} if "reward" in given else {}
    if "reference" in given:
        others["ref_model"] = policy(make)
    data = chats() if "chats" in given else prompts(**({"privileged_context": "it is 4"} if "context" in given else {}))
    trainer = getattr(import_module(module), f"{prefix}Trainer")
    return trainer(*models, args=args, train_dataset=data, processing_class=make.tokenizer, **others)


class Make:
    """`make(Config, **options)`: the configuration of a trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = chat_tokenizer()
        self.tokenizer.padding_side = "left"

    def __call__(self, config: Any, **options: Any) -> Any:
        more = {"output_dir": str(self.folder), "max_steps": STEPS, "per_device_train_batch_size": 4}
        return config(**OPTIONS | more | options)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., tuple[Any, RolloutManager]]]:
    """`make_trainer(name, **options)`: a trainer, and a manager of its model."""
    managers: list[RolloutManager] = []

    def make(name: str, **options: Any) -> tuple[Any, RolloutManager]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = build(name, Make(tmp_path), **options)
        managers.append(make_rollout(trainer.model, make_tokenizer()))
        return trainer, managers[-1]

    yield make
    for manager in managers:
        assert_nothing_leaked(manager)
        manager.close()


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_generate_on_the_engine(name, make_trainer):
    trainer, manager = make_trainer(name)
    attachment = attach(trainer, manager, fallback="raise")
    assert isinstance(attachment, TrlGenerateAttachment)
    trainer.train()
    assert attachment.hook.served >= STEPS
    assert not attachment.hook.fallbacks
    # A step without any gradient (SDPO without a successful sample) changes nothing.
    assert manager.policy_version == attachment.steps <= STEPS
    assert attachment.steps == STEPS or name == "sdpo"
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    assert all(entry["rollout/policy_version"] <= STEPS for entry in logged)
    served = attachment.hook.served
    attachment.detach()
    trainer.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2)
    assert attachment.hook.served == served
    assert "_get_per_token_logps_and_entropies" not in vars(trainer)


@pytest.mark.parametrize("name", ["rloo", "gkd", "distillation", "online_dpo", "a2po", "sdft", "gold", "iw_opd"])
def test_greedy_training_is_the_same_as_without_the_hook(name, make_trainer):
    """Losses and gradient norms of every step, with the tokens of transformers' loop."""
    found = []
    for attached in (False, True):
        trainer, manager = make_trainer(name)
        config = getattr(trainer, "generation_config", None)
        assert config is not None
        config.update(do_sample=False, temperature=1.0, top_k=0, top_p=1.0)
        for owner in (config, trainer.model.generation_config):
            owner.do_sample = False
        if getattr(trainer, "generation_kwargs", None):
            trainer.generation_kwargs |= {"do_sample": False}
        if attached:
            attach(trainer, manager, fallback="raise")
        trainer.train()
        found.append([logged(trainer, each) for each in ("loss", "grad_norm")])
    (loss, norm), (our_loss, our_norm) = found
    assert our_loss == pytest.approx(loss, rel=1e-3, abs=1e-6)
    assert our_norm == pytest.approx(norm, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["rloo", "sdpo"])
def test_old_log_probs_are_the_rollouts(name, make_trainer):
    options = {"gradient_accumulation_steps": 1, "steps_per_generation": 2} if name == "sdpo" else {}
    trainer, manager = make_trainer(name, temperature=0.7, top_k=20, **options)
    attribute = {"rloo": "_get_per_token_logps_and_entropies", "sdpo": "_compute_rollout_logps"}[name]
    own, seen = getattr(trainer, attribute), []
    attachment = attach(trainer, manager, fallback="raise")
    ours = getattr(trainer, attribute)

    def both(*args: Any, **kwargs: Any) -> Any:
        last, found = attachment.hook.last, ours(*args, **kwargs)
        if not torch.is_grad_enabled() or name == "sdpo":
            with torch.no_grad():
                theirs = own(*args, **kwargs)
            mask = (kwargs["completion_mask"] if name == "sdpo" else args[2][:, -args[3] :]).bool()
            pair = (found, theirs) if name == "sdpo" else (found[0], theirs[0])
            # Sampled by the rollout, and computed by the trainer's own forward.
            assert last is not None
            torch.testing.assert_close(pair[0][mask], pair[1][mask], atol=1e-5, rtol=0)
            assert not torch.equal(pair[0][mask], pair[1][mask]) or mask.sum() < 4
            seen.append(int(mask.sum()))
        return found

    setattr(trainer, attribute, both)
    trainer.train()
    assert len(seen) >= 2
    delattr(trainer, attribute)
    setattr(trainer, attribute, ours)


def test_what_only_a_grpo_trainer_takes_is_refused(make_trainer):
    trainer, manager = make_trainer("rloo")
    for option in ({"tree": True}, {"on_error": "mask"}, {"replay": True}):
        with pytest.raises(ConfigError, match="only a GRPOTrainer takes it"):
            attach(trainer, manager, **option)
    trainer.use_vllm = True
    with pytest.raises(ValueError, match="use_vllm=True"):
        attach(trainer, manager)
    with pytest.raises(TypeError, match="object is not a Trainer"):
        attach(object(), manager)
    assert trainer.model.generate(torch.tensor([[5, 6]]), max_new_tokens=1).shape == (1, 3)
