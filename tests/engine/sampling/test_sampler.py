"""Tests of the sampler: the distribution is Hugging Face's, and rows are independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollout.engine.kernels import cpu_draw
from rollout.engine.memory.buffers import BLOCK
from rollout.engine.sampling.constraints import Allowed
from rollout.engine.sampling.edits import History
from rollout.engine.sampling.random_stream import uniforms
from rollout.engine.sampling.sampler import Sampled, sample, token_logprobs
from rollout.engine.sampling.sampling_table import SamplingRows, SamplingTable
from rollout.errors import ConfigError
from rollout.requests.seeds import stream_key
from rollout.sampling_params import SamplingParams

VOCAB = 1000
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.5, "top_p": 0.7, "min_p": 0.3},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.7},
]


def logits_of(rows: int, vocabulary: int = VOCAB, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def rows_of(params: Sequence[SamplingParams], device: str = "cpu", first_key: int = 0) -> SamplingRows:
    """One row of the table for each row, each with its own stream."""
    table = SamplingTable(device)
    for row, each in enumerate(params):
        table.set(row, each, stream_key(first_key + row, 0))
    return table.select(np.arange(len(params)))


def draw(logits: Tensor, *params: SamplingParams, position: int = 0, **more: Any) -> Sampled:
    """One row per row of logits; a single `params` serves all."""
    rows = rows_of(params * len(logits) if len(params) == 1 else params)
    return sample(logits, rows, torch.full((len(logits),), position), **more)


def draw_many(logits: Tensor, params: SamplingParams, count: int, **more: Any) -> Tensor:
    """Tokens drawn from one row of logits [V] at `count` positions of one stream."""
    table = SamplingTable("cpu")
    table.set(0, params, stream_key(7, 0))
    rows = table.select(np.zeros(count, np.int64))
    return sample(logits.expand(count, -1), rows, torch.arange(count), **more).token_ids


def final_log_probs(logits: Tensor, params: SamplingParams, **more: Any) -> Tensor:
    """Our log-prob of every token [R, V]; -inf where filtered."""
    sampled = draw(logits, params.replace(logprobs=logits.shape[1]), **more)
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    return torch.full_like(logits, torch.nan).scatter_(1, sampled.top_ids, sampled.top_logprobs)


def reference(logits: Tensor, params: SamplingParams, histories: Sequence[History]) -> Tensor:
    """The same by Hugging Face's own processors."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    ids = torch.from_numpy(np.stack([np.concatenate(history) for history in histories]))
    scores: Tensor = processors(ids, logits.clone())
    return scores.log_softmax(-1)


