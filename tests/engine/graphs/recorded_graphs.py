"""A pretended device: graphs are records of torch's operations, and attention is one operation of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from rollout.engine.graphs.cuda_capture import WARM_UP_RUNS
from rollout.engine.graphs.decode_step import DecodeInputs
from rollout.engine.memory.kv_cache import KVCache
from tests.capturable import Capturable


@torch.library.custom_op("rollout_tests::decode", mutates_args=("keys", "values"))
def decode(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, seen: Tensor, tables: Tensor,
    scaling: float, window: int, softcap: float, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write and attend, row by row."""
    out = torch.zeros(*query.shape[:2], values.shape[3])
    block_size, groups = keys.shape[1], query.shape[1] // keys.shape[2]
    for row in range(len(query)):
        if slots[row] < 0:
            assert seen[row] < 0
            continue
        for cache, own in ((keys, key), (values, value)):
            cache.flatten(0, 1)[int(slots[row])] = own[row]
    for row in range(len(query)):
        last = int(seen[row])
        if last < 0:
            continue
        first = max(0, last + 1 - window) if window else 0
        positions = torch.arange(first, last + 1)
        places = tables[row, positions // block_size].long() * block_size + positions % block_size
        k, v = (cache.flatten(0, 1)[places].repeat_interleave(groups, 1) for cache in (keys, values))
        scores = torch.einsum("hd,shd->hs", query[row], k) * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None]], dim=1)
        out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1)[:, : len(positions)], v)
    return out.to(query.dtype)


class Plain:
    """Stands in for `TritonDecode`: attention of a layer is one operation of torch, as a record of the forward sees it."""

    nbytes = 1000

    def __init__(self, cache: KVCache) -> None:
        self.rows = self.released = 0
        self._cache = cache

    def release(self) -> None:
        self.released += 1

    def __call__(
        self, layer: int, inputs: DecodeInputs, query: Tensor, key: Tensor, value: Tensor, *,
        scaling: float, window: int | None, softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        self.rows = len(inputs.ids)
        return decode(
            query, key, value, *self._cache.layer(layer), inputs.slots, inputs.seen, inputs.tables, scaling,
            window or 0, softcap or 0.0, sinks,
        )  # fmt: skip


@dataclass(frozen=True)
class Result:
    """A tensor that an operation of a record has made."""

    index: int


class Record(Capturable):
    """Takes down the operations that run while it is entered; calling it runs them again, and no other line of Python.

    Tensors from before the recording stay, results are made again, and numbers keep their values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any]] = []
        self._results = WeakIdKeyDictionary()
        self._count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = tree_map_only(Tensor, lambda tensor: self._results.get(tensor, tensor), (args, kwargs))
        self._calls.append((func, *taken))
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._results[leaf] = Result(self._count)
            self._count += 1
        return out

    def __call__(self) -> None:
        made: list[Any] = []

        def found(result: Result) -> Any:
            return made[result.index]

        for func, args, kwargs in self._calls:
            made += tree_leaves(func(*tree_map_only(Result, found, args), **tree_map_only(Result, found, kwargs)))


class Recorder:
    """A device whose records are made of the operations of torch."""

    def __init__(self) -> None:
        self.captures = self.replays = self.forgotten = 0
        self.graph_bytes = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        for _ in range(WARM_UP_RUNS):
            work()
        with (record := Record()):
            work()
        self.captures += 1
        return lambda: self._replay(record)

    def forget(self) -> None:
        self.forgotten += 1

    def _replay(self, record: Record) -> None:
        self.replays += 1
        record()
