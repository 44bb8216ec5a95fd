"""`DynamicInferenceRequestRecord`: the segments of one sample, and their merge.

A checkpoint interrupts a sample and starts a new segment, whose prompt is the previous segment's prompt plus its generated
tokens. So the segments cover the completion without gap or overlap. Only the last segment, the live one, changes; the
exception is `set_routes`. `merge` returns the request as if it had never been interrupted.

    segment 0   [prompt ······][generated ···]
                                              checkpoint()
    segment 1   [prompt ·······················][generated ··]
                                                             checkpoint()
    segment 2   [prompt ······································][generated ·····]    ← record[-1]
    merge()     [prompt ······][generated ·····································]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import SerializationError
from rollout.requests.codec import FLOAT, STR, decode_fields, encode_fields, list_of, optional
from rollout.requests.request import REQUEST, DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import KeptTokens, Routes

_PER_TOKEN = ("generated_tokens", "generated_log_probs", "generated_top_n_logprobs")
_OF_THE_LAST = (
    "status", "finish_reason", "stop_reason", "error", "policy_version", "stream_offset", "seed", "metadata", "priority",
)  # fmt: skip
"""The fields that a merged request takes from the last segment."""
_OF_ONE_SEGMENT = {
    *_PER_TOKEN, "prompt", "status", "finish_reason", "stop_reason", "error", "kv_spans", "finished_chunk_token_count",
    "num_cached_tokens", "precomputed_block_hashes", "generated_kept_tokens", "generated_values", "generated_text",
    "generated_segments", "generated_sequence_lengths", "prompt_log_probs", "prompt_top_n_logprobs", "tpot", "ttft",
    "latency", "routing_indices", "events",
}  # fmt: skip
"""The fields that a checkpoint does not copy to the new segment: the old segment keeps its values, the new has defaults."""


@dataclass(kw_only=True, eq=False)
class DynamicInferenceRequestRecord:
    """All segments of one sample, in order. A segment is the part of a sample between two checkpoints.

    Raises:
        ValueError: there is no segment, or a segment belongs to another sample or does not continue the segment before it.
    """

    segments: list[DynamicInferenceRequest] = field(default_factory=list)
    latency: float | None = None
    """Seconds from arrival until the sample finished; None while it is unfinished."""
    completion_text: str | None = None
    """The text of the whole completion. If None, `merge` joins the texts of the segments."""

    def __post_init__(self) -> None:
        if not self.segments:
            raise ValueError(
                "a record of segments=[]: must have at least one; DynamicInferenceRequestRecord.from_request(request) makes "
                "one of a request"
            )
        for index, (before, after) in enumerate(pairwise(self.segments), start=1):
            if (after.request_id, after.sample_index) != (before.request_id, before.sample_index):
                raise ValueError(
                    f"segment {index} is of sample {(after.request_id, after.sample_index)}: must be of sample "
                    f"{(before.request_id, before.sample_index)}, as the segments before it"
                )
            if after.prompt_tokens != before.prompt_tokens + before.generated_tokens:
                raise ValueError(
                    f"segment {index} of request {after.request_id}: its prompt ({len(after.prompt_tokens)} tokens) "
                    f"must be the prompt and output of the segment before ({before.total_length} tokens)"
                )

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> DynamicInferenceRequestRecord:
        """Create a record whose first and live segment is `request` itself."""
        return cls(segments=[request])

    def __getitem__(self, index: int) -> DynamicInferenceRequest:
        return self.segments[index]

    def __len__(self) -> int:
        return len(self.segments)

    def __iter__(self) -> Iterator[DynamicInferenceRequest]:
        return iter(self.segments)

    @property
    def requests(self) -> list[DynamicInferenceRequest]:
        """An older name for `segments`."""
        return self.segments

    @property
    def request_id(self) -> int:
        """The id of the request."""
        return self.segments[0].request_id

    @property
    def sample_index(self) -> int:
        """The index of the sample among the samples of its prompt."""
        return self.segments[0].sample_index

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None before the first token."""
        return next((segment.ttft for segment in self.segments if segment.ttft is not None), None)

    def joined(self, name: str) -> list[Any]:
        """Return the entries of the list field `name`, concatenated over all segments."""
        return [entry for segment in self.segments for entry in getattr(segment, name)]

    def of_prompt(self, name: str) -> list[Any] | None:
        """Return the original prompt's entries in the field `name`, from the first segment that has them all, or None."""
        needed = len(self.segments[0].prompt_tokens) - 1
        rows = (getattr(segment, name) for segment in self.segments)
        return next((row[:needed] for row in rows if row is not None and len(row) >= needed), None)

    def advance_version(self, version: int, policy_only: bool = False) -> None:
        """Advance the live segment to policy version `version`; see `DynamicInferenceRequest.advance_version`."""
        self.segments[-1].advance_version(version, policy_only=policy_only)

    def increment_staleness(self, policy_only: bool = False) -> None:
        """Record one weight update in the live segment. Set `policy_only` if the request is waiting and has no KV."""
        self.segments[-1].increment_staleness(policy_only=policy_only)

    def checkpoint(self, tokenizer: object = None) -> DynamicInferenceRequest:
        """Start and return a new live segment without KV, whose prompt is the old live segment's prompt and output.

        The new segment's token budget is smaller by the number of generated tokens. Policy spans are kept up to the current
        length. A sample without a token has no policy spans, so its prompt gets the version of its next admission. If the
        ADD_ENGINE event is missing, it is added with the arrival time. `tokenizer` has no effect; `checkpoint` and `merge`
        accept it for older callers.
        """
        live = self.segments[-1]
        if live.event_add_engine is None:
            live.add_event_add_engine(timestamp=live.arrival_time)
        spans = VersionSpans()
        if live.completion_tokens:
            spans = live.policy_spans.copy()
            spans.extend_to(live.total_length, live.policy_version)
        params, made = live.sampling_params, live.generated_length
        max_tokens = max(0, params.max_tokens - made)
        kept = {each.name: getattr(live, each.name) for each in fields(live) if each.name not in _OF_ONE_SEGMENT}
        kept["prompt_tokens"] = live.prompt_tokens + live.generated_tokens
        kept["sampling_params"] = params.replace(
            max_tokens=max_tokens, min_tokens=min(max(0, params.min_tokens - made), max_tokens)
        )
        kept["rng_offset"] = live.rng_offset + made
        kept["policy_spans"] = spans
        self.segments.append(type(live)(**kept))
        return self.segments[-1]

    def merge(self, tokenizer: object = None) -> DynamicInferenceRequest:
        """Merge all segments into one request, as if it had never been interrupted; the record is unchanged.

        The id, prompt, token budget and block hashes come from the first segment. Tokens, log-probs, top-n, kept tokens,
        values, tpot, events and routing indices are concatenated. Status, finish reason and versions come from the last
        segment. Time to first token and prompt log-probs come from the first segment that has them.

        Raises:
            ValueError: a segment has log-probs or kept tokens for only some of its tokens.
        """
        first, last = self.segments[0], self.segments[-1]
        routing = [segment.routing_indices for segment in self.segments if segment.routing_indices is not None]
        texts = self._joined_or_none("generated_text")
        text = "".join(texts) if self.completion_text is None and texts is not None else self.completion_text
        columns: dict[str, Any] = {
            **{name: self._joined(name) for name in _PER_TOKEN},
            **{name: self.of_prompt(name) for name in ("prompt_log_probs", "prompt_top_n_logprobs")},
            **{name: self._joined_or_none(name) for name in ("generated_segments", "generated_sequence_lengths")},
            **{name: self.joined(name) for name in ("tpot", "events")},
            **{name: getattr(last, name) for name in _OF_THE_LAST},
        }
        return replace(
            first,
            **columns,
            generated_kept_tokens=self._kept_tokens(),
            generated_values=joined_values(self.segments),
            generated_text=text,
            ttft=self.ttft,
            latency=self.latency,
            routing_indices=np.concatenate(routing) if routing else None,
            policy_spans=last.policy_spans.copy(),
            kv_spans=last.kv_spans.copy(),
            finished_chunk_token_count=min(last.finished_chunk_token_count, len(first.prompt_tokens)),
        )

    def serialize(self) -> dict[str, Any]:
        """Encode as a plain dict for `msgpack.packb(…, use_bin_type=True)`."""
        return encode_fields(self, _WIRE)

    @classmethod
    def deserialize(cls, plain: Any) -> DynamicInferenceRequestRecord:
        """Decode a record; the exact inverse of `serialize`.

        Raises:
            SerializationError: a field is missing, unknown or malformed, or a segment does not continue the previous one.
        """
        decoded = decode_fields(cls.__name__, plain, _WIRE)
        try:
            return cls(**decoded)
        except ValueError as exc:
            raise SerializationError(f"{cls.__name__}.segments: {exc}") from exc

    def _kept_tokens(self) -> KeptTokens | None:
        sets = [segment.generated_kept_tokens for segment in self.segments]
        lengths, made = [len(each or ()) for each in sets], [segment.generated_length for segment in self.segments]
        if all(each is None for each in sets):
            return None
        if lengths != made:
            raise ValueError(
                f"request {self.request_id} sample {self.sample_index}: generated_kept_tokens of {lengths} tokens per "
                f"segment must have as many as there are tokens, {made}, or be None in all"
            )
        return KeptTokens.join(each for each in sets if each is not None)

    def _joined(self, name: str) -> list[Any]:
        lengths = [len(getattr(segment, name)) for segment in self.segments]
        made = [segment.generated_length for segment in self.segments]
        if any(lengths) and lengths != made:
            raise ValueError(
                f"request {self.request_id} sample {self.sample_index}: {name} of {lengths} entries per segment "
                f"must have as many as there are tokens, {made}, or none at all"
            )
        return self.joined(name)

    def _joined_or_none(self, name: str) -> list[Any] | None:
        return None if any(getattr(segment, name) is None for segment in self.segments) else self.joined(name)


