"""Tests of `model.generate` on the engine: equal to transformers' own loop, or that loop itself."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    MaxTimeCriteria,
    MinPLogitsWarper,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextStreamer,
)

from rollout.errors import ConfigError
from rollout.state import EngineState
from tests.models import VOCAB, make_model, make_tokenizer
from tests.ranks import run_together
from tests.rollouts import assert_nothing_leaked, make_rollout, update
from tests.trainer_hooks import generate_jobs
from tests.vision_models import NO_MARKS, make_vision_model, picture_prompt, trainer_inputs
from trainer_hooks.generate import GenerateHook, attach

WIDTH, NEW = 7, 12
TOKENIZER = make_tokenizer()
Attach = Callable[..., GenerateHook]


@pytest.fixture
def attached() -> Iterator[Attach]:
    """`attached(model, fallback="raise", tokenizer=..., **engine)`: a hook, detached and its manager closed at the end."""
    hooks: list[GenerateHook] = []

    def make(
        model: PreTrainedModel, fallback: Any = "raise", tokenizer: Any = TOKENIZER, **engine: Any
    ) -> GenerateHook:
        hooks.append(attach(model, make_rollout(model, tokenizer, **engine), fallback=fallback))
        return hooks[-1]

    yield make
    for hook in hooks:
        hook.detach()
        assert_nothing_leaked(hook.manager)
        hook.manager.close()


def batch(seed: int = 0, rows: int = 5) -> dict[str, Tensor]:
    """Prompts of unequal length, padded on the left."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB - 5, (rows, WIDTH), generator=random)
    padding = torch.randint(0, WIDTH - 1, (rows, 1), generator=random)
    mask = (torch.arange(WIDTH) >= padding).long()
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


PENALTY = {"repetition_penalty": 1.3} if Version(transformers.__version__) >= Version("5.23") else {}
"""Before 5.23 transformers penalises padding, too."""
GREEDY: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalty": PENALTY,
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": list(range(2, 60))},
    "min_length": {"min_length": WIDTH + 3, "eos_token_id": list(range(2, 60))},
    "suppress": {"suppress_tokens": list(range(20, 50)), "remove_invalid_values": True},
    "several eos": {"eos_token_id": list(range(2, 40))},
    "no eos": {"eos_token_id": None},
    "all": PENALTY | {"min_new_tokens": 3, "suppress_tokens": [7, 8], "eos_token_id": list(range(2, 40))},
    "copies": {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
    "no cache": {"use_cache": False},
}  # fmt: skip


@pytest.mark.parametrize("tokenizer", [TOKENIZER, None], ids=["tokenizer", "ids alone"])
def test_stop_strings_end_rows_where_transformers_ends_them(tokenizer, attached):
    model = make_model("qwen3")
    prompts = batch()
    options = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": TOKENIZER}
    plain = model.generate(**prompts, **options)
    # Ends inside, one that begins in the prompt, one that never comes.
    stops = [TOKENIZER.decode(plain[row, start : start + 2]) for row in range(5) for start in (WIDTH - 1, WIDTH + 2)]
    chosen = [[stop] for stop in stops] + [["never in here"], stops]
    expected = [model.generate(**prompts, **options, stop_strings=each) for each in chosen]
    hook = attached(model, tokenizer=tokenizer)
    for stop, tokens in zip(chosen, expected, strict=True):
        assert torch.equal(model.generate(**prompts, **options, stop_strings=stop), tokens), stop
    assert any(tokens.shape != plain.shape or not torch.equal(tokens, plain) for tokens in expected)
    assert hook.served == len(chosen)


FAMILIES = ["qwen3", "gemma3", "gpt2", "gpt_oss", "qwen3_next"]
"""Plain attention, windows, absolute positions, sinks and experts, recurrent layers; `test_equals_generate` has all."""


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_of_families_equal_transformers(name, attached):
    model = make_model(name).eval()
    calls = [{"max_new_tokens": NEW, "do_sample": False} | options for options in GREEDY.values()]
    expected = [model.generate(**batch(seed), **call) for seed, call in enumerate(calls)]
    hook = attached(model)
    for seed, (call, tokens) in enumerate(zip(calls, expected, strict=True)):
        assert torch.equal(model.generate(**batch(seed), **call), tokens), call
    assert hook.served == len(calls)


