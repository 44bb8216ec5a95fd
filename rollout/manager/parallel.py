"""Backends and loops of a manager whose ranks compute each forward pass together.

Tensor parallelism: the first rank of a group runs a call (`LeaderLoop`). The other members compute its forward passes until
the call finishes, then record the same results (`FollowerLoop`). `GroupCalls.meet` starts a call once all members make it
with equal prompts, policy version and adapters. A call returns on all members together, with the same results or the same
error. Requests that finish between two calls are reported with the next call. Ctrl-C interrupts the call on all members if
it arrives on the first rank during its steps, or on any member in `meet`. At other times it takes effect after the call, so
that all members keep the same groups.

Expert parallelism: in each round the ranks agree whether to stop, wait or compute, and then compute one step. A rank without
requests runs the expert layers without tokens (`LockstepLoop`). The ranks start and finish a run together: a rank that
raises still completes the current round, and then tells the others that it is leaving.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np

from rollout import errors
from rollout.config import CoordinatorConfig
from rollout.distributed.job.data_parallel import DataParallelBackend
from rollout.distributed.job.meeting import GO, INTERRUPTED, Meeting
from rollout.distributed.job.world import World
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.memory.buffers import plain_tensors
from rollout.engine.parallel.group import TensorParallelGroup
from rollout.engine.parallel.lockstep import BUSY, DONE, IDLE, LEFT
from rollout.engine.parts.context import KEPT_ALL
from rollout.errors import ConfigError, DeadlineError, EngineDeadError, EngineStateError, RolloutError
from rollout.manager.backend import Backend, LocalBackend
from rollout.manager.groups import key_of
from rollout.manager.run_loop import Goal, RunLoop
from rollout.requests.codec import unpack_msgpack
from rollout.requests.request import REQUEST, DynamicInferenceRequest, VLMInferenceRequest
from rollout.state import EngineState
from rollout.threads.interrupts import interrupt_deferred, interruptible, uninterrupted

IDLE_S = 0.005
"""The longest wait, in seconds, between two rounds in which no rank has work."""


class LockstepLoop(RunLoop):
    """The loop of one rank in an expert-parallel group, whose ranks compute every step together."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        lockstep = self._engine.peers.lockstep
        assert lockstep is not None
        self._lockstep = lockstep

    def _steps(self, finished: Callable[[], bool], step: Callable[[float], None], left: Callable[[], float]) -> None:
        told, done, idle_since = BUSY, False, self._clock()
        with self._lockstep.watching():
            try:
                while told != DONE:
                    with interrupt_deferred():
                        done = done or finished()
                        can_step = self._engine.has_unfinished and self._engine.state is EngineState.RUNNING
                        told = self._engine.parts.stepper.agree(DONE if done else BUSY if can_step else IDLE)
                        if told == LEFT:
                            raise EngineStateError(
                                f"a rank of the {self._lockstep.group.name} has left generate() by an error; what "
                                "is in flight stays in flight: call it again on every rank"
                            )
                        if told == BUSY:
                            idle_since = self._clock()
                            with plain_tensors(), self._lockstep.round():
                                if not done:
                                    step(0.0)
                        elif not done:
                            left()
                            self._wait(self._clock() - idle_since)
            except BaseException:
                # Tell the other ranks that this rank is leaving, unless the last round is over and they wait no longer.
                if told not in (LEFT, DONE):
                    with suppress(EngineDeadError):
                        self._engine.parts.stepper.agree(LEFT)
                raise

    def _wait(self, idle_s: float) -> None:
        """Wait for work. After `control_timeout_s` without work (`idle_s`), also raise an error if other ranks are late."""
        limit = self._engine.config.advanced.control_timeout_s
        self._backend.wait(IDLE_S if idle_s < limit else 2 * limit)
        if self._engine.state is EngineState.SUSPENDED:
            self._ensure_running()
        self.take_ended()


_DIFFER = "the members differ: "
_KEPT = "what suspend() has kept of the KV cache (0: nothing, 1: what requests hold, 2: all)"


class FollowerBackend(LocalBackend):
    """The backend of a tensor-parallel member other than the first; its engine stores requests but schedules none."""

    def ended(self, result: DynamicInferenceRequest) -> None:
        """Record a sample that the first rank reported as finished. Its images come from this rank's own request."""
        sample = self._engine.parts.ledger.live.get(result.request_id, {}).get(result.sample_index)
        own = None if sample is None else sample.record[0]
        if isinstance(own, VLMInferenceRequest) and isinstance(result, VLMInferenceRequest):
            result.imgs, result.image_inputs = own.imgs, own.image_inputs
        self._engine.parts.intake.forget(result.request_id, result.sample_index)

    def wait(self, timeout_s: float) -> None:
        """Return at once, because only the first rank waits for work."""

    def try_finish(self) -> bool:
        return False

    def gather(self, what: str, value: bytes) -> list[bytes] | None:
        return None


