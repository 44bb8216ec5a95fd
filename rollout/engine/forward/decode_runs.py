"""Runs of decode steps in one call, where nothing between two tokens needs the scheduler."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.engine.forward.step_tensors import pack
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.models.adapters import LoraAdapters
from rollout.engine.models.attention import Installation
from rollout.engine.sampling.constraints import Constraints
from rollout.engine.sampling.sampling_table import SamplingRows, SamplingTable
from rollout.engine.scheduling.sequences import SequenceTable
from rollout.engine.scheduling.step import ScheduledStep, StepTokens


class RunForward(Protocol):
    """A forward that makes several decode steps, each with what the one before has drawn."""

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent layers."""

    def ready(self, module_epoch: int) -> bool:
        """Whether it serves the model in its current state; see `BoundForward.ready`."""

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
        """Make decode steps, and no further one once a row is seen to have drawn a token that ends it, or to have no finite
        logit; by then steps behind it may have been made.

        Args:
            ids, rows: of the first step, one position per row, and block tables wide enough for all; may be overwritten.
            states: [R] state slot of each row; None: the model has none.
            params: of the R rows, which are `plain`.
            counters: [R] positions in the rows' random streams; may be overwritten.
            stop_ids: [R, S], padded with what is no token.
            steps: the most to make.
            asked: no further step is begun once it is not 0; another thread may set it meanwhile.

        Returns:
            Tokens [R, M] and log-probs [R, M] of the M steps made; NaN of a row without a finite logit.
        """


class DecodeRuns:
    """Makes runs of decode steps.

    Args:
        forward: makes the steps.
        asked: ends a run after the step it is at; another thread may set it at any time.
    """

    def __init__(
        self,
        forward: RunForward,
        table: SequenceTable,
        cache: KVCache,
        sampling: SamplingTable,
        adapters: LoraAdapters,
        installation: Installation,
        asked: ctypes.c_int32,
    ) -> None:
        self._forward = forward
        self._table = table
        self._cache = cache
        self._sampling = sampling
        self._adapters = adapters
        self._installation = installation
        self._asked = asked

    def serves(self, step: ScheduledStep, constraints: Constraints | None) -> bool:
        """Whether steps of these rows can follow one another without the scheduler.

        That is: decodes without drafts, named adapters and images that shift later positions, where the forward serves the
        model's present state, whose tokens are drawn from the logits over the temperature, and which ask for no more than
        log-probs.
        """
        table, rows = self._table, step.rows
        if step.prefills or step.depths is not None:
            return False
        if table.position_shift[rows].any() or self._adapters.of(rows) is not None:
            return False
        if self._forward.has_states and not table.plain[rows].all():
            # A row whose text ends it within a run would leave a state that is further than its tokens.
            return False
        if constraints is not None and constraints.constrains(rows):
            return False
        short = table.length[rows] < table.min_length[rows]
        if short.any() and (table.stop_ids[rows[short]] >= 0).any():
            return False
        if not self._sampling.select(rows).plain:
            return False
        with self._installation.inference():
            return self._forward.ready(self._installation.module_epoch)

    def run(self, step: ScheduledStep) -> StepTokens:
        """Make up to `step.ahead` steps, which `serves` has agreed to."""
        table, rows = self._table, step.rows
        ids, packed = pack(step, table)
        if step.copies:
            self._cache.copy_blocks(step.copies)
        counters = (table.length[rows] - table.origin[rows]).astype(np.int64)
        params = self._sampling.select(rows)
        with self._installation.inference():
            tokens, logprobs = self._forward.decode(
                ids, packed, table.state[rows], params, counters, table.stop_ids[rows], step.ahead, self._asked
            )
        if np.isnan(logprobs).any():
            # Of a row that had ended. A kernel may multiply what lies behind a sequence's end by zero, which leaves a NaN.
            row, made = np.nonzero(np.isnan(logprobs))
            at, size = step.starts[row] + made, table.block_size
            blocks = [each.tables[row, at // size] for each in packed.groups()]
            self._cache.zero_slots(np.concatenate([each * size + at % size for each in blocks]))
        return StepTokens(tokens.ravel(), logprobs.ravel(), steps=tokens.shape[1])
