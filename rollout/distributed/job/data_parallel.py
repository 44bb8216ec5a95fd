"""The backend of `RolloutManager` on several ranks: a client and a worker next to each engine, and one coordinator.

    generate() on every rank     submit own groups → step the engine for assigned samples → receive own results
    own results complete         keep stepping for the other ranks until all ranks arrive at the barrier
    between two generates        run no steps; the worker's threads keep the sessions alive

Every rank records the tokens received for its own groups, so they survive the loss of another rank or of the coordinator. In
the latter case rank 0 starts another coordinator, and every rank resubmits its open groups. A group's seed is set before the
group is submitted, so its samples do not depend on the ranks that compute them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollout.config import CoordinatorConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.client.group import OpenGroup
from rollout.distributed.job.collective import CollectiveCalls
from rollout.distributed.job.job_coordinator import START_TIMEOUT_S, JobCoordinator
from rollout.distributed.job.member import JobMember
from rollout.distributed.job.world import World
from rollout.distributed.protocol.messages import Stretch
from rollout.distributed.protocol.stretch import oldest_version, stretch_of
from rollout.distributed.transport.keys import JobKeys
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.intake import prompt_of
from rollout.errors import ConnectionLostError, RequestAbortedError, RolloutError
from rollout.requests.block_hash import stream_key
from rollout.requests.delta import SampleDelta
from rollout.requests.images import images_of
from rollout.requests.prompt import Prompt
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest, with_images
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status
from rollout.threads.loop_thread import LoopThread

ASK_AGAIN_S = 0.01
"""Seconds between two status requests while other ranks have an older policy version."""


@dataclass(eq=False)
class OwnGroup:
    """A group that this rank submitted, some of whose samples have not been returned to the caller yet."""

    group_id: int
    prompt: list[int]
    text: str | None
    params: SamplingParams
    metadata: Any
    arrival_time: float
    missing: set[int]
    """The indices of the samples that have not been returned to the caller yet."""
    saved: list[Stretch]
    """The tokens that existed before this process submitted the group, for example in a checkpoint."""
    open: OpenGroup | None = None
    """The submitted group with all its tokens; None until the group is submitted."""
    error: RolloutError | None = None
    """The reason why the missing samples have no result; None if the group has not failed."""
    priority: int = 0

    @property
    def ended(self) -> bool:
        """Whether the group is complete or has failed, so that no rank computes it any more."""
        return self.error is not None or (self.open is not None and self.open.complete)

    def known(self) -> list[Stretch]:
        """Return the saved and the received tokens, as stretches (batches of several samples' tokens)."""
        return self.saved if self.open is None else self.open.known()

    def oldest_version(self) -> int | None:
        """Return the lowest policy version among the tokens of unfinished samples, or None if there are no tokens yet."""
        if self.open is not None:
            return self.open.oldest_version()
        return oldest_version(delta for stretch in self.saved for delta in stretch.deltas())

    def interrupted(self) -> list[DynamicInferenceRequest]:
        """Return the `missing` samples as requests with all tokens known so far."""
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

    def returned(self, index: int, result: DynamicInferenceRequest) -> DynamicInferenceRequest:
        """Return a sample's result with the group's id, text and metadata, and count the sample as returned."""
        result.request_id, result.prompt, result.metadata = self.group_id, self.text, self.metadata
        self.missing.discard(index)
        return result

    def failed(self, index: int) -> DynamicInferenceRequest:
        """Return sample `index` as a request that failed with the group's error and holds all tokens known so far."""
        (request,) = [each for each in self.interrupted() if each.sample_index == index]
        error = self.error
        request.status = Status.FAILED
        request.finish_reason = FinishReason.ABORT if isinstance(error, RequestAbortedError) else FinishReason.ERROR
        request.error = f"{type(error).__name__}: {error}"
        request.add_event_fail()
        return request


def _all_have_reached(version: int, status: dict[str, Any]) -> bool:
    awaited = status["barrier_waits_for"]
    behind = [rank["name"] for rank in status["ranks"] if rank["policy_version"] < version]
    # Ignore ranks that already wait at a barrier for other ranks. They cannot update their weights before their current
    # call returns, and it cannot return before the other ranks have arrived.
    return all(awaited and name not in awaited for name in behind)


class DataParallelBackend:
    """The `Backend` of a `RolloutManager` on one of several ranks.

    Args:
        engine: the engine of this rank.
        config: options of the coordinator; if None, the defaults. See `JobCoordinator`.
        world: the ranks of the job.

    Raises:
        DeadlineError: some ranks did not connect in time.
    """

    def __init__(self, engine: DynamicInferenceEngine, config: CoordinatorConfig | None, world: World) -> None:
        self._engine = engine
        self._timeout_s = engine.config.advanced.control_timeout_s
        self._base_seed = engine.config.seed if world.rank == 0 else stream_key(engine.config.seed, -1 - world.rank)
        self._groups: dict[int, OwnGroup] = {}
        self._next_group_id = 0
        self._happened = False
        self._ended: deque[tuple[OwnGroup, int]] = deque()
        self._failed: deque[OwnGroup] = deque()
        self._asked: Future[dict[str, Any]] | None = None
        self._all_known_before = 0
        """A policy version that all ranks have reached, so this rank has received all tokens of earlier versions."""
        self._closed = False
        name = f"rank-{world.rank:0{len(str(world.size - 1))}d}"

        def new_client(address: str, keys: JobKeys | None) -> InferenceClient:
            return InferenceClient(address, name=name, keys=keys, member=world.rank)

        coordinator = JobCoordinator(config or CoordinatorConfig(), engine, world)
        self._loop = LoopThread("rollout-data-parallel")
        self._member = JobMember(
            engine, coordinator, self._loop, name=name, new_client=new_client, on_joined=self._send_all,
            on_event=self.wake, follows_version=False,
        )  # fmt: skip
        self._calls = CollectiveCalls(self._member, world, self.wake)
        try:
            # Report this rank as idle, so that samples assigned before its first `generate` can move to a busy rank.
            self._member.start(idle=True)
            # Wait for all ranks. Otherwise a rank that starts alone would compute all samples, because assignments do not
            # move to ranks that join later.
            self._calls.meet("RolloutManager()", max(START_TIMEOUT_S, self._timeout_s))
        except BaseException:
            self.close()
            raise

    # --- groups -----------------------------------------------------------------------------------------------------

    @property
    def next_group_id(self) -> int:
        return self._next_group_id

    def submit(self, group_id: int, prompt: Prompt, params: SamplingParams, metadata: Any) -> None:
        """Submit a group to the coordinator under the id `group_id`; `metadata` is copied to its samples."""
        tokens = self._engine.check_request(prompt, params)
        if params.seed is None:
            params = params.replace(seed=stream_key(self._base_seed, group_id))
        text = prompt if isinstance(prompt, str) else None
        self._next_group_id = max(self._next_group_id, group_id + 1)
        self._open(OwnGroup(group_id, tokens, text, params, metadata, time.time(), set(range(params.n)), []))

    def reserve_group_ids(self, until: int) -> None:
        self._next_group_id = max(self._next_group_id, until)

    def continue_from(self, records: list[DynamicInferenceRequestRecord]) -> None:
        """Submit the unfinished samples in `records`, which continue after their last recorded token."""
        by_group: dict[int, list[DynamicInferenceRequestRecord]] = {}
        for record in records:
            by_group.setdefault(record.request_id, []).append(record)
            self._engine.parts.intake.check_record(record)
        for group_id, of_group in by_group.items():
            first = of_group[0][0]
            params = first.sampling_params.replace(seed=first.seed)
            known = [stretch_of(record) for record in of_group if record[-1].completion_tokens]
            group = OwnGroup(
                group_id, prompt_of(first), first.prompt, params, first.metadata, first.arrival_time,
                {record.sample_index for record in of_group}, known, priority=first.priority,
            )  # fmt: skip
            self._open(group)

    def _open(self, group: OwnGroup) -> None:
        self._groups[group.group_id] = group
        self._loop.call_soon(self._send, group)

    # --- on the event loop's thread ---------------------------------------------------------------------------------

    def _send_all(self) -> None:
        for group in list(self._groups.values()):
            self._send(group)

    def _send(self, group: OwnGroup) -> None:
        wanted = tuple(group.missing)
        # Do nothing if the group was aborted or returned in the meantime, or if the connection is lost. In the latter case,
        # `_send_all` submits the group on the next connection.
        if (client := self._member.connected) is None or group.ended or not wanted:
            return
        try:
            opened = client.open_group(
                group.prompt, group.params, arrival_time=group.arrival_time, known=group.known(), wanted=wanted,
                priority=group.priority, min_policy_version=self._engine.policy_version,
            )  # fmt: skip
        except RolloutError as exc:
            self._fail(group, exc)
            return
        group.open = opened
        opened.on_update = lambda _, stretch: self._note_ended(group, stretch)
        opened.on_done = lambda opened: self._note_done(group, opened)

    def _note_ended(self, group: OwnGroup, stretch: Stretch) -> None:
        ended = stretch.ended()
        if ended:
            self._ended.extend((group, each) for each in ended)
            self.wake()

    def _note_done(self, group: OwnGroup, opened: OpenGroup) -> None:
        if isinstance(opened.error, ConnectionLostError):
            self.wake()
        elif opened.error is not None:
            self._fail(group, opened.error)

    def _fail(self, group: OwnGroup, error: RolloutError) -> None:
        group.error = error
        self._failed.append(group)
        self.wake()

    @property
    def idle(self) -> bool:
        return False

    def wake(self) -> None:
        self._happened = True
        self._member.worker.wake()

    # --- steps and barriers -----------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Wait until the engine has work, samples have finished, or the barrier was passed. Reconnect if necessary."""
        worker = self._member.worker
        worker.report_active()
        if (why := self._member.lost) is not None:
            self._calls.recover(why)
            # Return without waiting: if this started a new session, the caller must first arrive at the barrier again.
            return
        if not self._happened:
            self._engine.lifecycle.refuse_when_stopped()
        patience = min(timeout_s, self._timeout_s)
        if not worker.wait_for_work(patience, or_when=lambda: self._happened) and timeout_s > patience:
            self._calls.refuse_if_ranks_are_missing()

    def step(self) -> list[DynamicInferenceRequest]:
        """Run at most one engine step; return the finished samples of this rank's groups, whichever rank computed them."""
        self._happened = False
        self._member.worker.step()
        return self.take_ended()

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Return the finished samples of this rank's groups, each sample once."""
        results = []
        while self._ended:
            group, index = self._ended.popleft()
            if index in group.missing and group.open is not None:
                results.append(group.returned(index, group.open.request(index)))
        while self._failed:
            group = self._failed.popleft()
            results += [group.returned(each, group.failed(each)) for each in sorted(group.missing)]
        for group_id in {result.request_id for result in results}:
            if not self._groups[group_id].missing:
                del self._groups[group_id]
        return results

    def abort(self, group_id: int) -> None:
        """Abort a group on all ranks and drop its later results. Its KV blocks are freed asynchronously."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            group.missing.clear()
            self._loop.call_soon(self._abort_on_loop, group)

    def _abort_on_loop(self, group: OwnGroup) -> None:
        if group.open is not None and (client := self._member.connected) is not None:
            client.abort_request(group.open.request_id)

    def report_idle(self) -> None:
        """Report that this rank is idle, which means that it runs no steps until the next `wait`."""
        self._calls.give_up()
        self._member.worker.report_idle()

    def local_samples(self, samples_missing: int) -> int:
        """Return the number of samples in this rank's engine, whichever rank submitted them; `samples_missing` is unused."""
        return sum(self._engine.load)

    def try_finish(self) -> bool:
        """Return whether all ranks have finished their groups. Until then this rank computes samples for the others."""
        return self._calls.try_finish()

    def barrier(self, what: str) -> None:
        self._calls.meet(f"{what}()")

    @property
    def coordinator(self) -> JobCoordinator:
        """The address and keys of the job's coordinator."""
        return self._member.coordinator

    def gather(self, what: str, value: bytes) -> list[bytes] | None:
        """Collect one value per rank. Return all values in rank order on rank 0, and None on the other ranks.

        Every rank must call this method. It raises the same errors as `CollectiveCalls.meet`.
        """
        return self._calls.gather(what, value)

    # --- inspection -------------------------------------------------------------------------------------------------

    def staleness(self) -> Iterable[tuple[int, int]] | None:
        """Return the staleness of each unfinished group, or None if it is not known yet, so that the caller must retry.

        Returns:
            Pairs (group id, number of weight updates since the oldest token of the group's unfinished samples).
        """
        version = self._engine.policy_version
        if not self._groups:
            return []
        if not self._earlier_tokens_are_known(version):
            return None
        oldest = {group_id: group.oldest_version() for group_id, group in self._groups.items()}
        return [(group_id, 0 if first is None else version - first) for group_id, first in oldest.items()]

    def _earlier_tokens_are_known(self, version: int) -> bool:
        """Return, without waiting, whether this rank has received all tokens of policy versions before `version`.

        If False, a status request is pending or some rank has an older version, and the caller must retry later."""
        if self._all_known_before == version:
            return True
        asked, self._asked = self._asked, None
        if asked is None or not asked.done():
            self._asked = asked or self._start_asking(0.0)
            return False
        if asked.exception() is None and _all_have_reached(version, asked.result()):
            self._all_known_before = version
            return True
        self._asked = self._start_asking(ASK_AGAIN_S)
        return False

    def _start_asking(self, after_s: float) -> Future[dict[str, Any]] | None:
        client = self._member.connected
        if client is None:
            return None

        async def ask() -> dict[str, Any]:
            await asyncio.sleep(after_s)
            return await client.status()

        asked = self._loop.start(ask())
        asked.add_done_callback(lambda _: self.wake())
        return asked

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        """Return records of the unfinished samples of this rank's groups, with the tokens received so far."""

        async def read() -> list[DynamicInferenceRequest]:
            return [request for group in list(self._groups.values()) for request in group.interrupted()]

        # Read on the event loop's thread. Only that thread adds tokens, so the groups cannot change during the read.
        requests = [] if self._closed else self._loop.run_sync(read(), self._timeout_s)
        return [DynamicInferenceRequestRecord.from_request(request) for request in requests]

    def close(self) -> None:
        """Disconnect. The other ranks take over the samples that this rank's engine has not finished. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._member.leave()
        finally:
            self._member.close()
            self._loop.close()
