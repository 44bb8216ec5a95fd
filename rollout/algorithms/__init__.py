"""Advantages, importance weights and masks for policy-gradient losses, as plain functions on tensors.

    advantages = group_advantages(rewards, batch.group_ids, valid=batch.response_mask.any(1))
    keep = batch.response_mask & (batch.policy_staleness <= 2)
    weights = importance_weights(logprobs, batch.logprobs, keep)
    loss = -masked_mean(weights * advantages[:, None] * logprobs, keep)

Shapes: for N rows, the longest of T tokens, per-token values are [N, T], as in `RolloutBatch`; per-row values are [N] and
broadcast with `[:, None]`. `logprobs` are the trainer's log-probs and `rollout_logprobs` the sampler's, each for the token
at the same index. Δ is `logprobs` − `rollout_logprobs`, at the positions of `mask`.

Always true: arguments are not changed. Results are float32 (float64 if the input is float64) for any input type. Masked
positions never count, even if they are NaN. An unmasked NaN stays NaN in weights and means, and no mask drops it, so a
missing log-prob is noticed. If a function has the argument `detach`, its result is detached from autograd by default.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.algorithms.advantages import group_advantages as group_advantages
    from rollout.algorithms.importance import effective_sample_size as effective_sample_size
    from rollout.algorithms.importance import importance_weights as importance_weights
    from rollout.algorithms.importance import masked_mean as masked_mean
    from rollout.algorithms.importance import ratio_mask as ratio_mask
    from rollout.algorithms.importance import reverse_kl as reverse_kl
    from rollout.algorithms.importance import rollout_kl as rollout_kl
    from rollout.algorithms.importance import substitute as substitute
    from rollout.algorithms.replay import replay_logprobs as replay_logprobs

__all__ = [
    "effective_sample_size", "group_advantages", "importance_weights", "masked_mean", "ratio_mask", "replay_logprobs",
    "reverse_kl", "rollout_kl", "substitute",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
    home = {"group_advantages": "advantages", "replay_logprobs": "replay"}.get(name, "importance")
    return getattr(import_module(f"{__name__}.{home}"), name)
