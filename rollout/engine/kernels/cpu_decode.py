"""Builds and calls `cpu_decode.cpp`: decode attention that reads the blocks where they lie.

Compiled on first use (about 4 seconds), never at import, and kept in the user's cache directory under a key of the source,
the compiler and the processor. Without a compiler `load` returns None, says once what would make decoding faster, and the
plain-torch path serves.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

HEAD_DIMS = frozenset({16, 32, 48, 64, 80, 96, 128, 256})
COMPILE_TIMEOUT_S = 120
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno")
_log = logging.getLogger(__name__)

PagedDecode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int | None, float], Tensor]


class _Args(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "table", "positions")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv_heads", "width", "block_size", "window")),
        ("scaling", ctypes.c_float),
    )


@cache
def load() -> PagedDecode | None:
    """The kernel, compiled if need be; None where it cannot be."""
    try:
        library = ctypes.CDLL(str(_built()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as exc:
        _log.warning("decoding runs on plain torch (%s); with g++ installed it would be faster", exc)
        return None
    function = library.rollout_paged_decode
    function.argtypes = (ctypes.POINTER(_Args), ctypes.c_int64, ctypes.c_int)

    def paged_decode(
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        table: Tensor,
        positions: Tensor,
        window: int | None,
        scaling: float,
    ) -> Tensor:
        batch, heads, head_dim = query.shape
        out = torch.empty_like(query)
        args = _Args(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), table.data_ptr(), positions.data_ptr(),
            batch, heads, keys.shape[2], table.shape[1], keys.shape[1], window or 0, scaling,
        )  # fmt: skip
        if function(ctypes.byref(args), head_dim, int(query.dtype == torch.bfloat16)):
            raise RuntimeError(f"head_dim={head_dim}: must be one of {sorted(HEAD_DIMS)}")
        return out

    return paged_decode


def serves(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether the kernel takes these shapes and types: contiguous float32 or bfloat16, equal and known head sizes."""
    return (
        query.dtype in (torch.float32, torch.bfloat16)
        and query.dtype == keys.dtype
        and keys.shape == values.shape
        and query.shape[-1] in HEAD_DIMS
        and query.is_contiguous()
    )


def _built() -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError("there is no C++ compiler")
    source = Path(__file__).with_suffix(".cpp")
    openmp = _openmp_runtime()
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=10, check=True).stdout
    key = hashlib.sha256(
        b"\0".join([source.read_bytes(), version, str(openmp).encode(), _processor().encode(), repr(_FLAGS).encode()])
    ).hexdigest()[:20]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rollout-engine"
    target = folder / f"cpu_decode-{key}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "kernel.so"
            _compile(compiler, source, built, openmp)
            # Several ranks may build at once: each makes its own, the last rename wins, and all are the same.
            built.replace(target)
    return target


def _compile(compiler: str, source: Path, target: Path, openmp: Path) -> None:
    unlinked = target.with_suffix(".o")
    for command in (
        [compiler, *_FLAGS, "-c", str(source), "-o", str(unlinked)],
        # Not -fopenmp here: it would bring a second OpenMP runtime beside torch's, and their threads fight.
        [compiler, "-shared", str(unlinked), str(openmp), "-o", str(target)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[-300:]}")


def _openmp_runtime() -> Path:
    """The OpenMP library that torch has loaded."""
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            if re.search(r"/lib(gomp|iomp5|omp)[^/]*\.so", line):
                return Path(line.split(maxsplit=5)[-1])
    raise RuntimeError("torch's OpenMP runtime was not found")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    flags = (
        [line for line in info.read_text().splitlines() if line.startswith(("flags", "Features"))]
        if info.exists()
        else []
    )
    return platform.machine() + "".join(flags[:1])
