"""One session of a rank with a coordinator: connection, state machine, and the messages not yet applied."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollout.distributed.protocol import messages as wire
from rollout.distributed.transport.dealer import Dealer
from rollout.distributed.worker.session import RankSession
from rollout.errors import ConnectionLostError


@dataclass(eq=False)
class Link:
    """A session with its inbox. Every method except `put` requires the engine's lock."""

    address: str
    name: str
    dealer: Dealer
    session: RankSession
    inbox: deque[wire.Message | ConnectionLostError] = field(default_factory=deque)
    cut: bool = False
    """Whether the session is ending: nothing is sent, and incoming messages are dropped."""
    error: Exception | None = None
    """The reason why the session has ended, or None."""

    @property
    def live(self) -> bool:
        """Whether the coordinator has accepted the rank and the session is not ending."""
        return self.session.entered and not self.cut

    def transmit(self, message: wire.Message) -> None:
        """Send a message, on the loop's thread, unless the connection was closed in the meantime."""
        if self.dealer.is_open:
            self.dealer.send(message)

    def put(self, item: wire.Message | ConnectionLostError) -> None:
        """Queue a message, or the loss of the connection."""
        self.cut = self.cut or isinstance(item, ConnectionLostError)
        self.inbox.append(item)

    def apply(self) -> None:
        """Apply the messages received so far; raise if the session is lost or the engine cannot follow it."""
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
