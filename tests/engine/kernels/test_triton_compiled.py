"""Tests of what Triton compiles for the GPUs that are served, without one: limits of every kernel, and how many there are.

Each kernel is compiled through its own launch wrapper. The kernels have no arrays of their own, so their stack is what the
compiler spilled. `pip install triton==3.6.0` compiles with the Triton of torch 2.11.

Triton compiles a kernel for the types of its arguments, for numbers that are 1 or that 16 divides, and for addresses that 16
divides. A kernel that is compiled within a step holds it up for a second, and in a capture it could not be loaded.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rollout.engine.graphs.decode_step import DecodeState
from rollout.engine.kernels import triton_attention, triton_paged
from rollout.engine.kernels.decode_parts import DecodeParts
from rollout.engine.kernels.torch_paged import TorchPagedAttention
from rollout.engine.kernels.triton_attention import TritonPagedAttention
from rollout.engine.kernels.triton_paged import TritonPaged
from rollout.engine.memory.buffers import ALIGNMENT, packed, upload_together
from tests.engine.kernels.paged_step import Step

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing"),
]
CPU, BF16 = torch.device("cpu"), torch.bfloat16


class Driver:
    """The driver of a device, as far as Triton asks it before it compiles."""

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


@contextmanager
def pretended(architecture: int) -> Iterator[TritonPaged]:
    """The kernels on a device that is not there; 90 is sm_90."""
    from triton.runtime import driver

    kernels, before = triton_paged._kernels.__wrapped__(CPU), driver._active
    assert kernels is not None
    driver.set_active(Driver(architecture))
    try:
        yield TritonPaged(kernels)
    finally:
        driver._active = before


# --- limits -----------------------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """Attention that is compiled."""

    dtype: torch.dtype
    dim: int
    group: int
    kv_heads: int
    rules: dict[str, Any] = {}  # noqa: RUF012 - never changed


ATTENTION = (
    Heads(BF16, 128, 2, 8),
    Heads(BF16, 64, 8, 8, {"window": 128, "sinks": torch.zeros(64, dtype=BF16)}),
    Heads(BF16, 96, 5, 8),
    Heads(BF16, 256, 4, 2, {"softcap": 50.0}),
    Heads(BF16, 512, 8, 1),
    Heads(torch.float16, 128, 1, 8),
    Heads(torch.float32, 256, 2, 4),
)
"""Every dtype, size of a head and rule once, mostly as Qwen3, gpt-oss, Gemma 2 and Gemma 4 combine them."""
LARGEST = tuple(heads for heads in ATTENTION if heads.dim >= 256)
"""Those that need most registers and shared memory."""
KERNELS = {"attend_chunks", "attend_parts", "merge", "write"}
SHARED_BYTES = {80: 163 * 2**10, 90: 227 * 2**10}
"""The most that a block of threads may use, by architecture."""
REGISTERS = 255
SPILLED = {"attend_parts": 16, "attend_chunks": 40}
"""Bytes of stack of a thread: of attention on sm_80. Other kernels have none."""
SINGLE_LOADS = {"merge": 1, "attend_chunks": 2, "write": 2}
"""Loads of two bytes: of sinks, and where a row has few heads."""


def above(name: str, heads: Heads, architecture: int, kernel: Any, cubin: Path) -> list[str]:
    """Limits that a compiled kernel exceeds."""
    import triton.backends.nvidia

    cubin.write_bytes(kernel.asm["cubin"])
    program = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    done = subprocess.run([program, "-res-usage", cubin], capture_output=True, text=True, check=True)
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)[-1])
    ptx = str(kernel.asm["ptx"])
    used = {
        "registers": (registers, REGISTERS),
        "bytes of stack": (stack, SPILLED.get(name, 0)),
        "bytes of shared memory": (int(kernel.metadata.shared), SHARED_BYTES[architecture]),
        "loads of two bytes": (ptx.count("ld.global.b16"), SINGLE_LOADS.get(name, 0)),
    }
    found = [f"{name} {heads}: {count} {what} > {most}" for what, (count, most) in used.items() if count > most]
    # Attention in 16 bits loads the next tile while it computes this one.
    if name.startswith("attend") and heads.dtype != torch.float32 and "cp.async.cg" not in ptx:
        found.append(f"{name} {heads}: no asynchronous copies")
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "attention"), [(80, LARGEST), (90, ATTENTION)], ids=["sm_80", "sm_90"])
def test_every_kernel_fits_the_device(
    architecture: int, attention: tuple[Heads, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton.runtime.jit import KernelInterface

    found: dict[str, str] = {}
    exceeded: list[str] = []

    def compiling(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*given: Any, **options: Any) -> None:
            made, name = kernel.run(*given, grid=grid, warmup=True, **options), kernel.fn.__name__
            if made.hash not in found:
                found[made.hash] = name
                exceeded.extend(above(name, heads, architecture, made, tmp_path / "kernel.cubin"))

        return launch

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(KernelInterface, "__getitem__", compiling)
    ids, begins = torch.zeros(64, dtype=torch.int32), torch.zeros(65, dtype=torch.int32)
    tables = torch.zeros(64, 64, dtype=torch.int32)
    with pretended(architecture) as paged:
        for heads in attention:
            keys = torch.zeros(64, 16, heads.kv_heads, heads.dim, dtype=heads.dtype)
            query = torch.zeros(300, heads.kv_heads * heads.group, heads.dim, dtype=heads.dtype)
            rules: Any = {"scaling": 0.1} | heads.rules
            paged.write(keys[0, :4], keys[0, :4], keys, keys, ids[:4])
            paged.decode(query[:4], keys, keys, tables[:4], DecodeParts(ids[:4] + 600, 16), **rules)
            paged.prefill(query, keys, keys, tables, begins, ids, **rules)
    assert set(found.values()) == KERNELS
    assert len(found) > 3 * len(attention)
    assert exceeded == []


# --- variants ---------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM, BLOCK, COLUMNS = 4, 2, 16, 16, 64


@contextmanager
def recorded() -> Iterator[tuple[TritonPaged, Callable[[], dict[str, int]]]]:
    """The kernels, and how many compiled variants launches in this block have asked for; the launches do nothing."""
    from triton import knobs

    asked: dict[str, set[str]] = defaultdict(set)

    def ask(*, key: str, fn: Any, **_: Any) -> bool:
        asked[fn.name].add(key)
        return True  # Not to be compiled.

    with pretended(90) as paged, pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "jit_cache_hook", ask)
        yield paged, lambda: {name: len(keys) for name, keys in asked.items()}


def of_heads(count: int, heads: int) -> torch.Tensor:
    """[count, heads, D], as a module makes it: a view of heads first."""
    return torch.zeros(heads, count, DIM, dtype=BF16).transpose(0, 1)


def uploaded(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Upload as `upload_together` does for a GPU."""
    flat, begins = packed(arrays)
    whole = torch.from_numpy(flat)
    return [whole[begin : begin + each.size].view(each.shape) for each, begin in zip(arrays, begins, strict=True)]


