"""C++ forward of a decoder on a CPU, over the module's own parameters.

Served models: those whose layers are exactly known classes of transformers (`families.FAMILIES`), without hooks, replaced
forwards or quantised layers, of one dtype, and with all functions as transformers defines them. LoRA layers of PEFT take
part, and FSDP2 is looked through while the weights are whole. Everything is checked again whenever the trainer may have
modified the module, and functions, hooks and numbers before every step; a model that fails a check runs its own forward.
Parameters are never copied or packed: a weight update is seen by the next step.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.fused.fused_binding import Bound
from rollout.engine.fused.fused_checks import Unfusable, bypassed
from rollout.engine.kernels.cpu_draw import Draw
from rollout.engine.kernels.cpu_forward import Decode, Step
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.models.originals import Replaced
from rollout.engine.models.routers import Record
from rollout.engine.sampling.sampling_table import SamplingRows

_log = logging.getLogger(__name__)


class BoundForward(ABC):
    """A forward over the module's own parameters that stands in for the module's while nothing differs from transformers'.

    Args:
        cache: holds K and V.
        exact: serve only what exact mode has a training forward for.
        states: of recurrent layers; None: the model has none.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        cache: KVCache,
        *,
        exact: bool = False,
        states: StatePool | None = None,
    ) -> None:
        self._model = model
        self._layout = layout
        self._cache = cache
        self._exact = exact
        self._states = states
        self._bound: Bound | None = None
        self._module_epoch = -1
        self._why = ""
        self.record: Record | None = None
        """Gets what the routers choose in every forward; None: it is not recorded."""

    def ready(self, module_epoch: int) -> bool:
        """Whether the model, in its current state, can go through `run`.

        Args:
            module_epoch: changes whenever the trainer may have modified the module.
        """
        if module_epoch != self._module_epoch or (self._bound is not None and not self._bound.reads(self._cache)):
            self._module_epoch = module_epoch
            self._bind()
        return self._bound is not None and self._bypassed() is None

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers."""
        return self._states is not None

    @property
    def why_not(self) -> str:
        """Why the last `ready` was False."""
        return self._why or self._bypassed() or ""

    @abstractmethod
    def run(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        states: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Logits [len(keep), V] at packed positions `keep`, valid until the next call; K and V go into the cache.

        Args:
            ids: [P] token ids.
            rows: the P positions.
            states: [R] state slot of each sequence, whose states go on; None: the model has none.
        """

    @abstractmethod
    def release(self) -> None:
        """Release buffers that the next step allocates again."""

    def _bind(self) -> None:
        try:
            bound = Bound(self._model, self._layout, self._cache, exact=self._exact, states=self._states)
            self._bound, why = bound, ""
        except (Unfusable, Replaced, AttributeError) as exc:
            self._bound, why = None, str(exc)
        if why and why != self._why:
            _log.info("%s runs its own forward: %s", type(self._model).__name__, why)
        self._why = why

    def _bypassed(self) -> str | None:
        return bypassed(self._layout.device)


