"""One counter-based random stream per sample: the number at a position follows from key and position alone.

So the tokens of a sample are independent of the rest of the batch, of interruptions and of the device.
splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) in wrap-around int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.requests.block_hash import GOLDEN, LAST_SHIFT, ROUNDS


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform float64 [R] in [0, 1) for int64 keys [R] and positions [R]: splitmix64 at counter `positions`.

    Equal bit for bit on every device. Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014.
    """
    state = (positions + 1).mul_(_signed(GOLDEN)).add_(keys)
    for shift, factor in ROUNDS:
        state = state.bitwise_xor_(_logical_shift(state, shift)).mul_(_signed(factor))
    state = state.bitwise_xor_(_logical_shift(state, LAST_SHIFT))
    return _logical_shift(state, 11).to(torch.float64).mul_(2.0**-53)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _logical_shift(state: Tensor, shift: int) -> Tensor:
    return (state >> shift).bitwise_and_((1 << (64 - shift)) - 1)
