"""Tests of the algorithms against plain loops, hand-computed values, and edge cases."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.algorithms import (
    effective_sample_size,
    group_advantages,
    importance_weights,
    masked_mean,
    ratio_mask,
    reverse_kl,
    rollout_kl,
    substitute,
)

KINDS = ("grpo", "rloo", "dr_grpo")
NAN, INF = math.nan, math.inf


def loops_advantages(rewards: list[float], groups: list[int], valid: list[bool], kind: str, eps: float) -> list[float]:
    result = []
    for i, reward in enumerate(rewards):
        members = [j for j in range(len(rewards)) if groups[j] == groups[i] and valid[j]]
        if not valid[i] or len(members) < 2:
            result.append(0.0)
        elif kind == "rloo":
            result.append(reward - statistics.fmean(rewards[j] for j in members if j != i))
        else:
            values = [rewards[j] for j in members]
            result.append(reward - statistics.fmean(values))
            if kind == "grpo":
                result[-1] /= statistics.stdev(values) + eps
    return result


def loops_deltas(new: Tensor, old: Tensor, mask: Tensor) -> list[list[float]]:
    return [
        [float(a) - float(b) for a, b, m in zip(*row, strict=True) if m]
        for row in zip(new.tolist(), old.tolist(), mask.tolist(), strict=True)
    ]


def spread(rows: list[list[float]], mask: Tensor) -> Tensor:
    """The loops' values of each row's masked-in positions, back at their places."""
    out = torch.zeros(mask.shape, dtype=torch.float64)
    out[mask] = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
    return out


def example(seed: int = 0, n: int = 6, t: int = 9, scale: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    """Trainer's log-probs, sampler's, mask; one row of the mask is empty, and NaN stands wherever it is off."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(n, t, generator=generator) * 4
    new = old + scale * torch.randn(n, t, generator=generator)
    mask = torch.rand(n, t, generator=generator) < 0.6
    mask[2] = False
    return torch.where(mask, new, NAN), torch.where(mask, old, -INF), mask


def same(found: Tensor, expected: Tensor | list[float]) -> None:
    torch.testing.assert_close(found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=2e-6, atol=2e-6)


# --- advantages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_advantages_equal_plain_loops_over_groups_of_any_order_and_size(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(40, generator=generator) * 3
    groups = torch.randint(-3, 9, (40,), generator=generator) * 10**12
    groups[7] = 5
    valid = torch.rand(40, generator=generator) < 0.7
    expected = loops_advantages(rewards.double().tolist(), groups.tolist(), valid.tolist(), kind, 1e-4)
    same(group_advantages(rewards, groups, kind=kind, valid=valid), expected)
    everybody = loops_advantages(rewards.double().tolist(), groups.tolist(), [True] * 40, kind, 0.5)
    same(group_advantages(rewards, groups, kind=kind, eps=0.5), everybody)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_alone_in_its_group_and_a_group_of_equal_rewards_have_exactly_no_advantage(kind):
    rewards = torch.tensor([0.1, 0.1, 0.1, 7.0, 1e6 + 0.3, 1e6 + 0.3, 1e6 + 0.3])
    found = group_advantages(rewards, torch.tensor([1, 1, 1, 2, 3, 3, 3]), kind=kind)
    assert found.tolist() == [0.0] * 7


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_row_changes_nobodys_advantage_whatever_its_reward_is(kind):
    groups, valid = torch.tensor([1, 1, 1, 2, 2]), torch.tensor([True, False, True, True, False])
    found = [
        group_advantages(torch.tensor([1.0, bad, 3.0, 5.0, bad]), groups, kind=kind, valid=valid).tolist()
        for bad in (0.0, -1e9, NAN, INF)
    ]
    assert all(each == found[0] for each in found)
    assert found[0][1] == found[0][3] == found[0][4] == 0
    assert found[0][0] == -found[0][2] != 0


# --- importance weights -------------------------------------------------------------------------------------------------


LEVELS = ("token", "sequence", "geometric")


def ratios_of(row: list[float], level: str) -> list[float]:
    """Log-ratio of each token of a row."""
    together = {"sequence": math.fsum(row), "geometric": math.fsum(row) / max(len(row), 1)}
    return [together.get(level, delta) for delta in row]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cap", [1.5, 3, INF])
@pytest.mark.parametrize("level", LEVELS)
def test_importance_weights_equal_plain_loops(seed, cap, level):
    new, old, mask = example(seed)
    rows = [[min(math.exp(d), cap) for d in ratios_of(row, level)] for row in loops_deltas(new, old, mask)]
    same(importance_weights(new, old, mask, level=level, cap=cap), spread(rows, mask))


