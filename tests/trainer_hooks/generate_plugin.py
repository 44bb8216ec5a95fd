"""Pytest plugin: `model.generate` of any suite runs on the engine. Compare a run with and without it.

    python -m pytest -p tests.trainer_hooks.generate_plugin SUITE       every model is attached for each call
    python -m pytest SUITE                                              transformers' own loop

A model that the engine refuses, and a call that it does not serve, runs transformers' loop; the summary counts both. Made
for suites of others, with this repository in PYTHONPATH: in a checkout of transformers the families in `tests/models`, which
mix in `GenerationTesterMixin`; in one of TRL `tests/test_rloo_trainer.py` and `tests/experimental`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from functools import wraps
from typing import Any

from torch import nn
from transformers import GenerationMixin

from rollout.config import Advanced, InferenceConfig
from rollout.errors import RolloutError
from rollout.manager.manager import RolloutManager
from trainer_hooks.generate import attach

COUNTS: Counter[str] = Counter()
_own = GenerationMixin.generate
_inside: list[nn.Module] = []


@wraps(_own)
def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach the model for one call."""
    if _inside:
        return _own(self, *args, **kwargs)
    _inside.append(self)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                manager = RolloutManager(
                    self, None, InferenceConfig(kv_cache_blocks=512, advanced=Advanced(block_size_tokens=16))
                )
                hook = attach(self, manager)
            except (RolloutError, TypeError, ValueError, AttributeError, NotImplementedError) as refused:
                COUNTS[f"model refused: {type(self).__name__}: {refused!s:.90}"] += 1
                hook = None
        if hook is None:
            return _own(self, *args, **kwargs)
        try:
            return _own(self, *args, **kwargs)
        finally:
            COUNTS["served"] += hook.served
            COUNTS.update({f"fallback: {reason}": number for reason, number in hook.fallbacks.items()})
            hook.detach()
            manager.close()
    finally:
        _inside.clear()


GenerationMixin.generate = generate


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for name, number in COUNTS.most_common():
        terminalreporter.write_line(f"{number:6} {name}")
