"""Importance weights between trainer and sampler, masks by ratio, effective sample size, KL estimates, argument checks.

Always true: Δ = `logprobs` − `rollout_logprobs` at the positions of the mask. Results are 0 or False at masked positions. An
unmasked NaN stays NaN and no mask drops it, so a missing log-prob is noticed. An error names the tensor, the rule and the
cure. Shapes and dtypes are checked without a device sync.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    return values.to(torch.float64 if values.dtype == torch.float64 else torch.float32)


def log_ratio(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, detach: bool) -> Tensor:
    """Return Δ = `logprobs` − `rollout_logprobs` [N, T], 0 at masked positions; if `detach`, detached from autograd."""
    check_floating("logprobs", logprobs)
    check_floating("rollout_logprobs", rollout_logprobs)
    if mask.ndim != 2:
        raise ValueError(f"mask has shape {list(mask.shape)}: must be [N, T]; give a single row as mask[None]")
    check_mask(mask, logprobs=logprobs, rollout_logprobs=rollout_logprobs)
    dtype = torch.promote_types(wide(logprobs).dtype, wide(rollout_logprobs).dtype)
    ours, theirs = (torch.where(mask, each.to(dtype), 0) for each in (logprobs, rollout_logprobs))
    return (ours - theirs).detach() if detach else ours - theirs


def check_above_zero(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name}={value!r}: must be a number above 0")


def check_floating(name: str, values: Tensor) -> None:
    if not values.is_floating_point():
        raise ValueError(f"{name} has dtype {values.dtype}: must be floating; convert it with .float()")


def check_integer(name: str, values: Tensor) -> None:
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {values.dtype}: must be an integer type, as in the batch")


def check_mask(mask: Tensor, **others: Tensor) -> None:
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}: must be bool; convert it with .bool()")
    for name, values in others.items():
        if values.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, mask {list(mask.shape)}: must be equal, entry for entry; "
                "log-probs of logits[:, :-1] belong to mask[:, 1:]"
            )


Level = Literal["token", "sequence", "geometric"]

# --- importance weights -------------------------------------------------------------------------------------------------


def importance_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    cap: float = 2.0,
    detach: bool = True,
) -> Tensor:
    """Return the truncated importance weight min(ρ, cap) of every token.

        token      ρ = exp Δ. Espeholt et al. 2018, IMPALA, arXiv:1802.01561 (ρ̄); for the gap between trainer and
                   sampler (TIS): Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
        sequence   ρ = exp ΣΔ, the probability ratio of the whole row. Liu, Li et al. 2025, "When Speed Kills Stability:
                   Demystifying RL Collapse from the Training-Inference Mismatch"; verl `rollout_is="sequence"`
        geometric  ρ = exp(ΣΔ / number of tokens). Zheng et al. 2025, GSPO, arXiv:2507.18071, equation 7. For GSPO's
                   policy ratio (current against old log-probs), use `cap=math.inf, detach=False`, and clip it in the loss

    Args:
        logprobs: the trainer's log-probs, floating [N, T], of N rows, the longest of T tokens.
        rollout_logprobs: the sampler's log-probs, floating [N, T].
        mask: bool [N, T], usually `RolloutBatch.response_mask`.
        level: how ρ is aggregated. Unless it is "token", all tokens of a row have the same weight.
        cap: the largest weight; math.inf means no truncation. TRL uses 3, verl 2.
        detach: whether to detach the weights from autograd. If False, gradients flow to both log-probs, except through
            truncated weights.

    Returns:
        The weights, float32 [N, T], with 0 at masked positions.

    Raises:
        ValueError: shapes or dtypes do not match, `cap` is not a number above 0, or `level` is unknown.
    """
    check_above_zero("cap", cap)
    delta = _of_level(log_ratio(logprobs, rollout_logprobs, mask, detach), mask, level)
    # Clamp before exp as well: if exp overflowed to infinity, its gradient would be NaN.
    return torch.where(mask, delta.clamp(max=math.log(cap) + 1).exp().clamp(max=cap), 0)


def _of_level(delta: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Aggregate the log-ratios `delta` of tokens by `level`; return [N, T], or [N, 1] if a row has one value."""
    if level == "token":
        return delta
    if level == "sequence":
        return delta.sum(1, keepdim=True)
    if level == "geometric":
        return delta.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    raise ValueError(f"level={level!r}: must be 'token', 'sequence' or 'geometric'")


