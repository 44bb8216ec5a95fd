"""What a manager asks of its journal. Without one the answer is always that there is nothing.

Always true: a group that has ended is appended once, whole, or tried again with the next one; or it is in a checkpoint
made since. A group that failed is not appended: after a restart it is tried anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollout.journal.journal import Journal
from rollout.journal.reader import FinishedGroup
from rollout.manager.earlier_groups import EarlierGroups, key_of
from rollout.manager.groups import GroupLedger
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams

Samples = list[DynamicInferenceRequest]


class GroupJournal:
    """A journal as its manager sees it.

    Args:
        journal: None: nothing is written, and nothing was finished earlier.
    """

    def __init__(self, journal: Journal | None = None) -> None:
        self._journal = journal
        self._unwritten: list[tuple[bytes, Samples]] = []
        self._earlier: EarlierGroups | None = None

    def key(self, prompt: Any, params: SamplingParams, metadata: Any) -> bytes:
        """What stands for a submitted group, see `key_of`."""
        return b"" if self._journal is None else key_of(prompt, params, metadata)

    # --- writing ------------------------------------------------------------------------------------------------

    def write(self, results: Iterable[DynamicInferenceRequest], groups: GroupLedger) -> None:
        """Append the groups that have ended with these results.

        Raises:
            JournalError: the disk is full, say; the next call tries again.
        """
        if self._journal is None:
            return
        for group_id in dict.fromkeys(result.request_id for result in results):
            if group_id in groups and group_id not in groups.unfinished:
                samples = groups.results([group_id])
                if all(sample.error is None for sample in samples):
                    self._unwritten.append((groups.key(group_id), samples))
        while self._unwritten:
            key, samples = self._unwritten[0]
            self._journal.append(samples, key)
            del self._unwritten[0]

    def checkpoint(self, version: int) -> str:
        """A checkpoint of this policy version is made; its mark, "" without a journal.

        Raises:
            JournalError: no new file can be made; the journal goes on as it was.
        """
        if self._journal is None:
            return ""
        mark = self._journal.checkpoint(version)
        # What a full disk kept out is in the checkpoint, or was handed out before it.
        self._unwritten.clear()
        return mark

    # --- after a restart ----------------------------------------------------------------------------------------

    def restore(self, mark: str, version: int) -> None:
        """Go on from a checkpoint: its mark, and its policy version.

        Raises:
            ConfigError: the journal does not know it.
        """
        self._earlier = EarlierGroups(self._journal, mark, version) if self._journal is not None and mark else None

    def in_flight(self, group_id: int, tokens: list[int], params: SamplingParams) -> Samples | None:
        """A group that the checkpoint has in flight and that was finished since; None: it has to be computed."""
        return None if self._earlier is None else self._earlier.in_flight(group_id, tokens, params)

    def submitted(self, key: bytes, group_id: int) -> FinishedGroup | None:
        """A group of this key that was finished since, from now on under this id; None: it has to be computed."""
        return None if self._earlier is None else self._earlier.submitted(key, group_id)

    def put_back(self, groups: Iterable[FinishedGroup]) -> None:
        """What `submitted` gave is not used after all; in the order of giving."""
        if self._earlier is not None:
            self._earlier.put_back(groups)
