"""Sampling on CUDA in Triton: three reads of the logits in place, and no sort for top_k and top_p.

The tokens are those of `sampling/sampler.py` in plain torch. A row of V logits is cut into chunks: one kernel finds their
peaks, one sums their weights, one draws. With top_k or top_p, the least score that is kept is found by a search over the
bits of a score, four of them per round: 4 rounds for logits of 16 bits, 8 for others.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout.engine.kernels.triton_paged import device_of, power_of_two
from rollout.requests.seeds import GOLDEN, LAST_SHIFT, ROUNDS

SPAN = 4096
"""Tokens per chunk: few enough for the registers of one program."""
LEAST_CHUNKS = 64
"""Chunks that a kernel has room for, those of a vocabulary of 2^18: one compiled kernel for nearly all models."""
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_UNIT = 2.0**42
_log = logging.getLogger(__name__)


class TritonDrawn(NamedTuple):
    """One token per row; see `cpu_draw.Drawn`."""

    token: Tensor
    peak: Tensor
    log_sum: Tensor
    score: Tensor


@dataclass(frozen=True, eq=False)
class Filters:
    """Filters of every row; None: no row has one.

    Attributes:
        top_k: [R] int64, 2^31 - 1 where off.
        top_p: [R] float64, 1 where off.
        min_p: [R] float32, 0 where off.
    """

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None


class _Cut(NamedTuple):
    """What top_k and top_p leave of every row."""

    edge: Tensor
    """[R] int64, the least key that is kept."""
    room: Tensor
    """[R] int64, how many of those at the edge are kept: the ones with the lowest ids."""
    ties_before: Tensor
    """[R, C] int64, how many lie at the edge in the chunks before."""
    weight: Tensor
    """[R] int64, of all that is kept."""


class TritonDraw:
    """The compiled kernels.

    Args:
        precise: exponentials by the CUDA library, which the interpreter does not have, and products with the reciprocal of
            the temperature, as torch's on CUDA.
    """

    def __init__(self, kernels: _Kernels, *, precise: bool) -> None:
        self._kernels = kernels
        self._precise = precise

    def __call__(
        self, scores: Tensor, temperature: Tensor, greedy: Tensor, keys: Tensor, positions: Tensor, filters: Filters
    ) -> TritonDrawn:
        """Draw one token per row from softmax(scores / temperature), of what the filters keep.

        Args:
            scores: [R, V] float32, bfloat16 or float16, rows contiguous.
            temperature: [R] float32.
            greedy: [R] bool, rows that take their largest score (lowest id on ties); their filters are off.
            keys, positions: [R] int64, each row's random stream and counter (`random_stream.uniforms`).
        """
        with device_of(scores):
            warmth = temperature.reciprocal() if self._precise else temperature.contiguous()
            return _Call(self._kernels, scores, warmth, self._precise).drawn(
                greedy.contiguous(), keys.contiguous(), positions.contiguous(), filters
            )


class _Call:
    """One call: what all of its kernels read."""

    def __init__(self, kernels: _Kernels, scores: Tensor, temperature: Tensor, precise: bool) -> None:
        self._kernels = kernels
        self._read = scores, temperature
        self._rows, self._vocabulary = scores.shape
        self._chunks = -(-self._vocabulary // SPAN)
        self._grid = self._rows, self._chunks
        self._bits = 8 * min(scores.element_size(), 4)
        self._fixed = {"span": SPAN, "precise": precise, "num_warps": 8, "enable_fp_fusion": False}
        self._numeric = self._fixed | {"bits": self._bits}
        self._sizes = scores.stride(0), self._vocabulary

    def drawn(self, greedy: Tensor, keys: Tensor, positions: Tensor, filters: Filters) -> TritonDrawn:
        """See `TritonDraw.__call__`."""
        chunk_peak, best = self._new(torch.float32, self._chunks), self._new(torch.int32, self._chunks)
        if not self._rows:
            none = self._new(torch.float32)
            return TritonDrawn(keys.new_empty(0), none, none.double(), none)
        self._kernels.peaks[self._grid](*self._read, chunk_peak, best, *self._sizes, **self._fixed)
        peak = chunk_peak.amax(1)
        cut = self._cut(peak, filters)
        arguments = self._filters(peak, cut, filters)
        chosen = self._numeric | {"cut": cut is not None, "floored": filters.min_p is not None}
        sums = self._new(torch.int64, self._chunks)
        self._kernels.sums[self._grid](*self._read, peak, *arguments, sums, *self._sizes, **chosen)
        token, weight = self._new(torch.int64), self._new(torch.int64)
        score = self._new(torch.float32)
        self._kernels.choose[(self._rows,)](
            *self._read, peak, *arguments, sums, chunk_peak, best, greedy, keys, positions, token, score, weight,
            *self._sizes, self._chunks, padded_chunks=max(LEAST_CHUNKS, power_of_two(self._chunks)), **_SPLITMIX, **chosen,
        )  # fmt: skip
        log_sum = (weight.double() / _UNIT).log_()
        return TritonDrawn(token, peak, torch.where(peak.isfinite(), log_sum, torch.nan), score)

    def _cut(self, peak: Tensor, filters: Filters) -> _Cut | None:
        cut = None
        if filters.top_k is not None:
            cut = self._searched(peak, filters.top_k.clamp(max=self._vocabulary), counts=True)
        if filters.top_p is not None:
            whole = self._whole(peak) if cut is None else cut.weight
            wanted = torch.where(filters.top_p < 1, (whole * filters.top_p).ceil_().to(torch.int64), whole)
            cut = self._searched(peak, wanted, counts=False)
        return cut

    def _whole(self, peak: Tensor) -> Tensor:
        """[R] int64, the weight of all tokens."""
        sums = self._new(torch.int64, self._chunks)
        chosen = self._numeric | {"cut": False, "floored": False}
        self._kernels.sums[self._grid](
            *self._read, peak, *self._filters(peak, None, Filters()), sums, *self._sizes, **chosen
        )
        return sums.sum(1)

    def _searched(self, peak: Tensor, wanted: Tensor, *, counts: bool) -> _Cut:
        """The fewest tokens, likeliest first, that weigh `wanted`; `counts`: so many tokens."""
        rounds = self._bits // 4
        reached = torch.zeros(rounds, self._rows, 16, dtype=torch.int64, device=peak.device)
        low = torch.zeros(rounds + 1, self._rows, dtype=torch.int64, device=peak.device)
        for number in range(rounds):
            last = max(0, number - 1)
            self._kernels.narrow[self._grid](
                *self._read, peak, wanted, reached[last], reached[number], low[last], low[number], *self._sizes,
                self._bits - 4 * (number + 1), counts=counts, **self._numeric,
            )  # fmt: skip
        found = torch.empty(4, self._rows, self._chunks, dtype=torch.int64, device=peak.device)
        self._kernels.ties[self._grid](
            *self._read, peak, wanted, reached[-1], low[rounds - 1], low[rounds], found, *self._sizes, **self._numeric
        )
        above, above_weight, ties, tie_weight = found.sum(2).unbind()
        # All ties weigh the same.
        each = tie_weight // ties.clamp(min=1)
        room = wanted - above if counts else -((above_weight - wanted) // each.clamp(min=1))
        return _Cut(low[rounds], room, found[2].cumsum(1) - found[2], above_weight + room * each)

    def _filters(self, peak: Tensor, cut: _Cut | None, filters: Filters) -> tuple[Tensor, ...]:
        """Arguments `least`, `edge`, `room`, `ties_before`; of filters that are off, tensors that are not used."""
        unused = self._new(torch.int64, self._chunks)
        least = peak if filters.min_p is None else filters.min_p.contiguous()
        return (least, unused, unused, unused) if cut is None else (least, cut.edge, cut.room, cut.ties_before)

    def _new(self, dtype: torch.dtype, *columns: int) -> Tensor:
        return torch.empty(self._rows, *columns, dtype=dtype, device=self._read[0].device)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_SPLITMIX = {
    "golden": _signed(GOLDEN), "shift_1": ROUNDS[0][0], "factor_1": _signed(ROUNDS[0][1]), "shift_2": ROUNDS[1][0],
    "factor_2": _signed(ROUNDS[1][1]), "shift_3": LAST_SHIFT,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Kernels:
    peaks: Any
    sums: Any
    narrow: Any
    ties: Any
    choose: Any


_MOVING = ("shift", "chunks")
_ANYWHERE = (
    "temperature", "least", "edge", "room", "wanted", "before", "low", "low_out", "greedy", "keys", "positions",
)  # fmt: skip
"""Arguments of which Triton is not to compile a kernel for numbers, or for addresses, that 16 divides: they change between
steps, and are parts of tensors of any number of rows."""


@cache
def load(device: torch.device, dtype: torch.dtype) -> TritonDraw | None:
    """The kernels, after a trial run on `device` with logits of `dtype`; None where they do not work."""
    if dtype not in DTYPES:
        return None
    try:
        draw = TritonDraw(_kernels(), precise=device.type == "cuda")
        _try_out(draw, device, dtype)
    except Exception as exc:  # noqa: BLE001 - compiler, linker or driver may fail in any way; plain torch works without them
        reason = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        _log.warning("sampling from %s on %s runs on plain torch (%s)", dtype, device, reason)
        return None
    return draw


@cache
def _kernels() -> _Kernels:
    jit = import_module("triton").jit
    code = import_module("rollout.engine.kernels.triton_draw_kernels")
    return _Kernels(
        *(
            jit(each, do_not_specialize=_MOVING, do_not_specialize_on_alignment=_ANYWHERE)
            for each in (code.peaks, code.sums, code.narrow, code.ties, code.choose)
        )
    )


def _try_out(draw: TritonDraw, device: torch.device, dtype: torch.dtype) -> None:
    """Rows of one token that all parameters leave: every kernel, as it is compiled for vocabularies that 16 divides."""
    scores = torch.zeros(3, SPAN + 16, dtype=dtype, device=device)
    scores[:, SPAN] = 30
    ones = torch.ones(3, device=device)
    for filters in (Filters(), Filters(ones.long(), 0.5 * ones.double(), 0.1 * ones)):
        drawn = draw(scores, ones, ones < 0, ones.long(), ones.long(), filters)
        if drawn.token.tolist() != [SPAN] * 3:
            raise RuntimeError("draws of the only likely token gave others")


def serves(scores: Tensor) -> bool:
    """Whether the kernels support these logits."""
    return scores.device.type == "cuda" and scores.dtype in DTYPES and scores.stride(1) == 1
