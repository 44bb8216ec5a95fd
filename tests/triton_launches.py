"""Which compiled kernels launches ask for: Triton's own rules for an H200 that is not there, and nothing is compiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def recorded() -> Iterator[dict[str, set[str]]]:
    """Compiled kernels that launches in this block ask for, by name; the launches do nothing."""
    from triton import knobs
    from triton.runtime import driver

    asked: dict[str, set[str]] = defaultdict(set)

    def ask(*, key: str, fn: Any, **_: Any) -> bool:
        asked[fn.name].add(key)
        return True  # Not to be compiled.

    before, hook = driver._active, knobs.runtime.jit_cache_hook
    driver.set_active(_Driver())
    knobs.runtime.jit_cache_hook = ask
    try:
        yield asked
    finally:
        driver._active, knobs.runtime.jit_cache_hook = before, hook
