"""Names of the stages in a good order, and the seconds that each may take of a GPU's time."""

from __future__ import annotations

LIMITS = {
    "env": 60, "kernels": 90, "poison": 60, "truth": 200, "speed_small": 90, "tune": 200, "ways": 90,
    "fused": 270, "families": 300, "exact": 240, "memory": 120, "speed": 240, "without": 240,
    "sanitize": 230, "tests": 540,
}  # fmt: skip
