"""Runs decode steps as CUDA graphs: captures the module's own forward pass for about ten batch sizes, and replays it.

In a step of a small batch, Python takes longer to launch the thousands of kernels than the device takes to run them. A
replay launches all of them with one call. Always true:
- All sizes are captured together, in the first decode step that finds no graphs, while the engine's lock is held. This is
  usually the step that verifies the model when the engine is built. Later steps are padded to the next captured size.
- All graphs read one `DecodeState`, which has room for a fixed number of block table columns. The attention workspace has
  room for a fixed number of parts into which a step's keys are split. If a step needs more room, all graphs are dropped.
- A graph contains the addresses of the KV pool and the weights, and the effect of everything that the forward pass reads in
  Python: plain attributes, configurations, functions. Graphs are dropped when one of these changes. Code from other
  packages may read anything, so a model with such code is captured again whenever the trainer may have modified it.
- If a capture fails, the step runs the model's own forward pass. The next attempt follows after the next suspend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.graphs.cuda_capture import CudaDevice, no_kept_casts
from rollout.engine.graphs.decode_step import CapturedBatch, DecodeState, TritonDecode
from rollout.engine.kernels.decode_parts import num_splits
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.triton_attention import num_parts, table_columns
from rollout.engine.kernels.triton_paged import power_of_two
from rollout.engine.memory.buffers import lacks_device_memory
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.models.attention import Installation, forward_with
from rollout.engine.models.model_support import ModelLayout, has_global_hooks

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
"""The numbers of rows that decode steps are padded to; larger steps are padded to multiples of 128."""
GRAPH_BYTES = 2**23
"""The assumed size of one graph in bytes until all are captured: about 1,600 kernels that take about 5 KiB each."""
LEAST_LACKING = 2**26
"""The minimum number of bytes to keep free for graphs not captured yet, after a capture has run out of memory."""
LEAST_WORKSPACE = 2**26
"""The initial size, in bytes, of the workspace for the attention results of each part of the keys, before they are merged.

