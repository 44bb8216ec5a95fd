"""Sampling on a CPU in C++: two passes over the logits in place."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rollout.engine.kernels import cpu_library


class Draw(ctypes.Structure):
    """Mirror of the C++ struct `Draw` in cpu_sampling.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "scores", "temperature", "key", "position", "greedy", "token", "peak", "log_sum", "score", "keeping", "kept",
            "kept_counts",
        )),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "stride")),
    )  # fmt: skip


class Drawn(NamedTuple):
    """The result of a draw: one token per row."""

    token: Tensor
    """[R] int64, ids of the drawn tokens."""
    peak: Tensor
    """[R] float32, the largest score / temperature."""
    log_sum: Tensor
    """[R] float64, logarithm of the summed exponentials of score / temperature - peak, NaN where the peak is not finite."""
    score: Tensor
    """[R] float32, score / temperature of the token."""
    kept_ids: Tensor | None
    """[K] int32, the tokens that could be drawn in the rows that return them, row after row and ascending; None if no row
    does."""
    kept_counts: Tensor | None
    """[R] int64, number of `kept_ids` of each row."""


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
            scores: [R, V] float32 or bfloat16, rows contiguous.
            temperature: [R] float32.
            greedy: [R] bool, rows that take their largest score (lowest id on ties).
            keys, positions: [R] int64, each row's random stream and counter (`random_stream.uniforms`).
            keeping: [R] bool, rows that return the tokens that could be drawn. None: no row.
            room: with `keeping`, int32 [R, V], overwritten.
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
    """Return the kernel, or None if it cannot be built."""
    library = cpu_library.load()
    return None if library is None else CpuDraw(library)


def serves(scores: Tensor) -> bool:
    """Return whether the kernel supports these logits."""
    return scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.bfloat16) and scores.stride(1) == 1
