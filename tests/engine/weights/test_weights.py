"""Tests of one process's weights: the trainer's storage, an optional copy, the trainer's autocast."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from rollout.engine.forward.trial_forwards import paged_logits
from rollout.engine.weights.source import PartitionedWeights, weights_of
from rollout.errors import ConfigError, EngineStateError, UnsupportedModelError, WeightsChangedError
from rollout.sampling_params import SamplingParams
from tests.configs import engine_config
from tests.engines import assert_greedy, at_random, greedily, make_engine, token_ids
from tests.models import greedy, make_model, trainer_logprobs
from tests.rollouts import make_rollout, update

PROMPTS = [token_ids(5, 1), token_ids(9, 2), token_ids(2, 3)]


# --- shared -----------------------------------------------------------------------------------------------------------


def test_shared_weights_are_the_very_tensors_and_nothing_is_copied() -> None:
    model = make_model("qwen3")
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    engine = make_engine(model)
    engine.generate(PROMPTS, greedily(4))
    sampled = dict(engine.weights.sampled.named_parameters())
    assert engine.weights.sampled is model
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert all(sampled[name] is parameter for name, parameter in model.named_parameters())


@pytest.mark.parametrize("fingerprints", ["off", "sampled"])
def test_a_model_that_has_moved_to_another_device_is_refused_with_the_cure(fingerprints: str) -> None:
    model = make_model("qwen3")
    rollout = make_rollout(model, weight_fingerprints=fingerprints)
    model.to("meta")
    with pytest.raises(
        EngineStateError, match=r"float32 on cpu when the rollout was built, and is .* on meta: build it"
    ):
        rollout.generate([PROMPTS[0]], greedily(2))
    assert rollout.groups_in_flight == 0


def test_a_compiled_model_is_taken_out_of_its_wrapper() -> None:
    model = make_model("qwen3")
    wrapper = torch.compile(model)
    rollout = make_rollout(wrapper)
    assert rollout.model is rollout.engine.model is model
    (request,) = rollout.generate([PROMPTS[0]], greedily(4))
    assert request.generated_tokens == greedy(model, PROMPTS[0], 4)


# --- copied -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_a_copy_in_another_dtype_samples_the_weights_of_the_last_update(name: str) -> None:
    model = make_model(name)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    rollout = make_rollout(model, inference_dtype="bfloat16")
    for seed in range(3):
        batch = rollout.generate(PROMPTS, greedily(6))
        reference = make_model(name)
        reference.load_state_dict(model.state_dict())
        reference.to(torch.bfloat16)
        # The rotary table stays as wide as the trainer's.
        for mine, theirs in zip(reference.buffers(), model.buffers(), strict=True):
            mine.data = theirs.data.clone()
        alone = make_rollout(reference)
        assert [each.generated_tokens for each in batch] == [
            each.generated_tokens for each in alone.generate(PROMPTS, greedily(6))
        ]
        assert batch.input_ids.device == next(model.parameters()).device
        update(model, rollout, seed)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before


def test_a_copy_never_calls_a_forward_that_was_put_into_the_trainers_module() -> None:
    model = make_model("qwen3")
    called: list[int] = []
    forward = model.forward

    def watched(*args: Any, **options: Any) -> Any:
        called.append(1)
        return forward(*args, **options)

    model.forward = watched
    engine = make_engine(model, inference_dtype="float32")
    engine.generate(PROMPTS, greedily(2))
    assert not called
    assert model.forward is watched


def test_a_copy_has_a_checkpoint_that_was_loaded_before_the_first_generate() -> None:
    model = make_model("qwen3")
    rollout = make_rollout(model, inference_dtype="float32", verify_model=True)
    model.load_state_dict(make_model("qwen3", seed=3).state_dict())
    (request,) = rollout.generate([PROMPTS[0]], greedily(6))
    assert_greedy(model, request)


def test_a_copy_of_a_model_with_adapters_is_refused_by_name() -> None:
    model = get_peft_model(make_model("qwen3"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedModelError, match=r"PeftModel has adapters.*leave InferenceConfig\.inference_dtype"):
        make_engine(model, inference_dtype="bfloat16")


# --- the trainer's autocast -------------------------------------------------------------------------------------------


def autocast() -> torch.autocast:
    # A new one each time: an instance entered inside itself never ends.
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("given", ["by option", "around the call", "around the model's forward"])
def test_under_autocast_log_probs_are_as_near_the_trainers_as_two_attentions_of_the_trainer(
    name: str, given: str
) -> None:
    """Any other order of additions turns some roundings to bfloat16: exact is what the trainer's own two are not."""
    model = make_model(name)
    if "forward" in given:
        model.forward = autocast()(model.forward)
    options = {"autocast_dtype": "bfloat16"} if "option" in given else {}
    rollout = make_rollout(model, verify_model="call" not in given, **options)
    with autocast() if "call" in given else nullcontext():
        batch = rollout.generate(PROMPTS, SamplingParams(max_tokens=40, seed=1, n=4, ignore_eos=True))
    assert "option" not in given or rollout.engine.controller.layout.kv_dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    trained = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with autocast():
            trained.append(
                torch.cat([trainer_logprobs(model, each.prompt_tokens + each.generated_tokens)[-40:] for each in batch])
            )
    mine = torch.cat([torch.tensor(each.generated_log_probs) for each in batch])
    assert float((mine - trained[0]).abs().mean()) < 1.1 * float((trained[0] - trained[1]).abs().mean())


