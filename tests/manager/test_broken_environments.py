"""Tests of environments and rewards that are written wrongly: a named error at once, no hang, no batch of NaN."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollout.errors import DeadlineError, EngineStateError, RolloutFailedError
from rollout.manager.episodes import player
from rollout.manager.episodes.environment import StepResult
from tests.rollouts import GREEDY, assert_nothing_leaked, make_rollout, tokens


class Good:
    def reset(self, task):
        return [5, 6]

    def step(self, turn):
        return StepResult((), 1.0, done=True)


class NoStep:
    def reset(self, task):
        return [5, 6]


class Gym(Good):
    def step(self, turn):
        return [9], 1.0, True, False, {}


class GymReset(Good):
    def reset(self, task):
        return [5, 6], {}


class Configured(Good):
    def __init__(self, size):
        self.size = size


async def without_argument():
    return 1.0


async def without_reward(episode):
    await episode.sample([5, 6])


async def gym_reward(episode):
    return (await episode.sample([5, 6])), 1.0, True


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (NoStep, r"environment=NoStep has no step\(\)"),
        (lambda: 0, r"made an object of type int, which has no reset\(\) and no step\(\)"),
        (lambda episode: 1.0, "async def play"),
        (Gym, r"Gym.step\(\) returned \(\[9\], 1.0, True, False, {}\) of type tuple: return StepResult\("),
        (GymReset, r"reset\(\) of GymReset gave no prompt"),
        (Configured, "size.*without required arguments"),
        (Good(), "pass its class"),
        (without_argument, "called with 1 arguments"),
        (without_reward, "returned None of type NoneType: return its reward, a number"),
        (gym_reward, "of type tuple: return its reward, a number"),
    ],
)
def test_an_environment_without_the_interface_is_an_error_of_the_call(small, environment, words):
    """These gave a batch without tokens whose rewards are NaN."""
    with pytest.raises(TypeError, match=words):
        small.run([None, None], environment, tokens(4), n=2)
    assert small.episode_groups_in_play == 0
    assert small.run([None], Good, tokens(4)).rewards.tolist() == [1.0]
    assert_nothing_leaked(small)


def test_an_environment_that_breaks_while_the_goal_decides_is_an_error_of_the_call(small, monkeypatch):
    """It was a failed sample."""
    look, decides = player.EpisodePlayer.look_at_the_clock, threading.Event()

    def look_and_let_it_break(episodes):
        look(episodes)
        for future in episodes._futures.values():
            decides.set()
            future.result(10)

    async def play(episode):
        await asyncio.to_thread(decides.wait, 10)

    monkeypatch.setattr(player.EpisodePlayer, "look_at_the_clock", look_and_let_it_break)
    with pytest.raises(TypeError, match="return its reward, a number"):
        small.run([None], play)


def test_a_run_of_which_every_episode_failed_raises_and_the_first_failure_is_logged_once(small, caplog):
    async def play(episode):
        raise OSError(f"no tool {episode.index}")

    async def good_for_one(episode):
        if episode.index:
            raise OSError("no tool")
        await episode.sample([5, 6])
        return 1.0

    with caplog.at_level(logging.WARNING, "rollout"):
        with pytest.raises(RolloutFailedError, match=r"4 of 4 samples failed, .*no tool 0") as caught:
            small.run([None, None], play, tokens(4), n=2, on_error="mask")
        assert len(caught.value.batch) == 4
        assert small.run([None], good_for_one, tokens(4), n=2, on_error="mask").errors[0] is None
    (record,) = caplog.records
    assert "later failures by OSError are not logged" in record.message
    assert record.exc_info is not None
    assert "in play" in logging.Formatter().formatException(record.exc_info)


@pytest.mark.parametrize("threaded", [False, True], ids=["coroutine", "thread"])
def test_a_blocking_call_of_an_environment_is_refused_before_it_waits_for_the_run(small, threaded):
    """`generate` waited for ever for the `run` that waited for it."""
    with pytest.raises(DeadlineError, match=r"run\(\) passed timeout_s=0 after 0 of 1 groups"):
        small.run([None], Good, timeout_s=0)
    calls = {
        "generate": lambda: small.generate([[5]], GREEDY),
        "generate_scored": lambda: small.generate_scored([[5]], len, groups=1),
        "run": lambda: small.run([None], Good),
        "as_completed": lambda: next(small.as_completed()),
        "score": lambda: small.score([[5, 6]]),
        "weights_updated": small.weights_updated,
        "before_optimizer_step": small.before_optimizer_step,
        "pause": small.pause,
        "unpause": small.unpause,
        "suspend": small.suspend,
        "resume": small.resume,
        "suspended": small.suspended,
        "load_state_dict": lambda: small.load_state_dict({}),
        "close": small.close,
    }
    told = {}

    def ask():
        for name, call in calls.items():
            with pytest.raises(EngineStateError) as caught:
                call()
            told[name] = str(caught.value)

    async def play(episode):
        await asyncio.to_thread(ask) if threaded else ask()
        # The cures of the message.
        await episode.sample([5, 6], GREEDY)
        await small.sample([5, 6], GREEDY)
        return 1.0

    assert small.run([None], play, GREEDY, timeout_s=60, min_groups=None).errors[0] is None
    for name, message in told.items():
        assert message.startswith(f"{name}() in an environment of run()")
        assert "await episode.sample(prompt)" in message
    assert set(told) == set(calls)


def test_a_wait_of_a_pools_thread_ends_with_the_deadline_of_run(small):
    """A thread of the user's own pool does not inherit that it belongs to an environment."""
    pool = ThreadPoolExecutor()

    async def play(episode):
        asked = asyncio.wrap_future(pool.submit(small.generate, [[5]], GREEDY))
        return float(len(await asked))

    # Only the deadline of `run` ends this; the pool's thread then generates.
    with pytest.raises(DeadlineError, match=r"run\(\) passed"):
        small.run([None], play, GREEDY, timeout_s=0.3)
    pool.shutdown()
    assert small.run([], play).rewards.tolist() == [1.0]


