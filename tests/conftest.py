"""Pytest configuration and fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# The models are tiny: a second thread costs more than it brings, and many times more when the machine is busy.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_is_left_switched_on() -> Iterator[None]:
    """A test that leaves autocast or no_grad behind would make later ones fail for no reason of theirs."""
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
