"""Forwards of one step of a model with recurrent states.

Its layers tell sequences apart by rows only: all decodes run together, and prefill chunks of equal length together. Where
kernels of the model's own know the borders of packed sequences, all prompts that begin lie in one row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import upload, upload_together
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.models.length_groups import length_groups
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.models.recurrent_states import PackedStates, StateRows, States
from rollout.engine.multimodal.step_images import StepImages

IntArray = NDArray[np.int64]
Forward = Callable[[IntArray, PagedRows, IntArray, States, StepImages | None], Tensor]
"""Logits [B, C, V] of token ids [B, L], of their rows, at columns [C], with states and images."""


def forward_by_length(
    forward: Forward,
    layout: ModelLayout,
    pool: StatePool,
    ids: IntArray,
    rows: PagedRows,
    keep: IntArray,
    states: NDArray[np.int32],
    images: StepImages | None,
) -> Tensor:
    """Logits [len(keep), V] at packed positions `keep`; the states in `pool` go on.

    Args:
        forward: of the model.
        ids: [P] token ids.
        states: [R], slot of each sequence.
        images: of the step; None: it has none.
    """
    parts, places = [], []
    for group in length_groups(rows, keep, continues=layout.continues, packs=layout.packs and images is None):
        slots = states[group.members]
        cache: States = StateRows(pool, slots, begins=group.begins)
        if group.packed:
            cache = PackedStates(pool, slots, group.rows.offsets)
        pictured = None if images is None else images.part(group.positions.ravel())
        logits = forward(ids[group.positions], group.rows, group.columns, cache, pictured)
        cache.flush()
        row, column = upload_together((group.row, group.column), layout.device)
        parts.append(logits[row, column])
        places.append(group.places)
    order = np.argsort(np.concatenate(places), kind="stable")
    return torch.cat(parts).index_select(0, upload(order, layout.device))
