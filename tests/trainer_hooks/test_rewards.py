"""Tests of rewards in other processes."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from rollout import ConfigError, PromptTask, SamplingParams
from tests.models import make_model
from tests.rollouts import assert_nothing_leaked, make_rollout
from tests.trainer_hooks import reward_functions
from trainer_hooks.rewards import RewardPool

PAIR = SamplingParams(n=2, max_tokens=6, ignore_eos=True)


def tasks(count: int | None = None) -> Any:
    numbers = itertools.count() if count is None else range(count)
    return (PromptTask([3 + number % 80, 5], number) for number in numbers)


def test_a_pool_gives_the_batch_of_the_function_itself():
    found = []
    for pooled in (False, True):
        manager = make_rollout(make_model("qwen3"))
        with RewardPool(reward_functions.lengths, timeout_s=60.0) as pool:
            reward: Any = pool if pooled else reward_functions.lengths
            batches = [manager.generate_scored(tasks(5), reward, PAIR, groups=5, keep=None) for _ in range(2)]
        found.append([(batch.rewards.tolist(), batch.input_ids.tolist()) for batch in batches])
        assert_nothing_leaked(manager)
        manager.close()
    assert found[0] == found[1]
    assert len(set(found[0][0][0])) > 1


def test_groups_that_do_not_differ_are_replaced():
    manager = make_rollout(make_model("qwen3"))
    with RewardPool(reward_functions.lengths) as pool:
        batch = manager.generate_scored(tasks(), pool, PAIR, groups=4)
    assert (batch.rewards.view(4, 2).std(1) > 0).all()
    manager.close()


def test_a_call_that_hangs_is_ended_and_others_are_not():
    manager = make_rollout(make_model("qwen3"))
    with RewardPool(reward_functions.hangs, timeout_s=1.0, on_timeout=-1.0) as pool:
        batch = manager.generate_scored(tasks(4), pool, PAIR, groups=4, keep=None)
        assert (batch.rewards.view(4, 2) == -1).all(1).tolist() == [False, True, False, True]
    with (
        RewardPool(reward_functions.hangs, timeout_s=0.2) as pool,
        pytest.raises(TimeoutError, match=r"timeout_s=0\.2"),
    ):
        manager.generate_scored(tasks(4), pool, PAIR, groups=4, keep=None)
    manager.abort(range(100))
    manager.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rewards")]


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [(reward_functions.fails, KeyError, "no such answer"), (reward_functions.dies, RuntimeError, "has died")],
)
def test_what_goes_wrong_is_raised(reward, error, message):
    manager = make_rollout(make_model("qwen3"))
    with RewardPool(reward) as pool, pytest.raises(error, match=message):
        manager.generate_scored(tasks(2), pool, PAIR, groups=2)
    manager.abort(range(100))
    manager.close()


def test_rows_of_trl_are_one_call_per_prompt():
    with RewardPool(reward_functions.of_columns) as pool:
        found = pool(
            prompts=["a", "a", "b"], completions=["x", "xyz", "xy"], weight=[1.0, 2.0, 3.0], trainer_state=object(),
            log_metric=print,
        )  # fmt: skip
    assert found == [1.0, 6.0, 6.0]
    assert pool.__name__ == "of_columns"


def test_mistakes_are_told_at_the_call():
    for options, message in (({"processes": 0}, "processes=0"), ({"timeout_s": 0}, "timeout_s=0")):
        with pytest.raises(ConfigError, match=message):
            RewardPool(reward_functions.lengths, **options)
    manager = make_rollout(make_model("qwen3"))
    with RewardPool(reward_functions.of_columns) as pool, pytest.raises(TypeError, match="called with 1 arguments"):
        manager.generate_scored(tasks(2), pool, PAIR, groups=2)
    manager.close()
