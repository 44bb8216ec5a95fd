"""Log-probs of single rows by torch's own log-softmax, for exact mode."""

from __future__ import annotations

import torch
from torch import Tensor

SHORT = 2**14
"""Elements of an operation that torch runs on one thread; it splits those of 2^15."""


def over_temperature(scores: Tensor, temperature: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Scores [R, V] over the temperature [R] of each row, with the bits of torch's `scores / number`.

    On CUDA torch multiplies by the reciprocal of a number; dividing by a tensor gives other bits there.
    """
    if scores.device.type == "cuda":
        return torch.mul(scores, temperature.reciprocal()[:, None], out=out)
    return torch.div(scores, temperature[:, None], out=out)


def softmax_logprobs(scores: Tensor, token_ids: Tensor, temperature: Tensor | None = None) -> Tensor:
    """[R, k] float32 log-probs of token ids [R, k]: `(scores.float() / temperature).log_softmax(-1)`, bit for bit.

    torch's log-softmax treats rows alike whatever lies beside them. On a CPU they are computed one by one, in operations too
    short for torch's OpenMP threads, which would go on spinning beside the threads of the kernels.

    Args:
        scores: [R, V], any float dtype.
        temperature: [R] float32; None: 1.
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
