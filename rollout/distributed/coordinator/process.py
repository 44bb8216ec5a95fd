"""The coordinator as a thread or a process: the state machine in `core` with a socket, timers, a tokenizer and a file.

One turn of the loop: poll → receive → tokenizer results → timers → send → schedule file.

A turn blocks only in its poll, until a frame, a tokenizer result or a signal arrives, or a deadline passes. The work and
memory of a turn are bounded, and libzmq receives fairly from all peers. A peer that does not read is dropped when more than
`PIPE_MESSAGES` messages wait for it. A killed peer is dropped when the next heartbeat is sent to it.
"""

from __future__ import annotations

import gc
import math
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import zmq

from rollout import state
from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.coordinator import CoordinatorCore
from rollout.distributed.coordinator.schedule_file import ScheduleFile
from rollout.distributed.coordinator.tokenizer_threads import TextCodec, TextWorker
from rollout.distributed.protocol.frames import MAX_FRAME_BYTES, decode, encode
from rollout.distributed.protocol.messages import Heartbeat, Message
from rollout.distributed.transport.keys import Context, Gatekeeper, JobKeys, Socket, is_loopback
from rollout.errors import ConfigError, DeadlineError, SerializationError
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.threads.diagnosis import watch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

PIPE_MESSAGES = 1000
"""The number of messages that libzmq queues for a peer that does not read. If more are sent, the peer counts as lost."""
READ_AHEAD_MESSAGES = 1
"""The number of complete messages from a peer that libzmq stores until the coordinator reads them."""
GOODBYE_S = 1.0
"""Seconds within which the last frames must be sent when the coordinator shuts down."""
HANDSHAKE_S = 10
"""The timeout of the ZMTP handshake, in seconds."""
PENDING_CONNECTIONS = 4096


def router_socket(context: Context, config: CoordinatorConfig, keys: JobKeys | None, ipv6: bool) -> Socket:
    """Return a configured ROUTER socket that is not bound yet; with `ipv6`, it can be bound to IPv6 addresses."""
    router: Socket = context.socket(zmq.ROUTER)
    router.router_mandatory = True
    # Let a reconnecting peer take over its identity: it may return before this side notices that the old connection broke.
    router.router_handover = True
    router.maxmsgsize = MAX_FRAME_BYTES + (64 << 10)
    router.sndhwm, router.rcvhwm = PIPE_MESSAGES, READ_AHEAD_MESSAGES
    router.linger = int(GOODBYE_S * 1000)
    router.ipv6 = ipv6
    router.backlog = PENDING_CONNECTIONS
    router.handshake_ivl = HANDSHAKE_S * 1000
    router.heartbeat_ivl = math.ceil(config.advanced.heartbeat_interval_s * 1000)
    router.heartbeat_timeout = math.ceil(config.advanced.heartbeat_timeout_s * 1000)
    if keys is not None:
        keys.secure_server(router)
    return router


def listen(router: Socket, interface: str, config: CoordinatorConfig) -> str:
    """Bind a socket to `interface`, and return the socket's address, `tcp://address:port`.

    Raises:
        ConfigError: the port is taken, or the address is not an address of this machine.
    """
    port = config.inference_coordinator_port
    host = f"[{interface}]" if ":" in interface else interface
    try:
        router.bind(f"tcp://{host}:{'*' if port is None else port}")
    except zmq.ZMQError as exc:
        if exc.errno == zmq.EADDRINUSE:
            raise ConfigError(
                f"CoordinatorConfig.inference_coordinator_port={port}: another process listens there on "
                f"{config.host}; end it, choose another port, or None for a free one"
            ) from exc
        raise ConfigError(
            f"CoordinatorConfig.host={config.host!r}: cannot listen there ({exc}); give an address of this machine"
        ) from exc
    return router.get_string(zmq.LAST_ENDPOINT)


