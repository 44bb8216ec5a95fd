"""`PackedRollouts`: the tokens of a batch end to end, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rollout.manager.kept_tokens import KeptSets


@dataclass(frozen=True, eq=False, repr=False)
class PackedRollouts:
    """The tokens of a batch end to end, [L] without padding between sequences.

    Where L was rounded up, the surplus at the end lies beyond `cu_seqlens[-1]`: pad tokens with positions from 0,
    masked out, of sequence -1 and version -1.
    """

    input_ids: Tensor
    """int64 [L]."""

    position_ids: Tensor
    """int64 [L]: from 0 in every sequence."""

    sequence_ids: Tensor
    """int64 [L]: the row of the batch a token belongs to, so that `advantages[sequence_ids]` spreads over tokens."""

    cu_seqlens: Tensor
    """int32 [N+1]: sequence i is `cu_seqlens[i]:cu_seqlens[i+1]`."""

    max_seqlen: int
    """Length of the longest sequence."""

    response_mask: Tensor
    """bool [L]: see `RolloutBatch.response_mask`, as the fields below."""

    logprobs: Tensor
    """float32 [L]."""

    policy_versions: Tensor
    """int64 [L]."""

    policy_staleness: Tensor
    """int32 [L]."""

    kv_versions: Tensor
    """int64 [L]."""

    kv_staleness: Tensor
    """int32 [L]."""

    routed_experts: Tensor | None
    """int16 [L, layers, k]; see `RolloutBatch.routed_experts`."""
    kept_tokens: KeptSets | None = None
    """See `RolloutBatch.kept_tokens`; its counts are [L]."""
    image_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Arguments of the forward that images bring: their tensors, those of a prompt once per row, token types,
    `position_ids` [4, 1, L] (place in the row, time, height, width) where a model has such, and `attention_mask`, which the
    attention of `trainer_hooks.tree` reads, where images see themselves in both directions (Gemma 3, Gemma 4)."""

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward, whose logits are [1, L, V]."""
        return {
            "input_ids": self.input_ids[None],
            "position_ids": self.position_ids[None],
            "use_cache": False,
            **self.image_inputs,
        }