def test_a_long_sequence_far_apart_is_truncated_and_not_infinite_and_neither_is_its_gradient():
    old = torch.full((1, 5000), -9.0)
    new = torch.zeros(1, 5000, requires_grad=True)
    mask = torch.ones(1, 5000, dtype=torch.bool)
    weights = importance_weights(new, old, mask, level="sequence", cap=5.0, detach=False)
    weights.sum().backward()
    assert weights.eq(5.0).all()
    assert new.grad is not None
    assert new.grad.eq(0).all()


def test_a_missing_log_prob_under_the_mask_is_seen_and_one_outside_it_is_not():
    new, old = torch.zeros(2, 2), torch.tensor([[NAN, -1.0], [-1.0, NAN]])
    mask = torch.tensor([[True, True], [True, False]])
    assert importance_weights(new, old, mask).isnan().tolist() == [[True, False], [False, False]]
    for level in ("sequence", "geometric"):
        assert importance_weights(new, old, mask, level=level).isnan().tolist() == [[True, True], [False, False]]
    assert rollout_kl(new, old, mask).isnan().tolist() == [[True, False], [False, False]]
    assert ratio_mask(new, old, mask, low=0.5, high=2.0)[0, 0]
    assert masked_mean(rollout_kl(new, old, mask), mask).isnan()


# --- effective sample size ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        ([1, 1, 1, 1], 4.0),
        ([5, 5], 2.0),
        ([1, 0, 0], 1.0),
        ([3, 1], 1.6),
        ([0, 0], 0.0),
        ([], 0.0),
        ([1e30, 1e30], 2.0),
    ],
)
def test_the_effective_sample_size_by_hand(weights, size):
    found = effective_sample_size(torch.tensor(weights, dtype=torch.float32))
    same(found, torch.tensor(size))
    share = effective_sample_size(torch.tensor(weights, dtype=torch.float32), normalized=True)
    same(share, torch.tensor(size / max(len(weights), 1)))


def test_the_effective_sample_size_counts_what_the_mask_keeps_and_no_common_factor():
    weights, mask = torch.rand(5, 7, dtype=torch.float64), torch.rand(5, 7) < 0.5
    kept = weights[mask].tolist()
    expected = sum(kept) ** 2 / sum(w * w for w in kept)
    same(effective_sample_size(torch.where(mask, weights, NAN), mask), torch.tensor(expected))
    same(effective_sample_size(weights * 1e-30, mask, normalized=True), torch.tensor(expected / len(kept)))
    assert effective_sample_size(weights, torch.zeros_like(mask)) == 0


# --- masks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", LEVELS)
def test_masking_by_ratio_equals_plain_loops(seed, level):
    new, old, mask = example(seed, n=40)
    expected = torch.zeros_like(mask)
    for i, row in enumerate(loops_deltas(new, old, mask)):
        ratios = [math.exp(delta) for delta in ratios_of(row, level)]
        expected[i, mask[i]] = torch.tensor([0.6 <= ratio <= 1.8 for ratio in ratios], dtype=torch.bool)
    found = ratio_mask(new, old, mask, low=0.6, high=1.8, level=level)
    assert found.equal(expected)
    assert found.any()
    assert (mask & ~found).any()


def test_a_token_whose_ratio_is_on_the_edge_stays():
    old, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    new = torch.tensor([[0.5, 5.0, 5.1]], dtype=torch.float64).log()
    edge = [float(ratio) for ratio in new.exp()[0]]
    assert ratio_mask(new, old, mask, low=edge[0], high=edge[1]).tolist() == [[True, True, False]]
    assert not ratio_mask(torch.full((1, 3), -INF), old, mask, low=0.1, high=5).any()
    assert ratio_mask(torch.full((1, 3), -INF), old, mask, low=0, high=5).all()


# --- divergence ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("k1", lambda d: -d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(d) - 1 - d)],
)
def test_each_estimate_of_the_divergence_equals_plain_loops(estimator, formula, seed):
    new, old, mask = example(seed)
    rows = [[formula(delta) for delta in row] for row in loops_deltas(new, old, mask)]
    found = rollout_kl(new, old, mask, estimator=estimator)
    same(found, spread(rows, mask))
    same(masked_mean(found, mask), torch.tensor(statistics.fmean(value for row in rows for value in row)))