def effective_sample_size(weights: Tensor, mask: Tensor | None = None, *, normalized: bool = False) -> Tensor:
    """Return the effective sample size of importance weights, (Σw)² / Σw².

    Kish 1965, "Survey Sampling". PipelineRL's `rl/ess` and verl's `rollout_is_eff_sample_size` are the normalised size.

    Args:
        weights: weights of at least 0, floating, of any shape.
        mask: bool of the same shape, the weights to include. None means all.
        normalized: whether to divide by the number of included weights, which gives a number in [0, 1].

    Returns:
        float32 scalar, detached from autograd; 0 if no weight is above 0.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_floating("weights", weights)
    mask = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask
    check_mask(mask, weights=weights)
    if not mask.numel():
        return torch.zeros((), dtype=wide(weights).dtype, device=weights.device)
    counted = torch.where(mask, wide(weights.detach()), 0)
    # Divide the weights by the largest weight, so that their squares neither overflow nor underflow.
    largest = counted.max()
    shares = torch.where(largest == 0, 0, counted / largest)
    size = shares.sum().square() / torch.where(largest == 0, 1, shares.square().sum())
    return size / mask.sum().clamp(min=1) if normalized else size


# --- masks --------------------------------------------------------------------------------------------------------------


def ratio_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, low: float, high: float, level: Level = "token"
) -> Tensor:
    """Remove tokens or rows from `mask` whose trainer/sampler ratio ρ is outside [low, high].

        token      ρ = exp Δ, drops the token. IcePop: 0.5 and 5; Ling Team 2025, arXiv:2510.18855
        sequence   ρ = exp ΣΔ, drops the row. Masked importance sampling (MIS): low = 0; Liu, Li et al. 2025,
                   see `importance_weights`; TRL's `sequence_mask` uses high = 3
        geometric  ρ = exp(ΣΔ / number of tokens), drops the row. verl `rollout_rs="geometric"`: within 1e-3 of 1

    All other arguments and errors are as in `importance_weights`. ValueError is also raised unless 0 <= low < high.

    Returns:
        The reduced mask, bool [N, T]. Entries with a NaN ratio are kept.
    """
    if not 0 <= low < high:
        raise ValueError(f"low={low!r}, high={high!r}: must be 0 <= low < high; 1 is agreement")
    ratio = _of_level(log_ratio(logprobs, rollout_logprobs, mask, detach=True), mask, level).exp()
    return mask & ~((ratio < low) | (ratio > high))


# --- divergence ---------------------------------------------------------------------------------------------------------


def rollout_kl(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    estimator: Literal["k1", "k2", "k3"] = "k3",
    detach: bool = True,
) -> Tensor:
    """Estimate KL(sampler ‖ trainer) at each sampled token; the `masked_mean` of the estimates is the divergence.

        k1  −Δ               unbiased, either sign; verl's `rollout_corr/kl`
        k2  Δ² / 2           biased, low variance
        k3  exp Δ − 1 − Δ    unbiased, never below 0 (except for rounding); verl's `rollout_corr/k3_kl`

    Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html, with r = exp Δ.

    The other arguments and the errors are the same as for `importance_weights`.

    Returns:
        The estimates, float32 [N, T], with 0 at masked positions.
    """
    delta = log_ratio(logprobs, rollout_logprobs, mask, detach)
    if estimator == "k1":
        return -delta
    if estimator == "k2":
        return delta.square() / 2
    if estimator == "k3":
        return torch.expm1(delta) - delta
    raise ValueError(f"estimator={estimator!r}: must be 'k1', 'k2' or 'k3'")


def reverse_kl(logprobs: Tensor, top_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return KL(policy ‖ teacher) at every token, from the teacher's k most likely tokens: the on-policy distillation loss.

        Σ p log(p / q) over the k tokens  +  p′ log(p′ / q′)

    p is the policy's and q the teacher's probability; p′ and q′ are their probabilities of all other tokens together. The
    result equals the KL over the whole vocabulary if k is the vocabulary's size, and is never above it (log-sum inequality:
    Cover and Thomas, "Elements of Information Theory", theorem 2.7.1). The method is from Agarwal et al. 2024, "On-Policy
    Distillation of Language Models", https://arxiv.org/abs/2306.13649.

    Args:
        logprobs: the policy's log-probs of the teacher's k most likely tokens, floating [N, T, k] for N rows, the longest of
            T tokens: the `top_logprobs` of `batch.scores_of(model, temperature=1.0, top_k=scores.top_ids)`. Gradients flow
            to them.
        top_logprobs: the teacher's log-probs of the same tokens, floating [N, T, k], from
            `scores = rollout.score(teacher, batch, temperature=1.0, top_k=k)`.
        mask: bool [N, T], the tokens that count.

    Returns:
        The divergences, float32 [N, T], with 0 at masked positions.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_floating("logprobs", logprobs)
    check_floating("top_logprobs", top_logprobs)
    if logprobs.ndim != 3 or logprobs.shape != top_logprobs.shape:
        raise ValueError(
            f"logprobs has shape {list(logprobs.shape)}, top_logprobs {list(top_logprobs.shape)}: must be twice [N, T, k]"
        )
    check_mask(mask, **{"logprobs[..., 0]": logprobs[..., 0]})
    ours, theirs = wide(logprobs[mask]), wide(top_logprobs[mask])
    least = torch.finfo(ours.dtype).eps
    ours_rest, theirs_rest = (1 - each.exp().sum(1) for each in (ours, theirs))
    ours_rest, theirs_rest = ours_rest.clamp(min=least), theirs_rest.clamp(min=least).to(ours.dtype)
    found = (ours.exp() * (ours - theirs)).sum(1) + ours_rest * (ours_rest.log() - theirs_rest.log())
    return torch.zeros(mask.shape, dtype=found.dtype, device=found.device).masked_scatter(mask, found)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values` where `mask` is True; 0 if `mask` is True nowhere. Gradients flow to `values`.

    Args:
        values: floating, of any shape.
        mask: bool of the same shape.

    Returns:
        float32 scalar.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_floating("values", values)
    check_mask(mask, values=values)
    return torch.where(mask, wide(values), 0).sum() / mask.sum().clamp(min=1)


def substitute(logprobs: Tensor, exact: Tensor, mask: Tensor) -> Tensor:
    """Return the values of `exact` with the gradient of `logprobs`: exact + logprobs − stop_gradient(logprobs).

    Use it with log-probs from the sampler's own arithmetic (`RolloutManager.score`) in a loss that is differentiated
    through the trainer's forward pass. The ratio to the rollout's log-probs then does not include the numerical difference
    between the two forward passes: it is 1 until the weights change. The sum above is not computed literally, because it
    would round.

    Args:
        logprobs: log-probs from the trainer's forward pass, floating [N, T], of N rows, the longest of T tokens; gradients
            flow to them.
        exact: log-probs from the sampler with the same weights, floating [N, T]; no gradient flows to them.
        mask: bool [N, T], the tokens that count.

    Returns:
        float32 [N, T] (float64 if `logprobs` is float64), with 0 at masked positions.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_floating("logprobs", logprobs)
    check_floating("exact", exact)
    check_mask(mask, logprobs=logprobs, exact=exact)
    substituted: Tensor = _Substituted.apply(wide(logprobs), exact.detach())  # type: ignore[no-untyped-call]
    return torch.where(mask, substituted, 0)


class _Substituted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, exact: Tensor) -> Tensor:
        return exact.to(logprobs.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
