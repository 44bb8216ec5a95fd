"""Configurations from plain keyword arguments."""

from __future__ import annotations

from typing import Any

from rollout.config import Advanced, InferenceConfig


def engine_config(**options: Any) -> InferenceConfig:
    """An `InferenceConfig` whose advanced options are given among the others."""
    advanced = {name: options.pop(name) for name in Advanced.names() if name in options}
    return InferenceConfig(**options, advanced=Advanced(**advanced))
