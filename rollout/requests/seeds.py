"""Derives per-request and per-sample seeds from a base seed.

splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014).
"""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
LAST_SHIFT = 31


def stream_key(seed: int, index: int) -> int:
    """Key in [0, 2^63) of random stream `index` of `seed`: two rounds of splitmix64.

    A request without a seed gets the stream of its number, its samples get the streams of their index.
    """
    return _mixed(_mixed(seed + GOLDEN) + (index + 1) * GOLDEN) >> 1


def _mixed(state: int) -> int:
    state %= 2**64
    for shift, factor in ROUNDS:
        state = (state ^ state >> shift) * factor % 2**64
    return state ^ state >> LAST_SHIFT