class GroupCalls:
    """The agreement of a tensor-parallel group to start a call: all members start it, or no member does.

    Args:
        world: the ranks of the job.
    """

    def __init__(self, engine: DynamicInferenceEngine, group: TensorParallelGroup, world: World) -> None:
        self._engine = engine
        self._group = group
        names = [f"rank {rank}" for rank in group.ranks]
        self._meeting = Meeting(world.within(group.ranks, f"group-{group.ranks[0]}"), "call", names)
        self._submitted = hashlib.sha256()

    def submitted(self, first: int, prompts: Sequence[Any], params: Sequence[Any]) -> None:
        """Record prompts queued from group id `first` on; `meet` then checks that they are equal on all members."""
        for number, each in enumerate(zip(prompts, params, strict=True), first):
            self._submitted.update(key_of(*each, number))

    def meet(self, groups: Iterable[int]) -> None:
        """Wait until every member makes its next call.

        Args:
            groups: ids of this member's groups in flight.

        Raises:
            DeadlineError: some members did not make a call within `control_timeout_s`; the message names them. Raised on all
                other members.
            EngineStateError: members have different prompts or states, which the message names. Raised on all members.
            EngineDeadError: the group has been lost.
        """
        self._group.refuse_when_lost()
        engine = self._engine
        mine = {
            "policy version": engine.policy_version,
            "prompts or parameters": self._submitted.hexdigest()[:16],
            "groups in flight": sorted(groups),
            "adapters": engine.inspection.acting_adapters,
            _KEPT: engine.context.kept,
        }
        decision = self._meeting.meet(
            engine.config.advanced.control_timeout_s, msgpack.packb(mine), self._judge
        ).decode()
        if decision == GO.decode():
            return
        if INTERRUPTED in decision:
            # Ctrl-C was pressed on one member: all members raise, and each abandons the prompts of this call.
            raise KeyboardInterrupt
        if decision.startswith(_DIFFER):
            raise EngineStateError(f"{self._group.name}: {decision}")
        raise DeadlineError(
            f"{self._group.name}: {decision}; every rank of the group must make the same calls (if one only needs longer: "
            "Advanced.control_timeout_s)"
        )

    def _judge(self, values: list[bytes]) -> str | None:
        told = [unpack_msgpack("call of a tensor-parallel group", value) for value in values]
        ranks = self._group.ranks
        for name, expected in told[0].items():
            for rank, each in zip(ranks, told, strict=True):
                value = each.get(name)
                # Accept members that keep more of the KV cache than the first rank: the coordinator suspends only that rank.
                if value != expected and not (name == _KEPT and value > expected):
                    return (
                        f"{_DIFFER}{name} of rank {rank}: {value!s:.100}, of rank {ranks[0]}: {expected!s:.100}; every rank "
                        "of the group makes the same calls with the same arguments"
                    )
        return None


class LeaderLoop(RunLoop):
    """The loop of a tensor-parallel group's first rank, which decides what the group computes."""

    attended = True

    def __init__(self, calls: GroupCalls, *parts: Any) -> None:
        super().__init__(*parts)
        leader = self._engine.peers.leader
        assert leader is not None
        self._leader = leader
        self._calls = calls
        self._untold: list[DynamicInferenceRequest] = []

    def submitted(self, first: int, prompts: Sequence[Any], params: Sequence[Any]) -> None:
        self._calls.submitted(first, prompts, params)

    def book(self, samples: Iterable[DynamicInferenceRequest]) -> None:
        samples = list(samples)
        self._untold += samples
        super().book(samples)

    def call(self) -> AbstractContextManager[None]:
        return uninterrupted()

    def run(self, goal: Goal, **options: Any) -> None:
        with uninterrupted():
            self._calls.meet(self.groups)
            with self._leader.leading(self._outcome), interruptible(first=True):
                super().run(goal, **options)

    def _step(self, timeout_s: float, patient: bool) -> None:
        self._leader.beat()
        super()._step(timeout_s, patient)

    def _take(self, results: list[DynamicInferenceRequest]) -> None:
        self._untold += results
        super()._take(results)

    def _outcome(self, failed: BaseException | None) -> dict[str, Any]:
        untold, self._untold = self._untold, []
        live, held = self._engine.context.blocks_in_use()
        self._engine.context.kept = KEPT_ALL
        return {
            "error": None if failed is None else [type(failed).__name__, str(failed)],
            "results": [REQUEST.encode(_without_images(each)) for each in untold],
            "live": live.tobytes(),
            "held": held.tobytes(),
        }


