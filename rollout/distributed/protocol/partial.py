"""Conversion of partial completions between records and wire stretches."""

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
    """Return the completion so far of an unfinished record, for the rank that continues it."""
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
    """Partial completion of one sample."""

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
        """Return a request that continues the sample after its known tokens.

        Raises:
            SerializationError: top-n log-probs were requested and are missing for some token.
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
            # The highest version known for the sample.
            policy_version=max(self.prompt_version, *(version for version, _ in self.runs)),
            ttft=self.ttft,
        )
        request.put_events_before(unpack_events(self.events))
        if arrival_time is not None:
            request.arrival_time = arrival_time
        return request


def pieces(known: Iterable[Stretch], wanted: Sequence[int]) -> dict[int, Piece]:
    """Collect the partial completions of the wanted samples; those without any token are left out.

    Raises:
        SerializationError: a gap between two stretches.
    """
    pieces: dict[int, Piece] = {}
    for stretch in known:
        for index, start, _, tokens, log_probs, column in stretch.samples():
            if index not in wanted:
                continue
            prompt_version, *runs = stretch.versions[column]
            if not start or index not in pieces:
                # A restart drops the tokens and keeps the events.
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
