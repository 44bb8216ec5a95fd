"""Tests of a manager with a journal: groups finished before a kill are returned once and not computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.errors import EngineStateError, InvalidRequestError, JournalError
from rollout.journal import Journal
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from tests.models import make_model
from tests.rollouts import completions, make_rollout, update

SHORT = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(n=2, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model("qwen3", num_hidden_layers=1)


@contextmanager
def life(model: Any, folder: Path, state: dict[str, Any] | None = None) -> Iterator[RolloutManager]:
    """A manager of a process that is killed: nothing more is written at its end."""
    rollout = make_rollout(model, journal=Journal(folder))
    if state is not None:
        rollout.load_state_dict(state)
    yield rollout
    rollout._rounds.loop.journal._journal._release()


def sampled(batch: RolloutBatch) -> Counter[tuple[tuple[int, ...], ...]]:
    rows = [(tuple(each.prompt_tokens), tuple(each.generated_tokens)) for each in batch]
    return Counter(rows)


def test_what_ended_after_the_checkpoint_is_handed_out_once_and_not_computed_again(tmp_path, model):
    with life(model, tmp_path) as rollout:
        handed_before = rollout.generate([[9, 9]], SHORT)
        rollout.submit([[5], [6], [7]], [SHORT, LONG, LONG], metadata=[1, 2, 3])
        rollout.engine.step()
        state = rollout.state_dict()
        lost = rollout.generate([], min_groups=1)
        rollout.weights_updated()
        lost_later = rollout.generate([[8], [4]], [SHORT, SHORT])
        rollout.submit([[3]], LONG)

    for _ in range(2):
        with life(model, tmp_path, state) as rollout:
            assert rollout.policy_version == 0
            assert rollout.groups_in_flight == 3
            again = rollout.generate([], min_groups=1)
            assert completions(again)[: len(lost)] == completions(lost)
            again_later = rollout.generate([[8], [4]], [SHORT, SHORT])
            assert completions(again_later) == completions(lost_later)
            assert int(again_later.policy_staleness.max()) == 0

    with life(model, tmp_path, state) as rollout:
        everything = rollout.generate([[8], [4], [3], [8]], [SHORT, SHORT, LONG, SHORT], min_groups=7)
        assert everything.num_groups == 7
        assert sampled(handed_before).keys().isdisjoint(sampled(everything))
        assert not sampled(lost) + sampled(lost_later) - sampled(everything)
        # One finished group of prompt 8, which was asked for twice now: the second is a sample of its own.
        assert max(sampled(everything).values()) == 1
        assert len({group for group, _ in everything.groups()}) == 7


def test_nothing_is_computed_for_groups_that_were_finished(tmp_path, model):
    with life(model, tmp_path) as rollout:
        state = rollout.state_dict()
        first = rollout.generate([[5], [6]], LONG, metadata=["a", "b"])
    with life(model, tmp_path, state) as rollout:
        rollout.engine.step = lambda **_: pytest.fail("computed again")
        again = rollout.generate([[5], [6]], LONG, metadata=["a", "b"])
        assert (completions(again), again.metadata) == (completions(first), first.metadata)
        del rollout.engine.step
        other = rollout.generate([[5], [6]], LONG, metadata=["a", "c"])
        assert completions(other) != completions(first)


def test_a_call_that_is_refused_leaves_what_was_finished_for_the_next(tmp_path, model):
    with life(model, tmp_path) as rollout:
        state = rollout.state_dict()
        first = rollout.generate([[5], [5]], LONG)
    with life(model, tmp_path, state) as rollout:
        with pytest.raises(InvalidRequestError, match=r"prompts\[2\]"):
            rollout.generate([[5], [5], [1] * 5000], LONG)
        rollout.engine.step = lambda **_: pytest.fail("computed again")
        assert completions(rollout.generate([[5], [5]], LONG)) == completions(first)


def test_a_group_that_a_full_disk_kept_out_is_appended_with_the_next(tmp_path, model, monkeypatch):
    with life(model, tmp_path) as rollout:
        state = rollout.state_dict()
        rollout.submit([[5], [6]], LONG)
        with monkeypatch.context() as full:
            full.setattr(Journal, "append", lambda *group: (_ for _ in ()).throw(JournalError("full")))
            with pytest.raises(JournalError):
                rollout.generate([], min_groups=2)
        first = rollout.generate([], min_groups=2)
        rollout.generate([[7]], SHORT)
    with life(model, tmp_path, state) as rollout:
        rollout.engine.step = lambda **_: pytest.fail("computed again")
        assert completions(rollout.generate([[5], [6]], LONG)) == completions(first)


def test_a_checkpoint_that_cannot_be_made_leaves_the_journal_to_the_last_that_was(tmp_path, model, monkeypatch):
    with life(model, tmp_path) as rollout:
        state = rollout.state_dict()
        first = rollout.generate([[5], [6]], LONG)
        with monkeypatch.context() as failing:
            failing.setattr(
                rollout.engine, "snapshot", lambda: (_ for _ in ()).throw(EngineStateError("other adapters"))
            )
            for _ in range(3):
                with pytest.raises(EngineStateError, match="other adapters"):
                    rollout.state_dict()
    with life(model, tmp_path, state) as rollout:
        rollout.engine.step = lambda **_: pytest.fail("computed again")
        assert completions(rollout.generate([[5], [6]], LONG)) == completions(first)


def test_what_was_finished_after_a_checkpoint_that_does_not_load_is_nobodys(tmp_path, model, monkeypatch):
    with life(model, tmp_path) as rollout:
        state = rollout.state_dict()
        rollout.generate([[5]], LONG)
    with life(model, tmp_path) as rollout:
        with monkeypatch.context() as failing:
            failing.setattr(rollout.engine, "weights_updated", lambda version: (_ for _ in ()).throw(KeyError("no")))
            with pytest.raises(KeyError):
                rollout.load_state_dict(state)
        rollout.engine.step = lambda **_: (_ for _ in ()).throw(KeyError("computed anew"))
        with pytest.raises(KeyError, match="computed anew"):
            rollout.generate([[5]], LONG)


def test_after_the_next_checkpoint_it_is_not_handed_out_a_second_time(tmp_path, model):
    with life(model, tmp_path) as rollout:
        rollout.generate([[5], [6]], LONG)
        state = rollout.state_dict()
    with life(model, tmp_path, state) as rollout:
        rollout.engine.step = lambda **_: (_ for _ in ()).throw(KeyError("computed anew"))
        with pytest.raises(KeyError, match="computed anew"):
            rollout.generate([[5]], LONG)


def test_tokens_of_weights_that_are_gone_have_the_version_of_the_checkpoint(tmp_path):
    model = make_model("qwen3", num_hidden_layers=1)
    with life(model, tmp_path) as rollout:
        rollout.weights_updated()
        rollout.submit([[5]], LONG)
        rollout.engine.step()
        state = rollout.state_dict()
        for seed in range(3):
            rollout.engine.step()
            update(model, rollout, seed)
        lost = rollout.generate([], min_groups=1)
        assert lost.policy_versions.unique().tolist()[-1] == 4
    with life(model, tmp_path, state) as rollout:
        batch = rollout.generate([], min_groups=1)
        assert completions(batch) == completions(lost)
        assert batch.policy_versions[batch.response_mask].unique().tolist() == [1]
        assert batch.logprobs.equal(lost.logprobs)
