"""Sampling parameters per row, as arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import Scratch, upload
from rollout.errors import ConfigError
from rollout.sampling_params import FILTERS, PENALTIES, SamplingParams

Biases = Mapping[int, tuple[NDArray[np.int64], NDArray[np.float32]]]
"""(token ids, biases) by row of the table, for rows with a logit_bias."""

Listed = Mapping[int, Tensor]
"""Token ids by row of the table, for rows with logprob_token_ids."""

_NUMBERS = ("temperature", *PENALTIES, *(name for name in FILTERS if name != "top_k"))
_INTEGERS = ("top_k", "key", "top_n", "greedy", "raw", "tempered", "keeps")
_NO_TOP_K = 2**31 - 1


class SamplingRows:
    """Sampling parameters of R rows: tensors on the device, and flags on the host.

    Greedy rows are stored with temperature 1 and their filters off.

    Attributes:
        greedy, raw: [R] bool; `raw` rows report log-probs of the model's own logits, divided by `raw_temperature`.
        key: [R] int64.
        top_k: [R] int64, 2^31 - 1 where off.
        top_p: [R] float64.
        value: name of every penalty and filter but top_k → [R] float32.
        temperature, raw_temperature: [R] float32.
        filters: names of the filters that some row uses.
        limited: [L] int64, the rows with top_k or top_p.
        limited_width: the largest top_k of the limited rows; None when one of them has only top_p.
        penalized: [N] numpy int64, the rows with a penalty.
        bias: numpy (row, token id, bias) of every logit_bias.
        listed: (row, ids) of the rows that name the tokens of their top log-probs.
        top_n: the largest number of top log-probs of a row.
        plain: whether all rows draw from the logits over the temperature, and want the log-prob of the token alone.
        keeps: [R] bool, the rows that return the tokens their filters kept; `keeping`: [K] int64, their numbers.
        scratch: buffers shared by all rows of a table.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        numbers: NDArray[np.float64],
        integers: NDArray[np.int64],
        biases: Biases,
        listed: Listed,
        scratch: Scratch,
        device: torch.device,
    ) -> None:
        """`numbers` and `integers` hold one row of R values for every name of `_NUMBERS` and `_INTEGERS`."""
        self._source = rows, numbers, integers, biases, listed
        self.listed = (
            [(index, listed[row]) for index, row in enumerate(rows.tolist()) if row in listed] if listed else []
        )
        self.scratch = scratch
        self._parts: tuple[int, list[SamplingRows]] = len(rows), [self]
        given = dict(zip(_NUMBERS, numbers, strict=True))
        temperature, repetition, top_p = given["temperature"], given["repetition_penalty"], given["top_p"]
        top_k, key, top_n, greedy, raw, tempered, keeps = integers
        occurrence = (given["presence_penalty"] != 0) | (given["frequency_penalty"] != 0)
        limited = np.flatnonzero((top_k > 0) | (top_p < 1))
        self.top_n = int(top_n.max(initial=0))
        self.any_greedy, self.all_greedy = bool(greedy.any()), bool(greedy.all())
        self.any_raw, self.all_raw = bool(raw.any()), bool(raw.all())
        self.any_temperature = bool((temperature != 1).any())
        self.any_raw_temperature = bool(((temperature != 1) & (tempered > 0)).any())
        columns = given | {"top_k": top_k}
        self.filters = {name for name, off in FILTERS.items() if bool((columns[name] != off).any())}
        self.any_repetition = bool((repetition != 1).any())
        self.any_occurrence = bool(occurrence.any())
        self.any_penalty = self.any_repetition or self.any_occurrence
        self.penalized = np.flatnonzero((repetition != 1) | occurrence)
        self.bias = _biased(rows, biases)
        self.any_bias = len(self.bias[0]) > 0
        self.edited = bool(self.filters) or self.any_penalty or self.any_bias
        self.plain = not (self.edited or self.any_raw or self.top_n)
        self.any_keeping = bool(keeps.any())
        self.limited, self.keeping = upload(limited, device), upload(np.flatnonzero(keeps), device)
        bounded = len(limited) > 0 and bool((top_k[limited] > 0).all())
        self.limited_width = int(top_k[limited].max()) if bounded else None
        wide = upload(numbers, device)
        self.top_p = wide[_NUMBERS.index("top_p")]
        self.value = dict(zip(_NUMBERS, wide.to(torch.float32).unbind(), strict=True))
        self.temperature = self.value["temperature"]
        self.top_k, self.key = upload(np.stack([np.where(top_k > 0, top_k, _NO_TOP_K), key]), device).unbind()
        self.greedy, self.raw, hot, self.keeps = upload(np.stack([greedy, raw, tempered, keeps]) > 0, device).unbind()
        self.raw_temperature = torch.where(hot, self.temperature, 1.0)

    def __len__(self) -> int:
        return len(self._source[0])

    def parts(self, size: int) -> list[SamplingRows]:
        """Split the rows into parts of at most `size`."""
        if size >= len(self):
            return [self]
        if self._parts[0] != size:
            self._parts = size, [self._part(start, start + size) for start in range(0, len(self), size)]
        return self._parts[1]

    def _part(self, start: int, end: int) -> SamplingRows:
        rows, numbers, integers, biases, listed = self._source
        cut, device = slice(start, end), self.key.device
        return SamplingRows(rows[cut], numbers[:, cut], integers[:, cut], biases, listed, self.scratch, device)


