"""Conversion of partial completions between records and wire stretches.

Knows messages and records, no engine and no sockets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollout.distributed.protocol.messages import Stretch
from rollout.distributed.protocol.outcome import pack_top_n, unpack_top_n
from rollout.requests.codec import refuse
from rollout.requests.events import unpack_events
from rollout.requests.growth import TopN, growth
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams


def stretch_of(record: DynamicInferenceRequestRecord) -> Stretch:
    """All that is known of an unfinished record's completion, for whoever goes on with it."""
    known = growth(record, 0, 0)
    return Stretch(
        request_id=0,
        attempt=0,
        indices=[known.sample_index],
        starts=[0],
        counts=[known.count],
        token_ids=known.token_ids,
        log_probs=known.log_probs,
        versions=[known.versions],
        ttfts=None if known.ttft is None else [known.ttft],
        top_n=None if known.top_n is None else [pack_top_n(known.top_n)],
        events=None if known.events is None else [known.events],
    )


@dataclass(eq=False, slots=True)
class Piece:
    """What is known of one sample."""

    prompt_version: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)
    ttft: float | None = None
    top_n: TopN = field(default_factory=list)
    events: bytes = b""

    def request(
        self,
        number: int,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> DynamicInferenceRequest:
        """The sample, interrupted where it stands.

        Raises:
            SerializationError: top-n rows were asked for, and are not there for every token.
        """
        if params.logprobs and len(self.top_n) != len(self.tokens):
            refuse("known.top_n", f"{len(self.top_n)} rows", f"one for each of {len(self.tokens)} tokens")
        request = DynamicInferenceRequest(
            request_id=number,
            sample_index=index,
            prompt_tokens=prompt,
            sampling_params=params,
            priority=priority,
            seed=params.seed,
            generated_tokens=self.tokens,
            generated_log_probs=self.log_probs,
            generated_top_n_logprobs=self.top_n if params.logprobs else [],
            policy_spans=VersionSpans([(self.prompt_version, len(prompt)), *self.runs]),
            # Later than this one is only a version of which nothing is known yet.
            policy_version=max(self.prompt_version, *(version for version, _ in self.runs)),
            ttft=self.ttft,
        )
        request.put_events_before(unpack_events(self.events))
        if arrival_time is not None:
            request.arrival_time = arrival_time
        return request


def pieces(known: Iterable[Stretch], wanted: Sequence[int]) -> dict[int, Piece]:
    """What stretches hold of these samples; those of which no token is known are left out.

    Raises:
        SerializationError: tokens are missing between two stretches.
    """
    pieces: dict[int, Piece] = {}
    for stretch in known:
        for index, start, _, tokens, log_probs, column in stretch.samples():
            if index not in wanted:
                continue
            prompt_version, *runs = stretch.versions[column]
            if not start or index not in pieces:
                # What happened to an earlier life of it has happened.
                pieces[index] = Piece(prompt_version, events=pieces[index].events if index in pieces else b"")
            piece = pieces[index]
            if start != len(piece.tokens):
                refuse("known.starts", start, f"{len(piece.tokens)}, behind what is known of sample {index},")
            piece.tokens += np.frombuffer(tokens, "<i4").tolist()
            piece.log_probs += np.frombuffer(log_probs, "<f4").tolist()
            piece.runs += zip(runs[::2], runs[1::2], strict=True)
            if stretch.ttfts is not None and piece.ttft is None:
                piece.ttft = stretch.ttfts[column]
            if stretch.top_n is not None and (packed := stretch.top_n[column]) is not None:
                piece.top_n += unpack_top_n(packed)
            if stretch.events is not None:
                piece.events += stretch.events[column] or b""
    return {index: piece for index, piece in pieces.items() if piece.tokens}