def test_scores_and_logits_are_those_of_every_step(attached):
    model = make_model("qwen3")
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_scores": True,
               "output_logits": True, "eos_token_id": list(range(2, 40))} | PENALTY  # fmt: skip
    expected = model.generate(**batch(), **options)
    attached(model)
    found = model.generate(**batch(), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-5, rtol=1e-5)
    plain = model.generate(**batch(), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True)
    assert {plain.scores, plain.logits, plain.past_key_values} == {None}


SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8, "temperature": 1.5},
    "min_p": {"min_p": 0.2, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED.keys())
def test_sampled_tokens_follow_transformers_distribution(options, attached):
    """Pearson's statistic of the first two tokens against the probabilities of transformers' own scores.

    For d degrees of freedom it is about normal with mean d and variance 2d; the bound is 4.5 standard deviations, which a
    correct sampler exceeds in 1 of 300,000 runs. The seed is fixed.
    """
    model, draws = make_model("qwen3", num_hidden_layers=1), 4000
    options = {"top_k": 0, "do_sample": True, "min_new_tokens": 2} | options
    prompt = {"input_ids": torch.tensor([[5, 9, 17]])}
    shown = {"return_dict_in_generate": True, "output_scores": True}
    first = model.generate(**prompt, max_new_tokens=2, **options, **shown).scores[0].softmax(-1)[0]
    attached(model, max_requests=64)
    torch.manual_seed(3)
    tokens = model.generate(**prompt, max_new_tokens=2, num_return_sequences=draws, **options)[:, 3:]
    assert tokens.shape == (draws, 2)
    _check_draws(tokens[:, 0], first)
    # After the most likely first token, transformers' loop once more.
    likeliest = int(first.argmax())
    follows = torch.cat([prompt["input_ids"], torch.tensor([[likeliest]])], dim=1)
    options["min_new_tokens"] = 1
    model_copy = copy.deepcopy(model)
    second = model_copy.generate(input_ids=follows, max_new_tokens=1, **options, **shown).scores[0].softmax(-1)[0]
    _check_draws(tokens[tokens[:, 0] == likeliest, 1], second)


def _check_draws(tokens: Tensor, probabilities: Tensor) -> None:
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert not counts[probabilities == 0].any()
    expected = probabilities.double() * len(tokens)
    # Rare tokens count together.
    rare = expected < 5
    pooled = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]])
    pooled, seen = pooled[pooled > 0], seen[pooled > 0]
    degrees = max(1, len(pooled) - 1)
    statistic = float(((seen - pooled) ** 2 / pooled).sum())
    assert statistic < degrees + 4.5 * (2 * degrees) ** 0.5, (statistic, degrees)


def test_manual_seed_makes_runs_repeatable(attached):
    model = make_model("qwen3")
    attached(model, max_requests=4)
    options = {"max_new_tokens": NEW, "do_sample": True, "num_return_sequences": 9}

    def draw(count: int) -> list[Tensor]:
        return [model.generate(**batch(), **options) for _ in range(count)]

    torch.manual_seed(5)
    first, second, third = draw(3)
    torch.manual_seed(5)
    again = draw(2)
    state = torch.get_rng_state()
    model.generate(**batch(), max_new_tokens=3, do_sample=False)
    assert torch.equal(torch.get_rng_state(), state), "greedy draws nothing"
    torch.randn(4)
    torch.set_rng_state(state)
    again += draw(1)
    assert all(torch.equal(*pair) for pair in zip((first, second, third), again, strict=True))
    assert not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) > 40


def test_equal_prompts_are_one_prefill(attached):
    model = make_model("qwen3")
    hook = attached(model)
    hook.manager.metrics()
    # As OnlineDPO repeats them: the samples of a prompt are not side by side.
    model.generate(
        torch.tensor([[5, 6, 7, 8, 9]] * 3 + [[9, 8, 7, 6, 5]] * 2).repeat(2, 1), max_new_tokens=4, do_sample=True
    )
    assert hook.manager.metrics()["rollout/prefill_tokens_saved"] == 8 * 5


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_optimizer_steps_are_followed_without_an_attachment(fused, attached):
    model = make_model("qwen3")
    hook = attached(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused, foreach=not fused)
    for step in range(3):
        assert hook.manager.policy_version == step
        found = model.generate(**batch(), max_new_tokens=NEW, do_sample=False)
        assert torch.equal(found, copy.deepcopy(model).generate(**batch(), max_new_tokens=NEW, do_sample=False))
        assert hook.manager.engine.state is EngineState.SUSPENDED
        model(**batch()).logits.logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()  # without gradients: no update
        model.generate(**batch(), max_new_tokens=1)


