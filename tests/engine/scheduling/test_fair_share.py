"""Tests of `FairShares`, and of the order in which an engine serves its clients' requests."""

from __future__ import annotations

from collections.abc import Hashable

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.scheduling.queues import SWEEP_AT, FairShares
from tests.engines import greedily, make_engine, token_ids


def order(arrivals: list[tuple[str, int]], shares: FairShares | None = None) -> list[str]:
    """Clients in the order in which their (client, tokens) requests are served."""
    shares = shares or FairShares()
    turns = [(shares.turn(0, client, tokens), number, client) for number, (client, tokens) in enumerate(arrivals)]
    return [client for _, _, client in sorted(turns)]


def test_the_requests_of_one_client_are_served_in_order_of_arrival_whatever_they_cost() -> None:
    shares = FairShares()
    turns = [shares.turn(0, None, tokens) for tokens in (100, 1, 5000, 3, 0, 0)]
    assert turns == sorted(set(turns))


def test_clients_that_wait_together_get_equal_shares_of_the_tokens() -> None:
    served = order([*[("a", 10)] * 6, *[("b", 30)] * 2])
    assert served == ["a", "b", "a", "a", "a", "b", "a", "a"]


def test_a_client_that_comes_late_is_next_but_has_no_claim_on_the_past() -> None:
    shares = FairShares()
    turns = [shares.turn(0, "a", 10) for _ in range(100)]
    for turn in turns[:50]:
        shares.admitted(0, turn)
    late = [shares.turn(0, "b", 10) for _ in range(3)]
    assert late == turns[49:52]


def test_each_priority_has_a_time_of_its_own() -> None:
    shares = FairShares()
    for _ in range(100):
        shares.admitted(1, shares.turn(1, "a", 1000))
    assert shares.turn(0, "b", 1) == 0


def test_clients_without_a_claim_are_forgotten() -> None:
    shares = FairShares()
    for number in range(50 * SWEEP_AT):
        shares.admitted(0, shares.turn(0, number, 5))
        shares.admitted(0, shares.turn(0, number, 5))
    assert len(shares._charged_to) <= SWEEP_AT + 1


# --- in an engine -------------------------------------------------------------------------------------------------------


def endings(engine: DynamicInferenceEngine) -> dict[int, int]:
    """Request id → number of the step in which its last sample ended."""
    ended: dict[int, int] = {}
    for step in range(10_000):
        if not engine.has_unfinished:
            return ended
        ended |= {record.request_id: step for record in engine.step()}
    raise AssertionError("requests never end")


def ask(engine: DynamicInferenceEngine, count: int, client: Hashable, *, n: int = 1, first: int = 0) -> list[int]:
    return [
        engine.add_request(token_ids(5, seed=first + number), greedily(1, n=n), client=client)
        for number in range(count)
    ]


def test_one_token_behind_another_clients_hundreds_of_samples_comes_with_the_first_steps() -> None:
    engine = make_engine("qwen3", max_requests=8)
    greedy = ask(engine, 300, "greedy", n=2)
    (modest,) = ask(engine, 1, "modest", first=1000)
    ended = endings(engine)
    assert ended[modest] <= 1
    assert ended[greedy[-1]] >= 300 * 2 // 8 - 1
    assert [ended[number] for number in greedy] == sorted(ended[number] for number in greedy)


def test_callers_that_name_no_client_are_served_in_order_of_arrival() -> None:
    engine = make_engine("qwen3", max_requests=4)
    numbers = [engine.add_request(token_ids(5, seed=seed), greedily(1 + seed % 3)) for seed in range(40)]
    assert numbers == sorted(numbers)
    admitted: list[int] = []
    while engine.has_unfinished:
        engine.step()
        step = engine.parts.stepper.last
        assert step is not None
        admitted += [sequence.record.request_id for sequence in step.prefills]
    assert admitted == numbers


def test_a_sample_that_was_evicted_keeps_its_turn() -> None:
    engine = make_engine("qwen3", max_requests=4, kv_cache_blocks=10, block_size_tokens=4, max_sequence_length=40)
    for seed in range(4):
        engine.add_request(token_ids(6, seed=seed), greedily(16), client="a")
    for seed in range(4):
        engine.add_request(token_ids(6, seed=10 + seed), greedily(16), client="b")
    ended = endings(engine)
    assert engine.stats()["preemptions"] > 0
    assert max(ended[0], ended[4]) <= min(ended[3], ended[7]), "the clients' first requests end before their last ones"
