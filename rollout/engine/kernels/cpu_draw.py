"""Sampling on a CPU by a C++ kernel, which reads the logits twice and does not copy them."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rollout.engine.kernels import cpu_library


class Draw(ctypes.Structure):
    """The mirror of the C++ struct `Draw` in cpu_sampling.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "scores", "temperature", "key", "position", "greedy", "token", "peak", "log_sum", "score", "keeping", "kept",
            "kept_counts",
        )),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "stride")),
    )  # fmt: skip


class Drawn(NamedTuple):
    """The result of drawing one token in each of R rows."""

    token: Tensor
    """The id of each drawn token, int64 [R]."""
    peak: Tensor
    """The largest score of each row, divided by the row's temperature, float32 [R]."""
    log_sum: Tensor
    """The log of the sum of exp(score / temperature - peak) over each row, float64 [R]; NaN if the peak is not finite."""
    score: Tensor
    """The score of each drawn token, divided by the row's temperature, float32 [R]."""
    kept_ids: Tensor | None
    """int32: the token ids that could be drawn, joined for all rows that request them; None if no row requests them."""
    kept_counts: Tensor | None
    """The number of entries of each row in `kept_ids`, int64 [R]; None without `kept_ids`."""


class CpuDraw:
    """The C++ kernel that draws tokens on a CPU."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = library.rollout_draw
        self._draw.argtypes = (ctypes.POINTER(Draw), ctypes.c_int64, ctypes.c_int)
        self._draw.restype = ctypes.c_int64

    def __call__(
        self,
        scores: Tensor,
        temperature: Tensor,
        greedy: Tensor,
        keys: Tensor,
        positions: Tensor,
        keeping: Tensor | None = None,
        room: Tensor | None = None,
    ) -> Drawn:
        """Draw one token per row from softmax(scores / temperature).

        Args:
            scores: logits of R rows and V tokens, float32 or bfloat16 [R, V] with contiguous rows.
            temperature: temperature of each row, float32 [R].
            greedy: whether each row takes the token with its largest score (on ties the lowest id), bool [R].
            keys: key of each row's random stream, int64 [R]; see `numerics.uniforms`.
            positions: position of each row in its random stream, int64 [R].
            keeping: whether each row returns the tokens that could be drawn, bool [R]; None if no row returns them.
            room: buffer for these tokens, int32 [R, V], which is overwritten; required with `keeping`.
        """
        count, vocabulary = scores.shape
        token = torch.empty(count, dtype=torch.int64, device="cpu")
        peak = torch.empty(count, dtype=torch.float32, device="cpu")
        log_sum = torch.empty(count, dtype=torch.float64, device="cpu")
        score = torch.empty(count, dtype=torch.float32, device="cpu")
        counts = None if keeping is None else torch.zeros(count, dtype=torch.int64, device="cpu")
        temperature, greedy = temperature.contiguous(), greedy.contiguous()
        keys, positions = keys.contiguous(), positions.contiguous()
        kept = 0
        if count:
            kept = self._draw(
                Draw(
                    scores.data_ptr(), temperature.data_ptr(), keys.data_ptr(), positions.data_ptr(), greedy.data_ptr(),
                    token.data_ptr(), peak.data_ptr(), log_sum.data_ptr(), score.data_ptr(),
                    *(None if each is None else each.data_ptr() for each in (keeping, room, counts)), count, vocabulary,
                    scores.stride(0),
                ),
                torch.get_num_threads(),
                int(scores.dtype == torch.bfloat16),
            )  # fmt: skip
        ids = None if room is None else room.flatten()[:kept].clone()
        return Drawn(token, peak, log_sum, score, ids, counts)


@cache
def load() -> CpuDraw | None:
    """Return the kernel, or None if the C++ library cannot be built."""
    library = cpu_library.load()
    return None if library is None else CpuDraw(library)


def serves(scores: Tensor) -> bool:
    """Return whether the kernel supports these logits: float32 or bfloat16, on a CPU, with contiguous rows."""
    return scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.bfloat16) and scores.stride(1) == 1
