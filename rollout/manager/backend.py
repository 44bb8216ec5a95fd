"""Backends of `RolloutManager`: the local engine, or all ranks of the job.

A manager knows groups and results; a backend knows where they are computed. Always true: every group that was submitted
and not aborted gives each of its samples once, by `step` or `take_ended`.
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
    """Where a manager's groups are computed. Methods with a body have what is right without other ranks."""

    @property
    def next_group_id(self) -> int:
        """The id the next group gets."""

    def submit(self, group_id: int, prompt: Prompt, params: SamplingParams, metadata: Any) -> None:
        """Queue a group under an id that has not been used.

        Raises:
            InvalidRequestError: it can never be served; nothing was queued.
        """

    def reserve_group_ids(self, until: int) -> None:
        """Ids below `until` are taken: `next_group_id` is at least that."""

    def continue_from(self, records: list[DynamicInferenceRequestRecord]) -> None:
        """Continue saved samples where they stand: all of them, or none.

        Raises:
            InvalidRequestError: one can never be served here.
        """

    def abort(self, group_id: int) -> None:
        """End a group: here now, elsewhere soon. Unknown ids are ignored."""

    def wait(self, timeout_s: float) -> None:
        """Wait until there is something to do, at most so long. Ctrl-C may interrupt it.

        Raises:
            EngineStateError: nothing can progress.
            DeadlineError: other ranks do not come to the end of theirs; names them.
            ConnectionLostError: the coordinator was lost, and none took its place in time.
        """

    def step(self) -> list[DynamicInferenceRequest]:
        """Make at most one step. Samples that have ended, merged."""

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Samples that have ended meanwhile, merged."""

    def try_finish(self) -> bool:
        """Whether this rank may stop computing; called again and again, with `step` in between, until it may.

        Raises:
            EngineStateError: the ranks have come here by different calls, or with different policy versions.
        """
        return True

    @property
    def idle(self) -> bool:
        """Whether `wait` would have nothing to wait for."""
        return False

    def wake(self) -> None:
        """End a `wait` on another thread, or the run of steps that it makes."""
        return

    def report_idle(self) -> None:
        """Tell the other ranks that this one makes no steps until its next run."""
        return

    def local_samples(self, samples_missing: int) -> int:
        """Number of samples that this engine has to compute, of those still to come and those that others ask for."""
        return samples_missing

    def barrier(self, what: str) -> None:
        """Wait until all ranks have made the same call: pause, unpause, suspend, resume.

        Raises:
            DeadlineError: some have not; names them.
            EngineStateError: some have done something else, or are of another policy version; names them.
        """
        return

    def staleness(self) -> Iterable[tuple[int, int]] | None:
        """(group id, updates since its oldest token was sampled) of groups with unfinished samples.

        None: the progress of another rank before the last update is not known yet; ask again after `wait`.
        """

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        """Records of the unfinished samples."""

    @property
    def coordinator(self) -> JobCoordinator | None:
        """Address and keys of the job's coordinator; None: there is none."""
        return None

    def gather(self, what: str, value: bytes) -> list[bytes] | None:
        """The values of all ranks in their order, on rank 0; None on the others. Every rank calls it.

        Args:
            what: the call that it is part of, equal on all ranks.

        Raises:
            DeadlineError, EngineStateError: some ranks have not made the call; names them.
        """
        return [value]

    def close(self) -> None:
        """Give up all groups and connections. Harmless when repeated."""
        return


class LocalBackend(Backend):
    """The engine in this process: no other process, no socket."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine

    @property
    def next_group_id(self) -> int:
        """The id the next group gets."""
        return self._engine.parts.intake.next_request_id

    def submit(self, group_id: int, prompt: Prompt, params: SamplingParams, metadata: Any) -> None:
        """Queue a group."""
        self._engine.add_request(prompt, params, request_id=group_id, metadata=metadata)

    def reserve_group_ids(self, until: int) -> None:
        """Ids below `until` are taken."""
        self._engine.parts.intake.reserve(until)

    def continue_from(self, records: list[DynamicInferenceRequestRecord]) -> None:
        """Continue saved samples where they stand: all of them, or none."""
        try:
            for record in records:
                self._engine.add_record(record)
        except BaseException:
            for record in records:
                self._engine.abort_request(record.request_id)
            self._engine.take_ended()
            raise

    def abort(self, group_id: int) -> None:
        """End a group now; its blocks are free when this returns."""
        self._engine.abort_request(group_id)

    @property
    def idle(self) -> bool:
        """Whether the engine has nothing to do."""
        return not self._engine.has_unfinished

    def wake(self) -> None:
        """End the run of steps that another thread makes."""
        self._engine.ask_for_boundary()

    def wait(self, timeout_s: float) -> None:
        """Return immediately; raise `EngineStateError` if nothing can progress."""
        if not self._engine.has_unfinished:
            self._engine.inspection.refuse_when_nothing_can_run()
            raise EngineStateError(
                "the groups in flight cannot end: another caller took their samples out of the engine (engine.step()?); "
                "abort() them"
            )

    def step(self) -> list[DynamicInferenceRequest]:
        """Make one step. Samples that have ended, merged."""
        return _merged(self._engine.step(ahead=True))

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Samples that ended between two steps."""
        return _merged(self._engine.take_ended())

    def staleness(self) -> Iterable[tuple[int, int]]:
        """(group id, updates since its oldest token was sampled)."""
        return self._engine.inspection.staleness().items()

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        """Records of the unfinished samples."""
        return self._engine.snapshot()


def _merged(records: list[DynamicInferenceRequestRecord]) -> list[DynamicInferenceRequest]:
    return [record.merge() for record in records]
