"""Random numbers and log-probs whose bits do not depend on the other rows of a batch.

A random number depends only on the row's key and position. A sample's random numbers are therefore the same in any batch, on
any device, and after interruptions. Log-probs have the bits of torch's own log-softmax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.requests.block_hash import GOLDEN, LAST_SHIFT, ROUNDS

SHORT = 2**14
"""The number of elements per operation. torch uses one thread for 2^14 elements, but several for 2^15."""


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return uniform float64 [R] in [0, 1) for int64 keys [R] and positions [R], equal bit for bit on every device.

    The generator is splitmix64 with counter `positions`, in wrap-around int64 (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, OOPSLA 2014).
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


def over_temperature(scores: Tensor, temperature: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Divide scores [R, V] by the temperature [R] of each row, bit-identical to torch's `scores / number`.

    On CUDA, torch multiplies by the reciprocal of the number, so this function does too. A division would give other bits.
    """
    if scores.device.type == "cuda":
        return torch.mul(scores, temperature.reciprocal()[:, None], out=out)
    return torch.div(scores, temperature[:, None], out=out)


def softmax_logprobs(scores: Tensor, token_ids: Tensor, temperature: Tensor | None = None) -> Tensor:
    """Return float32 log-probs [R, k] of k token ids per row: `(scores.float() / temperature).log_softmax(-1)`, bit for bit.

    torch's log-softmax of a row is independent of the other rows. On a CPU, rows are computed one by one, in operations too
    short for torch's OpenMP threads: these threads would keep spinning next to the kernels' threads.

    Args:
        scores: [R, V], any float dtype.
        token_ids: [R, k] int64, the token ids of each row.
        temperature: [R] float32; None means 1.
    """
    if scores.device.type != "cpu":
        scores = scores.float() if temperature is None else over_temperature(scores.float(), temperature)
        return scores.log_softmax(-1).gather(1, token_ids)
    divisors = [1.0] * len(scores) if temperature is None else temperature.tolist()
    line = torch.empty(scores.shape[1], dtype=torch.float32, device=scores.device)
    found = torch.empty(token_ids.shape, dtype=torch.float32, device=scores.device)
    for row, ids, divisor, out in zip(scores, token_ids, divisors, found, strict=True):
        for part, to in zip(torch.split(row, SHORT), torch.split(line, SHORT), strict=True):
            to.copy_(part)
            if divisor != 1.0:
                to.div_(divisor)
        torch.index_select(line.log_softmax(-1), 0, ids, out=out)
    return found