class FusedForward(BoundForward):
    """The C++ forward of one model.

    Args:
        library: see `cpu_library.load`.
        cache: holds K and V.
        exact: serve only what exact mode has a training forward for.
        states: of recurrent layers; None: the model has none.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        cache: KVCache,
        library: ctypes.CDLL,
        *,
        exact: bool = False,
        states: StatePool | None = None,
    ) -> None:
        super().__init__(model, layout, cache, exact=exact, states=states)
        self._library = library
        library.rollout_workspace_bytes.restype = library.rollout_decode.restype = ctypes.c_int64
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._logits = torch.empty(0, device="cpu")

    def run(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        states: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Logits [len(keep), V]; see `BoundForward`."""
        bound = self._bound
        assert bound is not None
        step, held = self._step(bound, ids, rows, keep, states)
        routes = None
        if self.record is not None:
            routes = np.empty((len(bound.mixtures), len(ids) * bound.model.chosen), np.int64)
            step.routes = routes.ctypes.data
        self._library.rollout_forward(ctypes.byref(bound.model), ctypes.byref(step), bound.narrow)
        del held  # `step` points to them.
        if self.record is not None and routes is not None:
            for index, (mixture, experts) in enumerate(zip(bound.mixtures, routes, strict=True)):
                self.record(index, torch.from_numpy(experts[: len(ids) * mixture.chosen]).view(-1, mixture.chosen))
        return self._logits[: len(keep) * bound.model.vocabulary].view(len(keep), bound.model.vocabulary)

    def decode(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        states: NDArray[np.int32] | None,
        params: SamplingRows,
        counters: NDArray[np.int64],
        stop_ids: NDArray[np.int32],
        steps: int,
        asked: ctypes.c_int32,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Make decode steps in one call, each of them with what the one before has drawn.

        The step in which a row draws a token that ends it, or has no finite logit, is the last.

        Args:
            ids, rows: of the first step, one position per row, and block tables wide enough for all; overwritten.
            states: see `run`.
            params: of the R rows, which are `plain`.
            counters: [R] positions in the rows' random streams; overwritten.
            stop_ids: [R, S], padded with what is no token.
            steps: the most to make.
            asked: no further step is made once it is not 0; another thread may set it meanwhile.

        Returns:
            Tokens [R, M] and log-probs [R, M] of the M steps made; NaN of a row without a finite logit.
        """
        bound, count = self._bound, len(ids)
        assert bound is not None
        keep, vocabulary = np.arange(count), bound.model.vocabulary
        step, (slots, *held) = self._step(bound, ids, rows, keep, states, steps)
        temperature, keys, greedy = (each.contiguous() for each in (params.temperature, params.key, params.greedy))
        token, peak, log_sum, score = (np.empty(count, dtype) for dtype in ("q", "f", "d", "f"))
        draw = Draw(
            step.logits, temperature.data_ptr(), keys.data_ptr(), counters.ctypes.data, greedy.data_ptr(),
            token.ctypes.data, peak.ctypes.data, log_sum.ctypes.data, score.ctypes.data,
            None, None, None, count, vocabulary, vocabulary,
        )  # fmt: skip
        tokens, logprobs = np.empty((count, steps), np.int64), np.empty((count, steps), np.float32)
        run = Decode(
            ids.ctypes.data, rows.positions.ctypes.data, slots.ctypes.data, counters.ctypes.data, stop_ids.ctypes.data,
            ctypes.addressof(asked), tokens.ctypes.data, logprobs.ctypes.data, slots.size // count, stop_ids.shape[1],
            steps,
        )  # fmt: skip
        made = self._library.rollout_decode(*map(ctypes.byref, (bound.model, step, draw, run)), bound.narrow)
        del held  # `step` points to them.
        return tokens[:, :made], logprobs[:, :made]

    def _step(
        self,
        bound: Bound,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        states: NDArray[np.int32] | None,
        steps: int = 1,
    ) -> tuple[Step, tuple[NDArray[np.int64], ...]]:
        """What C++ reads of a step, and of those that may follow it, with the arrays that it points to."""
        bound.reach(int(rows.positions.max()) + steps)
        threads, kept = torch.get_num_threads(), len(keep)
        need = self._library.rollout_workspace_bytes(
            ctypes.byref(bound.model),
            ctypes.c_int64(len(ids)),
            ctypes.c_int64(kept),
            bound.narrow,
        )
        if self._workspace.numel() < need:
            self._workspace = torch.empty(need, dtype=torch.uint8, device="cpu")
        if self._logits.numel() < kept * bound.model.vocabulary or self._logits.dtype != bound.dtype:
            self._logits = torch.empty(kept * bound.model.vocabulary, dtype=bound.dtype, device="cpu")
        slots, tables = rows.slots, rows.tables
        if rows.others:
            groups = rows.groups()
            slots, tables = np.stack([each.slots for each in groups]), np.stack([each.tables for each in groups])
        places = np.zeros(0, np.int64) if states is None else states.astype(np.int64)
        return Step(
            ids.ctypes.data, rows.positions.ctypes.data, slots.ctypes.data, rows.offsets.ctypes.data,
            tables.ctypes.data, keep.ctypes.data, places.ctypes.data, self._logits.data_ptr(), self._workspace.data_ptr(),
            None, len(ids), len(rows), rows.tables.shape[1], rows.block_size, kept, threads,
        ), (slots, tables, places)  # fmt: skip

    def release(self) -> None:
        """Release buffers that the next step allocates again."""
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._logits = torch.empty(0, device="cpu")
