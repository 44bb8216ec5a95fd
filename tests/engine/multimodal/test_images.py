"""Tests of prompts with images: tokens and log-probs as the model's own, in every cut of the work, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import InvalidRequestError
from rollout.requests.request import DynamicInferenceRequest, VLMInferenceRequest
from tests.engine.cuts import CUTS, lived
from tests.engines import assert_greedy, finish, greedily, make_engine, pass_suspended, steps, token_ids
from tests.vision_models import (
    CONFIGS,
    IMAGE,
    NO_MARKS,
    VIDEO,
    greedy_with_images,
    logprobs_with_images,
    make_vision_model,
    picture_prompt,
    shared_vision_model,
)

PARTS = (3, "a", 5, "b", 4)
"""Text, an image, text, another image, text."""
TOKENS = 10


def likeliest(**options: Any) -> Any:
    return greedily(TOKENS, logit_bias=NO_MARKS, **options)


def assert_as_generate(
    name: str, parts: Sequence[int | str], request: DynamicInferenceRequest, model: Any = None, seed: int = 0
) -> None:
    """Token for token what `generate` gives, and the log-probs of the trainer's forward."""
    model = shared_vision_model(name) if model is None else model
    inputs = picture_prompt(name, parts, seed)
    assert request.error is None
    assert request.prompt_tokens == inputs["input_ids"][0].tolist()
    assert request.generated_tokens == greedy_with_images(model, name, inputs, len(request.generated_tokens))
    expected = logprobs_with_images(model, name, inputs, request.generated_tokens)
    torch.testing.assert_close(torch.tensor(request.generated_log_probs), expected, rtol=0, atol=1e-5)


def served(
    engine: DynamicInferenceEngine, name: str, parts: Sequence[int | str], model: Any = None
) -> DynamicInferenceRequest:
    """The request of a prompt that is served alone, which is as `generate` gives it."""
    number = engine.add_request(picture_prompt(name, parts), likeliest())
    done = finish(engine)[number, 0]
    assert_as_generate(name, parts, done, model)
    return done


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("budget", [64, 8])
def test_images_text_and_both_in_one_batch_are_sampled_as_generate_samples_them(name: str, budget: int) -> None:
    """With 8 tokens per step an image of four is computed beside other work, and that of six in Qwen's families is cut."""
    model = shared_vision_model(name)
    engine = make_engine(model, max_tokens_per_step=budget)
    engine.add_request(picture_prompt(name, PARTS), likeliest(n=2))
    engine.add_request(token_ids(6), greedily(TOKENS))
    engine.add_request(picture_prompt(name, ["b"]), likeliest())
    done = finish(engine)
    assert_as_generate(name, PARTS, done[0, 0])
    assert done[0, 1].generated_tokens == done[0, 0].generated_tokens
    assert_greedy(model, done[1, 0])
    assert_as_generate(name, ["b"], done[2, 0])
    assert engine.stats()["images_encoded"] == 2
    assert isinstance(done[0, 0], VLMInferenceRequest)


VIDEO_MODELS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "muse_glimmer"]
WITH_VIDEO = (3, "clip", 4, "a", 2, "clipped", 3)


@pytest.mark.parametrize("name", VIDEO_MODELS)
def test_videos_beside_images_and_text_are_sampled_as_generate_samples_them(name: str) -> None:
    engine = make_engine(shared_vision_model(name), max_tokens_per_step=9)
    engine.add_request(picture_prompt(name, WITH_VIDEO), likeliest(n=2))
    engine.add_request(picture_prompt(name, ["clip"]), likeliest(prompt_logprobs=0))
    engine.add_request(token_ids(6), greedily(TOKENS))
    done = finish(engine)
    assert_as_generate(name, WITH_VIDEO, done[0, 0])
    assert_as_generate(name, ["clip"], done[1, 0])
    assert engine.stats()["images_encoded"] == 3, "a video is encoded once"
    prompt, scored = done[1, 0].prompt_tokens, done[1, 0].prompt_log_probs
    inputs = picture_prompt(name, ["clip"])
    assert scored is not None
    at = prompt.index(VIDEO)
    expected = logprobs_with_images(shared_vision_model(name), name, inputs, [], prompt=True)
    torch.testing.assert_close(torch.tensor(scored)[at - 1 :], expected[at - 1 :], rtol=0, atol=1e-5)


