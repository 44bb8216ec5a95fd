"""Tests of the sampler: its random numbers, its distribution, the edges of the unit interval."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.memory.buffers import BLOCK
from rollout.engine.sampling.numerics import uniforms
from rollout.engine.sampling.sampler import sample
from rollout.engine.sampling.sampling_table import SamplingRows, SamplingTable
from rollout.requests.block_hash import stream_key
from rollout.sampling_params import SamplingParams
from tests.engine.sampling.draws import (
    DEVICES,
    FILTERS,
    VOCAB,
    chi_square,
    draw,
    draw_many,
    equal,
    final_log_probs,
    histories_of,
    logits_of,
    reference,
    row_of,
)

# --- random numbers ---------------------------------------------------------------------------------------------------


def splitmix(state: int) -> int:
    """Vigna's reference implementation of one output."""
    mask = 2**64 - 1
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return state ^ (state >> 31)


@pytest.mark.parametrize("device", DEVICES)
def test_uniforms_are_splitmix64_at_a_counter_on_every_device(device: str) -> None:
    keys = [0, 1, 1234567, 2**62 + 12345, 2**63 - 1]
    positions = [0, 1, 2, 1000, 2**31]
    grid = [(key, position) for key in keys for position in positions]
    ours = uniforms(*torch.tensor(grid, device=device).unbind(1)).tolist()
    golden = 0x9E3779B97F4A7C15
    assert ours == [(splitmix((key + (p + 1) * golden) % 2**64) >> 11) * 2.0**-53 for key, p in grid]


def test_uniforms_and_stream_keys_keep_their_values_for_ever() -> None:
    # 6457827717110365317 is the first output of splitmix64 seeded with 1234567.
    assert uniforms(torch.tensor([1234567]), torch.tensor([0])).item() == (6457827717110365317 >> 11) * 2.0**-53
    assert stream_key(0, 0) == 6017775124710473527
    assert stream_key(0, 1) == 6467540162864785327
    assert stream_key(1, 0) == 3395948882924712079
    assert stream_key(2**63 - 1, 7) == 6062030773217566360


@pytest.mark.parametrize("walk", ["positions", "keys", "samples of one seed", "seeds"])
def test_uniforms_are_uniform_and_neighbours_independent(walk: str) -> None:
    count, cells = 200_000, 32
    index = torch.arange(count)
    keys = {
        "positions": torch.full((count,), stream_key(3, 0)),
        "keys": index,
        "samples of one seed": torch.tensor([stream_key(5, i) for i in range(count)]),
        "seeds": torch.tensor([stream_key(i, 0) for i in range(count)]),
    }[walk]
    drawn = uniforms(keys, index if walk == "positions" else torch.zeros_like(index))
    cell = (drawn * cells).long()
    assert abs(chi_square(cell.bincount(minlength=cells), torch.full((cells,), count / cells))) < 5
    for lag in (1, 2, 3):
        pairs = cell[:-lag] * cells + cell[lag:]
        expected = torch.full((cells * cells,), len(pairs) / cells**2)
        assert abs(chi_square(pairs.bincount(minlength=cells**2), expected)) < 5


# --- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocabulary", [VOCAB, 7, BLOCK, 3 * BLOCK + 1])
def test_the_final_distribution_is_that_of_hugging_face(filters: dict[str, Any], vocabulary: int) -> None:
    params = SamplingParams(**filters)
    for seed in range(3):
        logits, histories = logits_of(8, vocabulary, seed), histories_of(8, seed, vocabulary)
        ours = final_log_probs(logits, params, histories=histories)
        theirs = reference(logits, params, histories)
        assert torch.equal(ours.isfinite(), theirs.isfinite())
        assert (ours - theirs)[ours.isfinite()].abs().max() <= 1e-6 + 1e-7 * theirs[ours.isfinite()].abs().max()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_log_prob_of_a_token_is_its_log_prob_in_the_final_distribution(filters: dict[str, Any]) -> None:
    params, logits, histories = SamplingParams(**filters), logits_of(64), histories_of(64)
    sampled = draw(logits, params, histories=histories)
    listed = final_log_probs(logits, params, histories=histories)
    assert torch.equal(sampled.logprobs[:, None], listed.gather(1, sampled.token_ids[:, None]))
    assert sampled.logprobs.isfinite().all()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_the_distribution_says(filters: dict[str, Any]) -> None:
    count, params = 20_000, SamplingParams(**filters)
    logits, histories = logits_of(1, 200, seed=1, spread=1.5), histories_of(1, vocabulary=200)
    tokens = draw_many(logits[0], params, count, histories=histories * count)
    expected = reference(logits, params, histories)[0].exp() * count
    drawn = tokens.bincount(minlength=200)
    assert not drawn[expected == 0].any()
    if (expected > 0).sum() > 1:
        # Rare tokens are counted together, so that no single one decides.
        rare = expected < 5
        assert abs(chi_square(pooled(drawn, rare), pooled(expected, rare))) < 5


