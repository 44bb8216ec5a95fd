"""Groups submitted by this rank: deltas received so far, until the group is handed out.

Always true: an unfinished sample can be exported with every token received so far, whichever rank computed it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollout.distributed.client.group import OpenGroup
from rollout.distributed.protocol.messages import Stretch
from rollout.distributed.protocol.partial import oldest_version
from rollout.distributed.protocol.status import JobStatus
from rollout.errors import RequestAbortedError, RolloutError, SerializationError
from rollout.requests.delta import SampleDelta
from rollout.requests.images import images_of
from rollout.requests.request import DynamicInferenceRequest, with_images
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status

ASK_AGAIN_S = 0.01
"""Seconds between two status requests while other ranks are behind."""


@dataclass(eq=False)
class OwnGroup:
    """A group submitted by this rank, until each of its samples has been handed out."""

    group_id: int
    prompt: list[int]
    text: str | None
    params: SamplingParams
    metadata: Any
    arrival_time: float
    missing: set[int]
    """Samples that have not been handed out."""
    saved: list[Stretch]
    """Tokens known before it was sent."""
    open: OpenGroup | None = None
    """Tokens received since; None until it was sent."""
    error: RolloutError | None = None
    """Why the missing samples have no result."""
    priority: int = 0

    @property
    def ended(self) -> bool:
        """Whether no rank computes it any more: complete or failed."""
        return self.error is not None or (self.open is not None and self.open.complete)

    def known(self) -> list[Stretch]:
        """All tokens known so far, as stretches."""
        return self.saved if self.open is None else self.open.known()

    def oldest_version(self) -> int | None:
        """Lowest policy version of any token of an unfinished sample; None: no token yet."""
        if self.open is not None:
            return self.open.oldest_version()
        return oldest_version(delta for stretch in self.saved for delta in stretch.deltas())

    def interrupted(self) -> list[DynamicInferenceRequest]:
        """Requests of the samples that have not been handed out, with the tokens known so far."""
        known = {delta.sample_index: delta for stretch in self.known() for delta in stretch.deltas(self.missing)}
        requests = []
        for index in sorted(self.missing):
            delta = known.get(index) or SampleDelta(self.group_id, index)
            request = delta.to_request(
                self.group_id, self.prompt, self.params, priority=self.priority, arrival_time=self.arrival_time
            )
            request.prompt, request.metadata = self.text, self.metadata
            requests.append(with_images(request, images_of(self.prompt)))
        return requests

    def failed(self, index: int) -> DynamicInferenceRequest:
        """Request of a sample that failed with the group's error, with the tokens known so far."""
        (request,) = [each for each in self.interrupted() if each.sample_index == index]
        error = self.error
        request.status = Status.FAILED
        request.finish_reason = FinishReason.ABORT if isinstance(error, RequestAbortedError) else FinishReason.ERROR
        request.error = f"{type(error).__name__}: {error}"
        request.add_event_fail()
        return request


class EarlierTokens:
    """Whether every rank has reached a policy version, and so has reported all tokens of earlier versions.

    Args:
        ask: requests the job's status after so many seconds; returns None without a connection.
    """

    def __init__(self, ask: Callable[[float], Future[JobStatus] | None]) -> None:
        self._ask = ask
        self._asked: Future[JobStatus] | None = None
        self._known_before = 0

    def are_known(self, version: int) -> bool:
        """Return immediately. False: a status request is pending, or some rank is behind; call again later.

        Raises:
            SerializationError: the status cannot be read.
        """
        if self._known_before == version:
            return True
        asked, self._asked = self._asked, None
        if asked is None or not asked.done():
            self._asked = asked or self._ask(0.0)
            return False
        error = asked.exception()
        if isinstance(error, SerializationError):
            raise error
        if error is None and _all_have_reached(version, asked.result()):
            self._known_before = version
            return True
        self._asked = self._ask(ASK_AGAIN_S)
        return False


def _all_have_reached(version: int, status: JobStatus) -> bool:
    awaited = status.barrier_waits_for
    behind = [rank.name for rank in status.ranks if rank.policy_version < version]
    # A rank that waits at the end of the call while others do not will not reach this version within it.
    return all(awaited and name not in awaited for name in behind)
