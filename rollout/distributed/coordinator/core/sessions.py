"""The sessions of peers: handshake, sequence numbers, heartbeats, and cleanup at the end. No I/O; the clock is passed in.

There is at most one session per ZMQ identity, per rank name and per member (the client of a rank's training loop). When a
client's session ends, its requests are closed. When a rank's session ends, its assigned samples return to the queue.
"""

from __future__ import annotations

import math
from typing import cast

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.control import Barriers, ControlPlane
from rollout.distributed.coordinator.core.dispatch import Dispatcher
from rollout.distributed.coordinator.core.peers import Peers, shortened
from rollout.distributed.coordinator.core.request_table import RequestTable
from rollout.distributed.coordinator.core.requests import ClientPeer, Peer, RankPeer
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.fields import LostFramesError
from rollout.distributed.protocol.frames import Sequencer
from rollout.state import CoordinatorState, EngineState

MAX_RANK_LOSSES = 5
"""The number of ranks that may be lost in a row while they compute a request, without a new token of the request. Then the
request fails, because it is probably the cause of the losses."""


class Sessions:
    """A manager of the sessions in `Peers`, which opens sessions, checks that their peers are alive, and ends sessions."""

    def __init__(
        self,
        config: CoordinatorConfig,
        peers: Peers,
        control: ControlPlane,
        barriers: Barriers,
        dispatcher: Dispatcher,
        requests: RequestTable,
    ) -> None:
        self._config = config
        self._peers = peers
        self._control = control
        self._barriers = barriers
        self._dispatcher = dispatcher
        self._requests = requests
        self.max_rank_losses = MAX_RANK_LOSSES
        self._last_beat = -math.inf

    # --- handshake --------------------------------------------------------------------------------------------------

    def greet(self, identity: bytes, sequence: int, message: wire.Message, now: float) -> None:
        """Open a session for a new peer, or reject it with a reason."""
        if not isinstance(message, wire.Connect | wire.Register) or sequence != 0:
            if not isinstance(message, wire.Disconnect):
                text = "no session at this coordinator: reconnect (it was restarted, or has closed the session)"
                self._peers.refuse(identity, "unknown_peer", text)
        elif (theirs := message.protocol_version) != (ours := wire.PROTOCOL_VERSION):
            older = "the coordinator" if ours < theirs else "this side"
            text = f"the coordinator speaks protocol version {ours} and this side {theirs}; upgrade {older}"
            self._peers.refuse(identity, "version", text)
        elif self._control.state is CoordinatorState.STOPPING:
            self._peers.refuse(identity, "stopping", "the job is stopping; start another coordinator")
        elif isinstance(message, wire.Connect):
            self._greet_client(identity, message, now)
        else:
            self._greet_rank(identity, message, now)

    def _greet_client(self, identity: bytes, message: wire.Connect, now: float) -> None:
        size = self._config.data_parallel_size
        if message.member is not None and message.member >= size:
            text = f"member={message.member}: must be below data_parallel_size={size}"
            self._peers.refuse(identity, "malformed", text)
            return
        for older in [each for each in self._peers.clients.values() if each.member is not None]:
            if older.member == message.member:
                text = f"another process has connected as member {message.member}, {message.name!r}"
                self.end(older, "replaced", text, now)
        client = ClientPeer(identity, message.name, now, now, _begun(), message.member)
        self._peers.clients[identity] = client
        if client.member is not None:
            client.catching_up = True
            self._barriers.joined(client)
        self._peers.say(client, wire.ConnectAck(*self._terms(), self._barriers.passed + 1))

    def _greet_rank(self, identity: bytes, message: wire.Register, now: float) -> None:
        if message.max_requests < 1 or message.block_size != self._config.block_size_tokens:
            self._peers.refuse(
                identity,
                "malformed",
                f"max_requests={message.max_requests}, block_size={message.block_size}: must be at least 1, and the "
                f"coordinator's block_size_tokens={self._config.block_size_tokens}",
            )
            return
        if message.name in self._peers.by_name:
            text = f"another process has registered as {message.name!r}"
            self.end(self._peers.by_name[message.name], "replaced", text, now)
        rank = RankPeer(
            identity, message.name, now, now, _begun(), message.max_requests, EngineState(message.state),
            message.policy_version, progressed=now,
        )  # fmt: skip
        self._peers.add_rank(rank)
        self._dispatcher.add_rank(rank, message.hashes)
        self._control.policy_version = max(self._control.policy_version, rank.policy_version)
        self._peers.say(rank, wire.RegisterAck(*self._terms()))

    def _terms(self) -> tuple[str, int, float, float]:
        """Return the fields that `ConnectAck` and `RegisterAck` share: state, version, heartbeat interval and timeout."""
        config, control = self._config, self._control
        return (
            control.state.value, control.policy_version, config.advanced.heartbeat_interval_s,
            config.advanced.heartbeat_timeout_s,
        )  # fmt: skip

    # --- frames and heartbeats --------------------------------------------------------------------------------------

    def is_next(self, peer: Peer, sequence: int, now: float) -> bool:
        """Return whether a frame is the peer's next frame.

        If not, the frame is a duplicate, or earlier frames were lost and the session has been ended."""
        try:
            new = peer.frames.accept(sequence)
        except LostFramesError as exc:
            self.end(peer, "lost_frames", str(exc), now)
            return False
        if new:
            peer.heard = now
        return new

    def beat(self, now: float) -> None:
        """End the sessions of silent peers, and send heartbeats to peers that were not sent anything for a while."""
        interval, timeout = self._config.advanced.heartbeat_interval_s, self._config.advanced.heartbeat_timeout_s
        last, self._last_beat = self._last_beat, now
        if now - last > timeout / 2:
            # Do not count peers as silent if this process itself stalled, because their frames may still be unread.
            for peer in self._peers:
                peer.heard = now
            for rank in self._peers.ranks.values():
                rank.waited_for_since = math.inf
        for peer in self._peers:
            if now - peer.heard > timeout:
                self.end(peer, "silent", f"no frame was received from it for {timeout} s", now)
            elif now - peer.spoken >= interval / 2:
                self._peers.say(peer, wire.Heartbeat())

    def next_beat(self) -> float:
        """Return the time at which `beat` must be called next, in monotonic seconds."""
        return self._last_beat + self._config.advanced.heartbeat_interval_s / 2

    # --- ends of sessions -------------------------------------------------------------------------------------------

    def end(self, peer: Peer, code: str, text: str, now: float) -> None:
        """End a session: send the peer the reason (`code`, and `text` in words), and treat the peer as lost."""
        self._peers.say(peer, wire.Refused(code, shortened(text), True))
        self.leave(peer, text, now, died=True)

    def leave(self, peer: Peer, why: str, now: float, *, died: bool) -> None:
        """Remove a session that has ended. Close the requests of a client, or requeue the samples assigned to a rank.

        Args:
            why: reason, for error messages.
            died: whether the session ended unexpectedly. Barriers then still wait for a lost member for a grace period.
        """
        self._peers.drop(peer)
        self._control.lost(peer.identity)
        if isinstance(peer, ClientPeer):
            for request in list(peer.requests.values()):
                self._requests.close(request)
            if peer.member is not None:
                self._barriers.left(peer, now + self._config.advanced.heartbeat_timeout_s * died)
                self._barriers.expire(now)
        else:
            self._lose_rank(cast(RankPeer, peer), why, died)
        self._requests.look_for_ranks(now)

    def _lose_rank(self, rank: RankPeer, why: str, died: bool) -> None:
        for request in self._dispatcher.remove_rank(rank):
            request.losses += died
            if request.losses >= self.max_rank_losses:
                self._requests.fail(
                    request,
                    "RankLostError",
                    f"{request.losses} ranks were lost while it was there, without a new token of it; the last, "
                    f"{rank.name!r}, because: {why}; it is given to no other",
                )


def _begun() -> Sequencer:
    frames = Sequencer()
    frames.accept(0)
    return frames
