"""Fixtures of the job tests: one nursery process for all, because importing what a rank needs takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.job.nursery import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    try:
        yield nursery
    finally:
        nursery.close()
