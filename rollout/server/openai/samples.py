"""The reply fields of a sample: ids, log-probs, versions, finish reason, usage.

A whole sample is converted to one `TextDelta`, so that replies and streams share their code. A failed sample is an error of
its whole request, never a truncated reply.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any

from rollout.distributed.client.text_stream import TextDelta
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.token_columns import Routes, overlaid
from rollout.server.errors import ApiError
from rollout.state import FinishReason

# STALE becomes "length", because `max_staleness` has cut the sample off as a length limit would (policy `partial`). ABORT is
# the reason only if a control call has aborted the stream.
_FINISH_REASONS: dict[str | None, str | None] = {
    None: None, FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.STALE: "length",
    FinishReason.ABORT: "abort",
}  # fmt: skip

_CALLERS_FAULT = re.compile(r"InvalidRequestError: (?:request \d+ sample \d+: )?")
"""The beginning of the error of a sample whose request is invalid. Replies omit it, because its ids are engine-internal."""


def merged(deltas: Sequence[TextDelta]) -> list[TextDelta]:
    """Merge queued deltas into one per sample, in order of first appearance. A restarted sample loses its earlier deltas."""
    if len(deltas) == 1:
        return list(deltas)
    waiting: dict[int, list[TextDelta]] = {}
    for delta in deltas:
        pieces = waiting.setdefault(delta.sample_index, [])
        if delta.restarted:
            pieces.clear()
        pieces.append(delta)
    return [pieces[0] if len(pieces) == 1 else _joined(pieces) for pieces in waiting.values()]


def _joined(pieces: list[TextDelta]) -> TextDelta:
    last = pieces[-1]
    top = None if last.top_log_probs is None else [row for each in pieces for row in each.top_log_probs or ()]
    return TextDelta(
        last.sample_index,
        "".join([each.text for each in pieces]),
        [token for each in pieces for token in each.token_ids],
        [log_prob for each in pieces for log_prob in each.log_probs],
        [version for each in pieces for version in each.policy_versions],
        top,
        pieces[0].restarted,
        last.finish_reason,
        last.stop_reason,
        last.error,
        _joined_routes(pieces),
        None if last.kept_tokens is None else [ids for each in pieces for ids in each.kept_tokens or ()],
    )


def _joined_routes(pieces: list[TextDelta]) -> Routes | None:
    parts, known = [], 0
    for each in pieces:
        known += len(each.token_ids)
        if each.routed_experts is not None:
            # Number positions so that token i of the joined pieces was sampled from position i. The last row of a
            # piece's routes belongs to its last token.
            parts.append((known - len(each.routed_experts), each.routed_experts))
    return overlaid(parts)[1] if parts else None


def refuse_failed(finish_reason: str | None, error: str | None, index: int) -> None:
    """Raise `ApiError` if a sample has failed; return if it is unfinished or has a result.

    The status is 409 if the sample was aborted, 400 if its request is invalid, and otherwise 500."""
    if finish_reason == FinishReason.ABORT:
        cause = f": {error}" if error else ""
        raise ApiError(409, f"choice {index} was aborted{cause}", code="aborted")
    if finish_reason in _FINISH_REASONS and not error:
        return
    if blamed := _CALLERS_FAULT.match(error or ""):
        raise ApiError(400, f"choice {index}: {str(error)[blamed.end() :]}", code="sample_failed")
    raise ApiError(500, f"choice {index} failed: {error or finish_reason}", code="sample_failed")


def finish_reason(delta: TextDelta) -> str | None:
    """Return OpenAI's finish reason of the sample; None while it is unfinished."""
    return _FINISH_REASONS[delta.finish_reason]


def rollout(delta: TextDelta, policy_version: int, prompt_token_ids: list[int] | None = None) -> dict[str, Any]:
    """Return the `rollout` object of a choice; staleness is relative to `policy_version`, the current version."""
    fields: dict[str, Any] = {} if prompt_token_ids is None else {"prompt_token_ids": prompt_token_ids}
    return fields | tokens(delta, policy_version) | ending(delta)


def tokens(delta: TextDelta, policy_version: int) -> dict[str, Any]:
    """Return the per-token fields of the `rollout` object."""
    fields = {
        "token_ids": delta.token_ids,
        "log_probs": delta.log_probs,
        "policy_versions": delta.policy_versions,
        "policy_staleness": staleness(delta, policy_version),
    }
    return fields | routed_experts(delta)


def staleness(delta: TextDelta, policy_version: int) -> list[int]:
    """Return the number of policy versions since each token was sampled."""
    versions = delta.policy_versions
    if versions.count(policy_version) == len(versions):
        return [0] * len(versions)
    return [max(0, policy_version - version) for version in versions]


def routed_experts(delta: TextDelta) -> dict[str, Any]:
    """Return the field with the experts that each token was routed to (little-endian, in base64); empty if not recorded."""
    routes = delta.routed_experts
    if routes is None:
        return {}
    little = routes.astype(routes.dtype.newbyteorder("<"), copy=False)
    data = b64encode(little.tobytes()).decode("ascii")
    return {"routed_experts": {"data": data, "shape": list(routes.shape), "dtype": routes.dtype.name}}


def sampling_mask(delta: TextDelta) -> dict[str, Any]:
    """Return the field `sampling_mask`, the token ids from which each token was drawn; empty unless requested."""
    return {} if delta.kept_tokens is None else {"sampling_mask": delta.kept_tokens}


def ending(delta: TextDelta) -> dict[str, Any]:
    """Return the field `finish_reason` of `rollout`, with the engine's own reason; empty while the sample is unfinished."""
    return {} if delta.finish_reason is None else {"finish_reason": delta.finish_reason}


def usage_of(groups: Iterable[Sequence[DynamicInferenceRequest]]) -> dict[str, Any]:
    """Return OpenAI's `usage` of finished groups. A group's prompt counts once, with the first sample's cached tokens."""
    finished = list(groups)
    prompts = sum(len(group[0].prompt_tokens) for group in finished)
    generated = sum(request.generated_length for group in finished for request in group)
    cached = sum(group[0].num_cached_tokens for group in finished)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": generated,
        "total_tokens": prompts + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def prompt_columns(
    request: DynamicInferenceRequest, top: int
) -> tuple[list[int], list[float | None], list[list[tuple[int, float]]]]:
    """Return a prompt's token ids, their log-probs (None for the first), and the `top` most likely tokens per position."""
    rows = request.prompt_top_n_logprobs or [[] for _ in request.prompt_tokens[1:]]
    return request.prompt_tokens, [None, *(request.prompt_log_probs or ())], [[], *(row[:top] for row in rows)]
