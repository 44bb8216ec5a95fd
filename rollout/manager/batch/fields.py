"""The fields of a `RolloutBatch`, built from requests without a Python loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.manager.batch.columns import kept_sets, padded_routes, padded_values
from rollout.manager.batch.images import BatchImages, ImageLayout
from rollout.requests.request import DynamicInferenceRequest


def fields_of(
    rows: tuple[DynamicInferenceRequest, ...],
    policy_version: int,
    pad_token_id: int,
    *,
    max_staleness: int | None,
    sampled: Sequence[NDArray[np.bool_]] | None,
    image_layout: ImageLayout | None,
    device: torch.device | str | None,
) -> dict[str, Any]:
    """Return all fields of a batch except `policy_version` and `pad_token_id`; see `RolloutBatch.from_requests`."""
    _check(rows)
    prompt_lengths = _integers(len(r.prompt_tokens) for r in rows)
    response_lengths = _integers(len(r.generated_tokens) for r in rows)
    lengths = prompt_lengths + response_lengths
    column = np.arange(lengths.max(initial=0))
    real = column < lengths[:, None]
    response = real & (column >= prompt_lengths[:, None])
    errors = [_error(r) for r in rows]

    def padded(flat: NDArray[Any], where: NDArray[np.bool_], fill: int) -> NDArray[Any]:
        out = np.full(where.shape, fill, dtype=flat.dtype)
        out[where] = flat
        return out

    tokens = chain.from_iterable(chain(r.prompt_tokens, r.generated_tokens) for r in rows)
    policy_versions = padded(_joined([r.policy_versions for r in rows]), real, -1)
    kv_versions = padded(_joined([r.kv_versions for r in rows]), real, -1)
    policy_staleness = _staleness(policy_versions, real, policy_version, rows)
    kv_staleness = _staleness(kv_versions, real, policy_version, rows)

    drawn = response
    if sampled is not None:
        drawn = response & padded(np.concatenate([*sampled, np.empty(0, np.bool_)]), response, 0)
    usable = drawn & ~np.array([error is not None for error in errors], dtype=bool)[:, None]
    if max_staleness is not None:
        usable &= policy_staleness <= max_staleness
    logprobs = padded(_logprobs(rows, errors, int(response_lengths.sum())), response, 0)
    logprobs[np.isnan(logprobs) & ~usable] = 0

    arrays = {
        "input_ids": padded(_integers(tokens, int(lengths.sum())), real, pad_token_id),
        "attention_mask": real.astype(np.int64),
        "position_ids": np.where(real, column, 0),
        "response_mask": usable,
        "logprobs": logprobs,
        "policy_versions": policy_versions,
        "policy_staleness": policy_staleness,
        "kv_versions": kv_versions,
        "kv_staleness": kv_staleness,
        "group_ids": _integers(r.request_id for r in rows),
        "sample_indices": _integers(r.sample_index for r in rows),
        "prompt_lengths": prompt_lengths,
        "response_lengths": response_lengths,
    }
    kept = kept_sets(rows, len(column))
    shown = [row.images for row in rows]
    images = BatchImages.of(image_layout, shown, arrays["input_ids"], drawn, device)
    return {
        "requests": rows,
        "finish_reasons": [r.finish_reason.value if r.finish_reason else "error" for r in rows],
        "texts": [r.generated_text for r in rows],
        "errors": errors,
        "metadata": [r.metadata for r in rows],
        "routed_experts": padded_routes(rows, len(column), device),
        "images": images,
        "kept_tokens": kept if kept is None or device is None else kept.to(device),
        "token_values": padded_values(rows, len(column), device),
        **{name: torch.from_numpy(array).to(device) for name, array in arrays.items()},
    }


def _integers(values: Any, count: int = -1) -> NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64, count=count)


def _joined(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int64)


def _name(request: DynamicInferenceRequest) -> str:
    return f"request {request.request_id} sample {request.sample_index}"


def _check(rows: tuple[DynamicInferenceRequest, ...]) -> None:
    for request in rows:
        if not isinstance(request, DynamicInferenceRequest):
            raise TypeError(
                f"a batch is made of DynamicInferenceRequest, not {type(request).__name__}: merge() a record"
            )
        if request.finish_reason is None and not request.failed():
            raise ValueError(f"{_name(request)} has not ended ({request.status.name}): leave it out, or abort it first")
    seen: set[int] = set()
    for group, _ in groupby(rows, key=lambda request: request.request_id):
        if group in seen:
            raise ValueError(
                f"the samples of request {group} are not side by side: sort by prompt, then by sample_index"
            )
        seen.add(group)


def _error(request: DynamicInferenceRequest) -> str | None:
    if request.failed():
        return request.error or f"RequestFailedError: {_name(request)} failed and recorded no reason"
    return request.error


def _staleness(
    versions: NDArray[np.int64],
    real: NDArray[np.bool_],
    policy_version: int,
    rows: tuple[DynamicInferenceRequest, ...],
) -> NDArray[np.int32]:
    staleness = np.where(real, policy_version - versions, 0)
    if (staleness < 0).any():
        row = rows[int(np.argwhere(staleness < 0)[0, 0])]
        raise ValueError(
            f"{_name(row)} holds tokens of version {policy_version - int(staleness.min())}, above policy_version="
            f"{policy_version}: pass the version of the weights now"
        )
    return staleness.astype(np.int32)


def _logprobs(rows: tuple[DynamicInferenceRequest, ...], errors: list[str | None], count: int) -> NDArray[np.float32]:
    def of(request: DynamicInferenceRequest, error: str | None) -> Sequence[float]:
        known, needed = request.generated_log_probs or (), len(request.generated_tokens)
        if len(known) == needed:
            return known
        if len(known) == 0 or error is not None:
            return (float("nan"),) * needed
        raise ValueError(
            f"{_name(request)} has {len(known)} log-probs for {needed} tokens: its record was built wrongly"
        )

    each = (of(request, error) for request, error in zip(rows, errors, strict=True))
    return np.fromiter(chain.from_iterable(each), dtype=np.float32, count=count)
