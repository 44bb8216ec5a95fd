"""Groups submitted by this rank: deltas received so far, until the group is handed out.

Always true: a sample can be given back where it stands, with every token that is known here, wherever it was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollout.distributed.client.group import OpenGroup
from rollout.distributed.protocol.messages import Stretch
from rollout.distributed.protocol.partial import pieces
from rollout.errors import RequestAbortedError, RolloutError
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status

ASK_AGAIN_S = 0.01
"""Between two looks at how far the other ranks are."""


@dataclass(eq=False)
class OwnGroup:
    """A group of this rank's, until each of its samples has been handed out."""

    group_id: int
    prompt: list[int]
    text: str | None
    params: SamplingParams
    metadata: Any
    arrival_time: float
    missing: set[int]
    """Samples that have not been handed out."""
    saved: list[Stretch]
    """What was known of it before it was sent."""
    open: OpenGroup | None = None
    """What is known of it since; None until it was sent."""
    error: RolloutError | None = None
    """Why it has ended without the samples that are missing."""
    priority: int = 0

    @property
    def ended(self) -> bool:
        """Whether nobody has anything to compute for it any more."""
        return self.error is not None or (self.open is not None and self.open.complete)

    def known(self) -> list[Stretch]:
        """Its tokens."""
        return self.saved if self.open is None else self.open.known()

    def oldest_version(self) -> int | None:
        """The lowest policy version of a token of a sample that has not ended; None: they have no token."""
        if self.open is not None:
            return self.open.oldest_version()
        rows = (runs for stretch in self.saved for runs in stretch.versions)
        return min((version for runs in rows for version in runs[1::2]), default=None)

    def interrupted(self) -> list[DynamicInferenceRequest]:
        """The samples that have not been handed out, where they stand."""
        samples = sorted(self.missing)
        known = pieces(self.known(), samples)
        requests = []
        for index in samples:
            piece = known.get(index)
            if piece is not None:
                request = piece.request(
                    self.group_id,
                    index,
                    self.prompt,
                    self.params,
                    priority=self.priority,
                    arrival_time=self.arrival_time,
                )
            else:
                request = DynamicInferenceRequest(
                    request_id=self.group_id,
                    sample_index=index,
                    prompt_tokens=self.prompt,
                    sampling_params=self.params,
                    arrival_time=self.arrival_time,
                    priority=self.priority,
                    seed=self.params.seed,
                )
            request.prompt, request.metadata = self.text, self.metadata
            requests.append(request)
        return requests

    def failed(self, index: int) -> DynamicInferenceRequest:
        """A sample that it has ended without, with the tokens that are known of it."""
        (request,) = [each for each in self.interrupted() if each.sample_index == index]
        error = self.error
        request.status = Status.FAILED
        request.finish_reason = FinishReason.ABORT if isinstance(error, RequestAbortedError) else FinishReason.ERROR
        request.error = f"{type(error).__name__}: {error}"
        request.add_event_fail()
        return request


class EarlierTokens:
    """Whether every rank has come to a version of the weights, and so has said what it computed under those before.

    Args:
        ask: starts to ask for the coordinator's status, after so many seconds; None: nobody is there to ask.
    """

    def __init__(self, ask: Callable[[float], Future[dict[str, Any]] | None]) -> None:
        self._ask = ask
        self._asked: Future[dict[str, Any]] | None = None
        self._known_before = 0

    def are_known(self, version: int) -> bool:
        """Never waits. False: the question is on its way, ask again when it has ended."""
        if self._known_before == version:
            return True
        asked, self._asked = self._asked, None
        if asked is None or not asked.done():
            self._asked = asked or self._ask(0.0)
            return False
        if asked.exception() is None and _all_have_come_to(version, asked.result()):
            self._known_before = version
            return True
        self._asked = self._ask(ASK_AGAIN_S)
        return False


def _all_have_come_to(version: int, status: dict[str, Any]) -> bool:
    awaited = status["barrier_waits_for"]
    behind = [each["name"] for each in status["ranks"] if each["policy_version"] < version]
    # Whoever has come to the end of the call already will not come to this version: the barrier says so.
    return all(awaited and name not in awaited for name in behind)
