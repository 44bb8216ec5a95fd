"""Groups of a training loop: submitted, finished, handed out.

Always true: a group is *unfinished* or *complete* from `add` to `pop` or `drop`, and leaves once, with all its samples;
results of groups that are not here (aborted, handed out) are refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from rollout.requests.request import DynamicInferenceRequest


@dataclass
class _Group:
    size: int
    prompt: Hashable
    """Of its prompt, in the `LengthBook`."""
    key: bytes
    """In the journal."""
    results: dict[int, DynamicInferenceRequest] = field(default_factory=dict)
    oldest_version: int | None = None
    """That sampled any completion token in `results`."""


class GroupLedger:
    """Groups by id, in order of submission."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
        self.unfinished: set[int] = set()
        """Ids of groups of which samples are missing."""
        self.samples_missing = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def complete(self) -> list[int]:
        """Ids of groups whose samples have all come back, in order of submission."""
        return [each for each in self._groups if each not in self.unfinished]

    def add(self, group_id: int, size: int, prompt: Hashable = None, key: bytes = b"") -> None:
        """Book an accepted group of `size` samples."""
        self._groups[group_id] = _Group(size, prompt, key)
        self.unfinished.add(group_id)
        self.samples_missing += size

    def take(self, result: DynamicInferenceRequest) -> bool:
        """Book a sample that has ended; False if its group is unknown or has it already."""
        group = self._groups.get(result.request_id)
        if group is None or result.sample_index in group.results:
            return False
        group.results[result.sample_index] = result
        oldest = result.policy_spans.oldest(start=result.original_prompt_length)
        if oldest is not None:
            group.oldest_version = oldest if group.oldest_version is None else min(oldest, group.oldest_version)
        self.samples_missing -= 1
        if len(group.results) == group.size:
            self.unfinished.discard(result.request_id)
        return True

    def prompt(self, group_id: int) -> Hashable:
        """The `prompt` passed to `add`; None: none."""
        return self._groups[group_id].prompt

    def key(self, group_id: int) -> bytes:
        """The `key` passed to `add`."""
        return self._groups[group_id].key

    def sizes(self) -> Iterator[tuple[int, int]]:
        """(group id, samples), in order of submission."""
        return ((group_id, group.size) for group_id, group in self._groups.items())

    def results(self, group_ids: Iterable[int]) -> list[DynamicInferenceRequest]:
        """Ended samples of these groups: groups in the order given, samples side by side."""
        return [result for each in group_ids for _, result in sorted(self._groups[each].results.items())]

    def drop(self, group_ids: Iterable[int]) -> None:
        """Remove groups that were handed out or given up. Unknown ids are ignored."""
        for each in group_ids:
            group = self._groups.pop(each, None)
            if group is not None:
                self.unfinished.discard(each)
                self.samples_missing -= group.size - len(group.results)

    def oldest_versions(self) -> Iterator[tuple[int, int]]:
        """(group id, oldest version of a token that has come back) of unfinished groups that have one."""
        for each in self.unfinished:
            oldest = self._groups[each].oldest_version
            if oldest is not None:
                yield each, oldest
