"""Names of the stages in a good order, and the seconds that each may take of a GPU's time."""

from __future__ import annotations

LIMITS = {"tests": 540, "kernels": 150, "truth": 200, "memory": 120, "speed": 270, "tune": 200}
