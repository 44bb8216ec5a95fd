"""Tests that every Triton kernel compiles for the GPUs that are served, by the installed Triton, within its limits.

Each kernel is compiled through its own launch wrapper, without a device. The kernels have no arrays of their own, so their
stack is what the compiler spilled. `pip install triton==3.6.0` compiles with the Triton of torch 2.11.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine.kernels import triton_paged
from rollout.engine.kernels.decode_parts import DecodeParts
from rollout.engine.kernels.triton_paged import TritonPaged

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
KERNELS = {"attend_chunks", "attend_parts", "merge", "write"}

CPU = torch.device("cpu")
SHARED_BYTES = {80: 163 * 2**10, 90: 227 * 2**10}
"""Bytes of shared memory of a block of threads, by architecture."""
REGISTERS = 255
SPILLED = {"attend_parts": 16, "attend_chunks": 40}
"""Bytes of stack of a thread: of attention on sm_80. Other kernels have none."""
PIPELINED = ("attend_parts", "attend_chunks")
"""Kernels that load the next tile while they compute this one, in 16 bits."""
SINGLE_LOADS = {"merge": 1, "attend_chunks": 2, "write": 2}
"""Loads of two bytes: of sinks, and where a row has few heads."""


@dataclass(frozen=True)
class Heads:
    """Attention that is compiled."""

    dtype: torch.dtype
    dim: int
    group: int
    kv_heads: int
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False

    def __str__(self) -> str:
        rules = (("cap", self.softcap), ("window", self.window), ("sinks", self.sinks))
        named = "".join(f" {name}" for name, value in rules if value)
        return f"{str(self.dtype)[6:]} d{self.dim} g{self.group}{named}"


ATTENTION = (
    Heads(torch.bfloat16, 128, 2, 8),
    Heads(torch.bfloat16, 64, 8, 8, window=128, sinks=True),
    Heads(torch.bfloat16, 96, 5, 8),
    Heads(torch.bfloat16, 256, 4, 2, softcap=50.0),
    Heads(torch.bfloat16, 512, 8, 1),
    Heads(torch.float16, 128, 1, 8),
    Heads(torch.float32, 256, 2, 4),
)
"""Every dtype, size of a head and rule once, mostly as Qwen3, gpt-oss, Gemma 2 and Gemma 4 combine them."""
LARGEST = tuple(heads for heads in ATTENTION if heads.dim >= 256)
"""Those that need most registers and shared memory."""


@dataclass(frozen=True)
class Compiled:
    """The resources that a compiled kernel takes for each of its threads or blocks."""

    name: str
    variant: str
    architecture: int
    registers: int
    stack: int
    shared: int
    single_loads: int
    """Loads of two bytes of global memory, in PTX."""
    async_copies: int
    """Copies to shared memory in 16 bytes that are not waited for, in PTX."""

    @property
    def above(self) -> list[str]:
        """Limits that it exceeds."""
        limits = {
            "registers": REGISTERS, "stack": SPILLED.get(self.name, 0), "shared": SHARED_BYTES[self.architecture],
            "single_loads": SINGLE_LOADS.get(self.name, 0),
        }  # fmt: skip
        if self.name in PIPELINED and "float32" not in self.variant and not self.async_copies:
            return ["no asynchronous copies"]
        return [f"{name} {getattr(self, name)} > {most}" for name, most in limits.items() if getattr(self, name) > most]

    def __str__(self) -> str:
        used = f"{self.registers:4} registers, {self.stack:4} B of stack, {self.shared / 1024:6.1f} KiB shared"
        loads = f"{self.single_loads:2} loads of 2 B, {self.async_copies:2} asynchronous copies"
        return f"sm_{self.architecture} {self.name:13} {self.variant:32} {used}, {loads}"


class Driver:
    """The part of a device's driver that Triton calls before it compiles."""

    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        return divmod(self._architecture, 10)


