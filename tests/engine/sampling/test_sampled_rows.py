"""Tests of the sampler among other rows: a row's bits, log-probs, and the table of their parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.kernels import cpu_draw
from rollout.engine.sampling.constraints import Allowed
from rollout.engine.sampling.sampler import sample, token_logprobs
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.requests.block_hash import stream_key
from rollout.sampling_params import SamplingParams
from tests.engine.sampling.draws import DEVICES, FILTERS, VOCAB, draw, equal, histories_of, logits_of, row_of, rows_of

# --- neighbours -------------------------------------------------------------------------------------------------------


def many_kinds(rows: int) -> list[SamplingParams]:
    """Rows of every kind: filters, penalties, biases, greedy, all log-prob modes."""
    bias = {"logit_bias": {3: 2.0, 900: -4.0}}
    kinds = [*FILTERS, {"temperature": 0}, bias, {"presence_penalty": 0.4}, {"top_p": 0.6, "frequency_penalty": -0.2}]
    modes = ("processed", "raw", "processed", "tempered")
    return [SamplingParams(**kinds[i % len(kinds)], logprobs=4, logprobs_mode=modes[i % 4]) for i in range(rows)]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(VOCAB, torch.float32), (VOCAB, torch.bfloat16), (40_961, torch.float32)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_row_alone_equals_itself_among_63_others_bit_for_bit(
    device: str, vocabulary: int, dtype: torch.dtype
) -> None:
    """Alone, a row without a filter takes the short way through the sampler, beside others the long one."""
    kinds, logits, histories = many_kinds(64), logits_of(64, vocabulary).to(device, dtype), histories_of(64)
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


@pytest.mark.parametrize(("mode", "temperature"), [("raw", 1.0), ("tempered", 0.6)])
@pytest.mark.parametrize("shaping", [{"top_k": 20}, {"repetition_penalty": 1.3}, {"top_p": 0.5, "min_p": 0.1}, {}])
def test_log_probs_of_the_models_own_logits_are_raw_or_at_the_temperature(
    shaping: dict[str, Any], mode: str, temperature: float
) -> None:
    logits, histories = logits_of(32), histories_of(32)
    params = SamplingParams(temperature=0.6, **shaping, logprobs=6)
    tempered = draw(logits, params.replace(logprobs_mode=mode), histories=histories)
    expected = (logits / temperature).log_softmax(-1)
    assert tempered.top_logprobs is not None
    assert torch.equal(tempered.token_ids, draw(logits, params, histories=histories).token_ids)
    assert torch.allclose(tempered.logprobs, expected.gather(1, tempered.token_ids[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(tempered.top_logprobs, expected.topk(6).values, atol=1e-5)


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


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_row_may_come_several_times_and_the_table_grows() -> None:
    table = SamplingTable("cpu")
    table.set(500, SamplingParams(temperature=0.5, top_k=7), 99)
    table.set(3, SamplingParams(min_p=0.2), 5)
    rows = table.select(np.array([500, 3, 500]))
    assert rows.key.tolist() == [99, 5, 99]
    assert rows.temperature.tolist() == [0.5, 1.0, 0.5]
    assert rows.top_k[[0, 2]].tolist() == [7, 7]
    assert (rows.filters, rows.any_greedy) == ({"top_k", "min_p"}, False)


def test_a_row_forgets_the_parameters_it_had() -> None:
    table, logits = SamplingTable("cpu"), torch.zeros(1, 8)
    table.set(0, SamplingParams(temperature=0, logit_bias={5: 9.0}), 1)
    first = table.select(np.zeros(1, np.int64))
    table.set(0, SamplingParams(temperature=0), 1)
    position = torch.zeros(1, dtype=torch.int64)
    assert sample(logits, table.select(np.zeros(1, np.int64)), position).token_ids.tolist() == [0]
    assert sample(logits, first, position).token_ids.tolist() == [5]


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
