"""The coordinator's loop: a ROUTER socket, timers, a tokenizer and the schedule file around `CoordinatorCore`.

    one turn      poll → receive → tokenizer results → timers → send → schedule file

Always true:
- a turn blocks only in its initial poll, which a frame, a text, a signal or a deadline ends;
- work and memory of a turn are bounded, and libzmq receives fairly from its peers, so that a flooding peer does not
  starve others; data buffered by libzmq itself is bounded by `ConnectionWatch`;
- backpressure: a peer that does not read is dropped after `max_backlog_mb`; a killed one at the next heartbeat to it.

A ROUTER gives no reliable event when a full pipe empties: libzmq may have consumed the wake-up inside an earlier call. So
while frames are queued for a peer, and only then, sending is retried every `RETRY_S`.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

import zmq

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.connections import ConnectionWatch
from rollout.distributed.coordinator.core.coordinator import CoordinatorCore
from rollout.distributed.coordinator.listening import GOODBYE_S, READ_AHEAD_MESSAGES, listen, resolved, router_socket
from rollout.distributed.coordinator.outbox import Outgoing
from rollout.distributed.coordinator.schedule_file import ScheduleFile
from rollout.distributed.coordinator.tokenizer_threads import TextCodec, TextResult, TextWorker
from rollout.distributed.protocol.frames import MAX_FRAME_BYTES, decode, encode
from rollout.distributed.protocol.messages import Heartbeat
from rollout.distributed.transport.keys import Context, Gatekeeper, JobKeys, Socket, is_loopback
from rollout.errors import ConfigError, SerializationError
from rollout.threads.diagnosis import watch

FRAMES_PER_TURN = 64
BYTES_PER_TURN = 32 << 20
"""Maximum input of a turn: small, so that ranks and clients get their messages early."""

TURN_S = 0.02
"""Time after its first message in which a turn receives further ones; one message takes a tenth of a second at worst. An
abort that follows the longest prompt comes within it, so that the prompt is sent to no rank."""

MAX_FRAMES_PER_MESSAGE = 512
MAX_BYTES_TOGETHER = 2 << 20
"""Maximum size of a message's frames besides the longest. A larger one is refused undecoded: libzmq is fair per message."""

LONGEST_MESSAGE = MAX_FRAME_BYTES + MAX_BYTES_TOGETHER + (64 << 10)

RETRY_S = 0.02
LONGEST_WAIT_S = 60.0


