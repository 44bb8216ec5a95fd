"""One nursery for all tests of this folder: it takes seconds to import what a rank needs."""

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
