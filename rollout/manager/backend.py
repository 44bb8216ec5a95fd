"""Backends of `RolloutManager`: the local engine, or all ranks of the job.

A manager keeps track of groups and their results; a backend computes them. `step` or `take_ended` returns each sample of a
submitted group exactly once, unless the group is aborted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from rollout.distributed.job.job_coordinator import JobCoordinator
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import EngineStateError
from rollout.requests.prompt import Prompt
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams


class Backend(Protocol):
    """A backend that computes a manager's groups. The default implementations are correct for a single rank."""

    @property
    def next_group_id(self) -> int:
        """The smallest id that a new group can have."""

    def submit(self, group_id: int, prompt: Prompt, params: SamplingParams, metadata: Any) -> None:
        """Queue the samples of a prompt under the unused group id `group_id`; each finished sample has `metadata`.

        Raises:
            InvalidRequestError: the group can never be served; nothing was queued.
        """

    def reserve_group_ids(self, until: int) -> None:
        """Raise `next_group_id` to at least `until`, so that smaller ids stay unused."""

    def continue_from(self, records: list[DynamicInferenceRequestRecord]) -> None:
        """Continue saved samples after their last token.

        Raises:
            InvalidRequestError: a sample can never be served; no sample was queued.
        """

    def abort(self, group_id: int) -> None:
        """Abort a group: at once on this rank, later on other ranks that compute it. An unknown id is ignored."""

    def wait(self, timeout_s: float) -> None:
        """Wait until there is work to do, or `timeout_s` has passed. Ctrl-C may interrupt the wait.

        Raises:
            EngineStateError: no request can progress.
            DeadlineError: other ranks do not finish their calls; the message names them.
            ConnectionLostError: the coordinator was lost and was not replaced in time.
        """

    def step(self) -> list[DynamicInferenceRequest]:
        """Run at most one engine step; return the finished samples. The parts of an interrupted sample are merged."""

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Return the samples that finished outside of a step. The parts of an interrupted sample are merged."""

    def staleness(self) -> Iterable[tuple[int, int]] | None:
        """Return (group id, updates since the group's oldest token was sampled) for groups with unfinished samples.

        None means that another rank has not yet reported its progress before the last update; call again after `wait`.
        """

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        """Return records of the unfinished samples, from which `continue_from` continues them."""

    def try_finish(self) -> bool:
        """Return whether this rank may stop because no rank needs it. The caller alternates this with `step` until then.

        Raises:
            EngineStateError: the ranks are in different calls, or have different policy versions.
        """
        return True

    @property
    def idle(self) -> bool:
        """Whether the backend has no work left, so that `wait` would have nothing to wait for."""
        return False

    def wake(self) -> None:
        """Interrupt a `wait` or a run of steps on another thread."""
        return

    def report_idle(self) -> None:
        """Report to the coordinator that this rank runs no engine steps until its next `RunLoop.run`."""
        return

    def local_samples(self, samples_missing: int) -> int:
        """Return how many unfinished samples this rank's engine has; this manager's groups have `samples_missing`."""
        return samples_missing

    def barrier(self, what: str) -> None:
        """Wait until all ranks have made the same call, for example pause or resume.

        Args:
            what: name of the call.

        Raises:
            DeadlineError: some ranks have not made the call; the message names them.
            EngineStateError: some ranks have made another call or have another policy version; the message names the ranks.
        """
        return

    @property
    def coordinator(self) -> JobCoordinator | None:
        """The address and keys of the job's coordinator; None if there is no coordinator."""
        return None

    def gather(self, what: str, value: bytes) -> list[bytes] | None:
        """Return the values of all ranks, in rank order, on rank 0; None on other ranks. Every rank must call this method.

        Args:
            what: name of the enclosing call, which must be equal on all ranks.
            value: this rank's value.

        Raises:
            DeadlineError, EngineStateError: some ranks have not made the call; the message names them.
        """
        return [value]

    def close(self) -> None:
        """Abandon all groups and close all connections. Repeated calls have no effect."""
        return


class LocalBackend(Backend):
    """A backend that runs the engine of this process. It needs no other process and no socket."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine

    @property
    def next_group_id(self) -> int:
        return self._engine.parts.intake.next_request_id

    def submit(self, group_id: int, prompt: Prompt, params: SamplingParams, metadata: Any) -> None:
        self._engine.add_request(prompt, params, request_id=group_id, metadata=metadata)

    def reserve_group_ids(self, until: int) -> None:
        self._engine.parts.intake.reserve(until)

    def continue_from(self, records: list[DynamicInferenceRequestRecord]) -> None:
        try:
            for record in records:
                self._engine.add_record(record)
        except BaseException:
            for record in records:
                self._engine.abort_request(record.request_id)
            self._engine.take_ended()
            raise

    def abort(self, group_id: int) -> None:
        self._engine.abort_request(group_id)

    @property
    def idle(self) -> bool:
        return not self._engine.has_unfinished

    def wake(self) -> None:
        self._engine.ask_for_boundary()

    def wait(self, timeout_s: float) -> None:
        if not self._engine.has_unfinished:
            self._engine.inspection.refuse_when_nothing_can_run()
            raise EngineStateError(
                "the groups in flight cannot end: another caller took their samples out of the engine (engine.step()?); "
                "abort() them"
            )

    def step(self) -> list[DynamicInferenceRequest]:
        return [record.merge() for record in self._engine.step(ahead=True)]

    def take_ended(self) -> list[DynamicInferenceRequest]:
        return [record.merge() for record in self._engine.take_ended()]

    def staleness(self) -> Iterable[tuple[int, int]]:
        return self._engine.inspection.staleness().items()

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        return self._engine.snapshot()
