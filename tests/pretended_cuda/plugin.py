"""Plugin of pytest: `-p tests.pretended_cuda.plugin` runs tests marked `gpu` on the pretended device."""

from __future__ import annotations

import pytest

from tests.pretended_cuda.driver import install

_mode = install()


def pytest_configure() -> None:
    """Before tests are collected, which ask for the device when they are imported."""
    _mode.__enter__()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what measures or fills the device's memory, which here is the host's, or asks torch's compiler for its code."""
    for each in items:
        if each.get_closest_marker("whole_device") or each.get_closest_marker("real_device"):
            each.add_marker(pytest.mark.skip(reason="needs a real device"))


def pytest_unconfigure() -> None:
    _mode.__exit__(None, None, None)