If a step needs more, the size is at least doubled, which drops all graphs."""
STATE_LENGTH = 16384
"""The initial room of the block tables, in tokens. A longer sequence at least doubles the room, which drops all graphs."""
WORTHWHILE = 64
"""The number of replays that repay the cost of one capture."""
MAX_WASTED = 8
"""The number of consecutive times that graphs are dropped before `WORTHWHILE` replays, after which capturing stops."""
_log = logging.getLogger(__name__)


class GraphedDecode:
    """Runs the decode steps of one model as CUDA graphs.

    Args:
        cache: the KV cache.
        max_rows: maximum number of rows of a step.
        device: object that captures the graphs.
        kernels: the attention kernels to capture.

    Attributes:
        watched: function that returns a key of the modules' code and options. Graphs are dropped when the key changes.
        why_not: the reason why the last capture failed or why capturing has stopped, or an empty string.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        cache: KVCache,
        max_rows: int,
        device: CudaDevice,
        kernels: TritonDecode,
    ) -> None:
        self._model = model
        self._layout = layout
        self._cache = cache
        self._device = device
        self._kernels = kernels
        self._sizes = _row_sizes(max_rows)
        self._expected = len(self._sizes) * GRAPH_BYTES
        """The expected memory of the graphs of all batch sizes, in bytes."""
        self._columns = table_columns(STATE_LENGTH, cache.block_size)
        self._parts = _least_parts(layout, max_rows)
        self.watched: Callable[[], Hashable] = tuple
        self._state: DecodeState | None = None
        self._graphs: dict[int, Callable[[], None]] = {}
        """The functions that replay the captured graphs, by number of rows."""
        self._logits = torch.empty(0)
        """The logits [rows, vocabulary size]. All graphs share this tensor, because it is a small step's largest one."""
        self._fixed: tuple[int, ...] | None = None
        """The KV pool's addresses (`KVCache.addresses`) that the captured graphs contain."""
        self._computed: tuple[int, torch.dtype | None] | None = None
        self._signature: object = None
        self._replays = self._wasted = 0
        self._tried = False
        """Whether a capture of the batch sizes without a graph was attempted since the last suspend."""
        self.why_not = ""
        self._given_up = False

    @property
    def captured(self) -> list[int]:
        """The numbers of rows for which a graph has been captured, ascending."""
        return sorted(self._graphs)

    @property
    def graph_bytes(self) -> int:
        """The device memory of all graphs, including their workspace, inputs and logits, in bytes."""
        state = 0 if self._state is None else self._state.nbytes
        return self._device.graph_bytes + self._kernels.nbytes + self._logits.nbytes + state

    @property
    def bytes_to_come(self) -> int:
        """The device memory, in bytes, to reserve for graphs: the memory that they will still take or have taken.

        The memory already taken is included because torch reports it as free, although only graphs can use it.
        """
        missing = 0 if self._given_up else max(0, self._expected - self.graph_bytes)
        return self._device.graph_bytes + missing

    def expect(self, peak: int, positions: int) -> None:
        """Estimate the memory of the graphs, given that an eager step of `positions` positions took up to `peak` bytes."""
        if not self.captured:
            pool = self._sizes[-1] * peak // positions
            self._expected = max(self._expected, pool + len(self._sizes) * GRAPH_BYTES)

    def run(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        module_epoch: int,
        rotary: NDArray[np.int64] | None = None,
    ) -> Tensor | None:
        """Run one decode step as a graph, which writes K and V into the cache. Call it inside `Installation.inference`.

        Args:
            ids: token ids of the P packed positions, [P].
            rows: the P positions and their block tables.
            keep: indices of the packed positions to compute logits for.
            module_epoch: number that changes whenever the trainer may have modified the module.
            rotary: rotary positions; see `DecodeState.send`.

        Returns:
            Logits [len(keep), vocabulary size], valid until the next call; None if the module must run this step itself.
        """
        count = len(rows)
        if len(ids) != count or len(keep) != count or count > self._sizes[-1] or (keep != np.arange(count)).any():
            return None
        if not self._ready(module_epoch):
            return None
        state = self._state_for(rows.positions)
        if not self._tried:
            self._capture_missing(state)
        size = min((rows for rows in self._graphs if rows >= count), default=0)
        if not size:
            return None
        state.send(ids, rows, rotary)
        self._replays += 1
        self._graphs[size]()
        return self._logits[:count]

    def retry(self) -> None:
        """Let the next step try again to capture missing graphs. The engine calls this when it suspends."""
        self._tried = False

    def release(self) -> None:
        """Drop all graphs and free their memory; the next decode step captures them again."""
        self._graphs.clear()
        self._tried = False
        self._state = None
        self._logits = torch.empty(0)
        self._device.forget()
        self._kernels.release()

    def give_up(self, why: str) -> None:
        """Stop capturing and replaying, for the reason `why`."""
        self._given_up, self.why_not = True, why
        self.release()
        _log.warning(
            "%s runs its own forward in every step instead of a CUDA graph: %s; "
            "InferenceConfig(advanced=Advanced(cuda_graphs=False)) skips the attempt",
            type(self._model).__name__,
            why,
        )

    def _ready(self, module_epoch: int) -> bool:
        if self._given_up or has_global_hooks():
            return False
        if self._cache.addresses != self._fixed:
            self._fixed = self._cache.addresses
            self.release()
        kind = self._layout.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if (module_epoch, precision) != self._computed:
            self._computed = module_epoch, precision
            signature = self.watched(), precision, _addresses_of(self._model)
            if signature != self._signature:
                self._signature = signature
                self._change()
        return not self._given_up

    def _state_for(self, positions: NDArray[np.int64]) -> DecodeState:
        """Return the decode state. If it has no room for rows at these positions, drop all graphs and build a larger one."""
        columns, parts = table_columns(int(positions.max()) + 1, self._cache.block_size), num_parts(positions)
        if columns > self._columns or parts > self._parts:
            # Release the captured graphs: they contain the addresses of the current buffers, which larger ones replace.
            self.release()
            if columns > self._columns:
                self._columns = max(columns, 2 * self._columns)
            self._parts = max(self._parts, power_of_two(parts))
        if self._state is None:
            self._state = DecodeState(self._sizes[-1], self._columns, self._cache.block_size, self._layout.device)
        return self._state

    def _capture_missing(self, state: DecodeState) -> None:
        """Capture the graphs of the missing batch sizes, largest first, so that smaller sizes reuse the largest's memory."""
        missing = [rows for rows in reversed(self._sizes) if rows not in self._graphs]
        short, lack = list[int](), ""
        state.clear()
        with no_kept_casts():
            for rows in missing:
                try:
                    self._graphs[rows] = self._device.capture(lambda rows=rows: self._run(state, rows))  # type: ignore[misc]
                except Exception as exc:  # noqa: BLE001 - without graphs the model still runs its own forward pass
                    why = f"{type(exc).__name__}: {exc}".partition("\n")[0]
                    if not lacks_device_memory(exc):
                        self._tried, self.why_not = True, why
                        _log.info("no CUDA graph of a decode step until the next suspend: %s", why)
                        return
                    short, lack = [rows, *short], why
        self._tried, self.why_not = True, ""
        if not short:
            self._expected = self.graph_bytes
            return
        lacking = max(2 * (self._expected - self.graph_bytes), LEAST_LACKING)
        self._expected = self.graph_bytes + lacking
        _log.warning(
            "no memory to capture decode steps of %s rows until the next suspend, after which the KV pool leaves %d MiB "
            "for it: %s", ", ".join(map(str, short)), lacking >> 20, lack,
        )  # fmt: skip

    def _run(self, state: DecodeState, rows: int) -> None:
        # Clear autocast's cache, because it may still hold cast copies of earlier weights.
        torch.clear_autocast_cache()
        inputs = state.inputs(rows, self._parts)
        keep = torch.arange(rows, device=self._layout.device)
        batch = CapturedBatch(self._kernels, self._layout, inputs)
        with Installation(self._model).forward():
            output = forward_with(
                batch, self._model, input_ids=inputs.ids[None], position_ids=inputs.positions[None], logits_to_keep=keep
            )
        logits: Tensor = output.logits[0]
        if not self._logits.numel():
            with torch.inference_mode(False):
                self._logits = logits.new_empty(self._sizes[-1], logits.shape[1])
        self._logits[:rows].copy_(logits)

    def _change(self) -> None:
        if self._graphs:
            self._wasted = self._wasted + 1 if self._replays < WORTHWHILE else 0
        self._replays = 0
        self.release()
        if self._wasted >= MAX_WASTED:
            self.give_up("its parameters or modules change every few steps, or may: code of other packages runs in it")


def _addresses_of(model: nn.Module) -> list[object]:
    tensors = (each for own in model.modules() for each in (*own._parameters.items(), *own._buffers.items()))
    return [(name, each.data_ptr(), each.dtype, each.shape) for name, each in tensors if each is not None]


def _least_parts(layout: ModelLayout, rows: int) -> int:
    """Return the initial workspace size of every graph, in parts (the kernels split the keys of each row into parts).

    This is the number that fits into `LEAST_WORKSPACE`, but at most the number for `rows` rows of `STATE_LENGTH` tokens.
    """
    sizes = (call.num_heads * (shape.value_dim + 1) for shape, call in zip(layout.layers, layout.calls, strict=True))
    return min(LEAST_WORKSPACE // (4 * max(sizes)), rows * num_splits(STATE_LENGTH))


def _row_sizes(most: int) -> list[int]:
    sizes = [*SIZES, *range(SIZES[-1] + 128, most + 128, 128)]
    return sizes[: 1 + next(place for place, size in enumerate(sizes) if size >= most)]
