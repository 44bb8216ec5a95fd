"""The groups of a training loop, from submission to return, and their journal (the finished groups on disk).

Always true: from `add` to `drop` a group is either *unfinished* or *complete*. It is returned once, with all its samples.
Results for an aborted or already returned group are rejected.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack

from rollout.journal import FinishedGroup, Journal, Place
from rollout.requests.images import images_of
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams


@dataclass
class Group:
    """A group that was submitted and not returned yet."""

    size: int
    prompt: Hashable
    """The prompt's key in the `LengthBook`, which averages completion lengths; 0 after a restart."""
    key: bytes
    """The group's key in the journal, which stores finished groups on disk; empty without a journal."""
    results: dict[int, DynamicInferenceRequest] = field(default_factory=dict)
    """Sample index → finished sample."""


class GroupLedger:
    """The groups that were submitted and not returned yet, by id, in order of submission."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self.unfinished: set[int] = set()
        """Ids of groups with missing samples."""
        self.samples_missing = 0
        self.rewards: dict[int, list[float | None]] = {}
        """Group id → rewards of its samples, for groups that `generate_scored` has kept. None stands for a failed sample."""

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def __getitem__(self, group_id: int) -> Group:
        return self._groups[group_id]

    def complete(self) -> list[int]:
        """Return the ids of groups whose samples have all finished, in order of submission."""
        return [each for each in self._groups if each not in self.unfinished]

    def add(self, group_id: int, size: int, prompt: Hashable = 0, key: bytes = b"") -> None:
        """Add a group of `size` samples that the backend has accepted; `prompt` and `key` are as in `Group`."""
        self._groups[group_id] = Group(size, prompt, key)
        self.unfinished.add(group_id)
        self.samples_missing += size

    def take(self, result: DynamicInferenceRequest) -> bool:
        """Record a finished sample. Return False if its group is unknown or already has the sample."""
        group = self._groups.get(result.request_id)
        if group is None or result.sample_index in group.results:
            return False
        group.results[result.sample_index] = result
        self.samples_missing -= 1
        if len(group.results) == group.size:
            self.unfinished.discard(result.request_id)
        return True

    def results(self, group_ids: Iterable[int]) -> list[DynamicInferenceRequest]:
        """Return the finished samples of these groups, in the given order; samples of a group are next to each other."""
        return [result for each in group_ids for _, result in sorted(self._groups[each].results.items())]

    def drop(self, group_ids: Iterable[int]) -> None:
        """Remove groups that were returned or abandoned. Unknown ids are ignored."""
        for each in group_ids:
            group = self._groups.pop(each, None)
            self.rewards.pop(each, None)
            if group is not None:
                self.unfinished.discard(each)
                self.samples_missing -= group.size - len(group.results)

    def oldest_versions(self) -> Iterator[tuple[int, int]]:
        """Yield (group id, oldest policy version of the sample's tokens) for each finished sample of an unfinished group."""
        for each in self.unfinished:
            for result in self._groups[each].results.values():
                oldest = result.policy_spans.oldest(start=result.original_prompt_length)
                if oldest is not None:
                    yield each, oldest


Samples = list[DynamicInferenceRequest]


class GroupJournal:
    """The journal of finished groups: it stores them on disk, and after a restart returns them instead of sampling again.

    Always true: a finished group is appended once, as a whole. If the write fails, the next `write` tries again, unless a
    checkpoint has saved the group meanwhile. A group with a failed sample is not appended. After a restart each group is
    returned once: a group in flight at the checkpoint is found by its id, prompt and parameters, a later group by its key.

    A restart loses the weights of updates after the checkpoint. A token sampled with such weights keeps its log-prob and
    gets the checkpoint's version: the last version that has the same weights before and after the restart.

    Args:
        journal: the journal file; if None, nothing is written or returned.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self._unwritten: list[tuple[bytes, Samples]] = []
        self._version = 0
        self._by_id: dict[int, Place] = {}
        self._by_key: defaultdict[bytes, deque[Place]] = defaultdict(deque)

    def key(self, prompt: Any, params: SamplingParams, metadata: Any) -> bytes:
        """Return the group's key in the journal, computed by `key_of`; without a journal, return an empty key."""
        return b"" if self._journal is None else key_of(prompt, params, metadata)

    # --- writing to the journal ---------------------------------------------------------------------------------

    def write(self, results: Iterable[DynamicInferenceRequest], groups: GroupLedger) -> None:
        """Append the groups completed by `results` to the journal on disk. After a `JournalError` the next call retries."""
        if self._journal is None:
            return
        for group_id in dict.fromkeys(result.request_id for result in results):
            if group_id in groups and group_id not in groups.unfinished:
                samples = groups.results([group_id])
                if all(sample.error is None for sample in samples):
                    self._unwritten.append((groups[group_id].key, samples))
        while self._unwritten:
            key, samples = self._unwritten[0]
            self._journal.append(samples, key)
            del self._unwritten[0]

    def checkpoint(self, version: int) -> str:
        """Start a new journal file for a checkpoint of this policy version.

        Returns:
            The mark that identifies the checkpoint in the journal; "" without a journal.
        """
        if self._journal is None:
            return ""
        mark = self._journal.checkpoint(version)
        # Forget groups whose write failed: every such group is in the checkpoint or was already returned to the caller.
        self._unwritten.clear()
        return mark

    # --- reading the journal after a restart --------------------------------------------------------------------

    def restore(self, mark: str, version: int) -> None:
        """Find groups that finished after checkpoint `mark` (at version `version`); raise `ConfigError` without the mark."""
        by_id: dict[int, Place] = {}
        by_key: defaultdict[bytes, deque[Place]] = defaultdict(deque)
        if self._journal is not None and mark:
            for group in self._journal.since(mark):
                if group.samples:
                    by_id[group.samples[0].request_id] = group.place
                by_key[group.key].append(group.place)
        self._version, self._by_id, self._by_key = version, by_id, by_key

    def in_flight(self, group_id: int, tokens: list[int], params: SamplingParams) -> Samples | None:
        """Return the samples of a group that was in flight at the checkpoint and has finished since.

        None means that the group still has to be generated: the journal lacks it, or its prompt or parameters differ.
        """
        place = self._by_id.get(group_id)
        group = self._read(place)
        if place is None or group is None:
            return None
        first = group.samples[0]
        if first.prompt_tokens != tokens or first.sampling_params != params:
            return None
        self._by_key[group.key].remove(place)
        return self._here(group.samples, group_id)

    def submitted(self, key: bytes, group_id: int) -> FinishedGroup | None:
        """Return a group with this key that has finished since the checkpoint, under its new id `group_id`.

        None means that the group still has to be generated.
        """
        places = self._by_key.get(key)
        while places:
            group = self._read(places.popleft())
            if group is not None:
                self._here(group.samples, group_id)
                return group
        return None

    def put_back(self, groups: Iterable[FinishedGroup]) -> None:
        """Undo the calls of `submitted` that returned `groups`, so that it can return them again in the same order."""
        for group in reversed(list(groups)):
            self._by_key[group.key].appendleft(group.place)

    def _read(self, place: Place | None) -> FinishedGroup | None:
        return None if self._journal is None or place is None else self._journal.read(place)

    def _here(self, samples: Samples, group_id: int) -> Samples:
        for sample in samples:
            sample.request_id = group_id
            sample.policy_version = min(sample.policy_version, self._version)
            sample.policy_spans = self._known_here(sample.policy_spans.runs)
            sample.kv_spans = self._known_here(sample.kv_spans.runs)
        return samples

    def _known_here(self, runs: Iterable[tuple[int, int]]) -> VersionSpans:
        return VersionSpans((min(version, self._version), count) for version, count in runs)


def key_of(prompt: Any, params: SamplingParams, metadata: Any) -> bytes:
    """Return the SHA-256 of a submitted group's prompt, parameters and metadata."""
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if (images := images_of(prompt)) is not None:
        plain = [list(prompt), images.digest]
    return hashlib.sha256(msgpack.packb([plain, params.serialize(), metadata], default=str)).digest()
