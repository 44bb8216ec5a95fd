"""Configurations from plain keyword arguments."""

from __future__ import annotations

from typing import Any

from rollout.config import Advanced, CoordinatorAdvanced, CoordinatorConfig, InferenceConfig


def engine_config(**options: Any) -> InferenceConfig:
    """An `InferenceConfig` whose advanced options are given among the others."""
    advanced = {name: options.pop(name) for name in Advanced.names() if name in options}
    return InferenceConfig(**options, advanced=Advanced(**advanced))


def coordinator_config(**options: Any) -> CoordinatorConfig:
    """A `CoordinatorConfig` whose advanced options are given among the others."""
    advanced = {name: options.pop(name) for name in CoordinatorAdvanced.names() if name in options}
    return CoordinatorConfig(**options, advanced=CoordinatorAdvanced(**advanced))
