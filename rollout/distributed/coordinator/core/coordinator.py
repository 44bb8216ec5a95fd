"""The coordinator's state machine: messages in, messages out. No I/O; the clock is passed in (`now`, in monotonic seconds).

    CoordinatorCore            passes each message to the part that handles it; timers; outgoing messages
     ├ Sessions                handshake, sequence numbers, heartbeats, end of a session
     ├ RequestTable            open requests from submission to outcome; memory limits, texts, deadlines
     ├ Dispatcher ─ Router     queue samples and choose a rank for each
     └ ControlPlane, Barriers  control calls to all engines; barriers of the ranks' training loops

- An accepted request finishes once: with an outcome for each of its samples, or with one error that names the request.
- Samples of a lost rank return to their old place in the queue and continue after the last token received.
- A rank's report about an assignment that it no longer has is ignored. A malformed report ends the rank's session.
- A message from one peer affects another peer's requests only through the documented effect of the message.
"""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Sequence
from typing import Any

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.control import Barriers, ControlPlane
from rollout.distributed.coordinator.core.dispatch import Dispatcher, ScheduleRecord
from rollout.distributed.coordinator.core.peers import Peers
from rollout.distributed.coordinator.core.request_table import RequestTable
from rollout.distributed.coordinator.core.requests import ClientPeer, Peer, RankPeer, TextJob
from rollout.distributed.coordinator.core.sessions import Sessions
from rollout.distributed.protocol import messages as wire
from rollout.errors import SerializationError
from rollout.state import ControlSignal, CoordinatorState, EngineState