def test_one_changed_element_is_an_update(attached):
    model = make_model("qwen3")
    hook = attached(model)
    model.generate(**batch(), max_new_tokens=1)
    model.generate(**batch(), max_new_tokens=1)
    assert hook.manager.policy_version == 0
    with torch.no_grad():
        model.lm_head.weight[11, 3] += 1
    model.generate(**batch(), max_new_tokens=1)
    assert hook.manager.policy_version == 1
    update(model, hook.manager)  # announced: counted once
    model.generate(**batch(), max_new_tokens=1)
    assert hook.manager.policy_version == 2
    for parameter in model.parameters():
        parameter.data.mul_(1.01)  # torch does not count writes through .data; the fingerprints see them
    model.generate(**batch(), max_new_tokens=1)
    assert hook.manager.policy_version == 3


class Ban(LogitsProcessor):
    """A processor that the engine cannot know."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([5]), -float("inf"))


class Hotter(TemperatureLogitsWarper):
    """A subclass may do anything."""


def refusals() -> dict[str, dict[str, Any]]:
    """Reason → options of a call that the engine does not serve."""
    wrong_order = [MinPLogitsWarper(0.1), TemperatureLogitsWarper(0.5)]
    return {
        "logits processor Ban": {"logits_processor": LogitsProcessorList([Ban()])},
        "logits processor Hotter": {"logits_processor": LogitsProcessorList([Hotter(0.5)])},
        "logits processors in the order": {"do_sample": True, "logits_processor": LogitsProcessorList(wrong_order)},
        "logits processor NoBadWordsLogitsProcessor": {"bad_words_ids": [[5, 6]]},
        "logits processor NoRepeatNGramLogitsProcessor": {"no_repeat_ngram_size": 2},
        "stopping criterion MaxTimeCriteria": {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(60.0)])},
        "stop strings without an eos_token_id": {"stop_strings": ["x"], "eos_token_id": None, "tokenizer": TOKENIZER},
        "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
        "output_hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
        "streamer": {"streamer": TextStreamer(TOKENIZER)},
        "position_ids": {"position_ids": torch.arange(WIDTH)[None] + 3},
        "an attention_mask with zeros": {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1]])},
        "beam search": {"num_beams": 2},
        "a KV cache of the caller": {},
        "inputs_embeds": {},
        "InvalidRequestError": {},
        "rows longer than": {"max_new_tokens": 8},
    }


@pytest.mark.parametrize("reason", refusals().keys())
def test_other_calls_run_transformers_loop(reason, attached):
    model = make_model("qwen3")
    options = {"max_new_tokens": 3, "do_sample": False} | refusals()[reason]
    inputs: dict[str, Any] = {"input_ids": batch(rows=1)["input_ids"]}
    with torch.no_grad():
        if reason == "a KV cache of the caller":
            inputs["past_key_values"] = model(inputs["input_ids"][:, :-2], use_cache=True).past_key_values
        if reason == "inputs_embeds":
            inputs = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])}
    limits = {"InvalidRequestError": WIDTH - 1, "rows longer than": WIDTH + 4}
    engine = {"max_sequence_length": limits[reason]} if reason in limits else {}
    torch.manual_seed(0)
    expected = model.generate(**copy.deepcopy(inputs), **options)
    hook = attached(model, "warn", **engine)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = model.generate(**copy.deepcopy(inputs), **options)
    assert [each.filename for each in caught if "own loop" in str(each.message)] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.generate(**copy.deepcopy(inputs), **options)
    assert (hook.served, list(hook.fallbacks.values())) == (0, [2])
    assert next(iter(hook.fallbacks)).startswith(reason)
    assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))
    hook.detach()
    strict = attach(model, hook.manager, fallback="raise")
    with strict, pytest.raises(ConfigError, match="the engine does not serve"):
        model.generate(**copy.deepcopy(inputs), **options)


def test_suspended_by_the_caller_runs_transformers_loop(attached):
    model = make_model("qwen3")
    hook = attached(model, "warn")
    with hook.manager.suspended(), pytest.warns(UserWarning, match="leave the block first"):
        model.generate(**batch(), max_new_tokens=2)
    model.generate(**batch(), max_new_tokens=2)
    assert hook.served == 1


def test_copies_and_files_know_nothing_of_the_hook(attached, tmp_path):
    model = make_model("qwen3")
    hook = attached(model)
    twin = copy.deepcopy(model)
    twin.generate(**batch(), max_new_tokens=2)
    loaded = pickle.loads(pickle.dumps(model))
    loaded.generate(**batch(), max_new_tokens=2)
    model.save_pretrained(tmp_path)
    type(model).from_pretrained(tmp_path).generate(**batch(), max_new_tokens=2)
    assert hook.served == 0
    with attach(twin, make_rollout(twin)) as other:
        hook.detach()
        twin.generate(**batch(), max_new_tokens=2)
        model.generate(**batch(), max_new_tokens=2)
        assert (hook.served, other.served) == (0, 1)
        other.manager.close()
    for name in ("_sample", "_beam_search", "_assisted_decoding", "_prepare_multimodal_encoder_kwargs_for_generation"):
        assert getattr(type(model), name, None) is getattr(GenerationMixin, name, None)


def test_wrappers_reach_the_hook(attached):
    peft = pytest.importorskip("peft")
    model = make_model("qwen3")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    expected = wrapped.generate(**batch(), max_new_tokens=NEW, do_sample=False)
    with wrapped.disable_adapter():
        base = wrapped.generate(**batch(), max_new_tokens=NEW, do_sample=False)
    hook = attached(wrapped)
    assert torch.equal(wrapped.generate(**batch(), max_new_tokens=NEW, do_sample=False), expected)
    with wrapped.disable_adapter():
        assert torch.equal(wrapped.generate(**batch(), max_new_tokens=NEW, do_sample=False), base)
    assert torch.equal(torch.compile(wrapped, backend="eager").generate(**batch(), max_new_tokens=NEW), expected)
    assert hook.served == 3


@pytest.mark.distributed
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_ranks_with_a_wrapped_model_generate_together_and_follow_its_steps(nursery, wrapper):
    for answer in run_together(nursery, 2, generate_jobs.generates, wrapper=wrapper):
        assert answer == {"equal": [True] * 3, "version": 2, "served": 3}


def test_mistakes_are_told():
    model, other = make_model("qwen3"), make_model("qwen3", seed=1)
    manager = make_rollout(model)
    with pytest.raises(ValueError, match="does not contain the Qwen3ForCausalLM"):
        attach(other, manager)
    with pytest.raises(ConfigError, match="must be 'warn' or 'raise'"):
        attach(model, manager, fallback="ignore")  # type: ignore[arg-type]
    with attach(model, manager), pytest.raises(ValueError, match="attached already"):
        attach(model, manager)
    manager.close()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason=f"transformers {transformers.__version__} encodes no images before its loop: 5.18 does",
)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3"])
@pytest.mark.parametrize("copies", [1, 2])
def test_images_are_split_into_rows(name, copies, attached):
    model = make_vision_model(name)
    model.generation_config.eos_token_id = None
    # An image each, and two in the last row; the rows are of one length, as these families pad their images differently.
    first, second = picture_prompt(name, [5, "a", 6]), picture_prompt(name, [4, "c", 7], seed=1)
    rows = [trainer_inputs(name, each) for each in (first, second, first)]
    inputs = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    sampling = {"do_sample": False} if copies == 1 else {"do_sample": True, "top_k": 1, "num_return_sequences": copies}
    options = {"max_new_tokens": 6, "suppress_tokens": list(NO_MARKS), "pad_token_id": 0} | sampling
    model.eval()
    expected = model.generate(**inputs, **options)
    hook = attached(model, tokenizer=None)
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert hook.served == 1
