"""A decoder's forward pass in C++ on a CPU, with the module's own parameters.

The model must be one of `families.FAMILIES`, with layers of transformers' own classes and a single dtype. It must have no
hooks, replaced `forward` or quantised layers. PEFT's LoRA layers are supported, and FSDP2's classes while the weights are
gathered. All of this is checked again whenever the trainer may have modified the module. Parameters are never copied, so a
step always uses the current weights.
"""

from __future__ import annotations

import ctypes
import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.fused.fused_binding import Bound
from rollout.engine.kernels.cpu_draw import Draw
from rollout.engine.kernels.cpu_forward import Decode, Step
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.models.originals import Unfusable, bypassed
from rollout.engine.models.routers import Record
from rollout.engine.sampling.sampling_table import SamplingRows
from rollout.engine.sampling.token_values import TokenValues

_log = logging.getLogger(__name__)


class FusedForward:
    """The C++ forward pass of one model. It replaces the module's own pass as long as no code of the module was replaced.

    Args:
        cache: the KV cache, read and written by every step.
        library: the C++ library; see `cpu_library.load`.
        exact, states: whether exact mode must support the model, and the pool of recurrent states; see `Bound`.
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
        self._model = model
        self._layout = layout
        self._cache = cache
        self._exact = exact
        self._states = states
        self._library = library
        library.rollout_workspace_bytes.restype = library.rollout_decode.restype = ctypes.c_int64
        self._workspace = self._logits = torch.empty(0, device="cpu")
        self._bound: Bound | None = None
        self._module_epoch = -1
        self._why = self._given_up = ""
        self.record: Record | None = None
        """A function that receives each router's choices in every forward pass. If None, the choices are not recorded."""
        self.values = TokenValues(model, None)
        """The collector of the hidden states from which the user's value function computes values of tokens."""

    def ready(self, module_epoch: int) -> bool:
        """Return whether `run` can compute the current model, which is checked again if `module_epoch` has changed."""
        if module_epoch != self._module_epoch or (self._bound is not None and not self._bound.reads(self._cache)):
            self._module_epoch = module_epoch
            self._bind()
        return self._bound is not None and not self._given_up and bypassed(self._layout.device) is None

    @property
    def why_not(self) -> str:
        """The reason why `ready` returned False, or an empty string if it returned True."""
        return self._given_up or self._why or bypassed(self._layout.device) or ""

    def give_up(self, why: str) -> None:
        """Make `ready` return False from now on, and log a warning with the reason `why`."""
        self._given_up = why
        _log.warning("%s runs its own forward: %s; please report it", type(self._model).__name__, why)

    def run(
        self, ids: NDArray[np.int64], rows: PagedRows, keep: NDArray[np.int64], states: NDArray[np.int32] | None = None
    ) -> Tensor:
        """Run a forward pass over P packed positions of R sequences; write their K and V, and update their states.

        Args:
            ids: token ids, [P].
            rows: the sequences, with their positions and block tables.
            keep: indices of the packed positions to compute logits for.
            states: state slot of each sequence, [R], or None if the model has no recurrent layers.

        Returns:
            Logits [len(keep), vocabulary size], valid until the next call.
        """
        bound = self._bound
        assert bound is not None
        step, held = self._step(bound, ids, rows, keep, states)
        hidden = self._hidden_of(step, bound, 1)
        routes = None
        if self.record is not None:
            routes = np.empty((len(bound.mixtures), len(ids) * bound.model.chosen), np.int64)
            step.routes = routes.ctypes.data
        self._library.rollout_forward(ctypes.byref(bound.model), ctypes.byref(step), bound.narrow)
        del held  # Keep the arrays until here: `step` points to their memory.
        if self.values.wanted:
            self.values.put(rows.slots[keep], hidden[0])
        if self.record is not None and routes is not None:
            for index, (mixture, experts) in enumerate(zip(bound.mixtures, routes, strict=True)):
                self.record(index, torch.from_numpy(experts[: len(ids) * mixture.chosen]).view(-1, mixture.chosen))
        return self._logits[: len(keep) * bound.model.vocabulary].view(len(keep), bound.model.vocabulary)

    def decode(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        states: NDArray[np.int32],
        params: SamplingRows,
        *,
        counters: NDArray[np.int64],
        stop_ids: NDArray[np.int32],
        steps: int,
        asked: ctypes.c_int32,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Run several decode steps in one C++ call. The input of each step is the tokens that the previous step drew.

        No further step starts once a row has drawn a stop token or has no finite logit.

        Args:
            ids: token ids of the first step, [R]. The call may overwrite `ids`, `rows` and `counters`.
            rows: one position per row, with block tables that have room for all steps.
            states: state slot of each row, [R]; not read if the model has no recurrent layers.
            params: sampling parameters of the R rows, whose attribute `plain` must be True.
            counters: positions in the rows' random streams, [R].
            stop_ids: token ids that finish each row, padded with negative numbers, [R, maximum per row].
            steps: maximum number of steps.
            asked: a stop flag that another thread may set at any time. No further step starts once it is not 0.

        Returns:
            Tokens and log-probs [R, M] of the M steps that ran. The log-prob is NaN if a row had no finite logit.
        """
        bound, count = self._bound, len(ids)
        assert bound is not None
        keep, vocabulary = np.arange(count), bound.model.vocabulary
        step, (slots, *held) = self._step(bound, ids, rows, keep, states, steps)
        hidden = self._hidden_of(step, bound, steps)
        temperature, keys, greedy = (each.contiguous() for each in (params.temperature, params.key, params.greedy))
        token, peak, log_sum, score = (np.empty(count, dtype) for dtype in ("q", "f", "d", "f"))
        draw = Draw(
            step.logits, temperature.data_ptr(), keys.data_ptr(), counters.ctypes.data, greedy.data_ptr(),
            token.ctypes.data, peak.ctypes.data, log_sum.ctypes.data, score.ctypes.data,
            None, None, None, count, vocabulary, vocabulary,
        )  # fmt: skip
        tokens, logprobs = np.empty((count, steps), np.int64), np.empty((count, steps), np.float32)
        ahead = Decode(
            ids.ctypes.data, rows.positions.ctypes.data, slots.ctypes.data, counters.ctypes.data,
            stop_ids.ctypes.data, ctypes.addressof(asked), tokens.ctypes.data, logprobs.ctypes.data,
            stop_ids.shape[1], steps,
        )  # fmt: skip
        made = self._library.rollout_decode(*map(ctypes.byref, (bound.model, step, draw, ahead)), bound.narrow)
        del held  # Keep the arrays until here: `step` points to their memory.
        if self.values.wanted:
            self.values.put(np.arange(count * made), hidden[:made].transpose(0, 1).flatten(0, 1))
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
        """Return the C++ struct for `steps` steps, and the arrays that it points to, which the caller must keep alive."""
        bound.reach(int(rows.positions.max()) + steps)
        kept = len(keep)
        need = self._library.rollout_workspace_bytes(
            ctypes.byref(bound.model), ctypes.c_int64(len(ids)), ctypes.c_int64(kept), bound.narrow
        )
        if self._workspace.numel() < need:
            self._workspace = torch.empty(need, dtype=torch.uint8, device="cpu")
        if self._logits.numel() < kept * bound.model.vocabulary or self._logits.dtype != bound.dtype:
            self._logits = torch.empty(kept * bound.model.vocabulary, dtype=bound.dtype, device="cpu")
        slots = rows.slots
        places = np.zeros(0, np.int64) if states is None else states.astype(np.int64)
        return Step(
            ids.ctypes.data, rows.positions.ctypes.data, slots.ctypes.data, rows.offsets.ctypes.data,
            rows.tables.ctypes.data, keep.ctypes.data, places.ctypes.data, self._logits.data_ptr(),
            self._workspace.data_ptr(), None, None, len(ids), len(rows), rows.tables.shape[1], rows.block_size, kept,
            torch.get_num_threads(),
        ), (slots, places)  # fmt: skip

    def _hidden_of(self, step: Step, bound: Bound, steps: int) -> Tensor:
        """Allocate a tensor [steps, kept positions, hidden size] for the head's inputs; empty if they are not needed."""
        hidden = torch.empty(steps * self.values.wanted, step.kept, bound.model.hidden, dtype=bound.dtype, device="cpu")
        step.hidden = hidden.data_ptr() if self.values.wanted else None
        return hidden

    def release(self) -> None:
        """Free the workspace and the logits. The next step allocates them again."""
        self._workspace = self._logits = torch.empty(0, device="cpu")

    def _bind(self) -> None:
        try:
            bound = Bound(self._model, self._layout, self._cache, exact=self._exact, states=self._states)
            self._bound, why = bound, ""
        except (Unfusable, AttributeError) as exc:
            self._bound, why = None, str(exc)
        if why and why != self._why:
            _log.info("%s runs its own forward: %s", type(self._model).__name__, why)
        self._why = why
