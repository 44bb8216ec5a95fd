"""Log-probs of prompt tokens: which positions of a step they come from, and their values, for sequences that want them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import upload
from rollout.engine.sampling.sampler import token_logprobs
from rollout.engine.scheduling.sequences import Sequence
from rollout.engine.scheduling.step import ScheduledStep

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions per full-vocabulary log-softmax; bounds the memory."""


def prompt_spans(
    step: ScheduledStep, packed: PagedRows, wanted: Rows[Sequence]
) -> list[tuple[Sequence, NDArray[np.int64]]]:
    """Per sequence that wants prompt log-probs: the packed positions whose successor is a prompt token."""
    spans = []
    for entry, sequence in enumerate(step.prefills, step.num_decodes):
        if sequence in wanted:
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
    """Append the log-probs of the tokens after `positions` to a sequence.

    Args:
        logits: [P, V] at the positions.
        positions: [P] in the sequence.
        text_ids: token ids with the placeholders of images in their places.
        exact: by torch's own log-softmax.
    """
    targets = upload(text_ids(sequence.tokens[positions + 1]).astype(np.int64), logits.device)
    top = sequence.params.prompt_logprobs or 0
    for start in range(0, len(positions), PROMPT_LOGPROB_ROWS):
        part = slice(start, start + PROMPT_LOGPROB_ROWS)
        values, top_ids, top_values = token_logprobs(logits[part], targets[part], top, exact=exact)
        sequence.prompt_logprobs += values.tolist()
        if top_ids is not None and top_values is not None:
            for ids, scores in zip(top_ids.tolist(), top_values.tolist(), strict=True):
                sequence.prompt_top.append(list(zip(ids, scores, strict=True)))
