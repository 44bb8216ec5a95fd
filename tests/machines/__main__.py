"""Compares the tokens of the C++ kernels alone between processors and compilers.

    python -m tests.machines

Variants whose compiler or emulator is missing are listed as not run. Exit status 1 if float32 tokens differ from those of
this processor. aarch64 needs `g++-aarch64-linux-gnu` and `qemu-user`.

Apple's SDK cannot be had elsewhere: its row compiles the same program for macOS on arm64 with Clang up to the generation of
code, with libc++, Darwin's types and Linux's C headers (Debian's `libc++-dev` and `libc6-dev-arm64-cross`).
"""

from __future__ import annotations

import glob
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("decode_alone.cpp")
FLAGS = ("-O3", "-std=c++17", "-pthread", "-fno-math-errno", "-Wno-psabi")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Variant:
    """A compiler with flags, and how its program is run."""

    name: str
    compiler: str
    flags: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """Commands that are not installed."""
        return [each for each in (self.compiler, *self.runner[:1]) if shutil.which(each) is None]

    def output(self, folder: Path, threads: int) -> list[str]:
        """Lines that the program prints, compiled on the first call."""
        program = folder / self.name.replace(" ", "-")
        if not program.exists():
            command = [self.compiler, *FLAGS, *self.flags, str(SOURCE), "-o", str(program)]
            subprocess.run(command, check=True, timeout=TIMEOUT_S)
        command = [*self.runner, str(program), str(threads)]
        return subprocess.run(
            command, check=True, timeout=TIMEOUT_S, capture_output=True, text=True
        ).stdout.splitlines()


ARM, QEMU = "aarch64-linux-gnu-g++", ("qemu-aarch64", "-cpu", "max")
VARIANTS = (
    Variant("g++ native", "g++", ("-march=native",)),
    Variant("g++ plain", "g++"),
    Variant("clang++ native", "clang++", ("-march=native",)),
    Variant("aarch64 NEON", ARM, ("-static",), QEMU),
    Variant("aarch64 SVE", ARM, ("-static", "-march=armv8.2-a+sve"), QEMU),
)


APPLE = "arm64-apple-macos12"
CXX_HEADERS = ("/usr/lib/llvm-*/include/c++/v1", "/usr/include/c++/v1")
C_HEADERS = "/usr/aarch64-linux-gnu/include"
DARWIN_TYPES = """#pragma once
typedef __{sign}INT8_TYPE__ {short}int8_t;
typedef __{sign}INT16_TYPE__ {short}int16_t;
typedef __{sign}INT32_TYPE__ {short}int32_t;
typedef __{sign}INT64_TYPE__ {short}int64_t;
"""
"""In Darwin int64_t is long long; glibc's headers say long, whatever the target."""


def apple(folder: Path) -> tuple[str, bool]:
    """What the row of macOS says, and whether the program failed to compile."""
    found = [each for pattern in CXX_HEADERS for each in sorted(glob.glob(pattern))]
    missing = [] if found else ["libc++"]
    missing += [] if Path(C_HEADERS).is_dir() else [C_HEADERS]
    missing += [] if shutil.which("clang++") else ["clang++"]
    if missing:
        return f"not run: {', '.join(missing)} not found", False
    (folder / "bits").mkdir()
    for name, sign in (("stdint-intn.h", ""), ("stdint-uintn.h", "U")):
        text = DARWIN_TYPES.format(sign=sign, short=sign.lower())
        (folder / "bits" / name).write_text(text, encoding="ascii")
    own = subprocess.run(
        ["clang++", "-print-resource-dir"], check=True, timeout=TIMEOUT_S, capture_output=True, text=True
    ).stdout.strip()
    headers = [str(folder), found[-1], f"{own}/include", C_HEADERS]
    command = ["clang++", f"--target={APPLE}", *FLAGS, "-Wall", "-Werror", "-Wno-stdlibcxx-not-found", "-fsyntax-only",
               "-nostdinc", "-D_GNU_SOURCE", "-U__nonnull"]  # fmt: skip
    for each in headers:
        command += ["-isystem", each]
    done = subprocess.run([*command, str(SOURCE)], check=False, timeout=TIMEOUT_S, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.strip())
    return ("DOES NOT COMPILE", True) if done.returncode else ("compiles, without a warning", False)


def main() -> int:
    """Print one line per variant; returns the exit status."""
    differ = False
    expected: list[str] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for variant in VARIANTS:
            if missing := variant.missing():
                print(f"{variant.name:<16} not run: {', '.join(missing)} not found")
                continue
            one, three = (
                [line for line in variant.output(Path(scratch), threads) if line.startswith("float32 tokens")]
                for threads in (1, 3)
            )
            expected = expected or one
            same = one == three == expected
            differ |= not same
            count = sum(len(line.split()) - 2 for line in one)
            print(f"{variant.name:<16} {count} tokens with 1 and with 3 threads: {'the same' if same else 'DIFFERENT'}")
    with tempfile.TemporaryDirectory() as scratch:
        said, failed = apple(Path(scratch))
    print(f"{'macOS arm64':<16} {said}")
    return int(differ or failed)


if __name__ == "__main__":
    sys.exit(main())
