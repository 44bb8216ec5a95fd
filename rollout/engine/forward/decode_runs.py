"""Runs of decode steps in one C++ call, where nothing between two tokens needs Python."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from rollout.engine.forward.fused_forward import FusedForward
from rollout.engine.forward.step_rows import pack
from rollout.engine.sampling.log_probs import Total, log_probs
from rollout.engine.scheduling.step import ScheduledStep, StepTokens

if TYPE_CHECKING:
    from rollout.engine.forward.model_runner import ModelRunner


class DecodeRuns:
    """Makes runs of decode steps through the fused forward of a model runner.

    Args:
        asked: ends a run after the step it is at; another thread may set it at any time.
    """

    def __init__(self, runner: ModelRunner, forward: FusedForward, asked: ctypes.c_int32) -> None:
        self._runner = runner
        self._forward = forward
        self._asked = asked

    def serve(self, step: ScheduledStep) -> bool:
        """Whether steps of these rows can follow one another without Python.

        That is: decodes without drafts, images and named adapters, through the fused forward as it is in the model's present
        state, whose tokens are drawn from the logits over the temperature, and which ask for no more than log-probs.
        """
        runner, rows = self._runner, step.rows
        table = runner.table
        if step.prefills or step.depths is not None or runner.fused is not self._forward:
            return False
        if table.position_shift[rows].any() or runner.adapters.of(rows) is not None:
            return False
        if runner.constraints is not None and runner.constraints.constrains(rows):
            return False
        short = table.length[rows] < table.min_length[rows]
        if short.any() and (table.stop_ids[rows[short]] >= 0).any():
            return False
        if not runner.sampling.select(rows).plain:
            return False
        with runner.installation:
            return self._forward.ready(runner.installation.module_epoch)

    def run(self, step: ScheduledStep) -> StepTokens:
        """Make up to `step.ahead` steps, which `serve` has agreed to."""
        runner, rows = self._runner, step.rows
        table = runner.table
        ids, packed = pack(step, table)
        if step.copies:
            runner.cache.copy_blocks(step.copies)
        counters = (table.length[rows] - table.origin[rows]).astype(np.int64)
        params = runner.sampling.select(rows)
        with runner.installation:
            drawn, steps = self._forward.decode(
                ids, packed, table.state[rows], params, counters, table.stop_ids[rows], step.ahead, self._asked
            )
        logprobs = log_probs(drawn.score, Total(drawn.peak, drawn.log_sum))
        tokens, values = (each.view(steps, len(rows)).T.flatten().numpy() for each in (drawn.token, logprobs))
        return StepTokens(tokens, values, steps=steps)
