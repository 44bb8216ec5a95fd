"""Mutable scheduling state: one `Sequence` per sample, its images, and a table of the active sequences. No tensors.

The table is a structure of arrays, so that a step over thousands of sequences takes only a few numpy calls. A sequence owns
a table row while it is active. Its record is updated only when the sequence gives up the row or a caller reads records.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.blocks.index import NO_BLOCK
from rollout.engine.blocks.pages import BlockPages
from rollout.engine.blocks.states import NO_SLOT
from rollout.engine.scheduling.adapters import NO_ADAPTER, Variant
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.requests.delta import (
    SampleDelta,
    computed_length,
    first_unknown,
    joined,
    kept_since,
    new_events,
    values_since,
    version_of_prompt,
    versions,
)
from rollout.requests.record import DynamicInferenceRequestRecord, route_rows, set_routes
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import first_unread, joined_sets, pack_routes, pack_top_n
from rollout.sampling_params import SamplingParams

NO_ROW = -1
NO_TOKEN = -1

IntArray = NDArray[np.int32]

ReadRoutes = Callable[[IntArray, int, int], NDArray[np.integer[Any]]]
"""A function that reads tokens' expert routes: (pages of a sequence, start, stop) → expert ids [stop - start, layers, k]."""
_one_run = lru_cache(maxsize=64)(VersionSpans.of_run)
"""A caching `VersionSpans.of_run`. Several deltas can share a cached result, because a delta's spans never change."""


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, shared by the prompt's samples. No tensors. A text-only prompt has `NO_IMAGES`.

    In the scheduler's arrays, a *key* replaces each of the I placeholder tokens. A key is a negative number computed from
    the image's content, so that block hashes and comparisons of cached blocks distinguish images just like tokens.

    Attributes:
        items: one item per image (or per tile of an image), each with a `digest` of its content and a `count`, which is its
            number of embeddings.
        places: [I] positions of the placeholders, ascending; the placeholders of an item are adjacent in this array.
        keys: [I] negative keys, one per placeholder.
        positions: [3, P + 1] rotary positions (time, height, width) of the prompt's P tokens and of the token after the
            prompt; None if they are the same as in text.
        whole: (start, stop) of each run of positions that attend to each other in both directions. A prefill chunk must not
            end inside a run.
    """

    items: tuple[Any, ...]
    places: NDArray[np.int64]
    keys: IntArray
    positions: NDArray[np.int64] | None = None
    whole: tuple[tuple[int, int], ...] = ()

    @property
    def shift(self) -> int:
        """The number to add to a position after the prompt to get its rotary position."""
        if self.positions is None:
            return 0
        return int(self.positions[0, -1]) + 1 - int(self.positions.shape[1])

    @property
    def longest_whole(self) -> int:
        """The length of the longest run in `whole`. A single step must compute all positions of a run."""
        return max((stop - start for start, stop in self.whole), default=0)

    def keyed(self, tokens: list[int]) -> IntArray:
        """Return the prompt's token ids as an array in which each placeholder is replaced by its key."""
        array = np.asarray(tokens, np.int32)
        array[self.places] = self.keys
        return array

    def fitting(self, start: int, count: int) -> int:
        """Return the length of the longest chunk from `start`, up to `count`, that does not end inside a run of `whole`.

        Return 0 if `start` is in a run that is not complete after `count` positions: a single step must compute all of it.
        """
        for first, stop in self.whole:
            if first < start + count < stop:
                return max(0, first - start)
        return count

    def rotary(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rotary positions [3, stop - start] of the positions from `start` to `stop` - 1."""
        own = np.broadcast_to(np.arange(start, stop, dtype=np.int64), (3, stop - start))
        if self.positions is None:
            return own
        known = self.positions[:, start:stop]
        return np.concatenate([known, own[:, known.shape[1] :] + self.shift], axis=1)

    def seen(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the last position that each position from `start` to `stop` - 1 attends to, as an array [stop - start].

        This is the position itself or, in a run of `whole` (positions that attend to each other), the run's last position.
        """
        last = np.arange(start, stop, dtype=np.int64)
        for first, end in self.whole:
            last[max(0, first - start) : max(0, end - start)] = end - 1
        return last


NO_IMAGES = PromptImages((), np.zeros(0, np.int64), np.zeros(0, np.int32))


def image_keys(digests: list[bytes], counts: list[int], videos: list[bool]) -> IntArray:
    """Return negative int32 keys [sum of counts] for images and videos.

    The keys of an item cycle through the 32-bit words of its digest. One bit of every key marks videos; see `is_video`.
    """
    words = [
        np.frombuffer(digest, "<u4").astype(np.int64) & 0x7FFFFFFE | video
        for digest, video in zip(digests, videos, strict=True)
    ]
    keys = [np.resize(-1 - each, count) for each, count in zip(words, counts, strict=True)]
    return np.concatenate([*keys, np.zeros(0, np.int64)]).astype(np.int32)


def is_video(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a bool array with the shape of `ids`, which is True where the id is the key of a video's placeholder."""
    keys: NDArray[np.bool_] = (ids < 0) & ((-1 - ids) % 2 == 1)
    return keys


@dataclass(eq=False)
class Sequence:
    """The scheduling state of one sample. Its *live segment* is the last segment of its record."""

    record: DynamicInferenceRequestRecord
    order: int
    """The number of the sequence's group. Groups are numbered in order of arrival."""
    tokens: IntArray
    """[P], the prompt of the live segment, that is, all tokens that existed when the sequence was last queued. Image
    placeholders are replaced by keys (see `PromptImages`)."""
    stop_ids: tuple[int, ...]
    """The token ids that finish the sequence: the request's stop ids and, unless `ignore_eos`, the model's EOS ids."""
    max_length: int
    """The length, prompt included, at which the sequence finishes."""
    min_length: int
    """The length, prompt included, up to which stop tokens and stop strings are ignored."""
    hashes: list[int]
    """The hashes of the complete blocks of `tokens`, for prefix lookups."""
    siblings: list[Sequence] = field(default_factory=list)
    """The other samples of the group, which are forked from this sequence once the prompt has been computed."""
    text: Any = None
    """The `CompletionText` that looks for stop strings; None if the request has no stop strings."""
    stop_string: str | None = None
    """The stop string that finished the sequence; None if it has not finished at a stop string."""
    row: int = NO_ROW
    variant: Variant = NO_ADAPTER
    """The adapter variant under which the sequence was accepted; it runs under no other variant."""
    pauses_for_snapshot: bool = True
    """Whether prefill is split at the block boundary where a snapshot of the recurrent states can be kept. False after a
    preemption, because the extra step would make the preemption even more expensive."""
    wants_prompt_logprobs: bool = False
    """Whether requested prompt log-probs are still missing. If so, the whole prompt is computed, even if it is cached."""
    images: PromptImages = NO_IMAGES
    """The images of the prompt."""
    prompt_top: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    """The set of token ids that each token of the live segment was drawn from, see `pack_kept`; empty if not requested."""

    @property
    def request(self) -> DynamicInferenceRequest:
        """The live segment, which is the last segment of the record."""
        return self.record[-1]

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the record's last segment."""
        return self.request.sampling_params

    @property
    def key(self) -> tuple[int, int]:
        """The sample's identity: (request_id, sample_index)."""
        first = self.record.segments[0]
        return first.request_id, first.sample_index

    @property
    def rank(self) -> tuple[int, int, int]:
        """The key by which queues are sorted: higher priority first, then earlier arrival, then lower sample index."""
        return -self.request.priority, self.order, self.record.sample_index

    @property
    def active(self) -> bool:
        """Whether the sequence owns a row of the table."""
        return self.row != NO_ROW

    def set_prompt(self, tokens: list[int], block_size: int) -> None:
        """Replace the live segment's prompt by `tokens`, which start with the current prompt, and hash its blocks."""
        self.tokens = self.images.keyed(tokens)
        self.hashes = compute_block_hashes_batched(self.tokens, block_size, self.request.sampling_params.prefix_share)


rank = attrgetter("rank")
"""The sort key for lists of sequences: a function that returns a sequence's `rank`."""


def insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Insert a sequence into a list that is sorted by rank."""
    bisect.insort(queue, sequence, key=rank)


def discard(queue: list[Sequence], sequence: Sequence) -> bool:
    """Remove a sequence from a list that is sorted by rank. Return whether the list contained it."""
    index = bisect.bisect_left(queue, sequence.rank, key=rank)
    if index == len(queue) or queue[index] is not sequence:
        return False
    del queue[index]
    return True


class SequenceTable:
    """The active sequences as arrays with S rows, one per sequence, and C token positions. Integers are int32.

    Attributes:
        tokens: [S, C], the tokens of prompt and completion.
        logprobs: [S, C] float32, the log-prob of each completion token; 0 for prompt tokens.
        values: [S, C, k] float32, the k numbers per completion token that the user's value function computed; k is 0 if
            there is no such function.
        times: [S, C] float64, the time in seconds at which each completion token was sampled.
        length: [S], the number of tokens of prompt and completion so far.
        computed: [S], the number of leading positions whose KV is in the cache.
        prompt_length: [S], the prompt length of the live segment.
        origin: [S], the length of the user's prompt. After a preemption, `prompt_length` may be larger.
        max_length, min_length: [S], see `Sequence`.
        stop_ids: [S, K], up to K stop ids per row, padded with `NO_TOKEN`.
        blocks: [S, B], up to B block ids per row (the block table), padded with `NO_BLOCK`.
        num_blocks: [S], the number of blocks in each row's block table.
        state: [S], the slot of the sequence's recurrent states, or `NO_SLOT` if the model has no such states or the sequence
            has no slot yet.
        trail: [S], the block at whose end a decode step last kept a snapshot of the state, or `NO_BLOCK`.
        chain: [S] int64, the hash of the chain of leading blocks that were registered or found in the cache.
        chained: [S], the number of blocks in this chain.
        position_shift: [S], the number to add to a position after the prompt to get its rotary position; 0 without images.
        current: [S] bool, whether weights, variant and forward settings are the same as when the sequence got the row.
        plain: [S] bool, whether no per-token Python code is needed (no stop strings, no top log-probs).
        read_routes: function that reads recorded expert routes; None if no routes are recorded.
    """

    length: IntArray
    computed: IntArray
    prompt_length: IntArray
    origin: IntArray
    max_length: IntArray
    min_length: IntArray
    num_blocks: IntArray
    chained: IntArray
    state: IntArray
    trail: IntArray
    position_shift: IntArray

    def __init__(self, block_size: int, pages: BlockPages) -> None:
        self.block_size = block_size
        self._pages = pages
        self.read_routes: ReadRoutes | None = None
        self.capacity = 0
        self.columns = 0
        self._free: list[int] = []
        for name in SequenceTable.__annotations__:
            setattr(self, name, np.zeros(0, np.int32))
        self.tokens: IntArray = np.zeros((0, 0), np.int32)
        self.logprobs: NDArray[np.float32] = np.zeros((0, 0), np.float32)
        self.values: NDArray[np.float32] = np.zeros((0, 0, 0), np.float32)
        self.times: NDArray[np.float64] = np.zeros((0, 0), np.float64)
        self.blocks: IntArray = np.zeros((0, 0), np.int32)
        self.stop_ids: IntArray = np.zeros((0, 1), np.int32)
        self.chain: NDArray[np.int64] = np.zeros(0, np.int64)
        self.current: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.plain: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def add(self, sequence: Sequence) -> None:
        """Give `sequence` a row and copy its prompt into the row. The row holds no block yet."""
        self._fit(sequence)
        row, prompt, params = self._free.pop(), sequence.tokens, sequence.params
        self.tokens[row, : len(prompt)] = prompt
        self.logprobs[row, : len(prompt)] = 0
        self.length[row] = self.prompt_length[row] = len(prompt)
        self.computed[row] = self.num_blocks[row] = self.chain[row] = self.chained[row] = 0
        self.state[row], self.trail[row] = NO_SLOT, NO_BLOCK
        self.origin[row] = sequence.request.original_prompt_length
        self.max_length[row], self.min_length[row] = sequence.max_length, sequence.min_length
        self.position_shift[row] = sequence.images.shift
        self.blocks[row] = NO_BLOCK
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(sequence.stop_ids)] = sequence.stop_ids
        self.current[row] = True
        self.plain[row] = sequence.text is None and not params.logprobs
        # Assign the row last, so that the sequence does not own a partly written row if this method raises.
        sequence.row = row

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Copy the state of the computed prompt, such as its block table, from `source`'s row to `target`'s row."""
        a, b = source.row, target.row
        for column in (self.computed, self.num_blocks, self.chain, self.chained, self.current):
            column[b] = column[a]
        self.blocks[b] = self.blocks[a]

    def remove(self, sequence: Sequence) -> None:
        """Free the table row of a sequence. The caller must have released its blocks."""
        self._free.append(sequence.row)
        sequence.row = NO_ROW

    def start_over(self) -> None:
        """Mark every row as free."""
        self._free = list(range(self.capacity - 1, -1, -1))

    def held(self, row: int) -> IntArray:
        """Return a view of a row's block ids, in order of position."""
        return self.blocks[row, : self.num_blocks[row]]

    def page_tables(self, rows: IntArray, width: int) -> NDArray[np.int64]:
        """Return the page ids [R, width] of the first `width` blocks of the R given rows."""
        return self._pages.of_blocks(self.blocks[rows, :width]).astype(np.int64)

    def generated(self, row: int) -> tuple[IntArray, NDArray[np.float32], NDArray[np.float64]]:
        """Return views of the live segment's completion tokens, their log-probs and their times."""
        span = slice(self.prompt_length[row], self.length[row])
        return self.tokens[row, span], self.logprobs[row, span], self.times[row, span]

    def growth(self, sequence: Sequence, known: int, prompt_version: int, events_known: int = 0) -> SampleDelta:
        """Return an active sequence's output beyond the first `known` tokens, without updating its record.

        The arguments are the same as for `rollout.requests.delta.growth`, which handles inactive sequences.
        """
        row, record = sequence.row, sequence.record
        live = record.segments[-1]
        origin, end = self.origin.item(row), self.length.item(row)
        start = first_unknown(live, end - origin, known, prompt_version)
        low, segment = origin + start, self.prompt_length.item(row)
        tokens = self.tokens[row, low:end].tobytes()
        events, num_events = new_events(record, events_known)
        params = live.sampling_params
        valued = self.values.shape[2] > 0
        listed = params.logprobs or params.return_kept_tokens or self.read_routes is not None or valued
        if start and low >= segment and len(live.policy_spans) <= low and not listed:
            # Handle the common case first: all new tokens are in the live segment and have the same policy version.
            log_probs, spans = self.logprobs[row, low:end].tobytes(), _one_run(live.policy_version, end - low)
            delta = SampleDelta(live.request_id, live.sample_index, start, tokens, log_probs, spans, prompt_version)
            delta.events, delta.num_events = events, num_events
            return delta
        log_probs = self.logprobs[row, max(low, segment) : end].tobytes()
        if low < segment:
            log_probs = np.asarray(joined(record, "generated_log_probs", start), np.float32).tobytes() + log_probs
        spans = versions(live, start, end - origin)
        delta = SampleDelta(
            live.request_id, live.sample_index, start, tokens, log_probs, spans, version_of_prompt(live)
        )
        delta.events, delta.num_events = events, num_events
        if not start:
            delta.ttft = record.ttft
            if delta.ttft is None and end > segment:
                delta.ttft = float(self.times[row, segment]) - live.arrival_time
        earlier = segment - origin
        if params.logprobs:
            top_n = sequence.top_logprobs[max(0, start - earlier) :]
            if start < earlier:
                top_n = [*joined(record, "generated_top_n_logprobs", start), *top_n]
            delta.top_n = pack_top_n(top_n)
        if self.read_routes is not None and tokens:
            first = first_unread(segment if end > segment else computed_length(record), low)
            delta.routes = pack_routes(first, self.routes(sequence, first, end - 1))
        if valued and end > origin + start:
            delta.values = values_since(record, start, earlier) + self.values[row, max(low, segment) : end].tobytes()
        if params.return_kept_tokens:
            delta.kept = kept_since(record, start, earlier) + b"".join(sequence.kept[max(0, start - earlier) :])
        return delta

    def routes(self, sequence: Sequence, start: int, stop: int) -> NDArray[np.integer[Any]]:
        """Return the experts [stop - start, layers, k] chosen at an active sequence's positions `start` to `stop` - 1."""
        assert self.read_routes is not None
        row = sequence.row
        if self.length[row] > self.prompt_length[row]:
            return self.read_routes(self._pages.of_blocks(self.held(row)), start, stop)
        # Read the record's earlier segments, which contain all routes if the live segment has no sampled token yet.
        earlier = [each.routing_indices for each in sequence.record.segments[:-1] if each.routing_indices is not None]
        return np.concatenate(earlier)[start:stop]

    def write_back(self, sequence: Sequence) -> None:
        """Copy the tokens and other results of an active sequence from its table row to its record."""
        row, request = sequence.row, sequence.request
        computed, prompt = int(self.computed[row]), int(self.prompt_length[row])
        tokens, logprobs, times = self.generated(row)
        request.generated_tokens, request.generated_log_probs = tokens.tolist(), logprobs.tolist()
        request.tpot = np.diff(times).tolist()
        if len(tokens) and request.ttft is None:
            request.ttft = float(times[0]) - request.arrival_time
        if sequence.params.logprobs:
            request.generated_top_n_logprobs = list(sequence.top_logprobs)
        if self.values.shape[2]:
            request.generated_values = self.values[row, prompt : int(self.length[row])].copy()
        if sequence.params.return_kept_tokens:
            request.generated_kept_tokens = joined_sets(sequence.kept)
        request.policy_spans.extend_to(int(self.length[row]), request.policy_version)
        request.kv_spans.extend_to(computed, request.policy_version)
        request.finished_chunk_token_count = min(computed, prompt)
        if self.read_routes is not None:
            stop = min(computed, int(self.length[row]) - 1)
            if len(tokens):
                set_routes(sequence.record.segments, self.read_routes(self._pages.of_blocks(self.held(row)), 0, stop))
            else:
                known = min(stop, route_rows(sequence.record.segments[:-1]))
                request.routing_indices = self.read_routes(self._pages.of_blocks(self.held(row)), known, stop)

    def _fit(self, sequence: Sequence) -> None:
        if not self._free:
            self._grow_rows()
        need = max(sequence.max_length, len(sequence.tokens))
        if need > self.columns:
            self.columns = max(need, 2 * self.columns)
            for name in ("tokens", "logprobs", "values", "times"):
                setattr(self, name, _widened(getattr(self, name), self.columns, 0))
            width = -(-self.columns // self.block_size)
            self.blocks = _widened(self.blocks, width, NO_BLOCK)
        if len(sequence.stop_ids) > self.stop_ids.shape[1]:
            self.stop_ids = _widened(self.stop_ids, len(sequence.stop_ids), NO_TOKEN)

    def _grow_rows(self) -> None:
        before, self.capacity = self.capacity, max(16, 2 * self.capacity)
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                grown = np.zeros((self.capacity, *value.shape[1:]), value.dtype)
                grown[:before] = value
                setattr(self, name, grown)
        self._free.extend(range(self.capacity - 1, before - 1, -1))


def _widened(array: NDArray[Any], width: int, fill: int) -> NDArray[Any]:
    wide = np.full((array.shape[0], width, *array.shape[2:]), fill, array.dtype)
    wide[:, : array.shape[1]] = array
    return wide
