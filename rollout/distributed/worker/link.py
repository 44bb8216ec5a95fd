"""One session of a rank with a coordinator: connection, state machine, and received messages that are not applied yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollout.distributed.protocol import messages as wire
from rollout.distributed.transport.dealer import Dealer
from rollout.distributed.worker.session import RankSession
from rollout.errors import ConnectionLostError


@dataclass(eq=False)
class Link:
    """A session with its connection and inbox. The caller of every method except `put` must hold the engine's lock."""

    address: str
    name: str
    dealer: Dealer
    session: RankSession
    inbox: deque[wire.Message | ConnectionLostError] = field(default_factory=deque)
    cut: bool = False
    """Whether the session is ending. Nothing is sent any more, and incoming messages are dropped."""
    error: Exception | None = None
    """The error with which the session has ended; None while the session is open."""

    @property
    def live(self) -> bool:
        """Whether the coordinator has accepted the rank and the session is not ending."""
        return self.session.entered and not self.cut

    def transmit(self, message: wire.Message) -> None:
        """Send a message, or do nothing if the connection is closed. Runs on the event loop's thread."""
        if self.dealer.is_open:
            self.dealer.send(message)

    def put(self, item: wire.Message | ConnectionLostError) -> None:
        """Queue a received message, or the error with which the connection was lost."""
        self.cut = self.cut or isinstance(item, ConnectionLostError)
        self.inbox.append(item)

    def apply(self) -> None:
        """Apply the messages received so far.

        Raises an exception if the session is lost, or if the engine cannot apply a message.
        """
        for _ in range(len(self.inbox)):
            item = self.inbox.popleft()
            if isinstance(item, ConnectionLostError):
                raise item
            if isinstance(item, wire.Refused) and not self.cut:
                raise ConnectionLostError(
                    f"{self.address}: the coordinator could not take a frame of worker {self.name!r} ({item.code}): "
                    f"{item.text}; this is a bug or a mix of versions",
                    final=True,
                )
            if not self.cut:
                self.session.receive(item)
