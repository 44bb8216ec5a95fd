"""Tests of `LLM` on several ranks, each a process with a real model: requests, work distribution, shutdown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters import saved_adapter
from tests.distributed.job.nursery import Nursery
from tests.engines import at_random, make_engine, token_ids
from tests.llm import llm_jobs
from tests.models import make_model
from tests.ranks import run_together

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def alone(count: int, length: int) -> list[list[int]]:
    """Return the completions of one engine for the same prompts."""
    engine = make_engine(make_model("qwen3", num_hidden_layers=2), kv_cache_blocks=512)
    return [
        engine.generate([token_ids(5, seed=seed)], at_random(length, seed=seed))[0].generated_tokens
        for seed in range(count)
    ]


def test_the_primary_rank_asks_all_compute_and_its_shutdown_ends_all(nursery: Nursery) -> None:
    first, second = run_together(nursery, 2, llm_jobs.asks_and_computes)
    assert (first["primary"], second["primary"]) == (True, False)
    assert first["tokens"] == alone(24, 30)
    assert first["made"] + second["made"] == 24 * 30
    assert min(first["made"], second["made"]) > 0
    assert [text.partition(" on a rank")[0] for text in second["refused"]] == [
        "generate()",
        "stream()",
        "submit()",
        "serve()",
    ]
    assert (first["state"], second["state"]) == ("stopped", "stopped")


def test_control_calls_of_the_primary_rank_reach_every_engine(nursery: Nursery) -> None:
    first, second = run_together(nursery, 2, llm_jobs.pauses_and_goes_on)
    assert first == ["paused", "suspended", "paused", "running", "version 1"]
    assert second[-1] == "version 1"


def test_an_adapter_reaches_every_rank_or_none(nursery: Nursery, tmp_path: Path) -> None:
    folders = {name: saved_adapter(llm_jobs.small(), tmp_path / name, r=rank) for name, rank in (("a", 4), ("b", 2))}
    first, second = run_together(nursery, 2, llm_jobs.names_an_adapter, base=str(tmp_path))
    assert first["refused"] == (1, {})
    for folder, mixed in zip(folders.values(), first["mixed"], strict=True):
        engine = make_engine(llm_jobs.small(), kv_cache_blocks=512)
        engine.load_adapter("x", folder)
        params = [at_random(20, seed=seed, adapter="x" if seed % 2 else None) for seed in range(16)]
        assert mixed == [
            engine.generate([token_ids(5, seed=seed)], params[seed])[0].generated_tokens for seed in range(16)
        ]
    assert first["versions"] == [1, 2]
    assert min(first["made"], second["made"]) > 0
    assert first["ended"] <= 6  # those that the engines had by then
    assert all("adapter 'x'" in error for error in first["errors"])


def test_a_killed_rank_costs_no_request(nursery: Nursery) -> None:
    first, second = run_together(nursery, 2, llm_jobs.loses_a_rank)
    assert first == alone(12, 60)
    assert second is None


def test_ranks_do_not_wait_for_a_primary_rank_that_has_died(nursery: Nursery) -> None:
    first, second = run_together(nursery, 2, llm_jobs.is_left_alone)
    assert first is None
    assert "ConnectionLostError" in second
