"""LoRA adapters that requests name: which are loaded, which sequence has which, and their part of a forward.

Nothing is injected into the model: while a forward with adapters runs, the `forward` of the layers concerned is replaced,
and put back before any other forward. Always true: sequences without an adapter are computed by a forward of their own,
exactly as if there were no adapters; all others of a step share one forward, each position with its own adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import upload
from rollout.engine.weights.lora_folder import LoraAdapter, LoraLayer, read_adapter
from rollout.errors import ConfigError, InvalidRequestError, UnsupportedModelError

MAX_ADAPTERS = 64
"""Adapters loaded at a time."""

IntArray = NDArray[np.int64]
Names = Sequence[str | None]
"""Adapter of each sequence of a step."""
Forward = Callable[[IntArray, PagedRows, IntArray], Tensor]
"""Logits [len(keep), V] of (ids, rows, keep), as `ModelRunner.forward` takes them."""
_Part = tuple[LoraLayer, Tensor | None]
"""An update, and which positions it is for; None: all."""


class LoraAdapters:
    """Loaded adapters of one model, and the adapter of each row of the sequence table."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._loaded: dict[str, LoraAdapter] = {}
        self._of_row: dict[int, str] = {}
        self._unloaded: set[str] = set()

    @property
    def folders(self) -> dict[str, str]:
        """Folder of each loaded adapter, by name."""
        return {name: adapter.folder for name, adapter in self._loaded.items()}

    def load(self, name: str, folder: str | PathLike[str]) -> bool:
        """Load an adapter, in place of one of the same name.

        Returns:
            Whether there has been another adapter of this name, of which there may be cached KV.

        Raises:
            ConfigError: it does not fit the model, or there are too many; nothing was changed.
        """
        if name not in self._loaded and len(self._loaded) >= MAX_ADAPTERS:
            raise ConfigError(
                f"adapter {name!r}: {MAX_ADAPTERS} adapters are loaded, the most there may be; unload one"
            )
        known = name in self._loaded or name in self._unloaded
        self._loaded[name] = read_adapter(self._model, folder)
        return known

    def unload(self, name: str) -> None:
        """Forget an adapter, which no sequence has any more. Harmless when repeated."""
        if self._loaded.pop(name, None) is not None:
            self._unloaded.add(name)

    def num_layers(self, name: str) -> int:
        """Number of layers that a loaded adapter changes."""
        return len(self._loaded[name].layers)

    def check(self, name: str | None) -> None:
        """Raises: InvalidRequestError: there is no such adapter."""
        if name is not None and name not in self._loaded:
            there = ", ".join(map(repr, self._loaded)) or "none"
            raise InvalidRequestError(
                f"adapter {name!r} is not loaded (loaded: {there}); load it by load_lora_adapter()"
            )

    def set(self, row: int, name: str | None) -> None:
        """Set the adapter of a row of the sequence table."""
        if name is not None:
            self._of_row[row] = name
        elif self._of_row:
            self._of_row.pop(row, None)

    def of(self, rows: NDArray[np.int32]) -> Names | None:
        """[R] adapter of each row; None: none has one."""
        if not self._of_row:
            return None
        named = [self._of_row.get(row) for row in rows.tolist()]
        return named if any(named) else None

    def run(
        self, ids: IntArray, rows: PagedRows, keep: IntArray, named: Names, plain: Forward, adapted: Forward
    ) -> Tensor:
        """Logits [len(keep), V] of sequences with and without adapters, at packed positions `keep`.

        Args:
            plain: forward of sequences without one.
            adapted: the module's own forward, for the others: of ids [1, P] to logits [1, len(keep), V].
        """
        parts: list[Tensor] = []
        places: list[IntArray] = []
        for acts in (False, True):
            entries = np.flatnonzero([(name is not None) is acts for name in named])
            if not len(entries):
                continue
            chosen, positions = rows.select(entries)
            place = np.flatnonzero(np.isin(keep, positions))
            at = np.searchsorted(positions, keep[place])
            if acts:
                with self._acting(np.repeat([str(named[entry]) for entry in entries.tolist()], chosen.counts)):
                    logits = adapted(ids[None, positions], chosen, at)[0]
            else:
                logits = plain(ids[positions], chosen, at)
            parts.append(logits[: len(at)])
            places.append(place)
        order = np.argsort(np.concatenate(places), kind="stable")
        return torch.cat(parts).index_select(0, upload(order, parts[0].device))

    @contextmanager
    def _acting(self, named: NDArray[np.str_]) -> Iterator[None]:
        """Forwards in the block compute each packed position with its adapter.

        Args:
            named: [P] adapter of each position.
        """
        parts: dict[str, list[_Part]] = {}
        device = next(self._model.parameters()).device
        names = np.unique(named).tolist()
        for name in names:
            index = None if len(names) == 1 else upload(np.flatnonzero(named == name), device)
            for path, layer in self._loaded[name].layers.items():
                parts.setdefault(path, []).append((layer, index))
        replaced: list[tuple[dict[str, Any], Any]] = []
        try:
            for path, updates in parts.items():
                module = self._model.get_submodule(path)
                attributes = vars(module)
                replaced.append((attributes, attributes.get("forward")))
                attributes["forward"] = partial(_updated, module.forward, path, updates, len(named))
            yield
        finally:
            for attributes, before in replaced:
                if before is None:
                    del attributes["forward"]
                else:
                    attributes["forward"] = before


def _updated(forward: Callable[[Tensor], Tensor], path: str, updates: list[_Part], positions: int, x: Tensor) -> Tensor:
    """Output of a linear layer with the low-rank updates of the positions that have one, in the dtypes PEFT computes in."""
    base = forward(x)
    inputs, outputs = x.flatten(0, -2), base.flatten(0, -2)
    for layer, index in updates:
        if index is None:
            return (base + _update(layer, x)).to(base.dtype)
        if len(inputs) != positions:
            raise UnsupportedModelError(
                f"{path} computes {len(inputs)} of {positions} positions, so several adapters cannot be told apart there: "
                "ask for one adapter at a time, or train it without this layer"
            )
        mixed = outputs.index_select(0, index) + _update(layer, inputs.index_select(0, index))
        outputs = outputs.index_copy(0, index, mixed.to(base.dtype))
    return outputs.view_as(base)


def _update(layer: LoraLayer, x: Tensor) -> Tensor:
    down, up = layer.down.to(x.device), layer.up.to(x.device)
    return linear(linear(x.to(down.dtype), down), up) * layer.scaling
