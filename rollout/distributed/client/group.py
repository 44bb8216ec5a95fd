"""Client side of one group: the deltas received for its samples, and the merged requests built from them.

Always true: a sample's stretches are contiguous; a restart discards the earlier ones. Stretches are stored as received
and split by sample only when a sample is read, so that receiving costs little for groups of many samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, overload

import numpy as np

from rollout.distributed.protocol.fields import TOKEN_BYTES
from rollout.distributed.protocol.frames import LostFramesError
from rollout.distributed.protocol.messages import Stretch
from rollout.distributed.protocol.outcome import Outcome, pack_top_n, unpack, unpack_top_n
from rollout.errors import InvalidRequestError, RolloutError, SerializationError
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.requests.events import unpack_events
from rollout.requests.growth import TopN
from rollout.requests.record import DynamicInferenceRequestRecord, split
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason
from rollout.state import Status as RequestStatus

PIECES_TOGETHER = 64
"""Stretches per sample after which they are merged: a stream receives one per token, and each object costs memory."""

_FAILED = (FinishReason.ERROR, FinishReason.ABORT)


def noop(*_: object) -> None:
    """Default callback: do nothing."""


class OpenGroup:
    """A prompt, its parameters, and everything received for its n samples.

    Attributes:
        request_id: client-side id.
        text: the prompt, if given as text.
        prompt_tokens: little-endian int32; None until the coordinator has tokenised a text.
        params: the caller's sampling parameters.
        arrival_time: wall-clock seconds.
        error: why the group failed, or None.
        on_update: called with (group, stretch) when tokens arrive or samples end.
        on_done: called with the group when it has ended or failed.
    """

    __slots__ = (
        "_earlier_events",
        "_ended",
        "_hashes",
        "_lengths",
        "_pieces",
        "_prompt_list",
        "_unwanted",
        "arrival_time",
        "error",
        "on_done",
        "on_update",
        "params",
        "priority",
        "prompt_tokens",
        "request_id",
        "text",
    )

    def __init__(
        self, request_id: int, prompt: str | bytes, params: SamplingParams, priority: int, arrival_time: float
    ) -> None:
        self.request_id = request_id
        self.text = prompt if isinstance(prompt, str) else None
        self.prompt_tokens = None if isinstance(prompt, str) else prompt
        self.params = params
        self.priority = priority
        self.arrival_time = arrival_time
        self.error: RolloutError | None = None
        self.on_update: Callable[[OpenGroup, Stretch], object] = noop
        self.on_done: Callable[[OpenGroup], object] = noop
        # A single stretch is stored without a list: one list per sample would burden the garbage collector.
        self._pieces: dict[int, Stretch | list[Stretch]] = {}
        self._lengths: dict[int, int] = {}
        self._prompt_list: list[int] | None = None
        self._hashes: list[int] = []
        self._earlier_events: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._unwanted: frozenset[int] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether every wanted sample has ended."""
        return len(self._ended) + len(self._unwanted) == self.params.n

    @property
    def done(self) -> bool:
        """Whether the group is complete or has failed."""
        return self.complete or self.error is not None

    def open_samples(self) -> list[int]:
        """Indices of the wanted samples that have not ended."""
        return [index for index in range(self.params.n) if index not in self._ended and index not in self._unwanted]

    def want_only(self, wanted: Collection[int]) -> None:
        """Restrict the wanted samples; of the others, those that have ended stay readable.

        Raises:
            InvalidRequestError: an index is outside the group.
        """
        foreign = [index for index in wanted if type(index) is not int or not 0 <= index < self.params.n]
        if foreign:
            raise InvalidRequestError(f"wanted={foreign}: must be samples in [0, n={self.params.n})")
        self._unwanted = frozenset(range(self.params.n)).difference(wanted, self._ended)

    def oldest_version(self) -> int | None:
        """Lowest policy version of any token of the open samples; None: no token yet."""
        rows = (_Sample(self._pieces[index], index) for index in self.open_samples() if index in self._pieces)
        return min((version for row in rows for version in row.versions()[1::2]), default=None)

    def take(self, stretch: Stretch) -> None:
        """Add a stretch of new tokens.

        Raises:
            LostFramesError: a gap to the tokens received so far.
            SerializationError: no such sample, or it has already ended.
        """
        outcomes, starts, counts = stretch.outcomes, stretch.starts, stretch.counts
        pieces, lengths, ended = self._pieces, self._lengths, self._ended
        for column, index in enumerate(stretch.indices):
            start = starts[column]
            if index in ended or index >= self.params.n or index in self._unwanted:
                state = "has ended" if index in ended else f"is none of n={self.params.n} or was not asked for"
                raise SerializationError(f"request {self.request_id}: tokens of sample {index}, which {state}")
            if start == 0:
                if index in pieces:
                    self._forget_tokens(index)
                pieces[index] = stretch
            elif start == lengths.get(index, 0):
                earlier = pieces[index]
                if isinstance(earlier, list):
                    if len(earlier) >= PIECES_TOGETHER and stretch.top_n is None:
                        earlier[:] = [self._joined([index])]
                        self._earlier_events.pop(index, None)
                    earlier.append(stretch)
                else:
                    pieces[index] = [earlier, stretch]
            else:
                raise LostFramesError(
                    f"request {self.request_id} sample {index}: expected tokens from {lengths.get(index, 0)}, got {start}"
                )
            lengths[index] = start + counts[column]
            if outcomes is not None and outcomes[column] is not None:
                ended.add(index)

    def _forget_tokens(self, index: int) -> None:
        """Discard a restarted sample's tokens; its earlier events are kept."""
        if events := self._events(_Sample(self._pieces[index], index), index):
            self._earlier_events[index] = events

    def _events(self, sample: _Sample, index: int) -> bytes:
        return self._earlier_events.get(index, b"") + sample.events()

    def known(self) -> list[Stretch]:
        """Return everything received, merged into at most one stretch, for `ClientSession.submit(…, known=…)`.

        Ended samples are included with their outcomes and are not computed again.
        """
        return [self._joined(sorted(self._pieces))] if self._pieces else []

    def _joined(self, indices: list[int]) -> Stretch:
        rows = [_Sample(self._pieces[index], index) for index in indices]
        top_n = [row.packed_top_n() for row in rows]
        return Stretch(
            self.request_id,
            0,
            indices,
            [0] * len(rows),
            [self._lengths[index] for index in indices],
            b"".join(row.token_ids() for row in rows),
            b"".join(row.log_probs() for row in rows),
            [row.versions() for row in rows],
            _unless_empty([row.first("ttfts") for row in rows]),
            _unless_empty(top_n),
            _unless_empty([row.last("texts") for row in rows]),
            _unless_empty([row.last("outcomes") for row in rows]),
            _unless_empty([self._events(row, index) or None for row, index in zip(rows, indices, strict=True)]),
        )

    def result(self) -> GroupResult:
        """Return the samples as requests.

        Raises:
            RolloutError: the group failed.
            RuntimeError: it has not ended.
        """
        if self.error is not None:
            raise self.error
        if not self.complete:
            raise RuntimeError(
                f"request {self.request_id}: of n={self.params.n} samples {len(self.open_samples())} have not ended; wait "
                "for them"
            )
        return GroupResult(self)

    def request(self, index: int) -> DynamicInferenceRequest:
        """Build the request of an ended sample, equal to the merged request of a direct engine.

        Raises:
            RuntimeError: the sample has not ended.
            SerializationError: its outcome is malformed.
        """
        if index not in self._ended:
            raise RuntimeError(f"request {self.request_id} sample {index} has not ended, or was not asked for")
        sample = _Sample(self._pieces[index], index)
        if self._prompt_list is None:
            self._prompt_list = np.frombuffer(self.prompt_tokens or b"", "<i4").tolist()
        outcome = unpack(sample.last("outcomes") or b"")
        reason = FinishReason(outcome.finish_reason)
        kv_spans = VersionSpans.deserialize(outcome.kv_runs)
        if outcome.block_size_tokens is not None and not self._hashes:
            self._hashes = compute_block_hashes_batched(self._prompt_list, outcome.block_size_tokens)
        request = DynamicInferenceRequest(
            request_id=self.request_id,
            sample_index=index,
            prompt=self.text,
            prompt_tokens=self._prompt_list,
            sampling_params=self._params_used(outcome),
            arrival_time=self.arrival_time,
            priority=self.priority,
            status=RequestStatus.FAILED if reason in _FAILED else RequestStatus.COMPLETED,
            finish_reason=reason,
            stop_reason=outcome.stop_reason,
            error=outcome.error,
            seed=outcome.seed,
            generated_text=sample.last("texts"),
            prompt_log_probs=outcome.prompt_log_probs,
            prompt_top_n_logprobs=outcome.prompt_top_n,
            generated_top_n_logprobs=sample.top_n(),
            tpot=outcome.tpot,
            ttft=outcome.ttft if (ttft := sample.first("ttfts")) is None else ttft,
            latency=outcome.latency,
            policy_version=outcome.policy_version,
            num_cached_tokens=outcome.num_cached_tokens,
            finished_chunk_token_count=min(len(kv_spans), len(self._prompt_list)),
            generated_tokens=np.frombuffer(sample.token_ids(), "<i4").tolist(),
            generated_log_probs=np.frombuffer(sample.log_probs(), "<f4").tolist(),
            policy_spans=VersionSpans.deserialize(outcome.policy_runs),
            kv_spans=kv_spans,
            block_size_tokens=outcome.block_size_tokens,
            enable_prefix_caching=outcome.block_size_tokens is not None,
            precomputed_block_hashes=self._hashes,
        )
        request.put_events_before(unpack_events(self._events(sample, index)))
        request.prompt_tokens = self._prompt_list
        return request

    def record(self, index: int) -> DynamicInferenceRequestRecord:
        """Build the record of an ended sample: one segment per interruption on the engine that finished it.

        Raises:
            RuntimeError: the sample has not ended.
            SerializationError: its outcome is malformed.
        """
        whole = self.request(index)
        return split(whole, unpack(_Sample(self._pieces[index], index).last("outcomes") or b"").segments)

    def _params_used(self, outcome: Outcome) -> SamplingParams:
        most = outcome.max_tokens
        if most == self.params.max_tokens:
            return self.params
        return self.params.replace(max_tokens=most, min_tokens=min(self.params.min_tokens, most))


