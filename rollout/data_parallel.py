"""All ranks of the job compute each other's groups: a client and a worker beside the engine, a coordinator in between.

    generate() on every rank     submit own groups → step the engine for whatever is assigned here → own results
    own results complete         go on stepping for the others, until every rank says the same (a barrier)
    between two generates        nothing steps; the worker's threads keep the sessions alive

Promises:
- a group that was submitted stays on record here, token by token: a lost rank costs nothing that is known, and neither
  does a lost coordinator, for rank 0 starts another and every rank submits its open groups again;
- what a group's samples become does not depend on where they are computed: each group has its seed before it leaves.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgpack

from rollout.client import InferenceClient
from rollout.client_session import OpenGroup
from rollout.config import CoordinatorConfig
from rollout.coordinator.launch import CoordinatorHandle, launch_coordinator
from rollout.engine.controller import Prompt
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import (
    ConnectionLostError,
    DeadlineError,
    RequestAbortedError,
    RolloutError,
    SerializationError,
)
from rollout.keys import JobKeys, is_loopback
from rollout.known import pieces, stretch_of
from rollout.loop_thread import LoopThread
from rollout.protocol import Stretch
from rollout.record import DynamicInferenceRequestRecord
from rollout.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.seeds import stream_key
from rollout.state import FinishReason, Status
from rollout.worker import EngineWorker
from rollout.world import World

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For all ranks to find each other: they may load their models one after the other."""
RETRY_S = 0.5
"""Between two looks for a coordinator that is gone."""


@dataclass(eq=False)
class _Group:
    """A group of this rank's, until each of its samples has been handed out."""

    group_id: int
    prompt: list[int]
    text: str | None
    params: SamplingParams
    metadata: Any
    arrival_time: float
    missing: set[int]
    """Samples that have not been handed out."""
    open: OpenGroup | None = None
    """What is known of it; None until it was sent."""

    def missing_and_not_ended(self) -> bool:
        """Whether somebody has still to compute for it."""
        return self.open is None or not self.open.complete