def test_a_video_at_another_speed_is_another_prompt() -> None:
    name = "qwen2_5_vl"
    engine = make_engine(shared_vision_model(name))
    cached = [
        served(engine, name, parts).num_cached_tokens for parts in ((3, "clip", 4), (3, "clip@2", 4), (3, "clip", 4))
    ]
    assert cached[0] == 0
    assert cached[1] == 4
    assert cached[2] > 16


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "qwen3_5"])
def test_a_cached_prefix_is_found_by_the_content_of_its_images(name: str) -> None:
    """Prompts that differ only in an image share the blocks before it; one with the same images shares all of them."""
    engine = make_engine(shared_vision_model(name))
    prompts = [PARTS, (3, "a", 5, "d", 4), PARTS, (*PARTS, 5, "c")]
    cached = [served(engine, name, parts).num_cached_tokens for parts in prompts]
    prompt = len(picture_prompt(name, PARTS)["input_ids"][0])
    first_image = len(picture_prompt(name, PARTS[:2])["input_ids"][0])
    # A state is kept at the end of a prompt alone.
    assert (cached[1] == 0) if name == "qwen3_5" else (first_image <= cached[1] < prompt - 5)
    assert cached[0] == 0
    assert prompt - 5 <= cached[2] < prompt
    assert cached[3] >= prompt // 4 * 4 - 4 * (name != "qwen3_5")
    assert engine.stats()["images_encoded"] == 4


@pytest.mark.parametrize("cut", ["persist", "offload", "recompute", "restarts"])
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "gemma4_small"])
def test_images_survive_every_cut(name: str, cut: str) -> None:
    def ask(engine: DynamicInferenceEngine) -> None:
        engine.add_request(picture_prompt(name, PARTS), likeliest(n=2))

    for request in lived(partial(make_engine, shared_vision_model(name)), ask, CUTS[cut])[0].values():
        assert_as_generate(name, PARTS, request)


@pytest.mark.parametrize(("name", "blocks"), [("qwen2_5_vl", 13), ("qwen3_5", 13), ("gemma3", 9)])
def test_preempted_requests_with_images_go_on_as_if_nothing_had_happened(name: str, blocks: int) -> None:
    engine = make_engine(
        shared_vision_model(name), kv_cache_blocks=blocks, max_tokens_per_step=16, enable_prefix_caching=False
    )
    for seed in range(3):
        engine.add_request(picture_prompt(name, PARTS, seed), likeliest())
    done = finish(engine)
    assert engine.stats()["preemptions"] > 0, "the pool was large enough for all"
    for seed in range(3):
        assert_as_generate(name, PARTS, done[seed, 0], seed=seed)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "idefics3"])
def test_after_an_update_the_tower_runs_again_and_no_earlier_prefix_is_served(name: str) -> None:
    model = make_vision_model(name)
    engine = make_engine(model)
    for _ in range(2):
        served(engine, name, PARTS, model)
    assert engine.stats()["images_encoded"] == 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    engine.weights_updated()
    served(engine, name, PARTS, model)
    assert engine.stats()["images_encoded"] == 4


def test_a_sampled_placeholder_is_a_token_like_any_other() -> None:
    """Also where it is part of the prompt after a preemption: no image belongs to it."""
    name = "qwen2_5_vl"
    model = shared_vision_model(name)
    inputs = picture_prompt(name, [3, "a", 2])
    model.eval()
    model.generation_config.eos_token_id = None
    out = model.generate(
        **inputs, mm_token_type_ids=(inputs["input_ids"] == IMAGE).int(), do_sample=False, max_new_tokens=6,
        pad_token_id=0, sequence_bias=[[[IMAGE], 100.0]],
    )  # fmt: skip
    model.train()
    model.model.rope_deltas = None
    engine = make_engine(model, enable_prefix_caching=False)
    engine.add_request(inputs, greedily(6, logit_bias={IMAGE: 100.0}, prompt_logprobs=0))
    ended = steps(engine, 4)
    pass_suspended(engine, "recompute")
    done = finish(engine, ended)[0, 0]
    assert done.generated_tokens == out[0, inputs["input_ids"].shape[1] :].tolist() == [IMAGE] * 6
    assert done.prompt_log_probs is not None
    assert len(done.prompt_log_probs) == inputs["input_ids"].shape[1] - 1


