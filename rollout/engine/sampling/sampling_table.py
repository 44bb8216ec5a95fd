"""The sampling parameters of the sequence table's rows, as arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.engine.memory.buffers import Scratch, upload
from rollout.sampling_params import FILTERS, PENALTIES, SamplingParams

Biases = Mapping[int, tuple[NDArray[np.int64], NDArray[np.float32]]]
"""The logit biases as (token ids, biases), by row of the table. Rows without a logit_bias have no entry."""

_COLUMNS = ("temperature", *PENALTIES, *FILTERS, "top_n", "greedy", "raw", "tempered", "keeps")
"""The names of the numbers stored per row; the last four are 0 or 1. All numbers are exact in float64."""
_NO_TOP_K = 2**31 - 1


class SamplingRows:
    """The sampling parameters of R rows: tensors on the device, and flags on the host.

    Greedy rows are stored with temperature 1 and their filters off.

    Attributes:
        greedy: [R] bool, whether each row takes the most likely token.
        raw: [R] bool, whether each row reports log-probs of the model's own logits, divided by `raw_temperature`.
        key: [R] int64, the key of each row's random stream.
        top_k: [R] int64; 2^31 - 1 for rows without top_k.
        top_p: [R] float64; 1 for rows without top_p.
        value: the values of every penalty and filter, [R] float32, by the parameter's name.
        temperature, raw_temperature: [R] float32, the divisors of the edited logits and of the model's own logits.
        filters: the names of the filters that some row uses.
        limited: [L] int64, the indices of the rows with top_k or top_p.
        limited_width: the largest top_k of the limited rows; None if a limited row has only top_p.
        penalized: [N] numpy int64, the indices of the rows with a penalty.
        bias: numpy arrays (row, token id, bias) with one element per biased token of a row.
        top_n: the largest number of top log-probs that a row returns.
        plain: whether every row draws from its logits divided by its temperature, without other edits, and returns nothing
            but the token's log-prob.
        keeps: [R] bool, whether each row returns the set of tokens that its filters kept.
        keeping: [K] int64, the indices of the rows that return this set.
        scratch: buffers shared by all rows of a table.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        columns: NDArray[np.float64],
        keys: NDArray[np.int64],
        biases: Biases,
        scratch: Scratch,
        device: torch.device,
    ) -> None:
        """Wrap the parameters of the R table rows in `rows`. `columns` has R values for every name in `_COLUMNS`."""
        self._source = rows, columns, keys, biases
        self.scratch = scratch
        self._parts: tuple[int, list[SamplingRows]] = len(rows), [self]
        given = dict(zip(_COLUMNS, columns, strict=True))
        temperature, repetition, top_k, top_p = (
            given[name] for name in ("temperature", "repetition_penalty", "top_k", "top_p")
        )
        top_n, greedy, raw, tempered, keeps = columns[_COLUMNS.index("top_n") :]
        occurrence = (given["presence_penalty"] != 0) | (given["frequency_penalty"] != 0)
        limited = np.flatnonzero((top_k > 0) | (top_p < 1))
        self.top_n = int(top_n.max(initial=0))
        self.any_greedy, self.all_greedy = bool(greedy.any()), bool(greedy.all())
        self.any_raw, self.all_raw = bool(raw.any()), bool(raw.all())
        self.any_temperature = bool((temperature != 1).any())
        self.any_raw_temperature = bool(((temperature != 1) & (tempered > 0)).any())
        self.filters = {name for name, off in FILTERS.items() if bool((given[name] != off).any())}
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
        wide = upload(columns, device)
        self.value = dict(zip(_COLUMNS, wide.to(torch.float32).unbind(), strict=True))
        self.temperature = self.value["temperature"]
        self.top_p, most = (wide[_COLUMNS.index(name)] for name in ("top_p", "top_k"))
        self.top_k = torch.where(most > 0, most, _NO_TOP_K).to(torch.int64)
        self.key = upload(keys, device)
        self.greedy, self.raw, hot, self.keeps = (wide[-4:] > 0).unbind()
        self.raw_temperature = torch.where(hot, self.temperature, 1.0)

    def __len__(self) -> int:
        return len(self._source[0])

    def parts(self, size: int) -> list[SamplingRows]:
        """Split the rows, in order, into parts of at most `size` rows, and return the parts."""
        if size >= len(self):
            return [self]
        if self._parts[0] != size:
            self._parts = size, [self._part(start, start + size) for start in range(0, len(self), size)]
        return self._parts[1]

    def _part(self, start: int, end: int) -> SamplingRows:
        rows, columns, keys, biases = self._source
        cut, device = slice(start, end), self.key.device
        return SamplingRows(rows[cut], columns[:, cut], keys[cut], biases, self.scratch, device)


class SamplingTable:
    """The sampling parameters of every row of the sequence table, on the host.

    `select` uploads the parameters of a step's rows. The upload is reused until the rows or the parameters change.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._columns: NDArray[np.float64] = np.zeros((len(_COLUMNS), 0))
        self._keys: NDArray[np.int64] = np.zeros(0, np.int64)
        self._biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._selected: tuple[NDArray[np.int64], SamplingRows] | None = None
        self._scratch = Scratch()

    def set(self, row: int, params: SamplingParams, key: int) -> None:
        """Set the parameters of `row` and the key of its random stream, as `stream_key` computes it."""
        capacity = len(self._keys)
        if row >= capacity:
            more = max(16, row + 1, 2 * capacity) - capacity
            self._columns, self._keys = np.pad(self._columns, ((0, 0), (0, more))), np.pad(self._keys, (0, more))
        greedy = params.greedy
        if greedy:
            params = params.replace(temperature=1.0, **FILTERS)
        raw, tempered = params.logprobs_mode != "processed", params.logprobs_mode == "tempered"
        shape = [getattr(params, name) for name in ("temperature", *PENALTIES, *FILTERS)]
        self._columns[:, row] = *shape, params.logprobs or 0, greedy, raw, tempered, params.return_kept_tokens
        self._keys[row] = key
        # Make a new dict, because earlier selections keep a reference to the old dict.
        self._biases = {other: bias for other, bias in self._biases.items() if other != row}
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias.items(), strict=True)
            self._biases[row] = np.array(tokens, np.int64), np.array(values, np.float32)
        self._selected = None

    def select(self, rows: NDArray[np.integer]) -> SamplingRows:
        """Return the parameters of `rows` [R]. Each row must have been `set`, and may appear several times."""
        if self._selected is None or not np.array_equal(self._selected[0], rows):
            chosen = np.array(rows, np.int64)
            # Use `take`, which makes the values of a column adjacent, as the C++ kernel reads them.
            params = SamplingRows(
                chosen,
                self._columns.take(chosen, axis=1),
                self._keys[chosen],
                self._biases,
                self._scratch,
                self.device,
            )
            self._selected = chosen, params
        return self._selected[1]


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
