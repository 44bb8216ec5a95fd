"""Pytest configuration and fixtures shared by all tests."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import settings

from tests.distributed.job.nursery import Nursery

# The models are tiny: a second thread costs more than it brings, and many times more when the machine is busy.
torch.set_num_threads(1)

# A busy machine may take any time for an example.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# A shell starts background jobs with Ctrl-C ignored, and processes inherit that: tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


IMPORTED_SINCE = 100
"""Modules, whose objects are worth a look for garbage before they are frozen."""
_frozen_modules = 0


def freeze_imports() -> None:
    """Exempt the million objects of imports from garbage collection, which would visit them each time."""
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


def pytest_collection_finish() -> None:
    freeze_imports()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_runtest_logfinish() -> None:
    """Trainers and wandb are imported when they are first used, and some collect garbage at every step."""
    if len(sys.modules) > _frozen_modules + IMPORTED_SINCE:
        freeze_imports()


@pytest.fixture(autouse=True)
def nothing_is_left_switched_on() -> Iterator[None]:
    """A test that leaves autocast or no_grad behind would make later ones fail for no reason of theirs."""
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """One for all tests of several ranks: importing what a rank needs takes seconds."""
    with closing(Nursery()) as nursery:
        yield nursery