class _Launcher:
    """A kernel whose launches compile it."""

    def __init__(self, kernel: Any, told: Callable[[str, Any], None]) -> None:
        self._kernel, self._told = kernel, told

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **options: Any) -> None:
            self._told(self._kernel.fn.__name__, self._kernel.run(*given, grid=grid, warmup=True, **options))

        return launch


def compile_all(architecture: int, folder: Path, attention: Sequence[Heads] = ATTENTION) -> Iterator[Compiled]:
    """Every kernel in every variant, compiled for an architecture (90: sm_90).

    Args:
        folder: for files meanwhile.
    """
    found: dict[str, Compiled] = {}
    variant = [""]

    def told(name: str, kernel: Any) -> None:
        if kernel.hash not in found:
            found[kernel.hash] = _measured(name, variant[0], architecture, kernel, folder)

    with _pretended(architecture):
        paged = _launching(told)
        for heads in attention:
            variant[0], before = str(heads), len(found)
            _attend(paged, heads)
            yield from list(found.values())[before:]


def _launching(told: Callable[[str, Any], None]) -> TritonPaged:
    kernels = triton_paged._kernels.__wrapped__(CPU)
    assert kernels is not None
    return TritonPaged(_launchers(kernels, told))


def _attend(paged: TritonPaged, heads: Heads) -> None:
    keys = torch.zeros(64, 16, heads.kv_heads, heads.dim, dtype=heads.dtype)
    query = torch.zeros(300, heads.kv_heads * heads.group, heads.dim, dtype=heads.dtype)
    ids = torch.zeros(64, dtype=torch.int32)
    tables = torch.zeros(64, 64, dtype=torch.int32)
    sinks = query[0, :, 0].contiguous() if heads.sinks else None
    rules: Any = {"scaling": 0.1, "window": heads.window, "softcap": heads.softcap, "sinks": sinks}
    paged.write(keys[0, :4], keys[0, :4], keys, keys, ids[:4])
    paged.decode(query[:4], keys, keys, tables[:4], DecodeParts(ids[:4] + 600, 16), **rules)
    begins = torch.zeros(65, dtype=torch.int32)
    paged.prefill(query, keys, keys, tables, begins, ids, **rules)


def _launchers(kernels: Any, told: Callable[[str, Any], None]) -> Any:
    made = {each.name: getattr(kernels, each.name) for each in fields(kernels)}
    return type(kernels)(
        **{name: each if isinstance(each, bool) else _Launcher(each, told) for name, each in made.items()}
    )


@contextmanager
def _pretended(architecture: int) -> Iterator[None]:
    from triton.runtime import driver

    before, programs = driver._active, triton_paged._programs
    driver.set_active(Driver(architecture))
    triton_paged._programs = lambda _: 3  # type: ignore[assignment]
    try:
        yield
    finally:
        driver._active, triton_paged._programs = before, programs


def _measured(name: str, variant: str, architecture: int, kernel: Any, folder: Path) -> Compiled:
    (cubin := folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    used = _run("cuobjdump", "-res-usage", str(cubin))
    registers, stack = (int(each) for each in re.findall(r"REG:(\d+) STACK:(\d+)", used)[-1])
    ptx, shared = str(kernel.asm["ptx"]), int(kernel.metadata.shared)
    counts = ptx.count("ld.global.b16"), ptx.count("cp.async.cg")
    return Compiled(name, variant, architecture, registers, stack, shared, *counts)


def _run(program: str, *arguments: str) -> str:
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / program
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "attention"), [(80, LARGEST), (90, ATTENTION)], ids=["sm_80", "sm_90"])
def test_every_kernel_fits_the_device(
    architecture: int, attention: tuple[Heads, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = list(compile_all(architecture, tmp_path, attention))
    assert {each.name for each in found} == KERNELS
    assert len(found) > 3 * len(attention)
    assert [str(each) for each in found if each.above] == []
