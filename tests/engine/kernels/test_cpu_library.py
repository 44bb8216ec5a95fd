"""Tests of building the C++ kernels: the cache, several processes at once, a read-only home, other compilers.

The compiler is a script that counts its calls and copies a library compiled before, so that each test takes milliseconds.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.engine.kernels import cpu_library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")


class FakeCompiler:
    """A compiler in a folder of its own; `library` is what it makes of every source.

    Attributes:
        path: of the executable.
    """

    def __init__(self, folder: Path, library: Path) -> None:
        self.path = folder / "g++"
        self._calls = folder / "calls"
        self._write(f'for last; do :; done; sleep 0.3; cp "{library}" "$last"')

    def refuse(self, flag: str) -> None:
        """Fail when called with `flag`, as a compiler does that does not know the processor."""
        self._write(
            f'case "$*" in *{flag}*) echo "unknown value native" >&2; exit 1;; esac; {self._work}', keep=self._work
        )

    @property
    def calls(self) -> list[str]:
        """Arguments of every call that compiled."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def _write(self, work: str, keep: str | None = None) -> None:
        self._work = keep or work
        self.path.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "g++ 1.0" && exit 0\necho "$*" >> "{self._calls}"\n{work}\n'
        )
        self.path.chmod(0o755)


@pytest.fixture(scope="module")
def some_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("library")
    (folder / "one.c").write_text("int one(void) { return 1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "one.c", "-o", "one.so"], cwd=folder, check=True, timeout=300)
    return folder / "one.so"


@pytest.fixture
def compiler(tmp_path, some_library, monkeypatch) -> FakeCompiler:
    (tmp_path / "bin").mkdir()
    made = FakeCompiler(tmp_path / "bin", some_library)
    monkeypatch.setenv("CXX", str(made.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def build() -> cpu_library.Kernels:
    """Return the kernels that a new process would get."""
    return cpu_library.status.__wrapped__()


def test_the_second_process_takes_the_first_ones_library_and_both_say_what_by(compiler, caplog):
    # With logging as it is without configuration: a minute or two without a line looks like a hang.
    with caplog.at_level(logging.WARNING, "rollout"):
        first = build()
    assert first.library is not None
    assert first.library.one() == 1
    assert "compiling the CPU kernels for this processor with g++ 1.0" in caplog.text
    assert first.described.startswith("g++ 1.0, in /")
    assert build().described == first.described
    assert len(compiler.calls) == 1


def test_processes_that_start_together_compile_once(compiler):
    ask = "from rollout.engine.kernels import cpu_library; print(cpu_library.load().one())"
    both = [
        subprocess.Popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, env=os.environ.copy())
        for _ in range(2)
    ]
    assert [each.communicate(timeout=300)[0].strip() for each in both] == ["1", "1"]
    assert len(compiler.calls) == 1


def test_another_processor_or_compiler_builds_its_own(compiler, monkeypatch):
    build()
    monkeypatch.setattr(cpu_library, "_processor", lambda: "x86_64 flags: some others")
    build()
    compiler.path.write_text(compiler.path.read_text().replace("g++ 1.0", "g++ 2.0"))
    build()
    assert len(compiler.calls) == 3


def test_a_cache_folder_that_cannot_be_written_is_named_with_the_cure(compiler, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    # Also root, whom permissions do not stop, cannot make a folder below a file.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    refused = build()
    assert refused.library is None
    assert str(tmp_path / "file") in refused.described
    assert "set XDG_CACHE_HOME" in refused.described


def test_a_compiler_that_does_not_know_the_processor_builds_without_its_instructions(compiler):
    compiler.refuse("=native")
    assert build().library is not None
    assert ["=native" in call for call in compiler.calls] == [True, False]


@pytest.mark.parametrize(
    ("machine", "flag"), [("x86_64", "-march=native"), ("aarch64", "-mcpu=native"), ("arm64", "-mcpu=native")]
)
def test_x86_is_tuned_by_march_and_arm_by_mcpu(compiler, monkeypatch, machine, flag):
    """Apple's Clang and GCC on aarch64 take -mcpu=native; GCC on x86 refuses it."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert build().library is not None
    (call,) = compiler.calls
    assert flag in call.split()
    assert not {"-fopenmp", "-lgomp", "-static", "-Wl,-soname"} & set(call.split())


def test_the_reason_names_every_compiler_that_was_looked_for(monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build().library is None
    assert "there is no C++ compiler (g++, c++, clang++)" in caplog.text


def test_the_library_of_this_machine_has_the_kernels():
    library = cpu_library.load()
    if library is not None:
        assert isinstance(library.rollout_forward, ctypes._CFuncPtr)