class DataParallelBackend:
    """The `Backend` of one rank among several.

    Args:
        engine: this rank's.
        config: of the coordinator; None: defaults. Size, block size, seed and host come from the job where they are left
            at their defaults.
        world: the ranks.

    Raises:
        DeadlineError: the ranks did not find each other.
    """

    def __init__(self, engine: DynamicInferenceEngine, config: CoordinatorConfig | None, world: World) -> None:
        self._engine = engine
        self._world = world
        self._config = _completed(config or CoordinatorConfig(), engine, world)
        self._timeout_s = engine.config.control_timeout_s
        self._base_seed = engine.config.seed if world.rank == 0 else stream_key(engine.config.seed, -1 - world.rank)
        self._groups: dict[int, _Group] = {}
        self._next_group_id = 0
        self._incarnation = 0
        self._coordinator: CoordinatorHandle | None = None
        self._keys: JobKeys | None = None
        self._address = ""
        self._loop = LoopThread("rollout-data-parallel")
        self._happened = False
        self._ended: deque[tuple[_Group, int]] = deque()
        self._failed: deque[tuple[_Group, OpenGroup]] = deque()
        self._barrier: Future[None] | None = None
        self._client: InferenceClient | None = None
        self._worker: EngineWorker | None = None
        self._closed = False
        try:
            self._launch_or_learn(START_TIMEOUT_S)
            self._worker = EngineWorker(
                engine,
                self._address,
                name=self._name,
                keys=self._keys,
                loop=self._loop,
                on_lost=lambda error: self._wake(),
            )
            self._worker.start(START_TIMEOUT_S)
            self._connect()
        except BaseException:
            self.close()
            raise

    # --- the coordinator --------------------------------------------------------------------------------------------

    @property
    def _name(self) -> str:
        width = len(str(self._world.size - 1))
        return f"rank-{self._world.rank:0{width}d}"

    def _launch_or_learn(self, timeout_s: float) -> None:
        key = f"coordinator/{self._incarnation}"
        if self._world.rank == 0:
            keys = None if self._config.insecure or is_loopback(self._config.host) else JobKeys.generate()
            self._coordinator = launch_coordinator(self._config, keys)
            self._address, self._keys = self._coordinator.address, keys
            told = None if keys is None else keys.client_side().serialize()
            self._world.publish(key, msgpack.packb([self._address, told]))
            return
        try:
            address, told = msgpack.unpackb(self._world.wait_for(key, timeout_s))
        except ValueError as exc:
            raise SerializationError(f"{key}: must be [address, keys]: {exc}") from exc
        self._address, self._keys = address, None if told is None else JobKeys.deserialize(told)

    def _connect(self) -> None:
        client = InferenceClient(self._address, name=self._name, keys=self._keys, member=True)
        self._loop.run(client.start(START_TIMEOUT_S), START_TIMEOUT_S + 5)
        self._client = client

    def _lost(self) -> Exception | None:
        if self._worker is not None and self._worker.lost is not None:
            return self._worker.lost
        return None if self._client is None else self._client.lost

    def _recover(self) -> None:
        """Begin anew after a session, or the coordinator itself, was lost; what is open is submitted again."""
        why = self._lost()
        if isinstance(why, RolloutError) and not isinstance(why, ConnectionLostError | DeadlineError):
            raise why
        _log.warning(
            "%s: %s; %d groups are open here and go on with another session", self._name, why, len(self._groups)
        )
        self._barrier = None
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._find_coordinator()
                self._leave_client("it connects anew")
                self._connect()
                self._its_worker().reconnect(self._address, self._keys, START_TIMEOUT_S)
                break
            except (ConnectionLostError, DeadlineError) as exc:
                if time.monotonic() > deadline:
                    raise ConnectionLostError(
                        f"{self._name}: no coordinator within {self._timeout_s} s (control_timeout_s) after: {why}; the "
                        f"last attempt: {exc}"
                    ) from exc
                time.sleep(RETRY_S)
        for group in self._groups.values():
            if group.missing_and_not_ended():
                self._loop.call_soon(self._send, group, [] if group.open is None else group.open.known())

    def _find_coordinator(self) -> None:
        if self._world.rank == 0:
            if self._coordinator is None or not self._coordinator.alive:
                self._incarnation += 1
                self._launch_or_learn(START_TIMEOUT_S)
        elif self._world.is_published(f"coordinator/{self._incarnation + 1}"):
            self._incarnation += 1
            self._launch_or_learn(START_TIMEOUT_S)

    # --- groups -----------------------------------------------------------------------------------------------------

    @property
    def next_group_id(self) -> int:
        """The id the next group gets."""
        return self._next_group_id

    def submit(self, prompt: Prompt, params: SamplingParams, metadata: Any) -> int:
        """Queue a group at the coordinator; returns its id."""
        tokens = self._engine.check_request(prompt, params)
        group_id = self._next_group_id
        if params.seed is None:
            params = params.replace(seed=stream_key(self._base_seed, group_id))
        text = prompt if isinstance(prompt, str) else None
        self._next_group_id += 1
        self._open(group_id, tokens, text, params, metadata, time.time(), range(params.n), [])
        return group_id

    def continue_from(self, records: list[DynamicInferenceRequestRecord], next_group_id: int) -> None:
        """Go on with samples of groups that were saved."""
        by_group: dict[int, list[DynamicInferenceRequestRecord]] = {}
        for record in records:
            by_group.setdefault(record.request_id, []).append(record)
            self._engine.check_request(record[0].prompt_tokens, record[0].sampling_params)
        for group_id, of_group in by_group.items():
            first = of_group[0][0]
            params = first.sampling_params.replace(seed=first.seed)
            self._open(
                group_id,
                first.prompt_tokens,
                first.prompt,
                params,
                first.metadata,
                first.arrival_time,
                [record.sample_index for record in of_group],
                [stretch_of(record) for record in of_group if record[-1].completion_tokens],
            )
        self._next_group_id = max(self._next_group_id, next_group_id)

    def _open(
        self,
        group_id: int,
        tokens: list[int],
        text: str | None,
        params: SamplingParams,
        metadata: Any,
        arrival_time: float,
        samples: Iterable[int],
        known: list[Stretch],
    ) -> None:
        group = _Group(group_id, tokens, text, params, metadata, arrival_time, set(samples))
        self._groups[group_id] = group
        self._loop.call_soon(self._send, group, known)

    # --- on the loop's thread ---------------------------------------------------------------------------------------

    def _send(self, group: _Group, known: list[Stretch]) -> None:
        client = self._client
        if client is None or client.lost is not None or group.group_id not in self._groups:
            # Aborted meanwhile; or lost, and whoever recovers sends it again.
            return
        group.open = client.open_group(
            group.prompt, group.params, arrival_time=group.arrival_time, known=known, wanted=group.missing
        )
        group.open.on_update = lambda _, stretch: self._note_ended(group, stretch)
        group.open.on_done = lambda opened: self._note_done(group, opened)

    def _note_ended(self, group: _Group, stretch: Stretch) -> None:
        if stretch.outcomes is not None:
            ended = [
                each for each, outcome in zip(stretch.indices, stretch.outcomes, strict=True) if outcome is not None
            ]
            self._ended.extend((group, each) for each in ended)
            self._wake()

    def _note_done(self, group: _Group, opened: OpenGroup) -> None:
        if opened.error is not None and not isinstance(opened.error, ConnectionLostError):
            self._failed.append((group, opened))
        self._wake()

    def _wake(self) -> None:
        self._happened = True
        if self._worker is not None:
            self._worker.wake()

    # --- computing --------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Wait until the engine has work, samples have ended, or the barrier is passed; recover what was lost."""
        if self._lost() is not None:
            self._recover()
        patience = min(timeout_s, self._timeout_s)
        if self._its_worker().wait_for_work(patience, or_when=lambda: self._happened) or timeout_s <= patience:
            return
        self._ask_who_is_missing()

    def advance(self) -> list[DynamicInferenceRequest]:
        """At most one step of the engine; then whatever of this rank's groups has ended, anywhere."""
        self._happened = False
        self._its_worker().step()
        return self.take_ended()

    def take_ended(self) -> list[DynamicInferenceRequest]:
        """Samples of this rank's groups that have ended."""
        results = []
        while self._ended:
            group, index = self._ended.popleft()
            if index in group.missing and group.open is not None:
                results.append(self._hand_out(group, index, group.open.request(index)))
        while self._failed:
            group, opened = self._failed.popleft()
            results += [self._hand_out(group, each, _failed(group, each, opened)) for each in sorted(group.missing)]
        return results

    def _hand_out(self, group: _Group, index: int, result: DynamicInferenceRequest) -> DynamicInferenceRequest:
        result.request_id, result.prompt, result.metadata = group.group_id, group.text, group.metadata
        group.missing.discard(index)
        if not group.missing:
            self._groups.pop(group.group_id, None)
        return result

    def abort(self, group_id: int) -> None:
        """End a group everywhere; its results are dropped from here on, and its blocks are free soon."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            group.missing.clear()
            self._loop.call_soon(self._abort_on_loop, group)

    def _abort_on_loop(self, group: _Group) -> None:
        if group.open is not None and self._client is not None and self._client.lost is None:
            self._client.abort_request(group.open.request_id)

    def leave(self) -> bool:
        """Whether every rank has come to the end of its groups; until then this one works for the others."""
        if self._lost() is not None:
            return False
        if self._barrier is None:
            self._barrier = self._come_to_barrier()
        if not self._barrier.done():
            return False
        barrier, self._barrier = self._barrier, None
        # Of a deadline `wait` has spoken already, and this rank remains where it has come to.
        if isinstance(barrier.exception(), ConnectionLostError | DeadlineError):
            return False
        barrier.result()
        return True

    def moved_together(self, what: str) -> None:
        """Wait until all ranks have done the same."""
        if self._lost() is not None:
            self._recover()
        try:
            self._come_to_barrier().result()
        except DeadlineError as exc:
            late = ", ".join(self._status()["barrier_waits_for"]) or "some ranks"
            raise DeadlineError(
                f"{what}(): {late} did not do the same within {self._timeout_s} s (control_timeout_s); every rank must"
            ) from exc

    @property
    def held_by_coordinator(self) -> bool:
        """Whether a control call has paused or suspended the engine: another one sets it going."""
        return self._its_worker().held_by_coordinator

    def _come_to_barrier(self) -> Future[None]:
        client = self._connected()
        barrier = self._loop.start(client.barrier(client.next_barrier, self._timeout_s))
        barrier.add_done_callback(lambda _: self._wake())
        return barrier

    def _ask_who_is_missing(self) -> None:
        """Nothing has happened for long: fine while some rank computes, else somebody will never come."""
        status = self._status()
        if any(rank["running"] or rank["assigned_samples"] for rank in status["ranks"]):
            return
        raise DeadlineError(
            f"{self._name}: nothing has happened for {self._timeout_s} s (control_timeout_s), waiting for "
            f"{', '.join(status['barrier_waits_for']) or 'nobody in particular'} to end generate(); every rank must call "
            "it, with an empty list where it has no prompts"
        )

    def _status(self) -> dict[str, Any]:
        return self._loop.run(self._connected().status(), self._timeout_s)

    def _its_worker(self) -> EngineWorker:
        if self._worker is None:
            raise ConnectionLostError(f"{self._name}: the coordinator was never found")
        return self._worker

    def _connected(self) -> InferenceClient:
        if self._client is None:
            raise ConnectionLostError(f"{self._name}: there is no connection to the coordinator; it was closed")
        return self._client

    # --- looking at it ----------------------------------------------------------------------------------------------

    def ages(self) -> Iterable[tuple[int, int]]:
        """(group id, updates since the oldest token known of its unfinished samples was sampled)."""
        version = self._engine.policy_version
        for group in self._groups.values():
            oldest = None if group.open is None else group.open.oldest_version()
            yield group.group_id, 0 if oldest is None else version - oldest

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        """Records of the unfinished samples of this rank's groups, with the tokens known here."""
        return [
            DynamicInferenceRequestRecord.from_request(request)
            for group in self._groups.values()
            for request in _interrupted(group, group.open)
        ]

    def close(self) -> None:
        """Leave the others, who take over what this rank was computing. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        self._leave_client("it was closed")
        if self._worker is not None:
            self._worker.stop()
        if self._coordinator is not None:
            self._coordinator.let_go()
        self._loop.close()

    def _leave_client(self, why: str) -> None:
        client, self._client = self._client, None
        if client is not None:
            self._loop.run(client.stop(), self._timeout_s)


def _interrupted(group: _Group, opened: OpenGroup | None) -> list[DynamicInferenceRequest]:
    """The samples that have not been handed out, where they stand."""
    samples = sorted(group.missing)
    known = {} if opened is None else pieces(opened.known(), samples)
    requests = []
    for index in samples:
        piece = known.get(index)
        if piece is not None:
            request = piece.request(group.group_id, index, group.prompt, group.params, arrival_time=group.arrival_time)
        else:
            request = DynamicInferenceRequest(
                request_id=group.group_id,
                sample_index=index,
                prompt_tokens=group.prompt,
                sampling_params=group.params,
                arrival_time=group.arrival_time,
                seed=group.params.seed,
            )
        request.prompt, request.metadata = group.text, group.metadata
        requests.append(request)
    return requests


def _failed(group: _Group, index: int, opened: OpenGroup) -> DynamicInferenceRequest:
    """A sample of a group that ended without a result, with the tokens that are known of it."""
    (request,) = [each for each in _interrupted(group, opened) if each.sample_index == index]
    error = opened.error
    request.status = Status.FAILED
    request.finish_reason = FinishReason.ABORT if isinstance(error, RequestAbortedError) else FinishReason.ERROR
    request.error = f"{type(error).__name__}: {error}"
    return request


def _completed(config: CoordinatorConfig, engine: DynamicInferenceEngine, world: World) -> CoordinatorConfig:
    """The user's options, with what the job knows better."""
    host = config.host
    if world.rank == 0 and not world.one_host and is_loopback(host):
        host = world.address_for_others()
    return config.replace(
        data_parallel_size=world.size,
        block_size_tokens=engine.config.block_size_tokens,
        enable_prefix_caching=config.enable_prefix_caching and engine.config.enable_prefix_caching,
        host=host,
    )
