"""Builds and loads the C++ kernels in `cpu_kernels.cpp`.

The library is compiled on first use (about 5 seconds), never at import. It is cached in the user's cache directory, under a
key computed from its sources, the compiler and the processor. If several processes need it at once, one process compiles it
and the others wait. Without a compiler or a writable folder, `load` returns None and warns once, and plain torch is used.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock

_SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
COMPILE_TIMEOUT_S = 600
"""The time limit for compiling, in seconds. It takes 5 s, or over two minutes if many other processes use the same cores."""
COMPILERS = ("g++", "c++", "clang++")
"""The compilers to try, in this order, unless the environment variable CXX names one."""
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-fno-math-errno")
CPU_INFO = Path("/proc/cpuinfo")
"""The file in which Linux describes the processor."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """The outcome of building and loading the kernels.

    Attributes:
        library: the loaded library, or None if it could not be built or loaded.
        described: the compiler's version and the library's path, or the reason why there is no library.
    """

    library: ctypes.CDLL | None
    described: str


def load() -> ctypes.CDLL | None:
    """Return the compiled library, or None if it cannot be built. The first call builds it if it is not cached."""
    return status().library


@cache
def status() -> Kernels:
    """Return the library and its description. The first call builds it if it is not cached."""
    try:
        return _load()
    except (OSError, RuntimeError, subprocess.SubprocessError) as exc:
        _log.warning(
            "the CPU runs plain torch (%s); with g++ or clang++ installed it would be several times as fast", exc
        )
        return Kernels(None, str(exc))


def _load() -> Kernels:
    compiler = _compiler()
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-engine"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = _built(folder / f"cpu_kernels-{_key(compiler)}.so", compiler)
    except OSError as exc:
        raise RuntimeError(f"{exc}; set XDG_CACHE_HOME to a folder that can be written") from exc
    return Kernels(ctypes.CDLL(str(path)), f"{compiler.version}, in {path}")


# --- finding and running the compiler -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compiler:
    path: str
    version: str
    """The first line that the compiler prints for `--version`."""


def _compiler() -> _Compiler:
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise RuntimeError(f"there is no C++ compiler ({', '.join(names)})")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    return _Compiler(path, next(iter(said.splitlines()), path))


def _compile(compiler: _Compiler, target: Path) -> None:
    failed = ""
    # Use -march=native on x86 and -mcpu=native elsewhere: on each platform, GCC accepts only this flag, and Clang does
    # too. If compiling fails (an old Clang on a new Arm core), compile without processor-specific instructions.
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    for tuning in ((native,), ()):
        command = [compiler.path, *FLAGS, *tuning, str(_SOURCE), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        if not done.returncode:
            return
        failed = done.stderr.strip() or f"exit code {done.returncode}"
    raise RuntimeError(f"{compiler.path} failed: {failed[-300:]}")


# --- cached libraries -----------------------------------------------------------------------------------------------------


def _key(compiler: _Compiler) -> str:
    parts = [path.read_bytes() for path in (_SOURCE, *sorted(_SOURCE.parent.glob("*.h")))]
    parts += [each.encode() for each in (compiler.version, _processor(), repr(FLAGS))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:20]


def _built(path: Path, compiler: _Compiler) -> Path:
    """Return the path of the library. Compile it unless this or another process has already done so.

    Raises:
        OSError: the library cannot be written, or another process has held the lock for twice `COMPILE_TIMEOUT_S`.
    """
    if path.exists():
        return path
    with FileLock(path.with_suffix(".lock"), timeout=2 * COMPILE_TIMEOUT_S):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
                built = Path(scratch) / "kernels.so"
                # Log a warning: default logging hides INFO, and without a message the process would seem to hang.
                _log.warning(
                    "compiling the CPU kernels for this processor with %s into %s: once per machine, a minute or two",
                    compiler.version, path,
                )  # fmt: skip
                began = time.monotonic()
                _compile(compiler, built)
                _log.info("compiled the CPU kernels in %.1f s", time.monotonic() - began)
                built.chmod(0o755)
                # Rename the complete file into place, because other processes load the library without taking the lock.
                built.replace(path)
    return path


def _processor() -> str:
    """Return a string that identifies the processor's instruction set, on which the compiled library depends."""
    if CPU_INFO.exists():
        lines = CPU_INFO.read_text().splitlines()
        wanted = ("flags", "Features", "CPU part")
        return platform.machine() + "".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
    return f"{platform.machine()} {platform.processor()} {platform.release()}"