def test_arrays_go_up_together_each_at_an_aligned_place() -> None:
    arrays = [np.arange(size, dtype=np.int32) for size in (3, 16, 0, 17)] + [np.arange(6, dtype=np.int32).reshape(2, 3)]
    assert all(begin * 4 % ALIGNMENT == 0 for begin in packed(arrays)[1])
    for upload in (uploaded, upload_together):
        for array, tensor in zip(arrays, upload(arrays, CPU), strict=True):
            assert np.array_equal(tensor.numpy(), array)


def test_eager_steps_of_any_rows_launch_the_same_attention(monkeypatch) -> None:
    monkeypatch.setattr(triton_attention, "upload_together", uploaded)
    with recorded() as (paged, variants):
        for counts, ends in (
            ([1], [5]), ([1, 1, 7, 16], [40, 700, 90, 16]), ([1] * 16, [300] * 16), ([1] * 3, [1] * 3), ([1] * 17, [9] * 17),
            ([16], [16]), ([1, 17, 1], [16, 17, 600]),
        ):  # fmt: skip
            step = Step(counts, ends, dtype=BF16)
            attention = TritonPagedAttention(paged, step.rows, CPU, TorchPagedAttention(step.rows, CPU))
            query, own = of_heads(sum(counts), HEADS), of_heads(sum(counts), KV_HEADS)
            paged.write(own, own, step.keys, step.values, torch.zeros(sum(counts), dtype=torch.int64))
            attention(query, step.keys, step.values, scaling=0.1, window=None)
        assert variants() == {"write": 1, "attend_parts": 1, "merge": 1, "attend_chunks": 1}


def test_captured_steps_of_any_size_launch_the_same_attention() -> None:
    keys, values = torch.zeros(2, 8, BLOCK, KV_HEADS, DIM, dtype=BF16)
    state = DecodeState(32, COLUMNS, BLOCK, CPU)
    with recorded() as (paged, variants):
        for count, capacity in ((1, 16), (2, 16), (16, 1000), (24, 7), (32, 1)):
            inputs = state.inputs(count, capacity)
            own = of_heads(count, KV_HEADS)
            paged.write(own, own, keys, values, inputs.slots)
            paged.decode(of_heads(count, HEADS), keys, values, inputs.tables, inputs.parts, scaling=0.1)
    assert variants() == {"write": 1, "attend_parts": 1, "merge": 1}