def pooled(counts: Tensor, rare: Tensor) -> Tensor:
    return torch.cat([counts[~rare].double(), counts[rare].sum(0, keepdim=True).double()])


@pytest.mark.parametrize("filters", [{}, {"top_k": 200}, {"temperature": 0.5, "min_p": 1e-9}], ids=str)
def test_log_probs_far_below_the_likeliest_are_right_although_they_are_never_drawn(filters: dict[str, Any]) -> None:
    logits, params = logits_of(8, spread=100.0), SamplingParams(**filters)
    ours, theirs = final_log_probs(logits, params), reference(logits.double(), params, histories_of(8))
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert torch.allclose(ours.double(), theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_float_type_is_worked_on_in_float32(dtype: torch.dtype) -> None:
    logits, params = logits_of(16).to(dtype), SamplingParams(temperature=0.9, top_p=0.9)
    assert equal(draw(logits, params), draw(logits.float(), params))


def test_equal_logits_are_kept_by_lower_id() -> None:
    logits = torch.zeros(1, 300)
    for filters, count in (({"top_k": 3}, 3), ({"top_p": 0.5}, 150), ({"top_k": 200, "top_p": 0.1}, 20)):
        kept = final_log_probs(logits, SamplingParams(**filters)).isfinite()[0]
        assert kept.nonzero()[:, 0].tolist() == list(range(count))


def test_top_k_keeps_k_tokens_however_unlikely_beside_a_row_with_top_p() -> None:
    logits = torch.tensor([[90.0, 0.0, 60.0, 30.0]]).expand(2, -1)
    sampled = draw(logits, SamplingParams(top_k=3, logprobs=4), SamplingParams(top_p=0.9))
    assert sampled.top_logprobs is not None
    assert sampled.top_logprobs[0].tolist() == [0.0, -30.0, -60.0, -torch.inf]


def test_presence_and_frequency_penalties_count_the_completion_alone() -> None:
    logits = logits_of(2, 50)
    histories = [(np.array([1, 2, 2]), np.array([3, 3, 4])), (np.array([5]), np.array([], np.int64))]
    changed = logits.clone()
    changed[0, 3] -= 0.5 + 2 * 0.25
    changed[0, 4] -= 0.5 + 0.25
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    ours = final_log_probs(logits, params, histories=histories)
    assert torch.allclose(ours, changed.log_softmax(-1), atol=1e-6)


def test_bias_then_bans_then_penalties_then_temperature() -> None:
    logits = logits_of(1, 50)
    histories = [(np.array([1, 7], np.int32), np.array([2], np.int32))]
    params = SamplingParams(
        logit_bias={1: 4.0, 7: 50.0, 9: -1.5}, repetition_penalty=2.0, presence_penalty=1.0, temperature=0.5
    )
    changed = logits.clone()
    changed[0, [1, 9]] += torch.tensor([4.0, -1.5])
    changed[0, 7] = -torch.inf
    for token in (1, 2):
        changed[0, token] *= 2.0 if changed[0, token] < 0 else 0.5
    changed[0, 2] -= 1.0
    ours = final_log_probs(logits, params, histories=histories, banned=[(0, [7, 99, -1])])
    assert torch.allclose(ours, (changed / 0.5).log_softmax(-1), atol=1e-6)


def test_banned_tokens_concern_their_row_only() -> None:
    logits = torch.zeros(3, 4)
    logits[:, 2] = 5.0
    sampled = draw(logits, SamplingParams(temperature=0), banned=[(1, [2]), (1, []), (1, (0, 1))])
    assert sampled.token_ids.tolist() == [2, 3, 2]


def test_the_logits_given_are_not_changed() -> None:
    logits, histories = logits_of(4), histories_of(4)
    before = logits.clone()
    params = SamplingParams(
        logit_bias={3: 1.0}, repetition_penalty=1.2, temperature=0.5, top_k=9, top_p=0.9, min_p=0.1, logprobs=3
    )
    draw(logits, params, histories=histories, banned=[(0, [1])])
    assert torch.equal(logits, before)


# --- greedy -----------------------------------------------------------------------------------------------------------


def test_greedy_rows_are_the_first_largest_logit_beside_sampled_rows_too() -> None:
    logits = logits_of(64).round()
    greedy = SamplingParams(temperature=0, top_k=5, top_p=0.3, min_p=0.5)
    together = draw(logits, *[greedy if row % 2 else SamplingParams() for row in range(64)])
    alone = draw(logits, greedy)
    assert torch.equal(alone.token_ids, logits.argmax(-1))
    assert torch.equal(together.token_ids[1::2], alone.token_ids[1::2])
    assert torch.equal(together.logprobs[1::2], alone.logprobs[1::2])


def test_the_log_prob_of_a_greedy_token_is_that_at_temperature_one() -> None:
    logits = logits_of(16)
    sampled = draw(logits, SamplingParams(temperature=0))
    assert torch.allclose(sampled.logprobs, logits.log_softmax(-1).max(-1).values, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 5, BLOCK, BLOCK + 1, 10 * BLOCK - 1])