# --- values and expert routes ---------------------------------------------------------------------------------------------


def joined_values(segments: Iterable[DynamicInferenceRequest]) -> NDArray[np.float32] | None:
    """Join the `generated_values` of all segments, or return None if there are none. A segment without values gets NaN."""
    parts = [(segment.generated_length, segment.generated_values) for segment in segments]
    width = next((values.shape[1] for _, values in parts if values is not None), None)
    if width is None:
        return None
    filled = [np.full((made, width), np.nan, np.float32) if values is None else values for made, values in parts]
    return np.concatenate(filled)


def route_rows(segments: Iterable[DynamicInferenceRequest]) -> int:
    """Return the number of positions with expert routes. A segment's routes continue the routes of earlier segments."""
    return sum(len(each.routing_indices) for each in segments if each.routing_indices is not None)


def set_routes(segments: Sequence[DynamicInferenceRequest], routes: Routes) -> None:
    """Distribute the expert routes of positions 0, 1, … over the segments. The last segment gets all remaining routes."""
    start = 0
    for segment in segments[:-1]:
        stop = max(start, segment.total_length - 1) if segment.generated_tokens else start
        segment.routing_indices, start = routes[start:stop], stop
    segments[-1].routing_indices = routes[start:]


_WIRE = {
    "segments": list_of(REQUEST),
    "latency": optional(FLOAT),
    "completion_text": optional(STR),
}
