"""Completions that environments request one at a time and that the stepping thread computes.

Always true: every completion finishes once, with a finished request or an error, unless the caller has cancelled it.
Completions do not affect each other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass

from rollout.errors import RequestError, RolloutError
from rollout.manager.backend import Backend
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams


@dataclass(eq=False, slots=True)
class OpenSample:
    """A requested completion that has not finished."""

    tokens: list[int]
    params: SamplingParams
    owner: int | None
    """The id of the episode group whose staleness includes the sample's tokens; None if staleness is not tracked."""
    future: Future[DynamicInferenceRequest]
    request_id: int | None = None
    """The request's id in the backend; None before the request is queued."""

    def end(self, outcome: DynamicInferenceRequest | BaseException) -> None:
        """Give the finished request or the error to the caller of `completion`, unless the caller has cancelled."""
        with suppress(InvalidStateError):
            if isinstance(outcome, BaseException):
                self.future.set_exception(outcome)
            else:
                self.future.set_result(outcome)


class OpenSamples:
    """The requested and unfinished completions of one manager.

    Args:
        wake: function that interrupts the backend's `wait`.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        # This condition's lock guards the fields below. It is a leaf lock: its holder must not acquire another lock.
        self._changed = threading.Condition()
        self._arrived: list[OpenSample] = []
        self._cancelled: list[OpenSample] = []
        self._queued: dict[int, OpenSample] = {}
        self._signalled = False

    def __len__(self) -> int:
        return len(self._arrived) + len(self._queued)

    # --- methods for any thread -----------------------------------------------------------------------------------

    async def completion(
        self,
        tokens: list[int],
        params: SamplingParams,
        keep: Callable[[DynamicInferenceRequest], None] | None = None,
        owner: int | None = None,
    ) -> DynamicInferenceRequest:
        """Request a completion of a prompt that `check_request` has accepted, and wait for it. Cancelling aborts it.

        Args:
            tokens: token ids of the prompt.
            params: parameters with n = 1.
            keep: function that gets the result on the stepping thread, before the caller gets it.
            owner: id of the episode group whose staleness includes the tokens; None if staleness is not tracked.

        Raises:
            RolloutError: the completion failed. The message gives the reason.
        """
        sample = OpenSample(tokens, params, owner, Future())
        if keep is not None:
            sample.future.add_done_callback(
                lambda ended: ended.cancelled() or ended.exception() or keep(ended.result())
            )
        with self._changed:
            self._arrived.append(sample)
        self.wake()
        try:
            return await asyncio.wrap_future(sample.future)
        except asyncio.CancelledError:
            sample.future.cancel()
            with self._changed:
                self._cancelled.append(sample)
            self.wake()
            raise

    def wake(self) -> None:
        """Interrupt the current `wait`, or make the next `wait` return immediately."""
        with self._changed:
            self._signalled = True
            self._changed.notify_all()
        self._wake()

    # --- methods for the stepping thread --------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Wait until `wake` is called or `timeout_s` has passed. Return at once if `wake` was called since the last wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._signalled, timeout_s)
            self._signalled = False

    def apply(self, backend: Backend) -> None:
        """Queue new completions in `backend` and abort cancelled ones. The caller must hold the engine's lock."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
        for sample in arrived:
            if sample.future.cancelled():
                continue
            sample.request_id = backend.next_group_id
            self._queued[sample.request_id] = sample
            try:
                backend.submit(sample.request_id, sample.tokens, sample.params, None)
            except RolloutError as exc:
                del self._queued[sample.request_id]
                sample.end(exc)
        for sample in cancelled:
            if sample.request_id is not None and self._queued.pop(sample.request_id, None) is not None:
                backend.abort(sample.request_id)

    def take(self, result: DynamicInferenceRequest) -> bool:
        """Give a finished request to the caller of `completion`. Return False if no open completion has the request's id."""
        sample = self._queued.pop(result.request_id, None)
        if sample is None:
            return False
        failed = result.error is not None
        sample.end(
            RequestError(f"request {result.request_id}: {result.error}", result.request_id) if failed else result
        )
        return True

    def owners(self) -> dict[int, int | None]:
        """Return a dict from request id to `OpenSample.owner`, for the completions that are queued in the backend."""
        return {request_id: sample.owner for request_id, sample in self._queued.items()}