def test_the_largest_logit_is_found_wherever_it_stands(vocabulary: int) -> None:
    logits = torch.zeros(vocabulary, vocabulary) + torch.eye(vocabulary) * 1e-30
    assert draw(logits, SamplingParams(temperature=0)).token_ids.tolist() == list(range(vocabulary))


# --- edges of the unit interval ---------------------------------------------------------------------------------------


def key_that_gives(bits: int) -> int:
    """The random stream whose number at position 0 is bits / 2^53: splitmix64, backwards."""

    def unshift(word: int, shift: int) -> int:
        found = word
        for _ in range(64 // shift):
            found = word ^ found >> shift
        return found

    state = unshift(bits << 11, 31)
    for shift, factor in ((27, 0x94D049BB133111EB), (30, 0xBF58476D1CE4E5B9)):
        state = unshift(state * pow(factor, -1, 2**64) % 2**64, shift)
    key = (state - 0x9E3779B97F4A7C15) % 2**64
    return key - 2**64 if key >= 2**63 else key


def rows_that_draw(bits: int, params: SamplingParams, count: int) -> SamplingRows:
    """Rows whose number at position 0 is bits / 2^53."""
    table = SamplingTable("cpu")
    for row in range(count):
        table.set(row, params, key_that_gives(bits))
    return table.select(np.arange(count))


@pytest.mark.parametrize("bits", [0, 1, 2**52, 2**53 - 1])
@pytest.mark.parametrize("vocabulary", [6, 1000, 40_000])
@pytest.mark.parametrize("compiled", [True, False])
def test_no_draw_picks_a_token_of_probability_zero(
    monkeypatch: pytest.MonkeyPatch, bits: int, vocabulary: int, compiled: bool
) -> None:
    if not compiled:
        monkeypatch.setattr("rollout.engine.sampling.sampler.cpu_draw.load", lambda: None)
    logits = logits_of(8, vocabulary)
    logits[:, :2] = logits[:, -2:] = -torch.inf
    logits[1, vocabulary // 2 :] = -torch.inf
    logits[2] = -torch.inf
    logits[2, vocabulary // 2] = -3.0
    for filters in FILTERS:
        params = SamplingParams(**filters)
        histories = histories_of(8, vocabulary=vocabulary)
        kept = reference(logits, params, histories) > -torch.inf
        positions = torch.zeros(8, dtype=torch.int64)
        sampled = sample(logits, rows_that_draw(bits, params, 8), positions, histories=histories)
        assert kept.gather(1, sampled.token_ids[:, None]).all()
        assert sampled.logprobs.isfinite().all()


@pytest.mark.parametrize("compiled", [True, False])
def test_the_ends_of_the_unit_interval_pick_the_first_and_the_last_token(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("rollout.engine.sampling.sampler.cpu_draw.load", lambda: None)
    logits = torch.zeros(1, 1000)
    logits[0, [0, 999]] = -torch.inf
    for bits, token in ((0, 1), (2**53 - 1, 998), (2**52, 500)):
        assert uniforms(torch.tensor([key_that_gives(bits)]), torch.tensor([0])).tolist() == [bits / 2**53]
        rows = rows_that_draw(bits, SamplingParams(), 1)
        assert sample(logits, rows, torch.tensor([0])).token_ids.tolist() == [token]


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.5, "min_p": 0.1}])
def test_a_row_without_a_finite_largest_logit_gets_nan_and_a_token_and_harms_no_neighbour(
    params: dict[str, Any],
) -> None:
    logits = logits_of(6)
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    logits[3] = torch.nan
    logits[4, 5] = torch.inf
    for mode in ("processed", "raw", "tempered"):
        chosen = SamplingParams(**params, logprobs_mode=mode, logprobs=2)
        sampled = draw(logits, chosen)
        assert sampled.logprobs.isnan().tolist() == [False, True, True, True, True, False]
        assert ((sampled.token_ids >= 0) & (sampled.token_ids < VOCAB)).all()
        assert equal(row_of(sampled, 0), draw(logits[:1], chosen))