def test_the_cache_of_embeddings_is_bounded_and_an_image_that_fell_out_is_encoded_again() -> None:
    name = "qwen3_vl"
    engine = make_engine(shared_vision_model(name), image_cache_memory_gb=5000 / 1024**3, enable_prefix_caching=False)
    for parts in ((2, "a"), (2, "b"), (2, "a"), (2, "a")):
        served(engine, name, parts)
        assert 0 < engine.stats()["image_cache_bytes"] <= 5000
    assert engine.stats()["images_encoded"] == 3
    assert engine.stats()["images_reused"] == 1
    pass_suspended(engine, "offload")
    assert engine.stats()["image_cache_bytes"] == 0, "an idle engine holds no embeddings on the device"


def test_a_model_that_stores_rotary_deltas_keeps_those_of_the_trainer() -> None:
    model = make_vision_model("qwen2_5_vl")
    model.model.rope_deltas = torch.tensor([[7]])
    engine = make_engine(model)
    engine.add_request(picture_prompt("qwen2_5_vl", PARTS), likeliest())
    finish(engine)
    assert model.model.rope_deltas.tolist() == [[7]]
    assert all(not module._forward_pre_hooks for module in model.modules())


# --- refused by name, before anything is queued ------------------------------------------------------------------------


def _without(name: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in inputs.items() if key != name}


