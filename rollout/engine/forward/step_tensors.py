"""Functions that build the tensors of a step's forward pass, and sample tokens and log-probs from its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import download_together, upload
from rollout.engine.multimodal.vision import Vision
from rollout.engine.sampling.constraints import Constraints
from rollout.engine.sampling.sampler import sample, token_logprobs
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.engine.scheduling.sequences import Sequence, SequenceTable
from rollout.engine.scheduling.step import ScheduledStep, StepTokens
from rollout.requests.token_columns import KeptTokens, packed_sets

PROMPT_LOGPROB_ROWS = 256
"""The number of prompt positions in one log-softmax over the vocabulary, which limits the memory for its result."""


def pack(step: ScheduledStep, table: SequenceTable) -> tuple[NDArray[np.int64], PagedRows]:
    """Return the token ids [P] and the packed rows of a step. Block tables are wide enough for `step.ahead` decode steps."""
    offsets = np.zeros(len(step.rows) + 1, np.int64)
    np.cumsum(step.counts, out=offsets[1:])
    entries = np.repeat(np.arange(len(step.rows)), step.counts)
    positions = np.arange(offsets[-1]) - offsets[entries] + step.starts[entries]
    width = -(-(int((step.starts + step.counts).max()) + max(0, step.ahead - 1)) // table.block_size)
    ids = table.tokens[step.rows[entries], positions].astype(np.int64)
    return ids, PagedRows(offsets, positions, table.page_tables(step.rows, width), table.block_size)


def sample_step(
    step: ScheduledStep,
    logits: Tensor,
    table: SequenceTable,
    sampling: SamplingTable,
    constraints: Constraints,
    vision: Vision,
    values: NDArray[np.float32] | None,
    *,
    exact: bool,
) -> StepTokens:
    """Draw one token for each of the R sampled rows of a step, from logits [R, V].

    The result also contains `values`, which the user's value function has computed for these rows.
    """
    rows = step.sampled_rows
    params = sampling.select(rows)
    length = table.length[rows]
    short = np.flatnonzero(length < table.min_length[rows])
    banned = [(index, ids[ids >= 0].tolist()) for index in short.tolist() if len(ids := table.stop_ids[rows[index]])]
    allowed = constraints.allowed(rows, table.tokens, table.origin, table.length)
    # If the constraint allows only the stop ids, the text is complete: do not ban them, even before `min_tokens`.
    complete = [index for index, ids in banned if allowed and allowed.only(index, ids)]
    banned = [(index, ids) for index, ids in banned if index not in complete]
    histories = None
    if params.any_penalty:
        histories = [
            (vision.text_ids(table.tokens[row, : table.origin[row]]), table.tokens[row, table.origin[row] : end])
            for row, end in zip(rows.tolist(), length.tolist(), strict=True)
        ]
    positions = upload((length - table.origin[rows]).astype(np.int64), logits.device)
    sampled = sample(logits, params, positions, histories=histories, banned=banned, allowed=allowed, exact=exact)
    top = kept = None
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        top = _pairs(sampled.top_ids, sampled.top_logprobs)
    if sampled.kept_ids is not None and sampled.kept_counts is not None:
        sets = KeptTokens(sampled.kept_ids.cpu().numpy(), sampled.kept_counts.cpu().numpy().astype(np.int32))
        kept = packed_sets(sets)
    token_ids, logprobs = download_together(sampled.token_ids, sampled.logprobs)
    failed = allowed.failed if allowed else {}
    return StepTokens(token_ids, logprobs, top, failed=failed, complete=complete, kept=kept, values=values)


def prompt_spans(step: ScheduledStep, packed: PagedRows) -> list[tuple[Sequence, NDArray[np.int64]]]:
    """Return (sequence, packed positions) for each prefilled sequence that requests prompt log-probs.

    These are the positions of the sequence's chunk in this step that are followed by a prompt token.
    """
    spans = []
    for entry, sequence in enumerate(step.prefills, step.num_decodes):
        if sequence.wants_prompt_logprobs:
            span = np.arange(packed.offsets[entry], packed.offsets[entry + 1])
            last = len(sequence.tokens) - 1
            spans.append((sequence, span[packed.positions[span] < last]))
    return spans


def take_prompt_logprobs(
    sequence: Sequence,
    logits: Tensor,
    positions: NDArray[np.int64],
    text_ids: Callable[[NDArray[Any]], NDArray[Any]],
    *,
    exact: bool,
) -> None:
    """Append the log-probs of the tokens that follow `positions` to a sequence's prompt log-probs.

    Args:
        sequence: the sequence, whose prompt is being computed.
        logits: [P, V], the logits at the P positions.
        positions: [P], positions in the sequence.
        text_ids: function that replaces the (negative) image keys in an array of tokens with the ids of placeholder tokens.
        exact: whether to use torch's own log-softmax, as exact mode requires.
    """
    targets = upload(text_ids(sequence.tokens[positions + 1]).astype(np.int64), logits.device)
    top = sequence.params.prompt_logprobs or 0
    for start in range(0, len(positions), PROMPT_LOGPROB_ROWS):
        part = slice(start, start + PROMPT_LOGPROB_ROWS)
        values, top_ids, top_values = token_logprobs(logits[part], targets[part], top, exact=exact)
        sequence.prompt_logprobs += values.tolist()
        if top_ids is not None and top_values is not None:
            sequence.prompt_top += _pairs(top_ids, top_values)


def _pairs(ids: Tensor, values: Tensor) -> list[list[tuple[int, float]]]:
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]