def resolved(host: str) -> str:
    """Return the IP address of a host name, because libzmq cannot bind to host names. `*` is returned unchanged."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare == "*":
        return bare
    try:
        return str(socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as exc:
        raise ConfigError(
            f"CoordinatorConfig.host={host!r}: no such address ({exc}); give one of this machine"
        ) from exc


TURN_S = 0.005
"""Seconds for which a turn receives messages. It is short, because the turn sends outgoing messages only afterwards."""
MAX_FRAMES_PER_MESSAGE = 512
"""The maximum number of frames per ZMQ message. A longer message is rejected without being decoded. Libzmq takes one message
per peer in turn, so a peer with long messages would get more than its share of the time."""
LONGEST_WAIT_S = 60.0


class DataParallelInferenceCoordinator:
    """The coordinator of a job. It exchanges the messages in `rollout.distributed.protocol.messages` with clients and ranks.

    To serve in a thread of this process, call `start()` and `stop()`. To serve in the current thread, call `bind()` and
    `run()`. The methods about ranks and hashes are not thread-safe: call them before the coordinator has started, or on its
    thread.

    Args:
        config: options of the coordinator.
        keys: the job's keys, including the server's secret key. None, which means no keys, is allowed only on loopback or
            with `CoordinatorConfig.insecure`.

    Raises:
        ConfigError: the host is not loopback, and neither `keys` nor `CoordinatorConfig.insecure` is given.
    """

    CoordinatorState = state.CoordinatorState
    """The enum of the states that a job can be in."""

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
        self._core = CoordinatorCore(config)
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
        # Create a separate ZeroMQ context: a context can have only one ZAP handler (for authentication), and other code
        # may use the global context.
        self._context = Context()
        self._schedule = ScheduleFile(None, self._core.dispatcher.policy, config.data_parallel_size)
        self._gatekeeper: Gatekeeper | None = None
        self._router: Socket
        self._thread: threading.Thread | None = None
        watch(self)

    def describe_state(self) -> Iterator[str]:
        """Yield the lines that `rollout.threads.diagnosis` prints: state, queue, barrier, ranks and clients."""
        table = self._core.status()
        yield (
            f"coordinator: {table['state']}, policy version {table['policy_version']}, {table['queued_samples']} samples "
            "queued"
        )
        yield f"  barrier waits for {table['barrier_waits_for']}"
        for kind in ("rank", "client"):
            for row in table[f"{kind}s"]:
                yield f"  {kind} {', '.join(f'{name} {value!r}' for name, value in row.items())}"

    def bind(self) -> str:
        """Open the socket and the schedule file.

        Returns:
            The address, `tcp://host:port`. The host is a wildcard if the socket listens on all interfaces.

        Raises:
            ConfigError: the port is taken, the host is not this machine, or the schedule file cannot be created.
        """
        config = self._config
        self._schedule = ScheduleFile(
            config.schedule_output_path, self._core.dispatcher.policy, config.data_parallel_size
        )
        if self._keys is not None:
            self._gatekeeper = Gatekeeper(self._context, self._keys)
            self._poll.register(self._gatekeeper.socket.fileno(), select.POLLIN)
        self._router = router_socket(self._context, config, self._keys, ":" in self._interface)
        self._poll.register(self._router.fileno(), select.POLLIN)
        return listen(self._router, self._interface, config)

    def close(self) -> None:
        """Close sockets and files. `run` calls this before it returns. Idempotent."""
        self._texts.close()
        self._schedule.close()
        self._context.destroy(linger=int(GOODBYE_S * 1000))
        self._woken.close()
        self._wake_end.close()

    def _loop(self) -> None:
        while not self._over():
            self._turn()
        now = time.monotonic()
        if not self._core.finished:
            self._core.shutdown(self._stop_reason or "the process that started the coordinator has ended", now)
        self._send(now)

    def _over(self) -> bool:
        deserted = self._orphaned and not self._core.peers.clients
        return self._core.finished or self._stop_reason is not None or deserted

    def _ask_to_stop(self, why: str) -> None:
        self._stop_reason = why
        self._wake()

    def _wake(self) -> None:
        # Ignore errors: a full pipe wakes the loop anyway, and a closed pipe means that the loop has finished.
        with suppress(BlockingIOError, OSError):
            self._wake_end.send(b"\0")

    # --- one turn of the loop ---------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._wait()
        now = time.monotonic()
        if self._gatekeeper is not None:
            self._gatekeeper.answer()
        self._receive(now)
        for job_id, result in self._texts.take_results():
            if isinstance(result, list):
                self._core.detokenized(job_id, result, now)
            else:
                self._core.tokenized(job_id, result, now)
        if now >= self._core.next_deadline():
            self._core.tick(now)
        self._send(now)
        for job in self._core.take_text_jobs():
            self._texts.put(job)
        self._schedule.append(self._core.take_decisions())

    def _wait(self) -> None:
        seconds = min(self._core.next_deadline() - time.monotonic(), LONGEST_WAIT_S)
        # Check for pending input first: the descriptors are edge-triggered, so poll() does not report earlier input.
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
        end = time.monotonic() + TURN_S
        while time.monotonic() < end:
            try:
                address, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if len(frames) > MAX_FRAMES_PER_MESSAGE:
                text = f"message of {len(frames)} frames: at most {MAX_FRAMES_PER_MESSAGE} are accepted; send several"
                self._core.peers.refuse(address.bytes, "malformed", text)
                continue
            for frame in frames:
                self._take(address.bytes, frame.buffer, now)

    def _take(self, peer: bytes, frame: memoryview, now: float) -> None:
        try:
            sequence, message = decode(frame)
        except SerializationError as exc:
            self._core.unreadable(peer, str(exc))
        else:
            self._core.receive(peer, sequence, message, now)

    def _send(self, now: float) -> None:
        # Repeat until nothing is left to send: if sending shows that a peer is lost, its samples are reassigned, which
        # creates more messages.
        while taken := self._core.take_outbox():
            frames: dict[bytes, list[bytes]] = {}
            for peer, sequence, message in taken:
                frame = encode(sequence, message)
                if len(frame) > MAX_FRAME_BYTES:
                    self._core.too_long(peer, message, len(frame), now)
                    frame = encode(sequence, Heartbeat())
                frames.setdefault(peer, []).append(frame)
            for peer, together in frames.items():
                if why := self._send_to(peer, together):
                    self._core.unreachable(peer, why, now)

    def _send_to(self, peer: bytes, frames: list[bytes]) -> str | None:
        """Send frames to a peer in as few ZMQ messages as possible. Return why the peer is lost, or None."""
        try:
            for first in range(0, len(frames), MAX_FRAMES_PER_MESSAGE):
                # Pass copy=False: libzmq then sends frames of more than 64 KiB without copying them.
                message = [peer, *frames[first : first + MAX_FRAMES_PER_MESSAGE]]
                self._router.send_multipart(message, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return f"it does not read: {PIPE_MESSAGES} messages wait for it"
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            return "its connection is gone"
        return None

    # --- running as a thread or process ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until the job stops, `stop()` is called, or the launcher and all clients have exited."""
        try:
            self._loop()
        finally:
            self.close()

    def start(self) -> str:
        """Bind the socket and serve in a daemon thread; return the address."""
        address = self.bind()
        self._thread = threading.Thread(target=self.run, name="coordinator", daemon=True)
        self._thread.start()
        return address

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop serving and disconnect all peers. Open requests fail with an error. Call this from another thread.

        Raises:
            DeadlineError: the coordinator's thread still runs after `timeout_s` seconds.
        """
        self._ask_to_stop("the coordinator was stopped")
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise DeadlineError(f"coordinator: has not ended within timeout_s={timeout_s}")

    @classmethod
    def entrypoint(
        cls, pipe: Connection, ready_event: Event, config: CoordinatorConfig, keys: JobKeys | None = None
    ) -> None:
        """Run in a `multiprocessing.Process`: send the address through the pipe, set the event, serve.

        The call returns when the job has stopped, or when the parent process has died and no client is connected.
        """
        from multiprocessing import parent_process

        parent = parent_process()
        coordinator = cls(config, keys)

        def announce(address: str) -> None:
            pipe.send(address)
            ready_event.set()

        coordinator.serve(announce, None if parent is None else parent.sentinel)

    def serve(self, announce: Callable[[str], None], launcher: int | None) -> None:
        """Bind, announce the address, and serve on a dedicated process's main thread until the job stops or SIGTERM arrives.

        Args:
            announce: a function that is called with the address.
            launcher: a file descriptor that becomes readable or closes when the launcher dies; None if nothing is watched.
        """
        # Ignore Ctrl-C: a terminal sends it to all processes of the job, but only the trainer must handle it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._ask_to_stop("the coordinator was terminated"))
        # Let signals wake the poll, or a signal just before the poll would be handled only after the poll's timeout.
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        _allow_many_connections()
        # Disable the cyclic garbage collector: this process creates no reference cycles, and a collection would block
        # it for 0.3 s per 100,000 requests.
        gc.freeze()
        gc.disable()
        if launcher is not None:
            self._launcher = launcher
            self._poll.register(launcher, select.POLLIN)
        try:
            announce(self.bind())
            self._loop()
        finally:
            signal.set_wakeup_fd(-1)
            self.close()

    # --- routing, for inspection --------------------------------------------------------------------------------------

    def get_next_data_parallel_rank(self) -> str | None:
        """Return the name of the rank that would get a request without cached blocks, or None if no rank has room."""
        return self.get_best_data_parallel_rank(())

    def get_best_data_parallel_rank(self, hashes: Sequence[int]) -> str | None:
        """Return the name of the rank that would get a request with these block hashes, or None if no rank has room."""
        placements = self._core.dispatcher.router.place(hashes, 1)
        return placements[0].rank if placements else None

    def compute_request_hashes(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the block hashes that a rank would compute for a prompt, or an empty list if prefix caching is off.

        Raises:
            InvalidRequestError: the text cannot be tokenised, or no tokenizer is configured.
        """
        if not self._config.enable_prefix_caching:
            return []
        tokens = self._codec.tokenize(prompt) if isinstance(prompt, str) else prompt
        return compute_block_hashes_batched(tokens, self._config.block_size_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of a completion without special tokens, or None if the completion cannot be decoded."""
        return self._codec.detokenize([np.asarray(token_ids, "<i4").tobytes()])[0]

    def _update_rank_hashes(self, name: str, hashes: Sequence[int]) -> None:
        self._core.dispatcher.router.reported(name, hashes, (), False)

    def _remove_engine(self, name: str) -> None:
        identity = self._core.peers.by_name[name].identity
        self._core.unreachable(identity, "it was removed", time.monotonic())

    def _send_to_engine(self, name: str, message: Message) -> bool:
        """Send a message to a rank; return whether the rank is still connected."""
        if name not in self._core.peers.by_name:
            return False
        self._core.peers.say(self._core.peers.by_name[name], message)
        self._send(time.monotonic())
        return name in self._core.peers.by_name


def _has_input(router: Socket) -> bool:
    return bool(int(router.get(zmq.EVENTS)) & zmq.POLLIN)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files (usually 1024) to the hard limit, because each peer takes one descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
