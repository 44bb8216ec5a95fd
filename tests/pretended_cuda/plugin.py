"""Plugin of pytest: `-p tests.pretended_cuda.plugin` runs tests marked `gpu` on the pretended device."""

from __future__ import annotations

from tests.pretended_cuda.driver import install

_mode = install()


def pytest_configure() -> None:
    """Before tests are collected, which ask for the device when they are imported."""
    _mode.__enter__()


def pytest_unconfigure() -> None:
    _mode.__exit__(None, None, None)
