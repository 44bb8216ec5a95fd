"""Parts of captured steps that an environment variable switches off: for a comparison, or where one fails on a device.

    ROLLOUT_CUDA_WITHOUT=tables,prefixes python train.py

It is read when an engine is built.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rollout.errors import ConfigError
from rollout.names import did_you_mean

VARIABLE = "ROLLOUT_CUDA_WITHOUT"
SWITCHES = {
    "tables": "block tables stay on the device between steps; off: all of them are sent in every step",
    "prefixes": "a prefix that rows share is read once for all of them; off: once for each row",
    "parts": "the programs of decode attention share out the parts of keys that there are, whatever the length; off: one "
    "program for every part there could be, and graphs for each length",
    "chunks": "steps with prefill chunks are replayed as CUDA graphs; off: they run eagerly",
    "runs": "several decode steps are queued on the device before the tokens of the first are read; off: one",
}
"""Name of each part and what it does."""


def switched_on(part: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a part of `SWITCHES` runs."""
    return part not in _off(environment)


def refuse_unknown_parts(environment: Mapping[str, str] = os.environ) -> None:
    """Check the variable, also where nothing is captured.

    Raises:
        ConfigError: it names a part that there is not.
    """
    for name in _off(environment):
        if name not in SWITCHES:
            cure = did_you_mean(name, SWITCHES, f"there are {', '.join(SWITCHES)}")
            raise ConfigError(f"{VARIABLE}={name}: there is no such part; {cure}")


def _off(environment: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in environment.get(VARIABLE, "").split(",") if name.strip()]