def distilled(k: int, vocab: int = 7) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits of a policy [2, 5, V], all log-probs of a teacher, its top k, and a mask."""
    generator = torch.Generator().manual_seed(k)
    logits = torch.randn(2, 5, vocab, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 5, vocab, generator=generator, dtype=torch.float64).log_softmax(-1)
    values, ids = teacher.topk(k)
    return logits, teacher, ids, values, torch.rand(2, 5, generator=generator) < 0.6


def test_the_reverse_kl_over_all_tokens_is_that_of_the_distributions_and_so_is_its_gradient():
    logits, teacher, ids, values, mask = distilled(7)
    ours = logits.log_softmax(-1)
    expected = torch.where(mask, (ours.exp() * (ours - teacher)).sum(-1), 0)
    found = reverse_kl(ours.gather(-1, ids), values, mask)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    (gradient,) = torch.autograd.grad(expected.sum(), logits, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logits)[0], gradient, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_reverse_kl_over_the_top_k_counts_all_other_tokens_as_one(k):
    logits, teacher, ids, values, mask = distilled(k)
    found = reverse_kl(logits.log_softmax(-1).gather(-1, ids), values, mask)
    whole = torch.zeros(2, 5, dtype=torch.float64)
    expected = torch.zeros(2, 5, dtype=torch.float64)
    p, q = logits.softmax(-1).detach(), teacher.exp()
    for row, column in mask.nonzero().tolist():
        chosen = ids[row, column].tolist()
        pairs = [(p[row, column, token], q[row, column, token]) for token in range(7)]
        among = [pairs[token] for token in chosen]
        rest = tuple(sum(pair[side] for token, pair in enumerate(pairs) if token not in chosen) for side in (0, 1))
        whole[row, column] = sum(a * (a / b).log() for a, b in pairs)
        expected[row, column] = sum(a * (a / b).log() for a, b in [*among, rest])
    torch.testing.assert_close(found, expected)
    assert (found <= whole + 1e-12).all()
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient[mask].abs().amax(-1).min() > 0
    assert not gradient[~mask].any()


def test_the_reverse_kl_of_bf16_is_float32_and_a_teacher_without_doubt_makes_no_infinity():
    logprobs = torch.full((1, 1, 1), 0.25, dtype=torch.bfloat16).log().requires_grad_()
    found = reverse_kl(logprobs, torch.zeros(1, 1, 1), torch.ones(1, 1, dtype=torch.bool))
    assert found.dtype == torch.float32
    assert found.isfinite().all()
    assert found.item() > 1
    found.sum().backward()
    assert logprobs.grad.isfinite().all()


# --- what holds for all -------------------------------------------------------------------------------------------------

PAIRWISE: list[Callable[..., Tensor]] = [
    importance_weights,
    partial(importance_weights, level="sequence"),
    partial(importance_weights, level="geometric", cap=INF),
    rollout_kl,
    lambda *given, **options: masked_mean(rollout_kl(*given, **options), given[2]),
]


@pytest.mark.parametrize("function", PAIRWISE)
def test_results_are_wide_whatever_comes_in_and_arguments_stay_as_they_were(function):
    new, old, mask = example()
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ):
        given = (new.to(dtype), old.to(dtype), mask)
        before = [each.clone() for each in given]
        found = function(*given)
        assert found.dtype == wide
        torch.testing.assert_close(given, tuple(before), equal_nan=True, rtol=0, atol=0)
        exact = function(given[0].double(), given[1].double(), mask)
        same(found, exact)
    assert function(new.bfloat16(), old, mask).dtype == torch.float32


def test_advantages_and_a_sample_size_are_float32_constants():
    rewards, groups = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True), torch.tensor([1, 1])
    for found in (group_advantages(rewards, groups), effective_sample_size(rewards)):
        assert found.dtype == torch.float32
        assert not found.requires_grad
    assert group_advantages(torch.tensor([True, False]), groups).dtype == torch.float32


@pytest.mark.parametrize("function", PAIRWISE)
def test_gradients_flow_only_when_asked_and_never_from_what_is_masked_out(function):
    new, old, mask = example()
    new = new.requires_grad_()
    assert not function(new, old, mask).requires_grad
    function(new, old, mask, detach=False).sum().backward()
    assert new.grad is not None
    assert new.grad.isfinite().all()
    assert new.grad[~mask].eq(0).all()
    assert new.grad[mask].ne(0).any()


def test_the_gradient_of_the_geometric_ratio_is_gspos():
    """Zheng et al. 2025, equation 10: the ratio times the mean of the tokens' gradients."""
    new, old, mask = example()
    new = torch.where(mask, new, 0).requires_grad_()
    ratio = importance_weights(new, old, mask, level="geometric", cap=INF, detach=False)
    (ratio.sum(1) / mask.sum(1).clamp(min=1)).sum().backward()
    expected = ratio.detach() / mask.sum(1, keepdim=True).clamp(min=1)
    assert new.grad is not None
    same(new.grad, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: reverse_kl(torch.ones(1, 2, 4), torch.ones(1, 2), torch.ones(1, 2) > 0), "must be twice [N, T, k]"),
        (
            lambda: reverse_kl(*torch.ones(2, 1, 3, 1), torch.ones(1, 2) > 0),
            "logprobs[..., 0] has shape [1, 3], mask [1, 2]",
        ),
        (lambda: group_advantages(torch.ones(2, 2), torch.ones(4).long()), "rewards have shape [2, 2]: must be [N]"),
        (lambda: group_advantages(torch.ones(3), torch.ones(4).long()), "group_ids have shape [4], rewards [3]"),
        (
            lambda: group_advantages(torch.ones(2), torch.ones(2).long(), valid=torch.ones(2)),
            "valid is torch.float32 [2]",
        ),
        (lambda: group_advantages(torch.tensor([0, NAN]), torch.ones(2).long()), "rewards[1]=nan: must be finite"),
        (lambda: group_advantages(torch.ones(2), torch.ones(2).long(), eps=0), "eps=0: must be a number above 0"),
        (lambda: group_advantages(torch.ones(2), torch.ones(2).long(), kind="ppo"), "kind='ppo': must be 'grpo', "),
        (lambda: pair(importance_weights, mask=torch.ones(2, 3)), "mask has dtype torch.float32: must be bool"),
        (
            lambda: pair(importance_weights, new=torch.ones(2, 2)),
            "logprobs has shape [2, 2], mask [2, 3]: must be equal",
        ),
        (lambda: pair(rollout_kl, new=torch.ones(2, 3).long()), "logprobs has dtype torch.int64: must be floating"),
        (lambda: pair(importance_weights, mask=torch.ones(3).bool()), "mask has shape [3]: must be [N, T]"),
        (lambda: pair(importance_weights, cap=0), "cap=0: must be a number above 0"),
        (lambda: pair(rollout_kl, estimator="k4"), "estimator='k4': must be 'k1', 'k2' or 'k3'"),
        (lambda: pair(ratio_mask, low=2.0, high=1.0), "low=2.0, high=1.0: must be 0 <= low < high"),
        (lambda: pair(ratio_mask, low=0.5, high=2.0, level="row"), "level='row': must be 'token', "),
        (lambda: effective_sample_size(torch.ones(3), torch.ones(2).bool()), "weights has shape [3], mask [2]"),
    ],
)
def test_an_argument_that_does_not_fit_is_named_with_the_rule(call, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    assert message in str(caught.value)


def pair(
    function: Callable[..., Tensor], *, new: Any = None, old: Any = None, mask: Any = None, **options: Any
) -> Tensor:
    return function(
        torch.zeros(2, 3) if new is None else new,
        torch.zeros(2, 3) if old is None else old,
        torch.ones(2, 3, dtype=torch.bool) if mask is None else mask,
        **options,
    )


def test_the_package_costs_no_torch_until_a_function_is_asked_for():
    program = "import sys, rollout.algorithms as a; print('torch' in sys.modules, len(a.__all__), hasattr(a, 'ppo'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "9", "False"]


def test_substituted_log_probs_have_the_value_of_one_forward_and_the_gradient_of_the_other():
    # -1e-9 + (-1.1 - -1e-9) rounds: the sum of the formula would not be -1.1.
    logprobs = torch.tensor([[-2.0, -1e-9, NAN, -INF]], requires_grad=True)
    exact = torch.tensor([[-2.1, -1.1, -3.0, -0.5]], requires_grad=True)
    mask = torch.tensor([[True, True, False, True]])
    found = substitute(logprobs, exact, mask)
    assert found.tolist() == torch.tensor([[-2.1, -1.1, 0.0, -0.5]]).tolist()
    (found * torch.tensor([[1.0, 2.0, 3.0, 4.0]])).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[1.0, 2.0, 0.0, 4.0]]
    assert exact.grad is None
    assert substitute(logprobs.bfloat16(), exact, mask).dtype == torch.float32
    with pytest.raises(ValueError, match="shape"):
        substitute(logprobs, exact[:, 1:], mask)
