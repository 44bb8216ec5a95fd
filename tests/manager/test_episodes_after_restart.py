"""Tests of episodes in flight across `state_dict` and `load_state_dict`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.errors import ConfigError
from rollout.manager.episodes.batch import EpisodeBatch
from rollout.manager.episodes.environment import EnvironmentTask, StepResult
from rollout.manager.manager import RolloutManager
from tests.rollouts import closed, make_rollout, tokens, update


class Stop:
    """Where the episodes of a first run stand still: the tool of turn `turn` does not answer."""

    turn: int | None = None
    stopped = 0
    steps = 0
    drift = 0


@pytest.fixture(autouse=True)
def stop() -> type[Stop]:
    Stop.turn, Stop.stopped, Stop.steps, Stop.drift = None, 0, 0, 0
    return Stop


class Tool:
    """Five turns; task 0 ends at once when all others stand still."""

    async def reset(self, task: int) -> list[int]:
        self.turns = 0
        while task == 0 and Stop.turn is not None and Stop.stopped < 4:
            await asyncio.sleep(0.001)
        return [5, 6, 7 + task]

    async def step(self, turn: Any) -> StepResult:
        Stop.steps += 1
        self.turns += 1
        if self.turns == Stop.turn and turn.prompt_tokens[2] != 7:
            Stop.stopped += 1
            await asyncio.Event().wait()
        return StepResult([9, 10 + self.turns + (Stop.drift if self.turns == 2 else 0)], 1.0, self.turns == 5)


class Other(Tool):
    """The same under another name."""


def sampled(batch: EpisodeBatch) -> list[Any]:
    return [
        [
            (turn.prompt_tokens, turn.generated_tokens, turn.generated_log_probs, turn.policy_versions.tolist())
            for turn in each.turns
        ]
        for each in batch.episodes
    ]


def stopped_at(
    turn: int, manager: RolloutManager, environment: Any, tasks: Any = range(3), **options: Any
) -> dict[str, Any]:
    """The state of a run of two episodes per task, of which task 0 has ended; the others wait for a tool."""
    Stop.turn = turn
    if "environments" not in options:
        manager.run(tasks, environment, tokens(7), n=2, min_groups=1)
    else:
        manager.run(tasks, sampling_params=tokens(7), n=2, min_groups=1)
    Stop.turn = None
    state = manager.state_dict()
    closed(manager)
    Stop.steps = 0
    return state


def test_episodes_go_on_after_a_restart_and_no_turn_is_sampled_again(frozen: Any) -> None:
    with make_rollout(frozen) as manager:
        manager.run([0], Tool, tokens(7), n=2)
        whole = manager.run([1, 2], Tool, tokens(7), n=2)
    state = stopped_at(3, make_rollout(frozen), Tool)
    with make_rollout(frozen) as manager:
        manager.load_state_dict(state)
        assert manager.episode_groups_in_play == 2
        again = manager.state_dict()
        batch = manager.run([], Tool, tokens(3))
        assert sampled(batch) == sampled(whole)
        assert batch.rewards.tolist() == [5.0] * 4
        assert manager.metrics()["rollout/generated_tokens"] == 4 * 2 * 7
        assert manager.metrics()["rollout/episode_turns_dropped_total"] == 0
    # The tools answer all turns again.
    assert Stop.steps == 20
    with make_rollout(frozen) as manager:
        manager.load_state_dict(again)
        assert sampled(manager.run([], Tool)) == sampled(whole)


def test_turns_of_before_keep_their_versions_and_new_ones_have_those_of_now(model: Any) -> None:
    state = stopped_at(3, make_rollout(model), Tool)
    with make_rollout(model) as manager:
        manager.load_state_dict(state)
        update(model, manager)
        batch = manager.run([], Tool)
        versions = batch.policy_versions[batch.response_mask].view(4, 5, 7)
        assert versions[:, :3].unique().tolist() == [0]
        assert versions[:, 3:].unique().tolist() == [1]


def test_a_coroutine_is_played_again_with_the_completions_of_its_branches(frozen: Any) -> None:
    async def play(episode: Any) -> float:
        await episode.sample([4, 5, 6 + episode.task])
        both = episode.tokens
        await asyncio.gather(episode.sample([*both, 7], tokens(4)), episode.sample([*both, 8]))
        if Stop.turn is not None and episode.task:
            Stop.stopped += 1
            await asyncio.Event().wait()
        while Stop.turn is not None and Stop.stopped < 2:
            await asyncio.sleep(0.001)
        await episode.sample(episode.tokens)
        return 1.0

    with make_rollout(frozen) as manager:
        manager.run([0], play, tokens(7), n=2)
        whole = manager.run([1], play, tokens(7), n=2)
    state = stopped_at(1, make_rollout(frozen), play, range(2))
    with make_rollout(frozen) as manager:
        manager.load_state_dict(state)
        assert sampled(manager.run([], play)) == sampled(whole)
        assert manager.metrics()["rollout/generated_tokens"] == 2 * 7


def test_an_environment_that_does_not_repeat_itself_is_sampled_anew_from_where_it_differs(frozen: Any) -> None:
    state = stopped_at(4, make_rollout(frozen), Tool)
    Stop.drift = 50
    with make_rollout(frozen) as manager:
        manager.load_state_dict(state)
        batch = manager.run([], Tool)
        assert [len(episode.turns) for episode in batch.episodes] == [5] * 4
        assert batch.response_mask.sum(1).tolist() == [35] * 4
        metrics = manager.metrics()
    # Two turns stand; the prompts of the third and the fourth are others now.
    assert metrics["rollout/generated_tokens"] == 4 * 3 * 7
    assert metrics["rollout/episode_turns_dropped"] == 4 * 2


def test_episodes_of_a_mixture_need_their_environments_by_name(frozen: Any) -> None:
    mixed = [EnvironmentTask(Other if task == 1 else Tool, task) for task in range(3)]
    state = stopped_at(2, make_rollout(frozen), None, mixed, environments=True)
    with make_rollout(frozen) as manager:
        manager.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"environments=\{'Other'"):
            manager.run([])
        with pytest.raises(ConfigError, match="pass one"):
            manager.run([], Tool, environments={})
        batch = manager.run([], environments={"Tool": Tool, "Other": Other})
        assert batch.rewards.tolist() == [5.0] * 4


def test_what_a_checkpoint_cannot_hold_is_left_out_with_a_warning(
    frozen: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(episode: Any) -> float:
        await episode.sample([4, 5])
        if episode.task:
            episode.info["tool"] = object()
            Stop.stopped += 1
            await asyncio.Event().wait()
        while Stop.stopped < 1:
            await asyncio.sleep(0.001)
        return 1.0

    manager = make_rollout(frozen)
    manager.run([0, 1], play, tokens(3), min_groups=1)
    state = manager.state_dict()
    closed(manager)
    assert "1 of 1 groups of episodes are not in this checkpoint" in caplog.text
    with make_rollout(frozen) as manager:
        manager.load_state_dict(state)
        assert manager.episode_groups_in_play == 0
