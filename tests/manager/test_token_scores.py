"""Log-probs of given sequences by the engine: those of the trainer's forward, prefixes once, nothing in flight disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

import rollout as package
from rollout import (
    LLM,
    ConfigError,
    EngineStateError,
    InvalidRequestError,
    RolloutManager,
    TokenScores,
    WeightsChangedError,
)
from rollout.engine.parts import prefill
from tests.adapters import adapted, saved_adapter
from tests.invariants import check_scheduler
from tests.models import VOCAB, make_model
from tests.rollouts import assert_nothing_leaked, completions, make_rollout, tokens, trainer_logprobs_of, update
from trainer_hooks.peft import adapter

PROMPTS = [[7, *range(5, 24)], [7, *range(5, 24), 31, 32], [9, 8], [50]]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("qwen3")


def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    model.train()
    return logits


def progress_of(rollout: RolloutManager) -> list[list[int]]:
    return [record[-1].completion_tokens for record in rollout.engine.snapshot()]


def assert_equals_forward(
    model: PreTrainedModel, scores: TokenScores, sequences: list[list[int]], temperature: float = 1.0
):
    for row, ids in enumerate(sequences):
        logprobs = (logits_of(model, ids) / temperature).log_softmax(-1)
        chosen = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        mask = scores.mask[row, : len(ids)].tolist()
        for column in range(1, len(ids)):
            if mask[column]:
                assert scores.logprobs[row, column].item() == pytest.approx(chosen[column - 1].item(), abs=1e-5)
                if scores.entropies is not None:
                    expected = -(logprobs[column - 1].exp() * logprobs[column - 1]).sum().item()
                    assert scores.entropies[row, column].item() == pytest.approx(expected, abs=1e-4)
                if scores.top_ids is not None and scores.top_logprobs is not None:
                    best = logprobs[column - 1].topk(scores.top_ids.shape[2])
                    assert scores.top_ids[row, column].tolist() == best.indices.tolist()
                    torch.testing.assert_close(scores.top_logprobs[row, column], best.values, atol=1e-5, rtol=0)
    outside = ~scores.mask
    assert not scores.logprobs[outside].any()
    assert scores.entropies is None or not scores.entropies[outside].any()


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_moe", "gpt2", "qwen3_next"])
def test_scores_are_those_of_the_models_own_forward(name):
    model = make_model(name)
    with make_rollout(model, max_tokens_per_step=16) as rollout:
        scores = rollout.score(PROMPTS[:3], temperature=0.7, top_k=3, entropy=True)
        assert scores.mask.sum(1).tolist() == [19, 21, 1]
        assert_equals_forward(model, scores, PROMPTS[:3], 0.7)
        later = rollout.score(PROMPTS, prompt_lengths=[12, 20, 0, 1])
        assert later.mask.sum(1).tolist() == [8, 2, 1, 0]
        assert_equals_forward(model, later, PROMPTS)
        assert_nothing_leaked(rollout)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3}, {"top_p": 0.8, "return_kept_tokens": True},
                                     {"top_k": 5, "return_kept_tokens": True, "logit_bias": {5: 2.0}},
                                     {"top_p": 0.5, "logprobs_mode": "raw"}, {"temperature": 0}], ids=str)  # fmt: skip
def test_scores_of_a_batch_are_its_own_log_probs_while_the_weights_stand(model, options):
    with make_rollout(model) as rollout:
        batch = rollout.generate(PROMPTS, tokens(9, n=3, **options))
        scores = rollout.score(batch)
        assert torch.equal(scores.mask, batch.response_mask)
        torch.testing.assert_close(scores.logprobs, batch.logprobs, atol=2e-6, rtol=0)
        if "top_p" not in options and not batch.kept_tokens:
            # The same arithmetic on the same bits of logits.
            assert torch.equal(scores.logprobs, batch.logprobs)


def test_prompts_are_computed_once_and_only_what_is_scored_behind_them(model):
    with make_rollout(model, max_tokens_per_step=64) as rollout:
        batch = rollout.generate([list(range(3, 43))], tokens(8, n=8))
        computed: list[int] = []
        forward = rollout.engine.controller.runner.forward

        def counting(ids, *others):
            computed.append(len(ids))
            return forward(ids, *others)

        rollout.engine.controller.runner.forward = counting
        rollout.score(batch)
        # Every row computes the last block of the prompt, whose last token has the first logits, and 7 of its 8 tokens.
        assert sum(computed) == 8 * (4 + 7)
        computed.clear()
        rollout.engine.flush_prefix_cache()
        rollout.score(batch)
        assert sum(computed) == 36 + 8 * (4 + 7)
        assert max(computed) <= 64


def test_exact_mode_scores_are_the_trainers_bits(model):
    with make_rollout(model, exact=True) as rollout:
        batch = rollout.generate(PROMPTS, tokens(9, n=2))
        update(model, rollout)
        scores = rollout.score(batch)
        with package.exact(model), torch.no_grad():
            logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1].float()
        expected = logits.log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        assert torch.equal(scores.logprobs[:, 1:][batch.response_mask[:, 1:]], expected[batch.response_mask[:, 1:]])
        assert not torch.equal(scores.logprobs, batch.logprobs)
    update(model, seed=0, size=-0.02)


def test_scores_name_their_version_and_the_staleness_of_the_tokens(model):
    with make_rollout(model) as rollout:
        batch = rollout.generate(PROMPTS, tokens(4))
        assert rollout.score(batch).policy_version == 0
        for seed in (1, 2):
            update(model, rollout, seed)
        scores = rollout.score(batch)
        assert scores.policy_version == 2
        assert scores.staleness is not None
        assert (scores.staleness == 2 * batch.response_mask).all()
        expected = torch.where(batch.response_mask, trainer_logprobs_of(model.eval(), batch).detach(), 0)
        torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=0)
        assert rollout.score([[1, 2, 3]]).staleness is None
    for seed in (1, 2):
        update(model, None, seed, -0.02)


def test_groups_in_flight_stand_still_and_go_on_as_if_nothing_had_been(model):
    def play(score: bool) -> tuple[list[list[int]], list[int]]:
        with make_rollout(model, kv_cache_blocks=20, seed=3) as rollout:
            rollout.submit(PROMPTS[:3], tokens(24))
            done = []
            for _ in range(6):
                done += rollout.engine.step()
            before = progress_of(rollout)
            if score:
                # 16 of the 20 blocks: some of those in flight have to give up theirs.
                found = rollout.score([[*range(3, 67)], [*range(3, 60)]])
                assert_equals_forward(model, found, [[*range(3, 67)], [*range(3, 60)]])
                assert progress_of(rollout) == before
                check_scheduler(rollout.engine.context.scheduler)
            batch = rollout.generate([], min_groups=3)
            later = rollout.generate([[4, 5]], tokens(3))
            return completions(batch), completions(later)[0]

    assert play(True) == play(False)


def test_a_score_under_adapters_and_under_the_model_without_them(model):
    lora = get_peft_model(
        make_model("qwen3"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    sequences = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 11]]
    with make_rollout(lora) as rollout:
        adapted = rollout.score(sequences)
        with adapter(rollout, None):
            reference = rollout.score(sequences)
        again = rollout.score(sequences)
        assert_equals_forward(lora, adapted, sequences)
        with lora.disable_adapter():
            assert_equals_forward(lora, reference, sequences)
        assert torch.equal(adapted.logprobs, again.logprobs)
        assert (adapted.logprobs - reference.logprobs).abs().max() > 1e-2
        assert (adapted.adapters, reference.adapters) == ("'default'", "none")


def test_another_model_and_an_llm_score_too(model):
    reference = make_model("llama", seed=5)
    before = [parameter.clone() for parameter in reference.parameters()]
    with make_rollout(model) as rollout:
        batch = rollout.generate(PROMPTS, tokens(5, n=2))
    scores = package.score(reference, batch, entropy=True)
    assert_equals_forward(reference, scores, [[*r.prompt_tokens, *r.generated_tokens] for r in batch])
    assert scores.staleness is None
    assert all(torch.equal(one, other) for one, other in zip(before, reference.parameters(), strict=True))
    assert reference.training
    with LLM(reference) as llm:
        assert torch.equal(llm.score(batch).logprobs, scores.logprobs)


def test_logits_are_bounded_and_an_empty_request_is_answered(model, monkeypatch):
    monkeypatch.setattr(prefill, "LOGITS_BYTES", 4 * VOCAB * 5)
    seen: list[int] = []
    with make_rollout(model) as rollout:
        forward = rollout.engine.controller.runner.forward

        def counting(ids, rows, keep, *others):
            seen.append(len(keep))
            return forward(ids, rows, keep, *others)

        rollout.engine.controller.runner.forward = counting
        assert_equals_forward(model, rollout.score(PROMPTS), PROMPTS)
        assert 0 < max(seen) <= 5
        assert rollout.score([]).logprobs.shape == (0, 0)
        assert rollout.score([[5]]).mask.tolist() == [[False]]


def test_what_cannot_be_scored_is_refused_by_name_and_holds_nothing(model):
    with make_rollout(model, kv_cache_blocks=8, max_sequence_length=40) as rollout:
        for sequences, message in (([[5, 6], [5, VOCAB]], "sequence 1: prompt token 97"), ([[]], "sequence 0"),
                                   ([[5] * 41], "max_sequence_length=40"), ([[5] * 37], "8")):  # fmt: skip
            if sequences == [[]]:
                assert rollout.score(sequences).logprobs.shape == (1, 0)
                continue
            with pytest.raises(InvalidRequestError, match=message):
                rollout.score(sequences)
        batch = rollout.generate([[5, 6]], tokens(3, top_k=4, repetition_penalty=1.2))
        with pytest.raises(ConfigError, match=r"repetition_penalty=1.2, top_k=4.*temperature="):
            rollout.score(batch)
        assert rollout.score(batch, temperature=1.0).mask.any()
        for options in ({"temperature": 0}, {"top_k": -1}, {"prompt_lengths": [1, 2]}, {"prompt_lengths": -1}):
            with pytest.raises(ConfigError):
                rollout.score([[5, 6]], **options)
        with pytest.raises(ConfigError, match="response_mask"):
            rollout.score(batch, prompt_lengths=1)
        with rollout.suspended(), pytest.raises(EngineStateError):
            rollout.score(batch, temperature=1.0)
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
        with pytest.raises(WeightsChangedError):
            rollout.score(batch, temperature=1.0)
        with torch.no_grad():
            model.lm_head.weight.sub_(1.0)
        rollout.weights_updated()
        assert rollout.score(batch, temperature=1.0).mask.any()
        assert_nothing_leaked(rollout)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_the_rollout_as_it_was(model, error):
    with make_rollout(model, max_tokens_per_step=16) as rollout:
        forward, left = rollout.engine.controller.runner.forward, [2]

        def failing(*step):
            left[0] -= 1
            if not left[0]:
                raise error("broken")
            return forward(*step)

        rollout.engine.controller.runner.forward = failing
        with pytest.raises(error, match="broken"):
            rollout.score(PROMPTS)
        assert_equals_forward(model, rollout.score(PROMPTS), PROMPTS)
        assert_nothing_leaked(rollout)


def test_a_suspended_rollout_wakes_for_a_score(model):
    rollout = RolloutManager(
        model, config=package.InferenceConfig(kv_cache_blocks=32, advanced=package.Advanced(verify_model=False))
    )
    rollout.before_optimizer_step()
    assert_equals_forward(model, rollout.score(PROMPTS), PROMPTS)
    rollout.close()
    with pytest.raises(EngineStateError, match="after close"):
        rollout.score(PROMPTS)


def test_rows_are_scored_with_the_adapter_their_requests_named(model: PreTrainedModel, tmp_path: Path) -> None:
    folder = saved_adapter(make_model("qwen3"), tmp_path)
    with make_rollout(model) as rollout:
        rollout.engine.load_adapter("a", folder)
        batch = rollout.generate([PROMPTS[0]] * 2, [tokens(3, adapter="a"), tokens(3)])
        scores = rollout.score(batch)
        assert torch.allclose(scores.logprobs, batch.logprobs, atol=1e-5)
        sequences = [row[: int(batch.prompt_lengths[0]) + 3].tolist() for row in batch.input_ids]
        named, plain = (rollout.score(sequences, adapter=name) for name in ("a", None))
        assert_equals_forward(adapted(make_model("qwen3"), folder), named, sequences)
        assert_equals_forward(model, plain, sequences)
        assert torch.equal(rollout.score(batch, adapter="a").logprobs[1, -3:], named.logprobs[1, -3:])
        assert (scores.adapters, named.adapters, plain.adapters) == ("'a'", "'a'", "none")
        with pytest.raises(InvalidRequestError, match="sequence 0: adapter 'b' is not loaded"):
            rollout.score(sequences, adapter="b")
        assert_nothing_leaked(rollout)
    assert_equals_forward(model, package.score(model, batch), sequences)
