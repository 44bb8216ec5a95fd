"""Sampling on a CPU in C++: two passes over the logits in place."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from rollout.engine.kernels import cpu_library


class _Draw(ctypes.Structure):
    """`Draw` in cpu_sampling.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "scores", "temperature", "key", "position", "greedy", "token", "peak", "log_sum", "score",
        )),
        *((name, ctypes.c_int64) for name in ("rows", "vocabulary", "stride")),
    )  # fmt: skip


class CpuDraw:
    """The C++ sampling kernel."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._draw = library.rollout_draw
        self._draw.argtypes = (ctypes.POINTER(_Draw), ctypes.c_int64, ctypes.c_int)

    def __call__(
        self, scores: Tensor, temperature: Tensor, greedy: Tensor, keys: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw one token per row from softmax(scores / temperature).

        Args:
            scores: [R, V] float32 or bfloat16, rows contiguous.
            temperature: [R] float32.
            greedy: [R] bool, rows that take their largest score (lowest id on ties).
            keys, positions: [R] int64, each row's random stream and counter (`random_stream.uniforms`).

        Returns:
            Token ids [R] int64; the peak [R] float32, the largest score / temperature; the logarithm of the summed
            exponentials of score / temperature - peak [R] float64, NaN where the peak is not finite; score / temperature of
            each token [R] float32.
        """
        count, vocabulary = scores.shape
        token = torch.empty(count, dtype=torch.int64, device="cpu")
        peak = torch.empty(count, dtype=torch.float32, device="cpu")
        log_sum = torch.empty(count, dtype=torch.float64, device="cpu")
        score = torch.empty(count, dtype=torch.float32, device="cpu")
        temperature, greedy = temperature.contiguous(), greedy.contiguous()
        keys, positions = keys.contiguous(), positions.contiguous()
        if count:
            self._draw(
                _Draw(
                    scores.data_ptr(), temperature.data_ptr(), keys.data_ptr(), positions.data_ptr(), greedy.data_ptr(),
                    token.data_ptr(), peak.data_ptr(), log_sum.data_ptr(), score.data_ptr(), count, vocabulary,
                    scores.stride(0),
                ),
                torch.get_num_threads(),
                int(scores.dtype == torch.bfloat16),
            )  # fmt: skip
        return token, peak, log_sum, score


@cache
def load() -> CpuDraw | None:
    """The kernel, or None where it cannot be built."""
    library = cpu_library.load()
    return None if library is None else CpuDraw(library)


def serves(scores: Tensor) -> bool:
    """Whether the kernel supports these logits."""
    return scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.bfloat16) and scores.stride(1) == 1
