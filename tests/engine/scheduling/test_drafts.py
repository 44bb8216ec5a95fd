"""Tests of what drafts are found, and of how many are judged to pay."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rollout.engine.scheduling import drafts
from rollout.engine.scheduling.drafts import (
    FIRST_WAIT,
    MAX_MATCH,
    Acceptance,
    CompletionHistory,
    DraftBudget,
    continuation,
    joined,
    matches,
)  # fmt: skip
from rollout.engine.scheduling.run_ahead import StepCost


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def drafted(pieces: list[np.ndarray], context: np.ndarray, most: int = 8) -> tuple[list[int], list[float], int]:
    corpus = joined(pieces)
    after, matched = matches(corpus, context)
    return (*(continuation(corpus, after, most) if matched else ([], [])), matched)


def test_the_longest_match_is_continued_and_not_a_shorter_one() -> None:
    own = ids(1, 2, 3, 9, 5, 2, 3, 7, 1, 2, 3)
    tokens, shares, matched = drafted([own], own)
    assert (tokens[:3], matched) == ([9, 5, 2], 3)
    assert shares[0] == 1


def test_places_vote_on_each_token_and_those_outvoted_leave() -> None:
    pieces = [ids(4, 5, 1, 1), ids(4, 5, 1, 2), ids(4, 5, 8, 9), ids(4, 5)]
    tokens, shares, _ = drafted(pieces, ids(4, 5))
    assert tokens == [1, 1]
    assert shares == pytest.approx([2 / 3, 1 / 2])


def test_a_continuation_ends_with_its_piece() -> None:
    assert drafted([ids(1, 2, 3), ids(7, 7)], ids(2))[0] == [3]
    assert drafted([ids(1, 2)], ids(2)) == ([], [], 0)


def test_a_match_is_as_long_as_the_context_or_the_limit() -> None:
    piece = np.arange(50, dtype=np.int32)
    assert drafted([piece], piece[:2])[2] == 2
    assert drafted([piece], piece[:40])[2] == MAX_MATCH


def test_history_is_bounded_by_prompt_and_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "PER_PROMPT", 10)
    monkeypatch.setattr(drafts, "ALL_PROMPTS", 25)
    history = CompletionHistory()
    for token in range(4):
        history.add(1, np.full(4, token, np.int32))
    assert set(history.of(1).tolist()) == {3, 2, -1}, "the newest of the prompt stay"
    history.add(2, np.full(99, 7, np.int32))
    assert (history.of(2) == 7).sum() == 10
    history.of(1)
    history.add(3, np.full(10, 8, np.int32))
    assert history.num_tokens <= 25
    assert len(history.of(2)) == 1, "the prompt unused for longest is forgotten"
    assert len(history.of(1)) > 1


# --- what pays ----------------------------------------------------------------------------------------------------------


def measured(base: float, position: float, noise: float = 0.0, rows: int = 1) -> DraftBudget:
    """A budget after steps of base + position · P seconds."""
    numbers, budget = random.Random(0), DraftBudget(StepCost())
    for step in range(60):
        positions = rows + step % 9
        budget.cost.observe(positions, (base + position * positions) * (1 + noise * numbers.random()))
    return budget


def test_the_cost_of_a_position_is_found_in_noisy_steps() -> None:
    assert measured(8e-3, 5e-4).cost.position == pytest.approx(5e-4, rel=0.1)
    assert measured(8e-3, 5e-4, noise=0.2).cost.position == pytest.approx(5e-4, rel=0.4)


def test_one_slow_step_changes_the_cost_little() -> None:
    budget = measured(8e-3, 5e-4)
    before = budget.cost.step(4)
    budget.cost.observe(4, 5.0)
    assert budget.cost.step(4) < 1.2 * before


def test_drafts_pay_where_few_rows_run_and_not_in_a_full_batch() -> None:
    likely = [1.0] * 16
    alone = measured(8e-3, 5e-4)
    assert alone.start(1)
    assert alone.length(12, likely) > 6
    full = measured(8e-3, 6e-4, rows=128)
    assert not full.start(128)


def test_drafts_get_shorter_as_they_are_rejected_and_longer_as_they_are_accepted() -> None:
    lengths = {}
    for accepted in (0, 8):
        budget = measured(8e-3, 5e-4)
        for _ in range(100):
            budget.acceptance.learn(1, [1.0] * 8, accepted)
        budget.start(1)
        lengths[accepted] = budget.length(1, [1.0] * 8)
    assert lengths == {0: 0, 8: 8}


def test_acceptance_is_learnt_up_to_the_first_rejected_token_only() -> None:
    acceptance, untouched = Acceptance(), Acceptance().of(5)
    acceptance.learn(3, [1.0] * 4, 1)
    assert acceptance.of(3) > Acceptance().of(3)
    assert acceptance.of(4) < Acceptance().of(4)
    assert acceptance.of(5) == untouched


def test_trials_that_fail_come_less_and_less_often() -> None:
    budget, trials = measured(8e-3, 6e-4, rows=128), []
    for step in range(2000):
        if budget.start(128) and budget.trial_due:
            trials.append(step)
            budget.made(trial=True)
            budget.failed_trial()
    gaps = np.diff(trials)
    assert trials[0] == FIRST_WAIT
    assert len(trials) < 8
    assert (gaps[1:] > 1.9 * gaps[:-1]).all()


def test_a_clock_that_stands_still_lets_every_draft_pay() -> None:
    budget = DraftBudget(StepCost())
    assert budget.cost.step(3) == 0
    assert budget.start(3)
    assert budget.length(1, [0.1] * 5) == 5
