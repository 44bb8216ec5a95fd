"""Tokens of a scheduled step out of its logits: minimum lengths, grammars and penalties, and the draw."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from rollout.engine.memory.buffers import download_together, upload
from rollout.engine.multimodal.vision import Vision
from rollout.engine.sampling.constraints import Constraints
from rollout.engine.sampling.sampler import sample
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.engine.scheduling.sequences import SequenceTable
from rollout.engine.scheduling.step import ScheduledStep, StepTokens
from rollout.requests.token_columns import KeptTokens, packed_sets


def sample_step(
    step: ScheduledStep,
    logits: Tensor,
    table: SequenceTable,
    sampling: SamplingTable,
    constraints: Constraints | None,
    vision: Vision,
    *,
    exact: bool,
) -> StepTokens:
    """One token for each sampled row of a step, of its logits [R, V]."""
    rows = step.sampled_rows
    params = sampling.select(rows)
    length = table.length[rows] if step.depths is None else table.length[rows] + step.depths
    short = np.flatnonzero(length < table.min_length[rows])
    banned = [(index, ids[ids >= 0].tolist()) for index in short.tolist() if len(ids := table.stop_ids[rows[index]])]
    allowed = None
    if constraints is not None:
        allowed = constraints.allowed(rows, table.tokens, table.origin, table.length)
    # A text that is complete can only end, also before `min_tokens`.
    complete = [index for index, ids in banned if allowed and allowed.only(index, ids)]
    banned = [(index, ids) for index, ids in banned if index not in complete]
    histories = None
    if params.any_penalty:
        histories = [
            (
                vision.text_ids(table.tokens[row, : table.origin[row]]),
                table.tokens[row, table.origin[row] : end],
            )
            for row, end in zip(rows.tolist(), length.tolist(), strict=True)
        ]
    positions = upload((length - table.origin[rows]).astype(np.int64), logits.device)
    sampled = sample(logits, params, positions, histories=histories, banned=banned, allowed=allowed, exact=exact)
    top = None
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        top = [
            list(zip(ids, values, strict=True))
            for ids, values in zip(sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
        ]
    kept = None
    if sampled.kept_ids is not None and sampled.kept_counts is not None:
        sets = KeptTokens(sampled.kept_ids.cpu().numpy(), sampled.kept_counts.cpu().numpy().astype(np.int32))
        kept = packed_sets(sets)
    token_ids, logprobs = download_together(sampled.token_ids, sampled.logprobs)
    return StepTokens(
        token_ids,
        logprobs,
        top,
        failed=allowed.failed if allowed else {},
        complete=complete,
        kept=kept,
    )
