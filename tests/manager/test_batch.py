"""Tests of batches: row alignment, padded against packed, the version of every token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from rollout.manager.batch.batch import PackedRollouts, RolloutBatch
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status

PAD = 99
RUNNING = Status.ACTIVE_AND_GENERATING_TOKENS


def request(
    request_id: int = 0,
    sample_index: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    completion: Sequence[int] = (4, 5),
    logprobs: Sequence[float] | None = None,
    **changes: object,
) -> DynamicInferenceRequest:
    """A finished sample."""
    fields = {
        "request_id": request_id,
        "sample_index": sample_index,
        "prompt_tokens": list(prompt),
        "generated_tokens": list(completion),
        "generated_log_probs": [-0.5 - token / 10 for token in completion] if logprobs is None else list(logprobs),
        "sampling_params": SamplingParams(max_tokens=64),
        "status": Status.COMPLETED,
        "finish_reason": FinishReason.STOP,
    }
    return DynamicInferenceRequest(**fields | changes)


def failed(request_id: int, sample_index: int = 0, **changes: object) -> DynamicInferenceRequest:
    ended = {"status": Status.FAILED, "finish_reason": FinishReason.ERROR, "error": "RuntimeError: device lost"}
    return request(request_id, sample_index, **ended | changes)


def build(*requests: DynamicInferenceRequest, policy_version: int = 0, **options: object) -> RolloutBatch:
    return RolloutBatch.from_requests(requests, policy_version=policy_version, pad_token_id=PAD, **options)


def generate(record: DynamicInferenceRequestRecord, count: int) -> None:
    """Let the live segment be prefilled and sample `count` tokens."""
    live = record[-1]
    live.finished_chunk_token_count = len(live.prompt_tokens)
    for _ in range(count):
        token = 10 + len(live.completion_tokens)
        live.generated_tokens.append(token)
        live.generated_log_probs.append(-token / 100)


def finish(record: DynamicInferenceRequestRecord) -> DynamicInferenceRequest:
    record[-1].status, record[-1].finish_reason = Status.COMPLETED, FinishReason.LENGTH
    return record.merge()


def interrupted(policy: str) -> DynamicInferenceRequest:
    """4 prompt tokens, 3 sampled under version 0, 3 under version 1, 2 under version 2."""
    record = DynamicInferenceRequestRecord.from_request(
        DynamicInferenceRequest(request_id=5, prompt_tokens=[1, 2, 3, 4], sampling_params=SamplingParams(max_tokens=8))
    )
    generate(record, 3)
    record.advance_version(1)
    generate(record, 3)
    if policy == "recompute":
        record.checkpoint()
        record.advance_version(2, policy_only=True)
    else:
        record.advance_version(2)
    generate(record, 2)
    return finish(record)


def test_rows_are_right_padded_and_aligned():
    batch = build(request(completion=[4, 5]), request(1, prompt=[7], completion=[8], logprobs=[-2.0]))
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [7, 8, PAD, PAD, PAD]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 0, 0]]
    assert batch.response_mask.tolist() == [[False, False, False, True, True], [False, True, False, False, False]]
    torch.testing.assert_close(batch.logprobs, torch.tensor([[0, 0, 0, -0.9, -1.0], [0, -2.0, 0, 0, 0]]))
    assert batch.prompt_lengths.tolist() == [3, 1]
    assert batch.response_lengths.tolist() == [2, 1]


def test_every_tensor_has_the_dtype_it_is_documented_with():
    batch = build(request())
    documented = {
        torch.int64: "input_ids attention_mask position_ids policy_versions kv_versions group_ids sample_indices "
        "prompt_lengths response_lengths",
        torch.int32: "policy_staleness kv_staleness",
        torch.float32: "logprobs",
        torch.bool: "response_mask",
    }
    for dtype, names in documented.items():
        for name in names.split():
            assert getattr(batch, name).dtype == dtype, name
    assert batch.packed().cu_seqlens.dtype == torch.int32


def test_lists_and_requests_keep_the_order_of_the_rows():
    one = request(3, 0, generated_text="four", metadata={"answer": 4})
    two = request(3, 1, finish_reason=FinishReason.LENGTH)
    three = request(9)
    batch = build(one, two, three)
    assert len(batch) == 3
    assert batch[1] is two
    assert batch[-1] is three
    assert list(batch) == [one, two, three]
    assert batch.texts == ["four", None, None]
    assert batch.metadata == [{"answer": 4}, None, None]
    assert batch.finish_reasons == ["stop", "length", "stop"]
    assert batch.errors == [None, None, None]
    assert batch.group_ids.tolist() == [3, 3, 9]
    assert batch.sample_indices.tolist() == [0, 1, 0]


def test_groups_are_slices_of_the_rows():
    batch = build(request(3, 0), request(3, 1), request(9), request(4, 0), request(4, 1))
    assert list(batch.groups()) == [(3, slice(0, 2)), (9, slice(2, 3)), (4, slice(3, 5))]
    assert batch.num_groups == 3


@pytest.mark.parametrize("policy", ["offload", "recompute"])
def test_a_merged_record_carries_the_version_of_every_token(policy):
    batch = build(interrupted(policy), request(6), policy_version=2)
    completion = list(range(10, 18))
    assert batch.input_ids[0].tolist() == [1, 2, 3, 4, *completion]
    torch.testing.assert_close(batch.logprobs[0, 4:], -torch.tensor(completion) / 100)
    assert batch.policy_versions[0].tolist() == [0] * 7 + [1] * 3 + [2] * 2
    assert batch.policy_staleness[0].tolist() == [2] * 7 + [1] * 3 + [0] * 2
    assert batch.kv_staleness[0].tolist() == ([0] * 12 if policy == "recompute" else [2] * 6 + [1] * 3 + [0] * 3)
    assert batch.policy_versions[1].tolist() == [0] * 5 + [-1] * 7
    assert batch.policy_staleness[1].tolist() == [2] * 5 + [0] * 7
    assert batch.kv_versions[1].tolist() == [0] * 5 + [-1] * 7
    assert batch.kv_staleness[1].tolist() == [2] * 5 + [0] * 7


def test_tokens_too_stale_leave_the_response_mask_and_nothing_else():
    merged = interrupted("offload")
    free, bound = build(merged, policy_version=2), build(merged, policy_version=2, max_staleness=1)
    assert free.response_mask[0].tolist() == [False] * 4 + [True] * 8
    assert bound.response_mask[0].tolist() == [False] * 7 + [True] * 5
    assert torch.equal(free.logprobs, bound.logprobs)
    assert torch.equal(free.policy_staleness, bound.policy_staleness)


def test_a_failed_sample_keeps_its_row_and_is_masked_out():
    """Missing, it would shift every later reward by one row; kept as a short answer, it would be trained on."""
    batch = build(request(0), failed(1, completion=[4, 5, 6]), request(2, completion=[7]))
    assert batch.errors == [None, "RuntimeError: device lost", None]
    assert batch.finish_reasons == ["stop", "error", "stop"]
    assert batch.input_ids[1].tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.response_mask.any(dim=1).tolist() == [True, False, True]
    assert batch[2].generated_tokens == [7]


def test_a_sample_that_failed_before_its_first_token_keeps_its_row():
    batch = build(request(0), failed(1, prompt=[], completion=[], finish_reason=None, error=None), request(2))
    assert batch.errors[1] == "RequestFailedError: request 1 sample 0 failed and recorded no reason"
    assert batch.finish_reasons[1] == "error"
    assert batch.attention_mask.sum(dim=1).tolist() == [5, 0, 5]
    assert batch.packed().cu_seqlens.tolist() == [0, 5, 5, 10]


def test_log_probs_that_nobody_recorded_are_nan_where_a_loss_would_use_them():
    batch = build(request(logprobs=[]), failed(1, logprobs=[-1.0]))
    assert batch.logprobs[0].isnan().tolist() == [False, False, False, True, True]
    assert batch.logprobs[1].tolist() == [0] * 5


def test_an_empty_batch_works():
    batch = build()
    assert len(batch) == 0
    assert list(batch) == list(batch.groups()) == batch.texts == []
    assert batch.input_ids.shape == batch.response_mask.shape == (0, 0)
    assert batch.group_ids.shape == (0,)
    packed = batch.packed(8)
    assert packed.input_ids.shape == (0,)
    assert packed.cu_seqlens.tolist() == [0]
    assert packed.max_seqlen == 0
    assert "0 samples in 0 groups" in repr(batch.to("cpu"))


def test_a_batch_moves_as_a_whole():
    batch = build(request(), request(1))
    moved = batch.to("meta")
    tensors = {name for name, value in vars(batch).items() if isinstance(value, Tensor)}
    assert {name for name, value in vars(moved).items() if isinstance(value, Tensor) and value.is_meta} == tensors
    assert moved.requests == batch.requests
    assert build(request(), device="meta").input_ids.is_meta


def sequences(packed: PackedRollouts, values: Tensor) -> list[list[float]]:
    return [values[start:stop].tolist() for start, stop in pairwise(packed.cu_seqlens.tolist())]


PER_TOKEN = ["input_ids", "position_ids", "response_mask", "logprobs", "policy_versions", "policy_staleness"]


@pytest.mark.parametrize("multiple_of", [1, 8, 64])
def test_padded_and_packed_hold_the_same_tokens(multiple_of):
    batch = build(
        interrupted("offload"), request(6, completion=[]), failed(7), request(8, prompt=[1]), policy_version=2
    )
    packed = batch.packed(multiple_of)
    for name in PER_TOKEN:
        padded = getattr(batch, name)
        expected = [row[: int(n)].tolist() for row, n in zip(padded, batch.attention_mask.sum(1), strict=True)]
        assert sequences(packed, getattr(packed, name)) == expected, name
    assert sequences(packed, packed.sequence_ids) == [[0] * 12, [1] * 3, [2] * 5, [3] * 3]
    assert packed.max_seqlen == 12
    assert len(packed.input_ids) % multiple_of == 0
    assert len(packed.input_ids) - 23 < multiple_of


def test_the_surplus_of_a_rounded_length_is_marked_as_nobodys():
    packed = build(request()).packed(8)
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5, PAD, PAD, PAD]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert packed.sequence_ids.tolist() == [0] * 5 + [-1] * 3
    assert packed.policy_versions.tolist() == [0] * 5 + [-1] * 3
    assert packed.response_mask.tolist() == [False] * 3 + [True] * 2 + [False] * 3
    assert packed.cu_seqlens.tolist() == [0, 5]


REFUSED = [
    (TypeError, r"merge\(\)", lambda: build(DynamicInferenceRequestRecord.from_request(request()))),
    (ValueError, "request 7 sample 0 has not ended", lambda: build(request(7, status=RUNNING, finish_reason=None))),
    (ValueError, "request 1 are not side by side", lambda: build(request(1), request(2), request(1, 1))),
    (ValueError, "request 0 sample 0 has 1 log-probs for 2 tokens", lambda: build(request(logprobs=[-1.0]))),
    (ValueError, "version 3, above policy_version=2", lambda: build(request(policy_version=3), policy_version=2)),
    (ValueError, "at least 1", lambda: build(request()).packed(0)),
    (TypeError, "rows='all'", lambda: build(request()).packed(1, "all")),
]


@pytest.mark.parametrize(("error", "message", "call"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_what_cannot_be_a_batch_is_refused_with_the_cure(error, message, call):
    with pytest.raises(error, match=message):
        call()