QWEN = picture_prompt("qwen2_5_vl", PARTS)
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no image": ("qwen2_5_vl", {"input_ids": QWEN["input_ids"]}, r"10 placeholders \(token 90\), and its images become 0"),
    "no grid": (
        "qwen2_5_vl", _without("image_grid_thw", QWEN), "has pixel_values and no image_grid_thw, which Qwen2_5_VLForCond",
    ),
    "another model's processor": (
        "gemma3", QWEN, "has image_grid_thw: Gemma3ForConditionalGeneration takes pixel_values for images",
    ),
    "pixels of another shape": (
        "qwen2_5_vl", QWEN | {"pixel_values": torch.zeros(5, 96)}, r"pixel_values of shape \[5, 96\]: image_grid_thw=",
    ),
    "pixels of another type": (
        "qwen2_5_vl", QWEN | {"pixel_values": QWEN["pixel_values"].int()}, "pixel_values of torch.int32: must be floating",
    ),
    "a grid that cannot be merged": (
        "qwen2_5_vl", QWEN | {"image_grid_thw": torch.tensor([[1, 4, 7], [1, 4, 3]])}, "multiples of 2",
    ),
    "a video": (
        "gemma3",
        picture_prompt("gemma3", ["a"]) | {"pixel_values_videos": torch.zeros(4, 96)},
        "pixel_values_videos: video is not served",
    ),
    "a placeholder and no video": (
        "qwen3_vl", {"input_ids": torch.tensor([[5, VIDEO]])}, r"1 placeholders \(token 91\), and its videos become 0",
    ),
    "a video without its speed": (
        "qwen2_5_vl",
        _without("second_per_grid_ts", picture_prompt("qwen2_5_vl", ["clip"])),
        "has pixel_values_videos and no second_per_grid_ts",
    ),
    "frames without their times": (
        "qwen3_vl",
        picture_prompt("qwen3_vl", ["clip"]) | {"input_ids": torch.tensor([[92, *[VIDEO] * 12, 93]]),
                                                "attention_mask": None},
        "finds no positions for these placeholders and grids .* between the frames of a video",
    ),
    "an image inside a video": (
        "qwen3_vl",
        picture_prompt("qwen3_vl", ["clip", "b"]) | {"input_ids": torch.tensor(
            [[*[VIDEO] * 4, *[IMAGE] * 4, *[VIDEO] * 8]]), "attention_mask": None},
        "placeholders of an image between those of a video",
    ),
    "patches that cannot be pooled": (
        "gemma4",
        picture_prompt("gemma4", ["a"]) | {"image_position_ids": torch.zeros(1, 32, 2, dtype=torch.long).index_fill(
            1, torch.arange(7), -1)},
        "25 patches of an image: must be a multiple of 4",
    ),
    "not tensors": ("qwen2_5_vl", QWEN | {"pixel_values": ["a.png"]}, "pixel_values of type list: must be a tensor"),
    "two prompts": ("qwen2_5_vl", QWEN | {"input_ids": torch.ones(2, 4)}, "give one prompt at a time"),
    "no crop": (
        "gemma3", picture_prompt("gemma3", ["a"]) | {"pixel_values": torch.zeros(0, 3, 16, 16)},
        r"its images become 0 embeddings \(0 images",
    ),
    "tiles without their mask": (
        "smolvlm",
        picture_prompt("smolvlm", ["a"]) | {"pixel_attention_mask": torch.ones(1, 2, 16, 16)},
        "pixel_attention_mask of shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_images_that_do_not_fit_are_refused_and_nothing_is_queued(case: str, engines: dict[str, Any]) -> None:
    name, inputs, words = WRONG[case]
    engine = engines.setdefault(name, make_engine(shared_vision_model(name)))
    for ask in (engine.add_request, engine.check_request):
        with pytest.raises(InvalidRequestError, match=words):
            ask(inputs, likeliest())
    assert not engine.has_unfinished


@pytest.fixture(scope="module")
def engines() -> dict[str, DynamicInferenceEngine]:
    return {}


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_an_image_at_which_the_tower_fails_harms_no_other_request(name: str) -> None:
    model = make_vision_model(name)
    engine = make_engine(model)
    tower = next(each for path, each in model.named_modules() if path.endswith(("visual", "vision_tower")))

    def fail(_: Any, args: Any, arguments: dict[str, Any]) -> None:
        if any(each.isinf().any() for each in (*args, *arguments.values()) if torch.is_tensor(each)):
            raise ArithmeticError("no such colour")

    tower.register_forward_pre_hook(fail, with_kwargs=True)
    engine.add_request(token_ids(6), greedily(TOKENS))
    steps(engine, 3)
    inputs = picture_prompt(name, ["b", 2])
    engine.add_request(picture_prompt(name, PARTS), likeliest())
    engine.add_request(inputs | {"pixel_values": torch.full_like(inputs["pixel_values"], torch.inf)}, likeliest(n=2))
    done = finish(engine)
    assert_greedy(model, done[0, 0])
    assert_as_generate(name, PARTS, done[1, 0], model)
    assert [done[2, sample].error for sample in range(2)] == ["ArithmeticError: no such colour"] * 2
    assert engine.stats()["preemptions"] == 0


def test_padding_is_taken_off_and_a_processed_text_is_a_text() -> None:
    name = "qwen2_5_vl"
    engine = make_engine(shared_vision_model(name))
    inputs = picture_prompt(name, PARTS)
    padded = {key: torch.nn.functional.pad(inputs[key], (3, 0)) for key in ("input_ids", "attention_mask")}
    engine.add_request(inputs | padded, likeliest())
    engine.add_request({"input_ids": token_ids(6), "attention_mask": [1] * 6}, greedily(TOKENS))
    done = finish(engine)
    assert_as_generate(name, PARTS, done[0, 0])
    assert type(done[1, 0]) is DynamicInferenceRequest


def test_an_image_that_sees_itself_in_both_directions_must_fit_one_step() -> None:
    engine = make_engine(shared_vision_model("gemma3"), max_tokens_per_step=3, max_requests=3)
    with pytest.raises(
        InvalidRequestError, match=r"4 tokens that attend to each other .* max_tokens_per_step=3; raise it"
    ):
        engine.add_request(picture_prompt("gemma3", PARTS), likeliest())
