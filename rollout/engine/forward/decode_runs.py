"""Runs of decode steps in one C++ call, where nothing between two tokens needs Python."""

from __future__ import annotations

import ctypes

import numpy as np

from rollout.engine.forward.adapters import LoraAdapters
from rollout.engine.forward.attention import Installation
from rollout.engine.forward.fused_forward import FusedForward
from rollout.engine.forward.step_rows import pack
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.sampling.constraints import Constraints
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.engine.scheduling.sequences import SequenceTable
from rollout.engine.scheduling.step import ScheduledStep, StepTokens


class DecodeRuns:
    """Makes runs of decode steps through the fused forward.

    Args:
        asked: ends a run after the step it is at; another thread may set it at any time.
    """

    def __init__(
        self,
        forward: FusedForward,
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
        """Whether steps of these rows can follow one another without Python.

        That is: decodes without drafts, named adapters and images that shift later positions, through the fused forward as
        it is in the model's present state, whose tokens are drawn from the logits over the temperature, and which ask for no
        more than log-probs.
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
        with self._installation:
            return self._forward.ready(self._installation.module_epoch)

    def run(self, step: ScheduledStep) -> StepTokens:
        """Make up to `step.ahead` steps, which `serves` has agreed to."""
        table, rows = self._table, step.rows
        ids, packed = pack(step, table)
        if step.copies:
            self._cache.copy_blocks(step.copies)
        counters = (table.length[rows] - table.origin[rows]).astype(np.int64)
        params = self._sampling.select(rows)
        with self._installation:
            tokens, logprobs = self._forward.decode(
                ids, packed, table.state[rows], params, counters, table.stop_ids[rows], step.ahead, self._asked
            )
        return StepTokens(tokens.ravel(), logprobs.ravel(), steps=tokens.shape[1])
