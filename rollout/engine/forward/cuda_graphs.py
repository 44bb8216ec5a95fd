"""CUDA graphs of steps: capture once per batch size, replay.

A step of a small batch takes less time on the device than Python needs to launch its thousands of kernels; a replay
launches them together. A graph is captured for a number of rows, rounded up, when a step first needs it, and for the
autocast in force; how long its rows are hardly matters, as programs share out the parts of keys that there are. Prefill
chunks of a step are padded to one of a few numbers of tokens and have a graph of their own, replayed beside that of the
step's decodes. Inputs are a `DecodeState` and a `ChunkState` that all graphs share, and the address of the KV pool is read
from `KVCache.addresses`, so a graph outlives a suspend. Weights changed in place are read as they are, under autocast too:
the casts are part of the graph, or made before it (`AutocastCopies`). Other changes of the model are looked for whenever
the trainer may have modified it (`signature_of`), and invalidate all graphs. A model that cannot be captured runs its own
forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.forward.attention import Installation, forward_with
from rollout.engine.forward.chunk_state import MOST_CHUNKS, SIZES, ChunkInputs, ChunkState, padded_tokens
from rollout.engine.forward.cuda_capture import Device, Uncapturable, no_kept_casts
from rollout.engine.forward.cuda_switches import switched_on
from rollout.engine.forward.decode_kernels import CapturedBatch, DecodeForward, DecodeKernels
from rollout.engine.forward.decode_state import DecodeInputs, DecodeState
from rollout.engine.forward.graph_signature import signature_of
from rollout.engine.forward.graph_sizes import GraphMemory, padded_length, padded_rows, row_sizes
from rollout.engine.forward.graph_steps import GraphStep
from rollout.engine.forward.model_support import ModelLayout, has_global_hooks
from rollout.engine.forward.prefix_sharing import PrefixSharing, token_bytes
from rollout.engine.kernels.decode_parts import num_splits
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.triton_attention import num_parts, table_columns
from rollout.engine.kernels.triton_paged import power_of_two
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.shortage import lacks_device_memory
from rollout.engine.weights.autocast_copies import NO_COPIES, AutocastCopies

LEAST_WORKSPACE = 2**26
"""Bytes for the parts of keys of a step, before they are merged; doubled, at the price of a capture, for more."""
STATE_LENGTH = 16384
"""Tokens that the tables of `DecodeState` have room for; doubled, at the price of all graphs, for a longer sequence, and
narrower again after a suspend, if no sequence since the last one had a quarter of them."""
WORTHWHILE = 64
"""Replays that amortise one capture."""
MAX_WASTED = 8
"""Consecutive invalidations before `WORTHWHILE` replays, after which capturing is given up."""
MAX_FAILED = 3
"""Sizes whose capture fails, although that of others did not, after which capturing is given up."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Size:
    """What a graph is captured for."""

    rows: int
    columns: int
    """Of the block tables."""
    precision: torch.dtype | None
    """Dtype of the autocast in force; None: there is none."""
    fused: tuple[float, ...] | None
    """What the fused forward has fixed (`DecodeForward.numbers`); None: the module's own forward was captured."""
    shares: bool
    """Whether prefixes that rows share are read once."""
    parts: int
    """Room for the parts of keys of all rows; 0: the fused forward does not need it."""
    tokens: int = 0
    """Of prefill chunks; 0: the rows decode."""

    def __str__(self) -> str:
        return f"prefill steps of {self.tokens} tokens" if self.tokens else f"decode steps of {self.rows} rows"


@dataclass(frozen=True, eq=False)
class _Graph:
    replay: Callable[[], None]
    dtype: torch.dtype
    """Of the logits."""


