"""Groups that a run before this one finished after its last checkpoint, until somebody asks for them.

Always true: each is given out once. A group that the checkpoint has in flight is known by its id, prompt and parameters;
one that was submitted later, by what was submitted: the trainer that goes on from the checkpoint submits it again.

Weights later than the checkpoint are gone. A token that they sampled keeps its log-prob, and has the version at which
their line of updates left this one: the last that both have in common.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import msgpack

from rollout.journal.journal import Journal
from rollout.journal.reader import Damage, FinishedGroup, Place
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams

Samples = list[DynamicInferenceRequest]


def key_of(prompt: Any, params: SamplingParams, metadata: Any) -> bytes:
    """What stands for a submitted group: equal where prompt, parameters and metadata are."""
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    return hashlib.sha256(msgpack.packb([plain, params.serialize(), metadata], default=str)).digest()


class EarlierGroups:
    """The groups after a checkpoint: where they lie, not they themselves.

    Args:
        journal: where they lie.
        mark: of the checkpoint.
        version: the policy version of the checkpoint.

    Attributes:
        damage: what could not be read.
    """

    def __init__(self, journal: Journal, mark: str, version: int) -> None:
        self._journal = journal
        self._version = version
        self._by_id: dict[int, Place] = {}
        self._by_key: defaultdict[bytes, deque[Place]] = defaultdict(deque)
        reader = journal.since(mark)
        for group in reader:
            if group.samples:
                self._by_id[group.samples[0].request_id] = group.place
                self._by_key[group.key].append(group.place)
        self.damage: list[Damage] = reader.damage

    def __len__(self) -> int:
        """Groups that nobody has asked for."""
        return sum(map(len, self._by_key.values()))

    def in_flight(self, group_id: int, tokens: list[int], params: SamplingParams) -> Samples | None:
        """The group of this id, if it was finished; None: it has to be computed."""
        place = self._by_id.get(group_id)
        group = None if place is None else self._journal.read(place)
        if place is None or group is None:
            return None
        first = group.samples[0]
        if first.prompt_tokens != tokens or first.sampling_params != params:
            return None
        self._by_key[group.key].remove(place)
        return self._here(group.samples, group_id)

    def submitted(self, key: bytes, group_id: int) -> FinishedGroup | None:
        """A finished group of this `key_of`, from now on under this id; None: there is none (any more)."""
        places = self._by_key.get(key)
        while places:
            group = self._journal.read(places.popleft())
            if group is not None:
                self._here(group.samples, group_id)
                return group
        return None

    def put_back(self, groups: Iterable[FinishedGroup]) -> None:
        """What `submitted` gave, in the order of giving, is not used after all."""
        for group in reversed(list(groups)):
            self._by_key[group.key].appendleft(group.place)

    def _here(self, samples: Samples, group_id: int) -> Samples:
        for sample in samples:
            sample.request_id = group_id
            sample.policy_version = min(sample.policy_version, self._version)
            sample.policy_spans = self._known_here(sample.policy_spans.runs)
            sample.kv_spans = self._known_here(sample.kv_spans.runs)
        return samples

    def _known_here(self, runs: Iterable[tuple[int, int]]) -> VersionSpans:
        return VersionSpans((min(version, self._version), count) for version, count in runs)