@dataclass(frozen=True, eq=False)
class DecodeRun:
    """Several decode steps in one call, each with the tokens that the step before has drawn.

    No further step begins once a row is seen to have drawn a token that ends it, or to have no finite logit.
    """

    ids: NDArray[np.int64]
    """[R] token ids of the first step; may be overwritten, like `rows` and `counters`."""
    rows: PagedRows
    """One position per row, and block tables wide enough for all steps."""
    states: NDArray[np.int32]
    """[R] state slot of each row; not read if the model has no recurrent layers."""
    params: SamplingRows
    """Sampling parameters of the R rows, which are `plain`."""
    counters: NDArray[np.int64]
    """[R] positions in the rows' random streams."""
    stop_ids: NDArray[np.int32]
    """[R, S] token ids that end a row, padded with negatives."""
    steps: int
    """Most steps to make."""
    asked: ctypes.c_int32
    """No further step begins once it is not 0; another thread may set it at any time."""


class SamplingTable:
    """Sampling parameters of every row, on the host; `select` uploads a step's, cached while rows and parameters stay."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._numbers: NDArray[np.float64] = np.zeros((len(_NUMBERS), 0))
        self._integers: NDArray[np.int64] = np.zeros((len(_INTEGERS), 0), np.int64)
        self._biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._listed: dict[int, Tensor] = {}
        self._selected: tuple[NDArray[np.int64], SamplingRows] | None = None
        self._scratch = Scratch()

    def set(self, row: int, params: SamplingParams, key: int) -> None:
        """Set the parameters of `row` and the key of its random stream (`stream_key`)."""
        capacity = self._numbers.shape[1]
        if row >= capacity:
            room = ((0, 0), (0, max(16, row + 1, 2 * capacity) - capacity))
            self._numbers, self._integers = np.pad(self._numbers, room), np.pad(self._integers, room)
        greedy = params.greedy
        if greedy:
            params = params.replace(temperature=1.0, **FILTERS)
        self._numbers[:, row] = [getattr(params, name) for name in _NUMBERS]
        raw, tempered = params.logprobs_mode != "processed", params.logprobs_mode == "tempered"
        keeps = params.return_kept_tokens
        self._integers[:, row] = params.top_k, key, params.logprobs or 0, greedy, raw, tempered, keeps
        self._listed = {other: ids for other, ids in self._listed.items() if other != row}
        if params.logprob_token_ids:
            self._listed[row] = torch.tensor(params.logprob_token_ids, dtype=torch.int64, device=self.device)
        # A new dict, because earlier selections keep a reference to the old one.
        self._biases = {other: bias for other, bias in self._biases.items() if other != row}
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias.items(), strict=True)
            self._biases[row] = np.array(tokens, np.int64), np.array(values, np.float32)
        self._selected = None

    def select(self, rows: NDArray[np.integer]) -> SamplingRows:
        """Parameters of the table's `rows` [R]; one may appear several times.

        Raises:
            ConfigError: a row was never set.
        """
        if self._selected is None or not np.array_equal(self._selected[0], rows):
            chosen = np.array(rows, np.int64)
            self._check(chosen)
            numbers, integers = self._numbers[:, chosen], self._integers[:, chosen]
            params = SamplingRows(chosen, numbers, integers, self._biases, self._listed, self._scratch, self.device)
            self._selected = chosen, params
        return self._selected[1]

    def _check(self, rows: NDArray[np.int64]) -> None:
        inside = (rows >= 0) & (rows < self._numbers.shape[1])
        known = inside.copy()
        # A stored temperature is never 0.
        known[inside] = self._numbers[0, rows[inside]] != 0
        if not known.all():
            row = rows[~known][0]
            raise ConfigError(f"SamplingTable.select: row {row} was never set; call set({row}, params, key) first")


def _biased(
    rows: NDArray[np.int64], biases: Biases
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    biased = [index for index, row in enumerate(rows.tolist()) if row in biases] if biases else []
    pairs = [biases[rows.item(index)] for index in biased]
    return (
        np.repeat(np.array(biased, np.int64), [len(tokens) for tokens, _ in pairs]),
        np.concatenate([np.zeros(0, np.int64), *(tokens for tokens, _ in pairs)]),
        np.concatenate([np.zeros(0, np.float32), *(values for _, values in pairs)]),
    )