class FollowerLoop(RunLoop):
    """The loop of a tensor-parallel member other than the first, which computes what the first rank decides."""

    attended = True

    def __init__(self, calls: GroupCalls, *parts: Any) -> None:
        super().__init__(*parts)
        self._calls = calls

    def submitted(self, first: int, prompts: Sequence[Any], params: Sequence[Any]) -> None:
        self._calls.submitted(first, prompts, params)

    def call(self) -> AbstractContextManager[None]:
        return uninterrupted(wholly=True)

    def run(self, goal: Goal, **options: Any) -> None:
        with self.call():
            self._follow()

    def _follow(self) -> None:
        self._calls.meet(self.groups)
        self._metrics.enter_phase("generate")
        failed: Exception | None = None
        try:
            with self.gathering.held():
                try:
                    self.gathering.ensure()
                except Exception as exc:  # noqa: BLE001 - the first rank fails to gather too, and reports it
                    failed = exc
                with self._engine.installation:
                    told = self._engine.parts.stepper.follow()
        finally:
            self._metrics.enter_phase("train")
        self._book(told)
        self.sync_metrics()
        if failed is not None:
            raise failed
        if told["error"] is not None:
            raise _error_of(*told["error"])

    def _book(self, told: dict[str, Any]) -> None:
        context = self._engine.context
        context.follow_blocks(*(np.frombuffer(bytearray(told[name]), np.int32) for name in ("live", "held")))
        context.kept = KEPT_ALL
        results = [REQUEST.decode(each) for each in told["results"]]
        assert isinstance(self._backend, FollowerBackend)
        for result in results:
            self._backend.ended(result)
        with self._engine.locked():
            self._take(results)


def _without_images(request: DynamicInferenceRequest) -> DynamicInferenceRequest:
    if isinstance(request, VLMInferenceRequest):
        return replace(request, imgs=None, image_inputs={})
    return request


def _error_of(name: str, message: str) -> BaseException:
    if name == "KeyboardInterrupt":
        return KeyboardInterrupt()
    kind = getattr(errors, name, None)
    known = isinstance(kind, type) and issubclass(kind, RolloutError) and kind is not errors.RolloutFailedError
    return kind(message) if known and kind is not None else EngineStateError(f"the first rank raised {name}: {message}")


def loop_of(engine: DynamicInferenceEngine, world: World | None, *parts: Any) -> RunLoop:
    """Return the loop for this rank's role in a parallel group, or a `RunLoop` if it has none, built from `parts`."""
    if engine.peers.lockstep is not None:
        return LockstepLoop(*parts)
    if engine.peers.group is None:
        return RunLoop(*parts)
    assert world is not None
    calls = GroupCalls(engine, engine.peers.group, world)
    return LeaderLoop(calls, *parts) if engine.peers.group.leads else FollowerLoop(calls, *parts)


def choose_backend(
    engine: DynamicInferenceEngine, coordinator: CoordinatorConfig | bool, world: World | None
) -> Backend:
    """Choose a `DataParallelBackend` if there are several ranks and `coordinator` is not False, else a local backend.

    A tensor-parallel group counts as one rank: its first member receives the requests for all members.

    Args:
        coordinator: see `RolloutManager`.
        world: the job's ranks, or None for this rank only.

    Raises:
        ConfigError: `coordinator` has a schedule file, but there is only one rank.
        DeadlineError: the ranks did not find each other in time.
    """
    if coordinator is False:
        world = None
    if (group := engine.peers.group) is not None and world is not None:
        leaders = world.leaders(group.ranks[0])
        world = world.within(leaders, "leaders") if group.leads and len(leaders) > 1 else None
    if group is not None and not group.leads:
        return FollowerBackend(engine)
    options = coordinator if isinstance(coordinator, CoordinatorConfig) else None
    if world is None:
        if options is not None and options.schedule_output_path is not None:
            raise ConfigError(
                f"CoordinatorConfig.schedule_output_path={options.schedule_output_path!r}: there is one rank, and "
                "nothing to route; leave it None, or initialise torch.distributed with several ranks first"
            )
        return LocalBackend(engine)
    return DataParallelBackend(engine, options, world)