class CoordinatorCore:
    """The state machine that distributes clients' requests over ranks and forwards control calls to engines."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.peers = Peers()
        self.control = ControlPlane(self.peers, self._engines_stopped)
        self.barriers = Barriers(self.peers, config.data_parallel_size)
        self.dispatcher = Dispatcher(config, self.peers)
        self.requests = RequestTable(config, self.peers, self.dispatcher)
        self.sessions = Sessions(config, self.peers, self.control, self.barriers, self.dispatcher, self.requests)
        self._shut_down = False
        self._now = 0.0

    @property
    def finished(self) -> bool:
        """Whether the coordinator has nothing left to do: it was shut down, or all peers have left after a STOP."""
        return self._shut_down or (self.control.stopped and not len(self.peers))

    # --- received messages ------------------------------------------------------------------------------------------

    def receive(self, identity: bytes, sequence: int, message: wire.Message, now: float) -> None:
        """Handle a message from a peer. Never raises, even for a malformed message."""
        self._now = now
        peer = self.peers.get(identity)
        if peer is None:
            self.sessions.greet(identity, sequence, message, now)
            self.requests.look_for_ranks(now)
        elif self.sessions.is_next(peer, sequence, now):
            if isinstance(message, wire.Heartbeat):
                # Do not dispatch: a heartbeat changes neither the queue nor a rank's load, and with 1,000 ranks the
                # check for room would be most of its cost.
                return
            self._take(peer, message)
        self._go_on()

    def _take(self, peer: Peer, message: wire.Message) -> None:
        match peer, message:
            case RankPeer(), wire.Progress():
                self._progress(peer, message)
            case _, wire.Disconnect():
                self.sessions.leave(peer, message.reason or "it has disconnected", self._now, died=False)
            case ClientPeer(), wire.Submit():
                stopping = self.control.state is CoordinatorState.STOPPING
                self.requests.submit(peer, message, self._now, stopping=stopping)
            case ClientPeer(), wire.Abort():
                if (request := peer.requests.get(message.request_id)) is not None:
                    self.requests.fail(request, "RequestAbortedError", "it was aborted")
            case ClientPeer(), wire.Control():
                self.control.call(peer, message, self._now)
                if message.signal == ControlSignal.STOP and self.control.state is CoordinatorState.STOPPING:
                    self.requests.fail_queued("RequestAbortedError", "the engines were stopped")
            case ClientPeer(), wire.Barrier():
                self.barriers.come(peer, message)
                self.dispatcher.look_at_versions()
            case ClientPeer(), wire.StatusQuery():
                self.peers.say(peer, wire.Status(message.call_id, self.status()))
            case RankPeer(), wire.Decline():
                assignment = peer.assignments.get(message.attempt)
                if assignment and not assignment.held and assignment.request.request_id == message.request_id:
                    self.requests.fail(assignment.request, message.error, message.text)
            case RankPeer(), wire.CommandAck() | wire.EngineMoved():
                self._moved(peer, message)
            case _:
                kind = "client" if isinstance(peer, ClientPeer) else "rank"
                self.peers.refuse(peer.identity, "not_yours", f"a {kind} does not send {type(message).__name__}")

    def _moved(self, rank: RankPeer, message: wire.CommandAck | wire.EngineMoved) -> None:
        rank.state = EngineState(message.state)
        if message.policy_version > rank.policy_version:
            rank.policy_version = message.policy_version
            self.dispatcher.router.version_changed(rank.name)
        self.control.policy_version = max(self.control.policy_version, message.policy_version)
        if isinstance(message, wire.CommandAck):
            self.control.acknowledged(rank, message)
        else:
            rank.resting, rank.waited_for_since, rank.ready = message.resting, math.inf, True
        self.dispatcher.rank_moved(rank)
        self.requests.look_for_ranks(self._now)

    def _progress(self, rank: RankPeer, message: wire.Progress) -> None:
        rank.running, rank.waiting, rank.progressed = message.running, message.waiting, self._now
        self.dispatcher.blocks_changed(rank, message.blocks_added, message.blocks_removed, message.flushed)
        rank.tokens += sum(sum(stretch.counts) for stretch in message.stretches)
        rank.latencies.extend(struct.iter_unpack("<2f", message.latencies))
        for stretch in message.stretches:
            assignment = rank.assignments.get(stretch.attempt)
            # Skip tokens of an unknown attempt: it was cancelled while the tokens were in transit.
            if assignment is None or assignment.held or assignment.request.request_id != stretch.request_id:
                continue
            try:
                if not assignment.samples.issuperset(stretch.indices):
                    samples = reprlib.repr(stretch.indices)
                    raise SerializationError(f"samples {samples} are not of attempt {stretch.attempt}")
                self.requests.advance(assignment, stretch)
            except SerializationError as exc:
                self.sessions.end(rank, "malformed", str(exc), self._now)
                return

    def unreadable(self, identity: bytes, text: str) -> None:
        """Reject a frame that cannot be decoded, with the reason `text`. The peer's session continues."""
        peer = self.peers.get(identity)
        if peer is not None:
            peer.frames.skip()
        self.peers.refuse(identity, "malformed", text)

    def shutdown(self, why: str, now: float) -> None:
        """Disconnect all peers with the reason `why`. Clients then fail their open requests."""
        self._now = now
        for peer in self.peers:
            self.peers.say(peer, wire.Disconnect(why[:256]))
        self._shut_down = True

    def too_long(self, identity: bytes, message: wire.Message, size: int, now: float) -> None:
        """Handle an outgoing message that was not sent because it exceeds the frame size.

        If the message is an assignment, its request fails; otherwise the peer's session ends."""
        self._now = now
        peer = self.peers.get(identity)
        why = f"a {type(message).__name__} takes {size} bytes, more than a frame may have; split the request"
        if isinstance(peer, RankPeer) and isinstance(message, wire.Assign):
            if (assignment := peer.assignments.get(message.attempt)) is not None:
                self.requests.fail(assignment.request, "InvalidRequestError", why)
        elif peer is not None:
            self.sessions.end(peer, "too_long", why, now)
        self._go_on()

    def unreachable(self, identity: bytes, why: str, now: float) -> None:
        """Handle the loss of a peer's connection, with `why` as the reason in error messages."""
        self._now = now
        peer = self.peers.get(identity)
        if peer is not None:
            self.sessions.leave(peer, why, now, died=True)
            self._go_on()

    def tick(self, now: float) -> None:
        """Handle everything that depends on time: heartbeats, silent peers, deadlines, grace periods."""
        self._now = now
        self.sessions.beat(now)
        self.control.expire(now)
        self.barriers.expire(now)
        self.requests.expire(now)
        self.requests.look_for_ranks(now)
        self.requests.give_up(now)
        if self.control.state is not CoordinatorState.STOPPING:
            self.dispatcher.look_for_away(now)
        self._go_on()

    def next_deadline(self) -> float:
        """Return the time at which `tick` must be called next, in monotonic seconds."""
        return min(self.sessions.next_beat(), self.control.next_deadline(), self.requests.next_deadline())

    def tokenized(self, job_id: int, tokens: Sequence[int] | Exception, now: float) -> None:
        """Handle the result of a tokenisation job: the prompt's tokens, or an error."""
        self._now = now
        self.requests.tokenized(job_id, tokens)
        self._go_on()

    def detokenized(self, job_id: int, texts: Sequence[str | None], now: float) -> None:
        """Handle the result of a detokenisation job: the texts of finished completions."""
        self._now = now
        self.requests.detokenized(job_id, texts)

    def _go_on(self) -> None:
        if self.control.state is not CoordinatorState.STOPPING:
            self.dispatcher.dispatch()

    def _engines_stopped(self) -> None:
        self.requests.fail_all("RequestAbortedError", "the engines were stopped")

    # --- messages to send -------------------------------------------------------------------------------------------

    def take_outbox(self) -> list[tuple[bytes, int, wire.Message]]:
        """Return the messages queued since the last call, in order, as (peer identity, sequence number, message)."""
        return self.peers.take_outbox(self._now)

    def take_text_jobs(self) -> list[TextJob]:
        """Return the tokenizer jobs since the last call. Each is answered with `tokenized` or `detokenized`."""
        return self.requests.take_text_jobs()

    def take_decisions(self) -> list[ScheduleRecord]:
        """Return the routing decisions made since the last call."""
        taken, self.dispatcher.decisions = self.dispatcher.decisions, []
        return taken

    def status(self) -> dict[str, Any]:
        """Return a snapshot of the job as plain values for a `Status` message. Durations are in seconds."""
        open_requests = list(self.requests)
        latencies = [pair for rank in self.peers.ranks.values() for pair in rank.latencies]
        return {
            "state": self.control.state.value,
            "policy_version": self.control.policy_version,
            "queued_samples": sum(len(each.queued) for each in open_requests),
            "oldest_request_s": max((self._now - each.since for each in open_requests), default=None),
            "first_token_s": _median_and_p99([first for first, _ in latencies]),
            "per_token_s": _median_and_p99([each for _, each in latencies]),
            "ranks": [
                {
                    "name": rank.name,
                    "state": rank.state.value,
                    "policy_version": rank.policy_version,
                    "ready": rank.ready,
                    "resting": rank.resting,
                    "max_requests": rank.max_requests,
                    "assigned_samples": sum(len(each.samples) for each in rank.assignments.values()),
                    "running": rank.running,
                    "waiting": rank.waiting,
                    "tokens": rank.tokens,
                    "silent_for_s": max(0.0, self._now - rank.heard),
                    "since_progress_s": max(0.0, self._now - rank.progressed),
                }
                for rank in sorted(self.peers.ranks.values(), key=lambda rank: rank.name)
            ],
            "clients": [
                {"name": client.name, "open_requests": len(client.requests), "member": client.member is not None}
                for client in sorted(self.peers.clients.values(), key=lambda client: client.name)
            ],
            "barrier_waits_for": self.barriers.missing(),
        }


def _median_and_p99(seconds: list[float]) -> list[float]:
    """Return [median, 99th percentile], or an empty list if there are no values."""
    ordered = sorted(seconds)
    return [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99)] if ordered else []
