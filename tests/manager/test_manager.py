"""Tests of the manager with a real model: prompts in, batches out, what is refused, the end."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

from rollout.engine.parts.holds import COORDINATOR, HoldLevel
from rollout.errors import (
    ConfigError,
    EngineStateError,
    InvalidRequestError,
)
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from tests.models import greedy, make_model, make_tokenizer
from tests.rollouts import (
    GREEDY,
    assert_nothing_leaked,
    completions,
    group_ids,
    make_rollout,
    tokens,
    trainer_logprobs_of,
    update,
)

# --- prompts in, batch out ------------------------------------------------------------------------------------------


def test_texts_token_ids_arrays_and_chats_are_prompts(frozen):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    rollout = make_rollout(frozen, tokenizer)
    ids = tokenizer("ab>")["input_ids"]
    chat = [{"role": "user", "content": "ab"}]
    batch = rollout.generate(["ab>", ids, tuple(ids), torch.tensor(ids), np.array(ids), chat], GREEDY)
    assert batch.num_groups == 6
    assert len({tuple(request.prompt_tokens) for request in batch}) == 1
    assert len({tuple(request.generated_tokens) for request in batch}) == 1
    assert batch.texts[0] == tokenizer.decode(batch[0].generated_tokens, skip_special_tokens=True)


def test_no_prompts_give_an_empty_batch(rollout):
    batch = rollout.generate([])
    assert (len(batch), batch.num_groups, tuple(batch.input_ids.shape)) == (0, 0, (0, 0))
    assert len(rollout.generate([], min_groups=5)) == 0


def test_without_a_tokenizer_token_ids_do_and_texts_are_none(frozen):
    batch = make_rollout(frozen).generate([[5, 6, 7]], GREEDY)
    assert batch.texts == [None]
    with pytest.raises(ConfigError, match=r"prompts\[1\]: a text prompt needs a tokenizer"):
        make_rollout(frozen).generate([[5], "a"], GREEDY)


def test_samples_of_a_prompt_are_side_by_side_and_prompts_in_order(rollout, tokenizer):
    prompts = ["one", "two!", "three"]
    batch = rollout.generate(prompts, SamplingParams(max_tokens=60, n=3, stop_token_ids=range(5, 12)))
    assert [tokenizer.decode(request.prompt_tokens) for request in batch] == [p for p in prompts for _ in range(3)]
    assert batch.sample_indices.tolist() == [0, 1, 2] * 3
    assert [rows for _, rows in batch.groups()] == [slice(0, 3), slice(3, 6), slice(6, 9)]
    for _, rows in batch.groups():
        assert len({tuple(request.generated_tokens) for request in batch.requests[rows]}) == 3
    # They came back in another order than they were asked for.
    assert sorted(batch.response_lengths.tolist()) != batch.response_lengths.tolist()


def test_the_pad_token_is_the_tokenizers_or_the_models(tokenizer):
    model = make_model("qwen3", num_hidden_layers=1, pad_token_id=96)
    assert make_rollout(model, tokenizer).generate(["a"], GREEDY).pad_token_id == tokenizer.pad_token_id
    batch = make_rollout(model).generate([[5], [5, 6, 7]], GREEDY)
    assert batch.pad_token_id == 96
    assert batch.input_ids[0, -2:].tolist() == [96, 96]


def test_a_coordinator_of_another_type_is_refused(frozen):
    with pytest.raises(ConfigError, match="coordinator='tcp://host:5000': must be a CoordinatorConfig, True or False"):
        RolloutManager(frozen, coordinator="tcp://host:5000")


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: r.generate("abc"), TypeError, "prompts is one str: pass a list"),
        (lambda r: r.generate({"input_ids": [5]}), TypeError, "prompts is one dict"),
        (lambda r: r.generate(b"abc"), TypeError, "prompts is one bytes"),
        (lambda r: r.generate([5, 6]), TypeError, r"prompts\[0\]: prompt of type int"),
        (lambda r: r.generate(["a", {"role": "user"}]), TypeError, r"prompts\[1\]: prompt of type dict"),
        (lambda r: r.generate(["a", [5, "b"]]), TypeError, r"prompts\[1\]: prompt\[1\]='b'"),
        (lambda r: r.generate(["a", []]), InvalidRequestError, r"prompts\[1\]: .*empty"),
        (lambda r: r.generate([[5], [500]]), InvalidRequestError, r"prompts\[1\]: .*500"),
        (lambda r: r.generate(["a"] * 3 + [[5] * 600]), InvalidRequestError, r"prompts\[3\]: .*600 tokens"),
        (lambda r: r.generate(["a"], min_groups=-1), ConfigError, "min_groups=-1: must be"),
        (lambda r: r.generate(["a"], min_groups=1.5), ConfigError, "min_groups=1.5: must be"),
        (lambda r: r.generate(["a"], min_groups=True), ConfigError, "min_groups=True: must be"),
        (lambda r: r.generate(["a"], on_error="ignore"), ConfigError, "on_error='ignore': must be"),
        (lambda r: r.as_completed(on_error="ignore"), ConfigError, "on_error='ignore': must be"),
        (lambda r: r.as_completed([7]), KeyError, r"groups \[7\] are not in flight"),
        (lambda r: r.generate(["a"], metadata=[1, 2]), ConfigError, "metadata has 2 entries for 1 prompts"),
        (lambda r: r.generate(["a"], [GREEDY] * 2), ConfigError, "sampling_params has 2 entries for 1 prompts"),
        (lambda r: r.suspend("disk"), ConfigError, "mode='disk': must be None or one of 'persist', 'offload'"),
    ],
)
def test_a_wrong_call_is_refused_by_name_and_leaves_nothing_behind(rollout, call, error, message):
    with pytest.raises(error, match=message):
        call(rollout)
    assert_nothing_leaked(rollout)
    assert len(rollout.generate(["a"], GREEDY)) == 1


def test_generating_is_refused_until_an_explicit_stop_is_undone(rollout):
    rollout.pause()
    with pytest.raises(EngineStateError, match=r"while paused: call manager\.unpause\(\) first"):
        rollout.generate(["a"], GREEDY)
    assert rollout.groups_in_flight == 0
    rollout.unpause()
    rollout.generate(["a"], GREEDY)
    rollout.suspend()
    with pytest.raises(EngineStateError, match=r"while suspended: call manager\.resume\(\) first"):
        rollout.generate(["a"], GREEDY)
    rollout.pause()
    with pytest.raises(EngineStateError, match="suspended"):
        rollout.unpause()
    with pytest.raises(EngineStateError, match=r"call manager\.resume\(\) first"):
        rollout.generate(["a"], GREEDY)
    rollout.resume()
    rollout.generate(["a"], GREEDY)
    rollout.engine.pause()
    with pytest.raises(EngineStateError, match="while paused"):
        rollout.generate(["a"], GREEDY)
    rollout.resume()
    rollout.generate(["a"], GREEDY)


def test_an_explicit_stop_outlives_the_optimizer_hook(rollout):
    """The hook used to resume on demand whatever it found, so an optimizer step silently undid a pause()."""
    rollout.pause()
    rollout.before_optimizer_step()
    rollout.weights_updated()
    with pytest.raises(EngineStateError, match=r"unpause\(\)"):
        rollout.generate(["a"], GREEDY)
    rollout.unpause()
    assert len(rollout.generate(["a"], GREEDY)) == 1
    rollout.suspend()
    with rollout.suspended():
        rollout.weights_updated()
    with pytest.raises(EngineStateError, match=r"resume\(\)"):
        rollout.generate(["a"], GREEDY)
    rollout.before_optimizer_step()
    rollout.pause()
    rollout.resume()
    assert len(rollout.generate(["a"], GREEDY)) == 1


def test_generating_inside_suspended_is_refused_and_submitting_is_not(rollout):
    with rollout.suspended():
        groups = rollout.submit(["a"], GREEDY)
        with pytest.raises(EngineStateError, match="leave the block first"):
            rollout.generate(["b"], GREEDY)
        with pytest.raises(EngineStateError, match="leave the block first"):
            next(rollout.as_completed())
        with rollout.suspended(), pytest.raises(EngineStateError, match="leave the block first"):
            rollout.generate([])
    assert group_ids(rollout.as_completed(groups)) == groups


def test_prompts_whose_completions_were_long_start_first_the_next_time(model):
    """A batch ends with its longest sample; one that starts last is computed nearly alone."""
    rollout = make_rollout(model, max_requests=1)
    prompts, lengths = [[5], [6], [7], [8]], [3, 12, 1, 7]
    params = [tokens(length) for length in lengths]
    first = rollout.generate(prompts, params)
    again = rollout.generate(prompts, params)
    assert again.response_lengths.tolist() == lengths
    began = [request.events[1].timestamp for request in (again[index] for index in range(4))]
    assert sorted(range(4), key=began.__getitem__) == [1, 3, 0, 2]
    assert sorted(range(4), key=[first[index].events[1].timestamp for index in range(4)].__getitem__) == [0, 1, 2, 3]


@pytest.mark.parametrize("fused", [True, False])
def test_a_batch_made_in_inference_mode_can_be_trained_on(fused):
    model = make_model("qwen3", num_hidden_layers=1)
    with torch.inference_mode():
        rollout = make_rollout(model, fused_forward=fused)
        batch = rollout.generate([[5, 6]], tokens(6, n=2, logprobs=1))
        with rollout.suspended("offload"):
            pass
        rollout.generate([[5, 6]], tokens(6))
        assert torch.is_inference_mode_enabled()
    loss = (trainer_logprobs_of(model, batch) - batch.logprobs)[batch.response_mask].exp().mean()
    loss.backward()
    assert model.lm_head.weight.grad is not None
    batch.logprobs.mul_(1.0)
    update(model, rollout)
    again = rollout.generate([[5, 6, 7]], GREEDY)
    assert completions(again) == [greedy(model, [5, 6, 7], 6)]


# --- the end --------------------------------------------------------------------------------------------------------


def test_close_warns_of_what_it_gives_up_and_may_be_repeated(model):
    rollout = make_rollout(model)
    rollout.generate([[5], [6]], [tokens(2), tokens(9)], min_groups=1)
    with pytest.warns(UserWarning, match=r"close\(\) drops 1 groups in flight; save state_dict\(\) first") as caught:
        rollout.close()
    assert caught[0].filename == __file__
    rollout.close()
    assert rollout.engine.stats()["kv_device_bytes"] == 0
    for call in (lambda: rollout.generate([[5]]), lambda: rollout.generate([]), lambda: next(rollout.as_completed())):
        rollout._rounds.groups.add(0, 1)
        with pytest.raises(EngineStateError, match=r"after close\(\)"):
            call()
        rollout._rounds.groups.drop([0])
    with pytest.raises(EngineStateError, match="stopped"):
        rollout.submit([[5]])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_manager_or_engine_cannot_be_copied_and_says_what_to_do_instead(model, copied):
    with make_rollout(model) as rollout:
        for each in (rollout, rollout.engine):
            with pytest.raises(
                TypeError, match=rf"{type(each).__name__} cannot be pickled or copied: .* build one where"
            ):
                copied(each)


def test_the_optimizer_hook_of_a_closed_rollout_has_nothing_to_do(model):
    rollout = make_rollout(model)
    rollout.generate([[5]], GREEDY)
    rollout.close()
    with rollout.suspended():
        rollout.before_optimizer_step()
        assert rollout.weights_updated() == 0
    assert rollout.metrics()["rollout/suspends"] == 0


@pytest.mark.parametrize("how", ["run", "pause", "suspend"])
def test_a_with_block_closes_in_every_state(model, how):
    with make_rollout(model) as rollout:
        rollout.generate([[5]], GREEDY)
        if how != "run":
            getattr(rollout, how)()
    assert rollout.engine.state is EngineState.STOPPED
    with pytest.warns(UserWarning, match="drops 2 groups") as caught, make_rollout(model) as rollout:
        rollout.submit([[5], [6]])
    assert caught[0].filename == __file__


# --- the manager's own holds, next to the coordinator's ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "go"), [("pause", "unpause"), ("suspend", "resume"), ("before_optimizer_step", "resume")]
)
@pytest.mark.parametrize("coordinator_first", [False, True])
def test_what_both_have_stopped_runs_when_both_have_let_it_run(
    rollout: RolloutManager, stop: str, go: str, coordinator_first: bool
) -> None:
    holds = rollout.engine.holds
    getattr(rollout, stop)()
    holds.hold(COORDINATOR, HoldLevel.PAUSED)
    if coordinator_first:
        holds.release(COORDINATOR)
        assert rollout.engine.state is not EngineState.RUNNING
        getattr(rollout, go)()
    else:
        getattr(rollout, go)()
        assert rollout.engine.state is EngineState.PAUSED
        holds.release(COORDINATOR)
    assert rollout.engine.state.value == "running"
    assert len(rollout.generate([[5, 6]])) == 1


def test_a_pause_of_the_manager_is_refused_by_name_though_the_coordinator_holds_the_engine_too(
    rollout: RolloutManager,
) -> None:
    rollout.engine.holds.hold(COORDINATOR, HoldLevel.PAUSED)
    rollout.pause()
    with pytest.raises(EngineStateError, match=r"manager\.unpause\(\)"):
        rollout.generate([[5, 6]])