class GraphedDecode:
    """Runs the decode steps of one model as CUDA graphs, and its prefill chunks.

    Args:
        cache: holds K and V.
        max_rows: most rows of a step.
        kernels: the attention of the module's forward.
        fused: captured in place of the module's forward where `run` says that it is ready.
        alone: capture nothing else.
        chunked: capture prefill chunks too.
        copies: read by the module's captured forward in the place of weights that autocast casts.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        cache: KVCache,
        max_rows: int,
        device: Device,
        kernels: DecodeKernels,
        fused: DecodeForward | None = None,
        *,
        alone: bool = False,
        chunked: bool = True,
        copies: AutocastCopies = NO_COPIES,
    ) -> None:
        self.fused = fused
        self._alone = alone
        self._model = model
        self._layout = layout
        self._block_size, self._groups = cache.block_size, cache.num_groups
        self._max_rows = max_rows
        self._device = device
        self._kernels = kernels
        self._resident = switched_on("tables")
        self._listed = switched_on("parts")
        self._least_parts = _least_parts(layout, max_rows)
        self._most_columns = table_columns(STATE_LENGTH, self._block_size)
        shares = kernels.shares and switched_on("prefixes")
        self._sharing = PrefixSharing(token_bytes(layout) * shares)
        self._chunked = chunked and switched_on("chunks")
        self.memory = GraphMemory([*row_sizes(max_rows) * (1 + shares), *SIZES[: len(SIZES) * self._chunked]])
        """What the graphs take of the device."""
        self._reached = 0
        """Most columns of the block tables of a step since the last suspend."""
        self._copies, self._layout_of_copies = copies, copies.layout
        self._state: DecodeState | None = None
        self._chunks: ChunkState | None = None
        self.last: GraphStep | None = None
        """The last step, if it was one graph of decodes."""
        self._graphs: dict[_Size, _Graph] = {}
        self._logits: dict[tuple[torch.dtype, bool], Tensor] = {}
        """By dtype, and whether they are those of chunks."""
        self._module_epoch = -1
        self._signature: list[object] = []
        self._replays = self._wasted = 0
        self._captured: set[torch.dtype | None] = set()
        self._failed: set[_Size] = set()
        self._short: set[_Size] = set()
        """Sizes for which there was no memory."""
        self._refused: dict[torch.dtype | None, str] = {}
        self._given_up = ""

    @property
    def why_not(self) -> str:
        """Why capturing was given up; empty: it was not."""
        return self._given_up or self._refused.get(self._precision(), "")

    @property
    def graph_bytes(self) -> int:
        """Device memory of all graphs, of their workspace and inputs, and of the logits they write."""
        logits = sum(each.nbytes for each in self._logits.values())
        states = sum(each.nbytes for each in (self._state, self._chunks) if each is not None)
        return self._device.graph_bytes + self._kernels.nbytes + logits + states

    @property
    def bytes_to_come(self) -> int:
        """Device memory that graphs will take beside `graph_bytes`, and their pool, which torch counts as free meanwhile."""
        return self._device.graph_bytes + (0 if self.why_not else self.memory.to_come(self.graph_bytes))

    def run(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        module_epoch: int,
        rotary: NDArray[np.int64] | None = None,
        *,
        fused: bool = False,
    ) -> Tensor | None:
        """Run one step as one graph or two, within an active `Installation`; K and V go into the cache.

        Args:
            ids: [P] token ids.
            rows: the P positions.
            keep: packed positions whose logits are wanted, each once; those of decoding rows come first.
            module_epoch: changes whenever the trainer may have modified the module.
            rotary: see `DecodeState.send`.
            fused: whether the fused forward computes what the module does now.

        Returns:
            Logits [len(keep), V], valid until the next call; None if this step must run the module's forward.
        """
        self.last, decodes = None, _decodes(rows, keep)
        chunked = decodes < len(rows)
        if not 0 <= decodes <= self._max_rows or (chunked and not self._chunked) or not self._ready(module_epoch):
            return None
        if self._copies.layout != self._layout_of_copies:
            self._forget()
            self._layout_of_copies = self._copies.layout
        numbers = self.fused.numbers if fused and self.fused is not None else None
        if numbers is None and self._alone:
            return None
        rotary, sizes = rows.positions if rotary is None else rotary, list[tuple[_Size, int]]()
        wanted: _Size | None = None
        if chunked:
            chunks, chosen = rows.select(np.arange(decodes, len(rows)))
            kept = keep[decodes:] - decodes
            # Before anything is sent or captured: beside chunks that run eagerly, decodes do so too.
            wanted = self._chunk_size(rows, chunks, kept, numbers)
            if wanted is None:
                return None
        if decodes:
            part = rows.select(np.arange(decodes))[0] if chunked else rows
            size = self._decoding(ids[:decodes], part, rotary[:decodes], numbers)
            if size is None:
                return None
            sizes.append((size, decodes))
        if wanted is not None:
            size = self._prefilling(wanted, ids[chosen], chunks, kept, rotary[chosen])
            if size is None:
                return None
            sizes.append((size, len(kept)))
            return self._replayed(sizes)
        (only, _), state = sizes[0], self._state
        assert state is not None
        replay = partial(self._replayed, sizes)
        self.last = GraphStep(state, replay, rows.positions, only.columns, self._block_size, only.parts)
        return replay()

    def _replayed(self, sizes: list[tuple[_Size, int]]) -> Tensor:
        """Logits of the graphs of these sizes, the first so many of each."""
        self._replays += 1
        logits = []
        for size, count in sizes:
            graph = self._graphs[size]
            graph.replay()
            logits.append(self._logits[graph.dtype, size.tokens > 0][:count])
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _decoding(
        self, ids: NDArray[np.int64], rows: PagedRows, rotary: NDArray[np.int64], numbers: tuple[float, ...] | None
    ) -> _Size | None:
        """Send decoding rows, and capture their step if there is no graph; None: they must run the module's forward."""
        by_kernels = self._by_kernels(numbers)
        shared = self._sharing.of(rows) if by_kernels else None
        padded, columns = padded_rows(len(ids)), self._columns(rows)
        state, parts = self._state_of(columns), 0
        if by_kernels and self._listed:
            columns, parts = state.columns, max(self._least_parts, power_of_two(num_parts(rows.positions)))
        elif by_kernels:
            parts = padded * (num_splits(columns * self._block_size) + (shared is not None))
        size = _Size(padded, columns, self._precision(), numbers, shared is not None, parts)
        if size in self._failed or size in self._short:
            return None
        state.send(ids, rows, rotary, shared)
        return self._captured_as(
            size, lambda: state.inputs(padded, columns, parts, shares=size.shares, spread=not self._listed)
        )

    def _chunk_size(
        self, rows: PagedRows, chunks: PagedRows, keep: NDArray[np.int64], numbers: tuple[float, ...] | None
    ) -> _Size | None:
        """Size of the graph of these prefill chunks of `rows`; None: they must run the module's forward."""
        tokens = padded_tokens(len(chunks.positions))
        # A model whose decode steps cannot be captured is not tried again.
        tried = len(chunks) < len(rows) or self._precision() in self._captured
        if not tokens or not tried or not self._by_kernels(numbers):
            return None
        columns = self._state_of(self._columns(rows)).columns
        if self._chunks is None:
            self._chunks = ChunkState(SIZES[-1], columns, self._layout.device, self._groups)
        size = _Size(MOST_CHUNKS, columns, self._precision(), numbers, False, 0, tokens)
        return size if self._chunks.serves(chunks, keep) and size not in self._short else None

    def _prefilling(
        self, size: _Size, ids: NDArray[np.int64], rows: PagedRows, keep: NDArray[np.int64], rotary: NDArray[np.int64]
    ) -> _Size | None:
        """Send prefill chunks, and capture their step if there is no graph; None: they must run the module's forward."""
        chunks = self._chunks
        assert chunks is not None
        chunks.send(ids, rows, keep, rotary)
        return self._captured_as(size, lambda: chunks.inputs(size.tokens))

    def _by_kernels(self, numbers: tuple[float, ...] | None) -> bool:
        return numbers is None or self.fused is None or self.fused.by_kernels

    def retry(self) -> None:
        """At a suspend: capture again what there was no memory for, and have no tables four times as wide as was needed."""
        self._short.clear()
        needed = max(self._reached, table_columns(STATE_LENGTH, self._block_size))
        if self._reached and 4 * needed <= self._most_columns:
            self._most_columns = needed
            self._forget()
        self._reached = 0

    def release(self) -> None:
        """Free the memory of all graphs; they are captured again when they are needed."""
        self.retry()
        self._forget()

    def give_up(self, why: str) -> None:
        """Capture and replay nothing any more."""
        self._given_up = why
        self._forget()
        self._say_why_not(why)

    def _ready(self, module_epoch: int) -> bool:
        if self.why_not or has_global_hooks():
            return False
        if module_epoch != self._module_epoch:
            self._module_epoch = module_epoch
            signature = signature_of(self._model)
            if signature != self._signature:
                self._signature = signature
                self._change()
        return not self._given_up

    def _precision(self) -> torch.dtype | None:
        """The dtype of the autocast in force; None: there is none."""
        kind = self._layout.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def _columns(self, rows: PagedRows) -> int:
        """Columns of block tables for these rows, rounded up."""
        return table_columns(padded_length(int(rows.positions.max()) + 1), self._block_size)

    def _state_of(self, columns: int) -> DecodeState:
        """The rows on the device, with block tables of at least `columns`."""
        self._reached = max(self._reached, columns)
        if self._state is None or self._state.columns < columns:
            if self._state is not None:
                # Graphs read the one there was.
                self._forget()
            self._most_columns = max(self._most_columns, columns)
            self._state = DecodeState(
                padded_rows(self._max_rows), self._most_columns, self._block_size, self._layout.device, self._groups,
                resident=self._resident,
            )  # fmt: skip
        return self._state

    def _captured_as(self, size: _Size, inputs: Callable[[], DecodeInputs | ChunkInputs]) -> _Size | None:
        """Capture a step of this size if there is no graph; None: that failed."""
        if size in self._graphs:
            return size
        written: list[torch.dtype] = []
        before, positions = self.graph_bytes, size.tokens or size.rows
        try:
            with no_kept_casts():
                replay = self._device.capture(lambda: written.append(self._forward(size, inputs)))
        except Exception as exc:  # noqa: BLE001 - a model that cannot be captured can still run its forward
            if lacks_device_memory(exc):
                self._short.add(size)
                told = (
                    "no memory to capture %s until the next suspend, after which the KV pool leaves %d MiB for it: %s"
                )
                _log.warning(told, size, self.memory.lacked(positions) >> 20, exc)
            else:
                self._fail(size, exc)
            return None
        self.memory.captured(positions, before, self.graph_bytes)
        self._captured.add(size.precision)
        self._graphs[size] = _Graph(replay, written[-1])
        return size

    def _fail(self, size: _Size, exc: Exception) -> None:
        """Give up this size; or the model, if no size could be captured or too many could not."""
        why = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        # Of a failed capture's memory nothing is left only when no graph of its pool is.
        self._forget()
        if size.tokens:
            self._chunked = False
            _log.warning(
                "steps with prefill chunks run eagerly, since %s cannot be captured as a CUDA graph: %s", size, why
            )
            return
        if size.fused is not None and not self._alone:
            self.fused = None
            _log.warning("the fused forward cannot be captured as a CUDA graph, so the module's own is: %s", why)
            return
        self._failed.add(size)
        one_of_many = size.precision in self._captured and len(self._failed) < MAX_FAILED
        if isinstance(exc, Uncapturable) or not one_of_many:
            self._refused[size.precision] = why
            self._say_why_not(why)
        else:
            _log.warning("%s cannot be captured as a CUDA graph: %s", size, why)

    def _change(self) -> None:
        if self._graphs:
            self._wasted = self._wasted + 1 if self._replays < WORTHWHILE else 0
        self._replays = 0
        self._forget()
        if self._wasted >= MAX_WASTED:
            self.give_up("its parameters or modules change every few steps")

    def _forward(self, size: _Size, made: Callable[[], DecodeInputs | ChunkInputs]) -> torch.dtype:
        """Run the forward and keep its logits; returns their dtype."""
        # Casts that were made before are of the weights as they were then.
        torch.clear_autocast_cache()
        inputs = made()
        fused = self.fused if size.fused is not None else None
        logits = self._module_logits(inputs) if fused is None else fused.decode(inputs)
        key = logits.dtype, size.tokens > 0
        if key not in self._logits:
            # Shared by all graphs: logits are the largest tensor of a small batch.
            largest = MOST_CHUNKS if size.tokens else padded_rows(self._max_rows)
            with torch.inference_mode(False):
                self._logits[key] = torch.empty(largest, logits.shape[1], dtype=logits.dtype, device=logits.device)
        self._logits[key][: len(logits)].copy_(logits)
        return logits.dtype

    def _module_logits(self, inputs: DecodeInputs | ChunkInputs) -> Tensor:
        keep = torch.arange(len(inputs.ids), device=self._layout.device) if inputs.keep is None else inputs.keep
        batch = CapturedBatch(self._kernels, self._layout, inputs)
        with self._copies.substituted(), Installation(self._model).forward():
            output = forward_with(
                batch, self._model, input_ids=inputs.ids[None], position_ids=inputs.positions[None], logits_to_keep=keep
            )
        logits: Tensor = output.logits[0]
        return logits

    def _say_why_not(self, why: str) -> None:
        _log.warning(
            "%s runs its forward every step, and not as a CUDA graph: %s; set InferenceConfig.cuda_graphs=False to "
            "skip the attempt",
            type(self._model).__name__,
            why,
        )

    def _forget(self) -> None:
        self._graphs.clear()
        self.memory.released()
        self._state = self._chunks = self.last = None
        self._logits.clear()
        self._device.forget()
        self._kernels.release()


def _least_parts(layout: ModelLayout, rows: int) -> int:
    """Parts of keys that every graph has room for: what fits into `LEAST_WORKSPACE`, or `rows` of `STATE_LENGTH` have."""
    sizes = (call.num_heads * (shape.value_dim + 1) for shape, call in zip(layout.layers, layout.calls, strict=True))
    return min(LEAST_WORKSPACE // (4 * max(sizes)), rows * num_splits(STATE_LENGTH))


def _decodes(rows: PagedRows, keep: NDArray[np.int64]) -> int:
    """Number of leading rows of one position whose logits are wanted, before all others; -1: some are in no such order."""
    single = int(np.append(rows.counts == 1, False).argmin())
    count = int(np.append(keep[:single] == np.arange(len(keep[:single])), False).argmin())
    return count if (keep[count:] >= count).all() else -1