def histories_of(rows: int, seed: int = 0, vocabulary: int = VOCAB) -> list[History]:
    random = np.random.default_rng(seed)
    return [(random.integers(0, vocabulary, 30), random.integers(0, vocabulary, 20)) for _ in range(rows)]


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean: about N(0, 1) for true samples."""
    freedom = int((expected > 0).sum()) - 1
    statistic = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum().item()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def equal(left: Sampled, right: Sampled) -> bool:
    """Bit for bit, NaN equal to NaN."""
    pairs = [
        (getattr(left, name), getattr(right, name)) for name in ("token_ids", "logprobs", "top_ids", "top_logprobs")
    ]
    return all(a is b is None or torch.equal(bits(a), bits(b)) for a, b in pairs)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def row_of(sampled: Sampled, index: int) -> Sampled:
    one = slice(index, index + 1)
    top_ids, top_logprobs = sampled.top_ids, sampled.top_logprobs
    return Sampled(
        sampled.token_ids[one],
        sampled.logprobs[one],
        None if top_ids is None else top_ids[one],
        None if top_logprobs is None else top_logprobs[one],
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


def test_uniforms_neither_change_their_arguments_nor_leave_the_unit_interval() -> None:
    keys, positions = torch.arange(1000), torch.arange(1000)
    drawn = uniforms(keys, positions)
    assert drawn.dtype == torch.float64
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert torch.equal(keys, torch.arange(1000))
    assert torch.equal(positions, torch.arange(1000))


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


def test_stream_keys_of_many_seeds_and_samples_all_differ() -> None:
    keys = {stream_key(seed, index) for seed in range(1000) for index in range(64)}
    assert len(keys) == 64_000
    assert all(0 <= key < 2**63 for key in keys)


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
        # Rare tokens together, lest one of them decides.
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


def test_top_k_of_one_is_greedy_even_among_equals() -> None:
    logits = logits_of(32).bfloat16().float().round()
    assert torch.equal(draw(logits, SamplingParams(top_k=1)).token_ids, logits.argmax(-1))


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


# --- neighbours -------------------------------------------------------------------------------------------------------


def many_kinds(rows: int) -> list[SamplingParams]:
    """Rows of every kind: filters, penalties, biases, greedy, all log-prob modes."""
    bias = {"logit_bias": {3: 2.0, 900: -4.0}}
    kinds = [*FILTERS, {"temperature": 0}, bias, {"presence_penalty": 0.4}, {"top_p": 0.6, "frequency_penalty": -0.2}]
    modes = ("processed", "raw", "processed", "tempered")
    return [SamplingParams(**kinds[i % len(kinds)], logprobs=4, logprobs_mode=modes[i % 4]) for i in range(rows)]


@pytest.mark.parametrize("vocabulary", [VOCAB, 40_961])
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_alone_equals_itself_among_63_others_bit_for_bit(device: str, vocabulary: int) -> None:
    kinds, logits, histories = many_kinds(64), logits_of(64, vocabulary).to(device), histories_of(64)
    positions = torch.arange(64, device=device)
    table = SamplingTable(device)
    for row, params in enumerate(kinds):
        table.set(row, params, stream_key(row, 3))
    banned = [(row, [row, 5]) for row in range(0, 64, 7)]
    together = sample(logits, table.select(np.arange(64)), positions, histories=histories, banned=banned)
    for row in range(64):
        one = slice(row, row + 1)
        alone = sample(
            logits[one],
            table.select(np.array([row])),
            positions[one],
            histories=histories[one],
            banned=[(0, ids) for number, ids in banned if number == row],
        )
        assert equal(alone, row_of(together, row)), kinds[row]


def test_identical_rows_in_other_company_and_order_give_identical_results() -> None:
    kinds, histories = many_kinds(40), histories_of(40)
    logits = logits_of(40).bfloat16()
    table = SamplingTable("cpu")
    for row, params in enumerate(kinds):
        table.set(row, params, stream_key(row, 0))
    base = sample(logits, table.select(np.arange(40)), torch.arange(40), histories=histories)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(40), 2))
    shuffled = sample(
        logits[order], table.select(order), torch.from_numpy(order), histories=[histories[row] for row in order]
    )
    for place, row in enumerate(order.tolist()):
        assert equal(row_of(shuffled, place), row_of(base, row))


@pytest.mark.parametrize("elements", [1, 3 * VOCAB, 10**9])
def test_working_through_the_rows_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    logits, histories, banned = logits_of(20), histories_of(20), [(0, [1]), (13, [2, 3]), (19, [4])]
    first, *others = many_kinds(20)
    kinds = [first.replace(logprobs=7), *others]
    whole = draw(logits, *kinds, histories=histories, banned=banned)
    scores = token_logprobs(logits, torch.arange(20), 3)
    monkeypatch.setattr("rollout.engine.sampling.sampler.CPU_ELEMENTS", elements)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert equal(draw(logits, *kinds, histories=histories, banned=banned), whole)
    again = token_logprobs(logits, torch.arange(20), 3)
    assert [tensor.tolist() for tensor in again if tensor is not None] == [
        tensor.tolist() for tensor in scores if tensor is not None
    ]


def test_a_stream_depends_on_seed_sample_and_position_alone() -> None:
    logits, params = logits_of(1), SamplingParams()
    table = SamplingTable("cpu")
    table.set(0, params, stream_key(11, 2))
    table.set(40, params, stream_key(11, 2))
    table.set(41, params, stream_key(11, 3))
    positions = torch.arange(200).repeat(3)
    chosen = np.repeat([0, 40, 41], 200)
    tokens = sample(logits.expand(600, -1), table.select(chosen), positions).token_ids.view(3, 200)
    assert torch.equal(tokens[0], tokens[1])
    assert (tokens[0] != tokens[2]).float().mean() > 0.5


@pytest.mark.parametrize("device", DEVICES[1:])
def test_nothing_waits_for_the_device(device: str) -> None:
    logits, histories = logits_of(64).to(device), histories_of(64)
    rows, positions = rows_of(many_kinds(64), device), torch.arange(64, device=device)
    allowed = Allowed([5], np.full((1, -(-VOCAB // 8)), 255, np.uint8), {})
    sample(logits, rows, positions, histories=histories)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = rows_of(many_kinds(64), device)
        sample(logits, rows, positions, histories=histories, banned=[(3, [1, 2])], allowed=allowed)
        token_logprobs(logits, positions, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- log-probs --------------------------------------------------------------------------------------------------------


def test_raw_log_probs_are_those_of_the_models_own_logits() -> None:
    logits, histories = logits_of(32), histories_of(32)
    params = SamplingParams(temperature=0.6, top_k=20, repetition_penalty=1.3, logprobs=6)
    raw = draw(logits, params.replace(logprobs_mode="raw"), histories=histories)
    processed = draw(logits, params, histories=histories)
    expected = logits.log_softmax(-1)
    assert raw.top_logprobs is not None
    assert torch.equal(raw.token_ids, processed.token_ids)
    assert torch.allclose(raw.logprobs, expected.gather(1, raw.token_ids[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(raw.top_logprobs, expected.topk(6).values, atol=1e-5)


@pytest.mark.parametrize("shaping", [{"top_k": 20}, {"repetition_penalty": 1.3}, {"top_p": 0.5, "min_p": 0.1}, {}])
def test_tempered_log_probs_are_those_of_the_models_own_logits_at_the_temperature(shaping: dict[str, Any]) -> None:
    logits, histories = logits_of(32), histories_of(32)
    params = SamplingParams(temperature=0.6, **shaping, logprobs=6)
    tempered = draw(logits, params.replace(logprobs_mode="tempered"), histories=histories)
    expected = (logits / 0.6).log_softmax(-1)
    assert tempered.top_logprobs is not None
    assert torch.equal(tempered.token_ids, draw(logits, params, histories=histories).token_ids)
    assert torch.allclose(tempered.logprobs, expected.gather(1, tempered.token_ids[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(tempered.top_logprobs, expected.topk(6).values, atol=1e-5)


def test_each_row_reports_in_its_own_mode() -> None:
    names = ("raw", "processed", "tempered")
    logits = logits_of(2, seed=4)[:1].expand(3, -1)
    modes = [SamplingParams(temperature=0.5, top_k=9, logprobs=2, logprobs_mode=mode) for mode in names]
    together = draw(logits, *modes)
    for row, params in enumerate(modes):
        table = SamplingTable("cpu")
        table.set(0, params, stream_key(row, 0))
        alone = sample(logits[:1], table.select(np.zeros(1, np.int64)), torch.zeros(1, dtype=torch.int64))
        assert equal(row_of(together, row), alone)


def test_top_log_probs_are_sorted_and_equal_ones_by_id() -> None:
    logits = torch.tensor([[0.0, 2.0, -1.0, 2.0, 0.0, 1.0]])
    sampled = draw(logits, SamplingParams(logprobs=5))
    assert sampled.top_ids is not None
    assert sampled.top_ids.tolist() == [[1, 3, 5, 0, 4]]


def test_as_many_top_log_probs_as_any_row_asks_for_and_none_if_none_does() -> None:
    logits = logits_of(3, 10)
    counts = [SamplingParams(logprobs=count) for count in (0, 3, None)]
    sampled = draw(logits, *counts)
    assert sampled.top_ids is not None
    assert sampled.top_ids.shape == (3, 3)
    assert draw(logits, SamplingParams(logprobs=0)).top_ids is None
    everything = draw(logits, SamplingParams(logprobs=50)).top_ids
    assert everything is not None
    assert everything.shape == (3, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_log_probs_are_the_log_softmax(dtype: torch.dtype) -> None:
    logits = logits_of(30).to(dtype)
    targets = torch.arange(30) * 7
    values, ids, top = token_logprobs(logits, targets, 5)
    expected = logits.float().log_softmax(-1)
    assert values.dtype == torch.float32
    assert ids is not None
    assert top is not None
    assert torch.allclose(values, expected.gather(1, targets[:, None])[:, 0], atol=1e-6, rtol=1e-6)
    assert torch.allclose(top, expected.topk(5).values, atol=1e-6, rtol=1e-6)
    assert torch.allclose(expected.gather(1, ids), top, atol=1e-6, rtol=1e-6)
    assert token_logprobs(logits, targets, 0)[1:] == (None, None)


def test_what_inference_mode_made_serves_outside_it_too() -> None:
    logits, kinds, histories = logits_of(20), many_kinds(20), histories_of(20)
    table, chosen, positions = SamplingTable("cpu"), np.arange(20), torch.arange(20)
    for row, params in enumerate(kinds):
        table.set(row, params, row)
    with torch.inference_mode():
        inside = sample(logits * 1, table.select(chosen), positions, histories=histories)
    assert equal(sample(logits, table.select(chosen), positions, histories=histories), inside)
    with torch.inference_mode():
        assert equal(sample(logits * 1, table.select(chosen), positions, histories=histories), inside)


def test_logits_that_require_grad_give_results_that_do_not() -> None:
    logits = logits_of(2).requires_grad_()
    sampled = draw(logits, SamplingParams(top_p=0.9, logprobs=2))
    assert not sampled.logprobs.requires_grad
    assert not token_logprobs(logits, torch.zeros(2, dtype=torch.int64), 2)[0].requires_grad


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_selection_is_made_once_while_nothing_changes() -> None:
    table = SamplingTable("cpu")
    table.set(0, SamplingParams(), 1)
    table.set(1, SamplingParams(top_k=3), 2)
    chosen = np.array([1, 0])
    rows = table.select(chosen)
    assert table.select(np.array([1, 0], np.int32)) is rows
    chosen[0] = 0
    assert table.select(chosen) is not rows
    rows = table.select(np.array([1, 0]))
    table.set(1, SamplingParams(), 2)
    assert rows.any_top_k
    assert not table.select(np.array([1, 0])).any_top_k


def test_a_row_may_come_several_times_and_the_table_grows() -> None:
    table = SamplingTable("cpu")
    table.set(500, SamplingParams(temperature=0.5, top_k=7), 99)
    table.set(3, SamplingParams(min_p=0.2), 5)
    rows = table.select(np.array([500, 3, 500]))
    assert rows.key.tolist() == [99, 5, 99]
    assert rows.temperature.tolist() == [0.5, 1.0, 0.5]
    assert rows.top_k[[0, 2]].tolist() == [7, 7]
    assert (rows.any_min_p, rows.any_top_k, rows.any_top_p, rows.any_greedy) == (True, True, False, False)


def test_a_row_forgets_the_parameters_it_had() -> None:
    table, logits = SamplingTable("cpu"), torch.zeros(1, 8)
    table.set(0, SamplingParams(temperature=0, logit_bias={5: 9.0}), 1)
    first = table.select(np.zeros(1, np.int64))
    table.set(0, SamplingParams(temperature=0), 1)
    position = torch.zeros(1, dtype=torch.int64)
    assert sample(logits, table.select(np.zeros(1, np.int64)), position).token_ids.tolist() == [0]
    assert sample(logits, first, position).token_ids.tolist() == [5]


@pytest.mark.parametrize("row", [2, 10_000, -1])
def test_a_row_that_was_never_set_is_refused_by_number(row: int) -> None:
    table = SamplingTable("cpu")
    table.set(0, SamplingParams(), 1)
    with pytest.raises(ConfigError, match=rf"row {row} was never set; call set\({row}"):
        table.select(np.array([0, row]))


def test_a_bias_beyond_the_vocabulary_is_refused_by_token() -> None:
    with pytest.raises(ConfigError, match="logit_bias names token 50: must be below the vocabulary size 50"):
        draw(logits_of(1, 50), SamplingParams(logit_bias={50: 1.0}))


def test_missing_histories_are_named() -> None:
    with pytest.raises(ConfigError, match="histories=None"):
        draw(logits_of(1), SamplingParams(presence_penalty=1.0))


def test_no_rows_give_no_tokens() -> None:
    sampled = draw(logits_of(0), SamplingParams(top_p=0.5, logprobs=2))
    assert sampled.token_ids.shape == sampled.logprobs.shape == (0,)
    assert token_logprobs(logits_of(0), torch.zeros(0, dtype=torch.int64), 0)[0].shape == (0,)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_the_log_prob_of_one_of_two_is_a_half_however_large_their_scores_are(
    compiled: bool, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("rollout.engine.sampling.sampler.cpu_draw.load", lambda: None)
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 8]] = 1e20
    drawn = sample(logits, rows_of([SamplingParams(logprobs=2, logprobs_mode=mode)]), torch.zeros(1, dtype=torch.int64))
    half = torch.tensor(0.5).log()
    torch.testing.assert_close(drawn.logprobs, half[None])
    assert drawn.top_logprobs is not None
    torch.testing.assert_close(drawn.top_logprobs, half.expand(1, 2))
    torch.testing.assert_close(token_logprobs(logits, torch.tensor([3]), 0)[0], half[None])


@pytest.mark.skipif(cpu_draw.load() is None, reason="no C++ compiler")
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"temperature": 0}, {"top_k": 5}, {"min_p": 0.05}])
def test_the_cpp_draw_and_plain_torch_draw_the_same_tokens(
    params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only their exponentials differ, in the last bit: not one token in these."""
    logits = 3 * logits_of(64, seed=5)
    for dtype in (torch.float32, torch.bfloat16):
        chosen = SamplingParams(**params)
        ours = draw(logits.to(dtype), chosen)
        with monkeypatch.context() as patch:
            patch.setattr("rollout.engine.sampling.sampler.cpu_draw.load", lambda: None)
            plain = draw(logits.to(dtype), chosen)
        assert torch.equal(ours.token_ids, plain.token_ids)
        torch.testing.assert_close(ours.logprobs, plain.logprobs, atol=2e-6, rtol=2e-6)


def test_a_row_gets_the_same_bits_beside_rows_with_filters() -> None:
    """Alone it takes the short way through the sampler, beside a filtered row the long one."""
    logits = logits_of(2, seed=6).bfloat16()
    table = SamplingTable("cpu")
    table.set(0, SamplingParams(temperature=0.8), 77)
    table.set(1, SamplingParams(top_k=3, logprobs=2), 78)
    positions = torch.zeros(2, dtype=torch.int64)
    together = sample(logits, table.select(np.array([0, 1])), positions)
    alone = sample(logits[:1], table.select(np.array([0])), positions[:1])
    assert alone.token_ids[0] == together.token_ids[0]
    assert alone.logprobs[0] == together.logprobs[0]
