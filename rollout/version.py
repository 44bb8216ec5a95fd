"""Version of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rollout-engine")
except PackageNotFoundError:
    # The folders are on the path without being installed.
    __version__ = "0+unknown"