def test_a_rollout_inside_the_trainers_autocast_leaves_it_no_weights_without_gradients() -> None:
    model = make_model("qwen3")
    engine = make_engine(model)
    ids = torch.tensor([PROMPTS[0]])
    with torch.autocast("cpu", torch.bfloat16):
        engine.generate(PROMPTS, greedily(2))
        model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_under_autocast_an_update_reaches_the_next_step_of_requests_in_flight() -> None:
    model = make_model("qwen3")
    engine = make_engine(model, autocast_dtype="bfloat16")
    engine.add_request(PROMPTS[0], at_random(8))
    with engine.installation:
        engine.step()
        update(model, size=0.5)
        engine.weights_updated()
        engine.step()
        (logits,) = (paged_logits(engine.controller.runner, PROMPTS[1], 3).float(),)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model.eval()(torch.tensor([PROMPTS[1]])).logits[0, -1].float()
    assert float((logits - expected).abs().max()) < 0.05 * float(expected.abs().max())


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weight_fingerprints", "some"),
        ("autocast_dtype", "float32"),
        ("inference_dtype", "int8"),
        ("inference_device", 1),
    ],
)
def test_an_option_of_another_value_is_refused_with_the_choices(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"(InferenceConfig|Advanced)\.{name}={value!r}: must be"):
        engine_config(**{name: value})


@contextmanager
def deepspeed_with(**names: Any) -> Iterator[None]:
    """DeepSpeed is not installed here; what is used of it stands in."""
    modules = {name: types.ModuleType(name) for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero")}
    vars(modules["deepspeed.runtime.zero"]).update(names)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        yield


class DeepSpeedEngine(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


def test_partitioned_weights_are_gathered_by_deepspeeds_own_context_where_it_is() -> None:
    model, said = make_model("qwen3"), []

    @contextmanager
    def unwrap(engine: Any) -> Iterator[nn.Module]:
        said.append("in")
        yield engine.module
        said.append("out")

    with deepspeed_with(unwrap_model_for_generation=unwrap):
        weights = weights_of(DeepSpeedEngine(model))
        assert isinstance(weights, PartitionedWeights)
        assert weights.sampled is model
        assert weights.collective
        weights.gather()
        weights.gather()
        assert weights.ready
        weights.release()
        weights.release()
    assert said == ["in", "out"]
    assert not weights.ready


def test_partitioned_weights_without_the_engine_are_refused_by_name() -> None:
    model = make_model("qwen3")
    next(model.parameters()).ds_id = 0
    with pytest.raises(UnsupportedModelError, match=r"Qwen3ForCausalLM is partitioned.*deepspeed\.initialize"):
        weights_of(model)


# --- a vocabulary that grows ------------------------------------------------------------------------------------------


def grown(model: Any) -> list[int]:
    """Resize the embeddings by 9 tokens; returns a prompt of new ones."""
    before = model.config.vocab_size
    model.resize_token_embeddings(before + 9, mean_resizing=False)
    return [before + 8, 5, before, 7]


def test_a_manager_takes_new_ids_in_prompts_once_the_new_weights_are_announced() -> None:
    model = make_model("qwen3")
    rollout = make_rollout(model)
    rollout.submit([PROMPTS[0]], greedily(24))
    rollout.generate([PROMPTS[1]], greedily(4), min_groups=1)
    prompt = grown(model)
    with pytest.raises(WeightsChangedError, match=r"weights_updated\(\)"):
        rollout.generate([prompt], greedily(4))
    rollout.weights_updated()
    batch = rollout.generate([prompt], greedily(8, logit_bias={prompt[0]: 1e9}))
    rows = {tuple(batch[row].prompt_tokens): batch[row] for row in range(len(batch))}
    assert rows[tuple(prompt)].generated_tokens == [prompt[0]] * 8
    batch = rollout.generate([prompt, PROMPTS[2]], greedily(8))
    assert [batch[row].generated_tokens for row in range(2)] == [
        greedy(model, each, 8) for each in (prompt, PROMPTS[2])
    ]


@pytest.mark.parametrize("copied", [False, True])
def test_an_engine_refuses_a_grown_vocabulary_and_names_the_cure(copied: bool) -> None:
    model = make_model("qwen3")
    engine = make_engine(model, inference_dtype="bfloat16" if copied else None)
    prompt, size = grown(model), model.config.vocab_size
    engine.weights_updated()
    with pytest.raises(EngineStateError, match=rf"of {size - 9} tokens.* has {size}: build another after resize"):
        engine.generate([prompt], greedily(4))
    if not copied:
        engine.rebuild()
        (request,) = engine.generate([prompt], greedily(8))
        assert_greedy(model, request)
