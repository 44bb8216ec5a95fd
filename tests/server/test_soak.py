"""Tests of many streams over HTTP while another thread pauses, suspends, changes the weights and resumes."""

from __future__ import annotations

import pytest

from tests.server.soak import soak

STREAMS = 256
SECONDS = 5.0
GROWTH_MB = 48.0
"""Caches that fill in the first seconds; 256 streams that leaked a few KiB each would be far beyond."""


@pytest.mark.slow
def test_every_stream_ends_right_whatever_happens_to_the_weights_under_it() -> None:
    ledger = soak(STREAMS, SECONDS)
    assert ledger.problems == []
    assert ledger.streams >= STREAMS
    assert ledger.seen == set(range(max(ledger.seen) + 1)), "no version is passed over"
    assert max(ledger.seen) >= 3
    assert ledger.memory_mb[-1] - ledger.memory_mb[1] < GROWTH_MB
