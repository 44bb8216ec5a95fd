"""The registry of connected clients and ranks, with the messages to send to each. No I/O, no clock.

Messages to a peer are sent in order and numbered without a gap. All stretches (batches of new tokens) for one client
in one turn of the coordinator's loop are sent in one `Update`, or in several if one would be too long.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollout.distributed.coordinator.core.requests import ClientPeer, Peer, RankPeer
from rollout.distributed.protocol.frames import MAX_STRETCHES
from rollout.distributed.protocol.messages import Message, Refused, Stretch, Update

UPDATE_BYTES = 4 << 20
"""The size, in bytes, after which no further batch of tokens is added to an `Update`, which must fit into a frame."""
SAMPLE_BYTES = 128
"""The number of bytes that each sample adds to the estimated size of an `Update`, on top of its buffers. Because of this
addition, `UPDATE_BYTES` also limits the number of samples in the message."""
MAX_ERROR_CHARACTERS = 2000
"""The maximum length of an error text sent to a peer. Without this limit, the text could quote megabytes of input."""


class Peers:
    """The open sessions, indexed by the peer's identity, and the messages to send."""

    def __init__(self) -> None:
        self.clients: dict[bytes, ClientPeer] = {}
        self.ranks: dict[bytes, RankPeer] = {}
        self.by_name: dict[str, RankPeer] = {}
        """The sessions of the connected ranks, by rank name."""
        self._outbox: list[tuple[bytes, int, Message]] = []
        self._with_stretches: dict[bytes, ClientPeer] = {}
        self._said_to: list[Peer] = []

    def __len__(self) -> int:
        return len(self.clients) + len(self.ranks)

    def __iter__(self) -> Iterator[Peer]:
        yield from list(self.ranks.values())
        yield from list(self.clients.values())

    def get(self, identity: bytes) -> Peer | None:
        return self.ranks.get(identity) or self.clients.get(identity)

    def add_rank(self, rank: RankPeer) -> None:
        self.ranks[rank.identity] = self.by_name[rank.name] = rank

    def drop(self, peer: Peer) -> None:
        self.clients.pop(peer.identity, None)
        if self.ranks.pop(peer.identity, None) is not None:
            del self.by_name[peer.name]
        self._with_stretches.pop(peer.identity, None)

    def say(self, peer: Peer, message: Message) -> None:
        """Queue a message for a peer. New tokens that wait for the peer's next `Update` are sent before the message."""
        if peer.identity in self._with_stretches:
            self._flush(self._with_stretches.pop(peer.identity))
        self._put(peer, message)

    def refuse(self, identity: bytes, code: str, text: str) -> None:
        """Queue a `Refused` message for a rejected frame. The message's `over` is True if the peer has no session."""
        peer = self.get(identity)
        if peer is None:
            self._outbox.append((identity, 0, Refused(code, shortened(text), True)))
        else:
            self.say(peer, Refused(code, shortened(text), False))

    def say_stretch(self, client: ClientPeer, stretch: Stretch) -> None:
        """Add a stretch (a batch of new tokens) to the client's next `Update` message."""
        size = stretch.buffer_bytes + SAMPLE_BYTES * len(stretch.indices)
        too_long = client.stretch_bytes + size > UPDATE_BYTES or len(client.stretches) >= MAX_STRETCHES
        if client.stretches and too_long:
            self._flush(client)
        client.stretches.append(stretch)
        client.stretch_bytes += size
        self._with_stretches[client.identity] = client

    def take_outbox(self, now: float) -> list[tuple[bytes, int, Message]]:
        """Return all messages queued since the last call, as (peer identity, sequence number, message)."""
        for client in self._with_stretches.values():
            self._flush(client)
        self._with_stretches.clear()
        for peer in self._said_to:
            peer.spoken = now
        self._said_to.clear()
        taken, self._outbox = self._outbox, []
        return taken

    def _flush(self, client: ClientPeer) -> None:
        stretches, client.stretches, client.stretch_bytes = client.stretches, [], 0
        self._put(client, Update(stretches))

    def _put(self, peer: Peer, message: Message) -> None:
        self._said_to.append(peer)
        self._outbox.append((peer.identity, peer.frames.next(), message))


def shortened(text: str) -> str:
    """Shorten an error text to about `MAX_ERROR_CHARACTERS` by removing its middle."""
    if len(text) <= MAX_ERROR_CHARACTERS:
        return text
    half = MAX_ERROR_CHARACTERS // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"