class GroupResult(Sequence[DynamicInferenceRequest]):
    """The n samples of a group, in order; each is built when it is first read.

    All samples share one `prompt_tokens` list.
    """

    __slots__ = ("_built", "_group")

    def __init__(self, group: OpenGroup) -> None:
        self._group = group
        self._built: dict[int, DynamicInferenceRequest] = {}

    def __len__(self) -> int:
        return self._group.params.n

    @overload
    def __getitem__(self, index: int) -> DynamicInferenceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[DynamicInferenceRequest]: ...
    def __getitem__(self, index: int | slice) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position not in self._built:
            self._built[position] = self._group.request(position)
        return self._built[position]

    @property
    def records(self) -> list[DynamicInferenceRequestRecord]:
        """The samples' records, in order; rebuilt at each access."""
        return [self._group.record(index) for index in range(len(self))]

    def __repr__(self) -> str:
        return f"GroupResult(request_id={self._group.request_id}, {len(self)} samples)"


class _Sample:
    """Columns of one sample, concatenated over its stretches."""

    def __init__(self, pieces: Stretch | list[Stretch], index: int) -> None:
        stretches = pieces if isinstance(pieces, list) else [pieces]
        self._pieces = [(stretch, stretch.indices.index(index)) for stretch in stretches]

    def token_ids(self) -> bytes:
        return b"".join(stretch.token_ids[_bytes(stretch, column)] for stretch, column in self._pieces)

    def log_probs(self) -> bytes:
        return b"".join(stretch.log_probs[_bytes(stretch, column)] for stretch, column in self._pieces)

    def versions(self) -> list[int]:
        rows = [stretch.versions[column] for stretch, column in self._pieces]
        spans = VersionSpans(pair for row in rows for pair in zip(row[1::2], row[2::2], strict=True))
        # The last prompt version counts: without a token, the prompt may have been admitted again.
        return [rows[-1][0], *spans.serialize()]

    def top_n(self) -> TopN:
        return [row for chunk in self._column("top_n") if chunk is not None for row in unpack_top_n(chunk)]

    def packed_top_n(self) -> bytes | None:
        rows = self.top_n()
        return pack_top_n(rows) if rows else None

    def events(self) -> bytes:
        return b"".join(chunk for chunk in self._column("events") if chunk is not None)

    def first(self, name: str) -> Any:
        return next((value for value in self._column(name) if value is not None), None)

    def last(self, name: str) -> Any:
        return next((value for value in reversed(list(self._column(name))) if value is not None), None)

    def _column(self, name: str) -> Iterator[Any]:
        for stretch, column in self._pieces:
            values = getattr(stretch, name)
            if values is not None:
                yield values[column]


def _bytes(stretch: Stretch, column: int) -> slice:
    start = TOKEN_BYTES * sum(stretch.counts[:column])
    return slice(start, start + TOKEN_BYTES * stretch.counts[column])


def _unless_empty(column: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in column) else column
