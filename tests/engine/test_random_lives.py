"""Random event sequences of an engine with a real model: every value of every sample equals Hugging Face's.

More of them: python -m tests.lives --seeds 0 1000; one event by event: python -m tests.lives --seed 12
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from rollout.requests.spans import VersionSpans
from tests.engines import at_random, make_engine, steps, token_ids
from tests.lives import ARCHITECTURES, RECURRENT, Life
from tests.models import make_model
from tests.oracle import Policy, check_record

LIVES = int(os.environ.get("ROLLOUT_LIVES", "12"))


@pytest.mark.parametrize(
    ("seed", "architectures"),
    [*((seed, ARCHITECTURES) for seed in range(LIVES)), *((seed, RECURRENT) for seed in range(6))],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_every_number_of_a_random_life_is_the_oracles(seed: int, architectures: Any) -> None:
    assert Life(seed, architectures=architectures).live() > 0


@pytest.mark.parametrize("seed", [181, 195, 236])
def test_samples_that_start_afresh_after_a_restart_do_so_under_the_new_configuration(seed: int) -> None:
    Life(seed).live()


def test_the_oracle_sees_keys_and_values_of_other_weights_than_a_record_says() -> None:
    policy = Policy(make_model("qwen3"), seed=0)
    engine = make_engine(policy.model)
    engine.add_request(token_ids(20), at_random(4))
    (record,) = steps(engine, 9)
    policy.update()
    check_record(policy, record, [])
    live = record[-1]
    live.kv_spans = VersionSpans([(1, 12), (0, len(live.kv_spans) - 12)])
    with pytest.raises(AssertionError, match="log-prob"):
        check_record(policy, record, [])
