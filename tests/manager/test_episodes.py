"""Tests of `sample` and `run`: episodes of many turns, their batch, failures, deadlines, updates and groups."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from rollout.errors import ConfigError, DeadlineError, EngineStateError, InvalidRequestError, RolloutFailedError
from rollout.manager.episodes.environment import EnvironmentTask, StepResult
from rollout.manager.scoring import rewards_differ
from rollout.sampling_params import SamplingParams
from tests.engines import BLOCK
from tests.models import make_model, trainer_logprobs
from tests.rollouts import assert_nothing_leaked, closed, logprob_error, make_rollout, tokens, update, value_error


class Echo:
    """Four turns; the tool answers with two tokens after a moment."""

    async def reset(self, task):
        self.turns = 0
        return [5, 6, task]

    async def step(self, turn):
        self.turns += 1
        await asyncio.sleep(0.001)
        return StepResult([9, 10], 1.0, self.turns == 4)


# --- one completion -------------------------------------------------------------------------------------------------


def test_a_completion_beside_the_turns_equals_that_of_generate_and_a_cancelled_one_frees_its_blocks(rollout):
    expected = rollout.generate([[5, 7]], tokens(8, temperature=0))

    async def play(episode):
        slow = asyncio.create_task(rollout.sample([5, 6], tokens(400)))
        await asyncio.sleep(0.02)
        slow.cancel()
        asked.append(await rollout.sample([5, 7], tokens(8, temperature=0)))
        with pytest.raises(InvalidRequestError, match=r"n=2 in sample\(\)"):
            await rollout.sample([5], SamplingParams(n=2))
        await episode.sample([5], tokens(3))
        return 1.0

    asked = []
    batch = rollout.run([None], play)
    assert asked[0].generated_tokens == expected[0].generated_tokens
    assert len(asked[0].generated_log_probs) == 8
    assert batch.response_mask.sum() == 3
    with pytest.raises(EngineStateError, match=r"sample\(\): call it in an environment of run\(\)"):
        asyncio.run(rollout.sample([5], tokens(3)))
    assert_nothing_leaked(rollout)


# --- episodes -------------------------------------------------------------------------------------------------------


def test_an_environment_plays_many_turns_and_its_row_masks_all_but_sampled_tokens(rollout, frozen):
    batch = rollout.run(range(3, 9), Echo, tokens(5), n=2)
    assert len(batch) == len(batch.episodes) == 12
    assert batch.rewards.tolist() == [4.0] * 12
    assert batch.group_ids.tolist() == sorted(batch.group_ids.tolist())
    assert batch.metadata == [task for task in range(3, 9) for _ in range(2)]
    pattern = [0] * 3 + ([1] * 5 + [0, 0]) * 3 + [1] * 5
    assert batch.response_mask.int().tolist() == [pattern] * 12
    assert batch.input_ids[0, 8:10].tolist() == [9, 10]
    assert logprob_error(frozen, batch) < 1e-5
    assert not batch.logprobs[~batch.response_mask].any()
    assert batch.to("cpu").episodes is batch.episodes
    assert_nothing_leaked(rollout)


def test_blocking_environments_and_text_observations_work_and_close_is_called(rollout, tokenizer):
    closed = []

    class Blocking:
        def reset(self, task):
            return "ab"

        def step(self, turn):
            time.sleep(0.001)
            return StepResult("xy", 0.5, done=len(turn.prompt_tokens) > 5)

        def close(self):
            closed.append(threading.current_thread())

    batch = rollout.run([None] * 2, Blocking, tokens(3))
    assert "xy" in batch.texts[0]
    assert batch.rewards.tolist() == [1.0, 1.0]
    assert len(closed) == 2
    assert threading.main_thread() not in closed


def test_an_edited_history_is_a_row_of_its_own_and_no_token_is_trained_on_twice(rollout, frozen):
    async def play(episode):
        await episode.sample([4, 5, 6])
        both = episode.tokens
        await asyncio.gather(episode.sample([*both, 7]), episode.sample([*both, 8]))
        return 1.0

    batch = rollout.run([None], play, tokens(4))
    assert batch.episode_ids.tolist() == [0, 0]
    assert batch.response_mask.sum(1).tolist() == [8, 4]
    assert batch.input_ids[0, :7].tolist() == batch.input_ids[1, :7].tolist()
    assert logprob_error(frozen, batch) < 1e-5


def test_kept_tokens_of_all_turns_give_the_log_probs_of_the_truncated_distribution(frozen):
    params = tokens(5, top_k=6, return_kept_tokens=True)
    with make_rollout(frozen, token_values=lambda hidden: hidden) as rollout:
        batch = rollout.run([3, 4], Echo, params)
    assert batch.kept_tokens.counts[0, 3:].tolist() == ([6] * 5 + [1, 1]) * 3 + [6] * 5
    mask = batch.response_mask
    found = batch.logprobs_of(frozen).detach()
    torch.testing.assert_close(found[mask], batch.logprobs[mask], atol=1e-4, rtol=0)
    assert value_error(frozen, batch, lambda hidden: hidden, mask) < 1e-4


def test_routes_of_all_turns_are_those_of_the_positions():
    with make_rollout(make_model("qwen3_moe", num_hidden_layers=1), record_routes=True) as manager:
        batch = manager.run([3], Echo, tokens(5))
    assert batch.routed_experts.shape[:2] == batch.input_ids.shape
    assert (batch.routed_experts[0, :-1] >= 0).all()


def test_a_turn_with_another_temperature_is_another_row(rollout):
    async def play(episode):
        await episode.sample([4, 5], tokens(3))
        await episode.sample(episode.tokens, tokens(3, temperature=0.5))
        return 0.0

    assert rollout.run([None], play).response_mask.int().tolist() == [[0, 0, 1, 1, 1, 0, 0, 0], [0] * 5 + [1] * 3]


def test_a_failure_is_its_episodes_alone(rollout):
    async def play(episode):
        await episode.sample([4, 5, 6])
        if episode.index == 1:
            raise OSError("the tool is gone")
        return float("nan") if episode.index == 2 else 1.0

    batch = rollout.run([None], play, tokens(4), n=4, on_error="mask")
    assert batch.errors == [None, "OSError: the tool is gone", "ValueError: reward=nan: must be finite", None]
    assert batch.response_mask.any(1).tolist() == [True, False, False, True]
    assert batch.rewards.isnan().tolist() == [False, True, True, False]
    with pytest.raises(RolloutFailedError, match="the tool is gone"):
        rollout.run([None], play, tokens(4), n=4)
    assert_nothing_leaked(rollout)


def test_an_episode_that_never_ends_fails_at_its_deadline_even_if_it_ignores_its_end(rollout):
    late = []

    async def play(episode):
        await episode.sample([4, 5, 6])
        if episode.index == 0:
            return 1.0
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            with pytest.raises(EngineStateError, match="after its end"):
                await episode.sample([4])
            late.append(episode)
            raise

    batch = rollout.run([None], play, tokens(4), n=2, episode_timeout_s=5.0, on_error="mask")
    assert batch.errors[0] is None
    assert batch.errors[1].startswith("RequestTimeoutError")
    rollout.run([None], play, tokens(4))
    assert late == [batch.episodes[1]]


def test_an_episode_without_a_turn_keeps_its_row(rollout):
    async def play(episode):
        raise KeyError("no such task")

    with pytest.raises(RolloutFailedError, match="no such task") as caught:
        rollout.run([None], play)
    batch = caught.value.batch
    assert len(batch) == 1
    assert "KeyError" in batch.errors[0]
    assert len(rollout.run([], play)) == 0


def test_a_prompt_that_does_not_fit_is_an_error_the_environment_can_catch(rollout):
    async def play(episode):
        with pytest.raises(InvalidRequestError):
            await episode.sample([5] * 4000)
        return len((await episode.sample([5])).generated_tokens)

    assert rollout.run([None], play, tokens(2)).rewards.tolist() == [2.0]


def test_partial_episodes_go_on_under_the_new_weights_with_the_version_of_every_token(small, model):
    gate = threading.Event()

    async def play(episode):
        await episode.sample([4, 5, episode.task])
        while episode.task >= 6 and not gate.is_set():
            await asyncio.sleep(0.001)
        await episode.sample([*episode.tokens, 9])
        return 0.0

    first = small.run([4, 5, 6, 7], play, tokens(3), n=2, min_groups=2)
    assert first.metadata == [4, 4, 5, 5]
    assert small.episode_groups_in_play == 2
    with small.suspended():
        update(model, small)
    gate.set()
    second = small.run([], play)
    assert second.metadata == [6, 6, 7, 7]
    assert second.policy_versions[0].tolist() == [0] * 6 + [1] * 4
    assert second.policy_staleness[0][second.response_mask[0]].tolist() == [1] * 3 + [0] * 3
    assert small.episode_groups_in_play == 0
    assert_nothing_leaked(small)


def test_groups_that_would_become_too_old_are_waited_for(model):
    small = make_rollout(model, max_staleness=1)

    async def play(episode):
        for _ in range(1 if episode.task == 0 else 6):
            await episode.sample(episode.tokens or [4, 5])
            await asyncio.sleep(0.002)
        return 0.0

    assert small.run([0, 1], play, tokens(2), min_groups=1).metadata == [0]
    update(model, small)
    batch = small.run([0], play, tokens(2), min_groups=1)
    assert 1 in batch.metadata
    assert int(batch.policy_staleness.max()) <= 1
    small.run([], play)
    small.close()


def test_groups_of_equal_rewards_are_replaced_from_the_iterator(rollout):
    async def play(episode):
        await episode.sample([4, 5, 6])
        return float(episode.index * (episode.task % 2))

    tasks = itertools.count()
    batch = rollout.run(tasks, play, tokens(2), n=2, min_groups=3, max_groups=4, keep=rewards_differ)
    assert all(task % 2 for task in batch.metadata)
    assert batch.num_groups >= 3
    assert next(tasks) <= 12
    assert rollout.metrics()["rollout/groups_discarded"] > 0


def test_tasks_bring_their_environments_and_a_bare_task_without_one_is_refused(rollout):
    batch = rollout.run((EnvironmentTask(Echo, task) for task in range(3, 9)), None, tokens(2), min_groups=2)
    assert batch.num_groups >= 2
    with pytest.raises(TypeError, match="EnvironmentTask"):
        rollout.run([3], None)
    with pytest.raises(TypeError, match="reset"):
        rollout.run([EnvironmentTask(7, None)], None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 0}, "n=0"),
        ({"min_groups": 0}, "min_groups=0"),
        ({"max_groups": 3}, r"pass iter\(tasks\)"),
        ({"sampling_params": SamplingParams(n=2)}, "n= of run"),
        ({"on_error": "ignore"}, "on_error='ignore'"),
        ({"max_discarded": -1}, "max_discarded=-1"),
        ({"tasks": iter([])}, "may have no end"),
        ({"tasks": iter([]), "min_groups": 3, "max_groups": 2}, "at least min_groups=3"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_by_name(rollout, options, words):
    with pytest.raises(ConfigError, match=words):
        rollout.run(**({"tasks": [], "environment": Echo} | options))


def test_a_run_gives_up_at_its_deadline_and_the_next_goes_on(rollout):
    gate = threading.Event()

    async def play(episode):
        while not gate.is_set():
            await asyncio.sleep(0.001)
        await episode.sample([4])
        return 1.0

    with pytest.raises(DeadlineError):
        rollout.run([None], play, tokens(2), timeout_s=0.05)
    gate.set()
    assert rollout.run([], play).rewards.tolist() == [1.0]


def test_ctrl_c_gives_up_the_episodes_of_its_run(rollout):
    async def play(episode):
        await asyncio.sleep(60)

    def tasks():
        yield None
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout.run(tasks(), play, min_groups=2)
    assert rollout.episode_groups_in_play == 0


def test_tokens_depend_on_the_episode_and_not_on_how_fast_its_tools_are(frozen):
    def tokens_with(delays: Iterator[float]) -> list[list[int]]:
        async def play(episode):
            for _ in range(3):
                await episode.sample([*episode.tokens, 5, episode.task], None)
                await asyncio.sleep(next(delays))
            return 0.0

        with make_rollout(frozen) as manager:
            batch = manager.run([3, 4, 5], play, tokens(4, temperature=1.0), n=2)
            return batch.input_ids.tolist()

    assert tokens_with(itertools.repeat(0.0)) == tokens_with(itertools.cycle([0.005, 0.0, 0.001]))


def test_no_token_of_an_earlier_turn_is_computed_twice_within_a_version(rollout):
    batch = rollout.run(range(3, 9), Echo, tokens(7))
    for episode in batch.episodes:
        for earlier, turn in itertools.pairwise(episode.turns):
            # The KV of the last token was never computed, and complete blocks alone are shared.
            assert turn.num_cached_tokens == (earlier.total_length - 1) // BLOCK * BLOCK


def test_a_checkpoint_has_no_episodes_and_later_ones_get_other_numbers(frozen):
    async def play(episode) -> float:
        await episode.sample([4, 5])
        while episode.task:
            await asyncio.sleep(0.001)
        return 1.0

    rollout = make_rollout(frozen)
    batch = rollout.run([0, 1], play, tokens(3), n=2, min_groups=1)
    state = rollout.state_dict()
    closed(rollout)
    with make_rollout(frozen) as rollout:
        rollout.load_state_dict(state)
        assert rollout.episode_groups_in_play == 0
        again = rollout.run([0], play, tokens(3), n=2)
    assert [episode.group_id for episode in (*batch.episodes, *again.episodes)] == [0, 0, 2, 2]
    assert [turn.generated_tokens for turn in batch] != [turn.generated_tokens for turn in again]


# --- the batch, whatever happens ------------------------------------------------------------------------------------


class Adventure:
    """Random turns, edits, branches and cuts; writes down every turn that it was given."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.seen: dict[tuple[int, int], list[tuple[list[int], list[int], list[float], list[int]]]] = {}

    async def __call__(self, episode) -> float:
        rng = random.Random(f"{self.seed} {episode.task} {episode.index}")
        seen = self.seen[episode.group_id, episode.index] = []

        async def sample(prompt: list[int]) -> list[int]:
            turn = await episode.sample(prompt, tokens(rng.randint(1, 5)))
            assert turn.prompt_tokens == prompt
            versions = turn.policy_versions[len(prompt) :].tolist()
            seen.append((prompt, turn.generated_tokens, turn.generated_log_probs, versions))
            return [*prompt, *turn.generated_tokens]

        histories = [[4, 5, 6 + episode.task]]
        for _ in range(rng.randint(1, 6)):
            history = rng.choice(histories)
            move = rng.random()
            if move < 0.4:
                histories = [await sample([*history, rng.randrange(3, 90)])]
            elif move < 0.6:
                branches = [sample([*history, rng.randrange(3, 90)]) for _ in range(2)]
                histories += await asyncio.gather(*branches)
            elif move < 0.8:
                histories.append(await sample(history[: rng.randint(1, len(history))]))
            else:
                edited = list(history)
                edited[rng.randrange(len(edited))] = rng.randrange(3, 90)
                histories.append(await sample(edited))
            await asyncio.sleep(rng.choice([0, 0, 0.003]))
        return rng.random()