class CoordinatorLoop:
    """Moves messages between the peers' sockets and the core until the core has finished, or it is told to stop.

    Args:
        keys: of the job, with the server's secret. None on loopback.

    Raises:
        ConfigError: the host is not loopback, and there are neither keys nor `insecure`.
    """

    def __init__(self, config: CoordinatorConfig, keys: JobKeys | None = None) -> None:
        self._interface = resolved(config.host)
        if keys is None and not config.insecure and not is_loopback(self._interface):
            raise ConfigError(
                f"CoordinatorConfig.host={config.host!r}: off loopback keys are needed; pass JobKeys.generate() to the "
                "coordinator and its client_side() to all other processes, or set insecure=True if no other user can "
                "reach the port"
            )
        self._config = config
        self._keys = keys
        self._core = CoordinatorCore(config, os.urandom(8).hex())
        self._codec = TextCodec(config.tokenizer)
        self._texts = TextWorker(self._codec, self._wake)
        self._wake_end, self._woken = socket.socketpair()
        self._wake_end.setblocking(False)
        self._woken.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._woken, select.POLLIN)
        self._launcher: int | None = None
        self._orphaned = False
        self._stop_reason: str | None = None
        self._context: Context | None = None
        self._schedule: ScheduleFile | None = None
        self._gatekeeper: Gatekeeper | None = None
        self._connections: ConnectionWatch | None = None
        self._router: Socket
        self._outgoing: Outgoing
        watch(self)

    def describe_state(self) -> Iterator[str]:
        """Lines for `rollout.threads.diagnosis`: state, queue, ranks, clients, and what a barrier waits for."""
        table = self._core.status()
        yield (
            f"coordinator: {table['state']}, policy version {table['policy_version']}, {table['queued_samples']} samples "
            "queued"
        )
        yield f"  barrier waits for {table['barrier_waits_for']}"
        for rank in table["ranks"]:
            yield (
                f"  rank {rank['name']!r}: {rank['state']}, version {rank['policy_version']}, "
                f"{rank['assigned_samples']} samples assigned, {rank['running']} running; silent for "
                f"{rank['silent_for_s']:.1f} s, progress {rank['since_progress_s']:.1f} s ago"
            )
        for client in table["clients"]:
            yield f"  client {client['name']!r}: {client['open_requests']} open requests"

    def bind(self) -> str:
        """Open the socket and the schedule file.

        Returns:
            `tcp://address:port`; the address is a wildcard when listening on all interfaces.

        Raises:
            ConfigError: the port is taken, the address is not this machine's, or the schedule file cannot be created.
        """
        config = self._config
        if config.schedule_output_path is not None:
            self._schedule = ScheduleFile(
                config.schedule_output_path,
                self._core.dispatcher.policy,
                config.data_parallel_size,
                append=config.schedule_append,
            )
        # Not the global context: a context has one ZAP handler.
        self._context = Context()
        if self._keys is not None:
            self._gatekeeper = Gatekeeper(self._context, self._keys)
            self._poll.register(self._gatekeeper.socket.fileno(), select.POLLIN)
        self._router = router_socket(self._context, config, self._keys, ":" in self._interface)
        self._poll.register(self._router.fileno(), select.POLLIN)
        self._connections = ConnectionWatch(self._router, 2 * LONGEST_MESSAGE, READ_AHEAD_MESSAGES, self._wake)
        self._poll.register(self._connections.events.fileno(), select.POLLIN)
        self._outgoing = Outgoing(
            # copy=False: libzmq reads frames of more than 64 KiB where they are.
            lambda parts: self._router.send_multipart(parts, zmq.NOBLOCK, copy=False),
            config.max_backlog_mb << 20,
        )
        return listen(self._router, self._interface, config)

    def close(self) -> None:
        """Close sockets and files; `run` does so itself. Idempotent."""
        self._texts.close()
        if self._schedule is not None:
            self._schedule.close()
        if self._connections is not None:
            self._connections.close()
        if self._context is not None:
            self._context.destroy(linger=int(GOODBYE_S * 1000))
        self._woken.close()
        self._wake_end.close()

    def _loop(self) -> None:
        while not self._over():
            self._turn()
        self._say_goodbye()

    def _over(self) -> bool:
        deserted = self._orphaned and not (self._config.outlive_launcher and len(self._core.peers))
        return self._core.finished or self._stop_reason is not None or deserted

    def _ask_to_stop(self, why: str) -> None:
        self._stop_reason = why
        self._wake()

    def _wake(self) -> None:
        # A full pipe will wake the loop anyway; a closed one belongs to a loop that has ended.
        with suppress(BlockingIOError, OSError):
            self._wake_end.send(b"\0")

    # --- one turn ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._wait()
        now = time.monotonic()
        if self._gatekeeper is not None:
            self._gatekeeper.answer()
        self._receive(now)
        for result in self._texts.take_results():
            self._take_text(result, now)
        if now >= self._core.next_deadline():
            self._core.tick(now)
        self._send(now)
        for job in self._core.take_text_jobs():
            self._texts.put(job)
        decisions = self._core.take_decisions()
        if self._schedule is not None:
            self._schedule.append(decisions)

    def _wait(self) -> None:
        seconds = min(self._core.next_deadline() - time.monotonic(), LONGEST_WAIT_S)
        if self._outgoing.waiting:
            seconds = min(seconds, RETRY_S)
        # The descriptors are edge-triggered: pending input must be queried.
        if _has_input(self._router) or (self._gatekeeper is not None and _has_input(self._gatekeeper.socket)):
            seconds = 0.0
        for descriptor, _ in self._poll.poll(math.ceil(max(0.0, seconds) * 1000)):
            if descriptor == self._woken.fileno():
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif descriptor == self._launcher:
                self._poll.unregister(descriptor)
                self._orphaned = True

    def _receive(self, now: float) -> None:
        room, frames_left = BYTES_PER_TURN, FRAMES_PER_TURN
        taken: dict[int, int] = defaultdict(int)
        emptied, end = False, math.inf
        while frames_left > 0 and room > 0 and time.monotonic() < end:
            try:
                # copy=False: only the message object has the source descriptor.
                address, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                emptied = True
                break
            # Not available for a peer with an older ZMTP version: it counts as unknown.
            with suppress(zmq.ZMQError):
                taken[int(address.get(zmq.SRCFD))] += 1
            frames_left -= max(1, len(frames))
            room -= self._take_message(address.bytes, frames, now)
            end = min(end, time.monotonic() + TURN_S)
        if self._connections is not None:
            self._connections.took(taken, emptied)

    def _take_message(self, peer: bytes, frames: Sequence[zmq.Frame], now: float) -> int:
        sizes = [len(frame) for frame in frames]
        if len(frames) > MAX_FRAMES_PER_MESSAGE or sum(sizes) - max(sizes, default=0) > MAX_BYTES_TOGETHER:
            text = f"message of {len(frames)} frames and {sum(sizes)} bytes: at most {MAX_FRAMES_PER_MESSAGE} are taken"
            text += f", with at most {MAX_BYTES_TOGETHER} bytes besides the longest; send several messages"
            self._core.refuse(peer, "malformed", text)
        else:
            for frame in frames:
                self._take(peer, frame.buffer, now)
        return sum(sizes)

    def _take(self, peer: bytes, frame: memoryview, now: float) -> None:
        try:
            sequence, message = decode(frame)
        except SerializationError as exc:
            self._core.unreadable(peer, str(exc))
        else:
            self._core.receive(peer, sequence, message, now)

    def _take_text(self, result: TextResult, now: float) -> None:
        if result.texts is not None:
            self._core.detokenized(result.job_id, result.texts, now)
        elif result.tokens is not None:
            self._core.tokenized(result.job_id, result.tokens, now)

    def _send(self, now: float) -> None:
        while True:
            for peer, sequence, message in self._core.take_outbox():
                frame = encode(sequence, message)
                if len(frame) > MAX_FRAME_BYTES:
                    self._core.too_long(peer, message, len(frame), now)
                    frame = encode(sequence, Heartbeat())
                self._outgoing.put(peer, frame)
            # Their samples are requeued or cancelled, which may queue further messages.
            for peer, why in self._outgoing.flush():
                self._core.unreachable(peer, why, now)
            if not self._core.has_more_to_say:
                return

    def _say_goodbye(self) -> None:
        now = time.monotonic()
        if not self._core.finished:
            self._core.shutdown(self._stop_reason or "the process that started the coordinator has ended", now)
        self._send(now)
        progress = select.poll()
        progress.register(self._router.fileno(), select.POLLIN)
        while self._outgoing.waiting and time.monotonic() < now + GOODBYE_S:
            progress.poll(RETRY_S * 1000)
            self._send(now)


def _has_input(router: Socket) -> bool:
    return bool(int(router.get(zmq.EVENTS)) & zmq.POLLIN)
