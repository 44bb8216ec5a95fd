"""What a model's recurrent layers can do, found by running a few tokens: go on from a state, keep packed prompts apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout.engine.memory.state_pool import StatePool, StateShape
from rollout.engine.models.attention import Installation, forward_with
from rollout.engine.models.attention_masks import PROBE
from rollout.engine.models.recurrent_states import PackedStates, StateRows, States

LENGTHS = (3, 2)
"""Of two packed prompts."""
TOLERANCE = {torch.float32: 1e-3}
NARROW_TOLERANCE = 5e-2


class _OwnValue:
    """`AttentionBatch` in which every position attends to itself alone, so that only recurrent layers carry anything on."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()


def continues(model: nn.Module, device: torch.device, shapes: Sequence[StateShape], argument: str) -> bool:
    """Whether recurrent states matter to a chunk of two tokens.

    Args:
        shapes: states of the model; none: it has no recurrent layers.
        argument: of its forward, that takes the cache.
    """
    recurrent = [each.key for each in shapes if each.key.kind == "recurrent"]
    if not recurrent:
        return True
    pool = StatePool(shapes, 2, device)
    for key in recurrent:
        pool.state(key)[1] = 1
    with Installation(model, implementation=PROBE).forward():
        zeros, ones = (_logits(model, device, range(2), argument, _row(pool, slot)) for slot in range(2))
    return not torch.equal(zeros, ones)


def packs(model: nn.Module, device: torch.device, shapes: Sequence[StateShape], argument: str) -> bool:
    """Whether two prompts in one row have the logits and the states that each has alone.

    That takes kernels that know the prompts' borders (flash-linear-attention, causal-conv1d); transformers' own functions
    raise. Arguments as of `continues`.
    """
    if not shapes:
        return False
    pool, offsets = StatePool(shapes, 4, device), np.concatenate([[0], np.cumsum(LENGTHS)])
    borders = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    places = [position for length in LENGTHS for position in range(length)]
    with Installation(model, implementation=PROBE).forward():
        try:
            cache = PackedStates(pool, np.arange(2, dtype=np.int32), offsets)
            together = _logits(model, device, range(offsets[-1]), argument, cache, places)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, AttributeError, ValueError, RuntimeError, LookupError, AssertionError):
            return False
        alone = [
            _logits(model, device, range(start, end), argument, _row(pool, 2 + index))
            for index, (start, end) in enumerate(borders)
        ]
    pairs = [(together, torch.cat(alone))]
    pairs += [(state[:2], state[2:]) for state in (pool.state(each.key) for each in shapes)]
    return all(_close(one, other) for one, other in pairs)


def _row(pool: StatePool, slot: int) -> StateRows:
    return StateRows(pool, np.array([slot], np.int32))


def _logits(
    model: nn.Module,
    device: torch.device,
    ids: range,
    argument: str,
    cache: States,
    places: Sequence[int] | None = None,
) -> Tensor:
    """[len(ids), V] logits of a row of tokens at positions `places`; None: from 0 on."""
    tokens, at = (torch.tensor([list(each)], device=device) for each in (ids, places or range(len(ids))))
    keep = torch.arange(len(ids), device=device)
    inputs = {"input_ids": tokens, "position_ids": at, "logits_to_keep": keep, argument: cache, **cache.arguments}
    logits: Tensor = forward_with(_OwnValue(), model, **inputs).logits[0]
    return logits


def _close(one: Tensor, other: Tensor) -> bool:
    tolerance = TOLERANCE.get(other.dtype, NARROW_TOLERANCE)
    distance = (one.float() - other.float()).abs().max()
    return bool(distance <= tolerance * other.float().abs().max())