def test_a_manager_closes_while_an_environment_blocks_its_event_loop(model, monkeypatch):
    monkeypatch.setattr(player, "EXIT_S", 0.05)
    manager, gate = make_rollout(model), threading.Event()

    async def play(episode):
        gate.wait()
        return 1.0

    with pytest.raises(DeadlineError):
        manager.run([None], play, timeout_s=0.05)
    with pytest.warns(UserWarning, match="1 groups of episodes in flight"):
        manager.close()
    gate.set()


def test_a_process_ends_cleanly_while_an_environment_is_still_busy():
    """The interpreter aborted: "terminate called without an active exception", status 134."""
    ended = subprocess.run(
        [sys.executable, "-c", EXIT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert "run() passed timeout_s=1 after 0 of 1 groups" in ended.stdout


EXIT = """
import asyncio, torch
from rollout import DeadlineError, SamplingParams
from tests.models import make_model
from tests.rollouts import closed, make_rollout

manager = make_rollout(make_model("qwen3"))

async def computes(episode):
    a = torch.randn(300, 300)
    while True:
        for _ in range(30):
            a = torch.tanh(a @ a)
        await asyncio.sleep(0)

try:
    manager.run([None], computes, SamplingParams(max_tokens=4), timeout_s=1)
except DeadlineError as exc:
    print(exc)
"""


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (
            lambda sample, task: 1.0,
            "reward: signature .sample, task., called with 1 arguments .*list of a group's samples",
        ),
        (lambda: [1.0], "called with 1 arguments"),
    ],
)
def test_a_reward_with_another_signature_is_refused_before_anything_is_sampled(small, reward, words):
    with pytest.raises(TypeError, match=words):
        small.generate_scored([[5, 6]], reward, tokens(4, n=2), groups=1)
    assert_nothing_leaked(small)


def test_a_reward_that_takes_one_sample_learns_that_it_gets_a_list(small):
    with pytest.raises(AttributeError) as caught:
        small.generate_scored([[5, 6]], lambda sample: sample.generated_text, tokens(4, n=2), groups=1)
    assert "list of a group's samples" in caught.value.__notes__[0]


def test_greedy_samples_of_one_prompt_are_warned_of_at_the_callers_line(small):
    greedy = GREEDY.replace(n=2)
    for call in (
        lambda: small.generate([[5]], greedy),
        lambda: small.generate_scored([[5]], lambda samples: [1.0, 0.0], greedy, groups=1),
        lambda: small.run([None], Good, GREEDY, n=2),
    ):
        with pytest.warns(UserWarning, match="n=2 with temperature=0") as caught:
            call()
        assert {warning.filename for warning in caught} == {__file__}