@pytest.mark.parametrize(
    ("seed", "name", "mode"),
    [
        (0, "qwen3", "persist"), (1, "qwen3", "offload"), (2, "qwen3", "recompute"),
        (3, "qwen3_next", "offload"), (4, "qwen3_moe", "persist"),
    ],
)  # fmt: skip
def test_every_sampled_token_stands_in_the_batch_once_as_it_was_sampled(seed, name, mode):
    model = make_model(name, num_hidden_layers=2) if name == "qwen3" else make_model(name)
    of_version = [copy.deepcopy(model)]
    adventure = Adventure(seed)
    rollout = make_rollout(model, kv_cache_blocks=48, max_requests=8, kv_cache_management_mode=mode)
    batches = []
    for round_ in range(4):
        last = round_ == 3
        tasks = [] if last else range(4 * round_, 4 * round_ + 4)
        batches.append(rollout.run(tasks, adventure, n=2, min_groups=None if last else 2))
        with rollout.suspended():
            update(model, rollout, seed=round_, size=0.05)
        of_version.append(copy.deepcopy(model))
    expected: list[tuple] = []
    found: list[tuple] = []
    checked = 0
    for batch in batches:
        for episode in batch.episodes:
            assert episode.error is None
            for prompt, completion, logprobs, versions in adventure.seen[episode.group_id, episode.index]:
                key = (episode.group_id, episode.index)
                for at, token in enumerate(completion):
                    before = (*prompt, *completion[:at])
                    expected.append((key, before, token, round(logprobs[at], 5), versions[at]))
            for turn in episode.turns:
                if len({*turn.policy_versions.tolist(), *(version for version, _ in turn.kv_spans.runs)}) == 1:
                    ids, prompt = [*turn.prompt_tokens, *turn.generated_tokens], len(turn.prompt_tokens)
                    exact = trainer_logprobs(of_version[turn.policy_version], ids)[prompt - 1 :]
                    torch.testing.assert_close(torch.tensor(turn.generated_log_probs), exact, atol=1e-4, rtol=0)
                    checked += 1
        for row in range(len(batch)):
            episode = batch.episodes[batch.episode_ids[row]]
            ids = batch.input_ids[row].tolist()
            for column in batch.response_mask[row].nonzero()[:, 0].tolist():
                logprob, version = batch.logprobs[row, column].item(), int(batch.policy_versions[row, column])
                key = (episode.group_id, episode.index)
                found.append((key, tuple(ids[:column]), ids[column], round(logprob, 5), version))
    assert Counter(found) == Counter(expected)
    assert len(expected) > 100
    assert len({version for *_, version in expected}) >= 3
    assert checked > 30
    assert_nothing_leaked(rollout)
    rollout.close()
