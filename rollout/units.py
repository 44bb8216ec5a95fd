"""Numbers as people read them: counts and bytes with a unit."""

from __future__ import annotations


def short_count(number: float) -> str:
    """`596 M`, `1.5 G`, `12 k`: three digits and a decimal unit."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def binary_bytes(number: float) -> str:
    """`1.1 GiB`, `12.0 MiB`, `3 KiB`, `96 B`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 2**10:.0f} KiB" if number >= 2**10 else f"{number:.0f} B"
