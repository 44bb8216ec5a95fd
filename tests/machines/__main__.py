"""Compares the tokens of the C++ kernels alone between processors and compilers.

    python -m tests.machines

Variants whose compiler or emulator is missing are listed as not run. Exit status 1 if float32 tokens differ from those of
this processor. aarch64 needs `g++-aarch64-linux-gnu` and `qemu-user`.
"""

from __future__ import annotations

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
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
