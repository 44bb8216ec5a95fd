"""Tests of batches with images: what the trainer's forward takes, checkpoints, journals, episodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rollout
from rollout import Advanced, InferenceConfig, RolloutManager, SamplingParams
from rollout.errors import InvalidRequestError
from rollout.journal import Journal
from tests.engines import token_ids
from tests.models import VOCAB
from tests.vision_models import CONFIGS, IMAGE, NO_MARKS, picture_prompt, shared_vision_model

SAMPLED = SamplingParams(n=2, max_tokens=6, ignore_eos=True, seed=3, logit_bias=NO_MARKS)


def manager_of(name: str, **options: Any) -> RolloutManager:
    config = InferenceConfig(
        kv_cache_blocks=96, max_requests=16, max_tokens_per_step=64, advanced=Advanced(block_size_tokens=4)
    )
    return RolloutManager(shared_vision_model(name), None, config, **options)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_trainers_forward_of_a_batch_gives_the_log_probs_it_was_sampled_with(name: str) -> None:
    """Rows with one, several and no images, and a video; all rows, and any part of them."""
    model = shared_vision_model(name)
    with manager_of(name) as manager:
        last = ["c", 4, "clip", 2] if "qwen" in name else ["c", 4]
        prompts = [picture_prompt(name, [2, "a", 3, "b"]), token_ids(5), picture_prompt(name, last)]
        batch = manager.generate(prompts, SAMPLED)
    model.eval()
    for rows in (None, slice(2, 4), slice(1, 5), torch.tensor([5, 0])):
        with torch.no_grad():
            logits = model(**batch.model_inputs(rows), use_cache=False).logits[:, :-1].float()
        if hasattr(model.model, "rope_deltas"):
            model.model.rope_deltas = None
        chosen = torch.arange(len(batch))[slice(None) if rows is None else rows]
        for token, bias in NO_MARKS.items():
            logits[..., token] += bias
        logprobs = logits.log_softmax(-1).gather(-1, batch.input_ids[chosen, 1:, None])[..., 0]
        mask = batch.response_mask[chosen, 1:]
        torch.testing.assert_close(logprobs[mask], batch.logprobs[chosen, 1:][mask], rtol=0, atol=1e-5)
    model.train()
    assert "pixel_values" not in batch.model_inputs(slice(2, 4)), "rows of text need no image"
    with pytest.raises(ValueError, match=r"rows have images: train on batch.tree\(\)"):
        batch.packed()
    assert batch.to("cpu").model_inputs().keys() == batch.model_inputs().keys()


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "gemma3", "gemma4_small"])
def test_scores_are_the_log_probs_of_the_trainers_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the logits of one step could not be those of an image, which is not cut."""
    monkeypatch.setattr("rollout.engine.parts.prefill.LOGITS_BYTES", 8 * VOCAB)
    with manager_of(name) as manager:
        prompts = [picture_prompt(name, [2, "a", 3, "b"]), token_ids(5), picture_prompt(name, ["a", 4])]
        batch = manager.generate(prompts, SAMPLED.replace(logprobs_mode="raw"))
        scores = manager.score(batch)
        assert manager.engine.stats()["images_encoded"] == 2
    torch.testing.assert_close(scores.logprobs, batch.logprobs, rtol=0, atol=1e-5)
    other = rollout.score(shared_vision_model(name), batch)
    torch.testing.assert_close(other.logprobs, batch.logprobs, rtol=0, atol=1e-5)


def test_token_ids_with_placeholders_and_no_image_are_not_scored() -> None:
    tokens = picture_prompt("qwen3_vl", [2, "a"])["input_ids"][0]
    with (
        manager_of("qwen3_vl") as manager,
        pytest.raises(InvalidRequestError, match=r"sequence 1: .* its images become 0 embeddings"),
    ):
        manager.score([token_ids(5), tokens])


def test_rows_with_a_sampled_placeholder_are_named() -> None:
    with manager_of("qwen2_5_vl") as manager:
        prompt = picture_prompt("qwen2_5_vl", [2, "a"])
        bad = SAMPLED.replace(logit_bias={IMAGE: 100.0})
        batch = manager.generate([prompt, prompt], [SAMPLED, bad])
    assert "pixel_values" in batch.model_inputs(slice(0, 2))
    with pytest.raises(ValueError, match=r"rows \[2, 3\]: a placeholder .* \(token 90, or 91 of a video\) was sampled"):
        batch.model_inputs()
    with pytest.raises(ValueError, match=r"rows \[2, 3\]: a placeholder"):
        batch.tree()


def test_a_checkpoint_holds_the_images_of_what_is_in_flight_and_of_what_has_ended() -> None:
    name = "qwen2_5_vl"
    prompts = [picture_prompt(name, [2, label]) for label in "ab"]
    with manager_of(name) as manager:
        whole = manager.generate(prompts, SAMPLED)
    with manager_of(name) as manager:
        manager.submit([prompts[0]], SAMPLED)
        manager.submit([prompts[1]], SAMPLED.replace(max_tokens=2))
        for _ in range(4):
            with manager.engine.installation:
                manager.engine._step(ahead=True)
        state = manager.state_dict()
        manager.abort(list(manager._rounds.groups))
    with manager_of(name) as again:
        again.load_state_dict(state)
        batch = again.generate([], min_groups=2)
    assert batch[0].generated_tokens == whole[0].generated_tokens
    assert batch.model_inputs()["pixel_values"].shape == whole.model_inputs()["pixel_values"].shape


def test_a_journal_tells_prompts_apart_by_their_images(tmp_path: Any) -> None:
    name = "gemma3"
    prompts = [picture_prompt(name, [2, label, 3]) for label in "ab"]
    with Journal(tmp_path) as journal, manager_of(name, journal=journal) as manager:
        state = manager.state_dict()
        first = manager.generate(prompts, SAMPLED)
    with Journal(tmp_path) as journal, manager_of(name, journal=journal) as manager:
        manager.load_state_dict(state)
        again = manager.generate([prompts[1], picture_prompt(name, [2, "c", 3]), prompts[0]], SAMPLED)
        assert manager.engine.stats()["images_encoded"] == 1, "only the new prompt is computed"
    for here, there in ((0, 2), (4, 0)):
        assert again[here].generated_tokens == first[there].generated_tokens
        assert torch.equal(again[here].imgs, first[there].imgs)


def test_turns_of_an_episode_share_a_row_as_long_as_their_images_are_the_same() -> None:
    name = "qwen3_vl"
    params = SAMPLED.replace(n=1)

    class Looks:
        async def __call__(self, episode: Any) -> float:
            first = await episode.sample(picture_prompt(name, [2, "a"]), params)
            follow = picture_prompt(name, [1, "b"])
            tokens = [*first.prompt_tokens, *first.generated_tokens, *follow["input_ids"][0].tolist()]
            both = picture_prompt(name, ["a", "b"])
            await episode.sample(both | {"input_ids": torch.tensor([tokens]), "attention_mask": None}, params)
            other = picture_prompt(name, ["c", "b"])
            await episode.sample(other | {"input_ids": torch.tensor([tokens]), "attention_mask": None}, params)
            return 1.0

    with manager_of(name) as manager:
        batch = manager.run([0], Looks(), n=1, sampling_params=params)
    assert batch.response_mask.sum(1).tolist() == [12, 6]
    rows = batch.model_inputs()
    assert rows["image_grid_thw"].shape[0] == 4
    assert (rows["input_ids"] == IMAGE).sum() == rows["mm_token_type_ids"].sum()
