"""Connection of a client to a coordinator: handshake, heartbeat, loss, and calls that are answered within a deadline.

Always true: after the connection is lost, every call raises `ConnectionLostError` immediately; another client is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rollout.distributed.client.session import Call, ClientSession
from rollout.distributed.protocol.messages import (
    PROTOCOL_VERSION,
    Connect,
    ConnectAck,
    Message,
    Refused,
    version_mismatch,
)
from rollout.distributed.transport.dealer import Dealer
from rollout.errors import ConfigError, ConnectionLostError, DeadlineError, SerializationError
from rollout.state import CoordinatorState
from rollout.threads.diagnosis import answer_signal, watch

if TYPE_CHECKING:
    from rollout.distributed.transport.keys import JobKeys


class ClientConnection:
    """A client's session with a coordinator, from `start` to `stop` or to its loss.

    Args:
        address: `tcp://host:port`.
        name: shown in logs.
        keys: of the job, if the coordinator requires them.
        member: rank whose training loop this client is; None: not a member.
    """

    def __init__(self, address: str, name: str, keys: JobKeys | None, member: int | None) -> None:
        if not isinstance(name, str) or len(name) > 256:
            raise ConfigError(f"name={name!r}: must be a string of at most 256 characters")
        if member is not None and (type(member) is not int or member < 0):
            raise ConfigError(f"member={member!r}: must be None or the number of a rank, from 0")
        self.address = address
        self.name = name
        self._member = member
        self._dealer = Dealer(address, name, keys=keys, on_message=self._receive, on_lost=self._lost)
        self._session = ClientSession(self._dealer.send, on_refused=self._refused)
        self._greeting: asyncio.Future[ConnectAck] | None = None
        self._welcome: ConnectAck | None = None
        self._state: CoordinatorState | None = None
        self._policy_version: int | None = None
        self._next_barrier = 0
        watch(self)
        answer_signal()

    def describe_state(self) -> Iterator[str]:
        """Lines for `rollout.threads.diagnosis`."""
        how = f"lost ({self.lost})" if self.lost is not None else "connected" if self.connected else "not connected"
        yield f"client {self.name!r} of {self.address}: {how}; {self._session.waits_for()}"

    async def start(self, timeout_s: float = 30.0) -> None:
        """Connect and perform the handshake. Idempotent.

        Raises:
            DeadlineError: no answer within `timeout_s`.
            ConnectionLostError: the coordinator refused or has another protocol version, or the connection was lost or
                stopped before; create another client.
            ConfigError: invalid address.
        """
        if self.lost is not None:
            raise ConnectionLostError(f"{self.lost}; build another client")
        if self.connected:
            return
        if self._greeting is not None:
            raise RuntimeError(f"client {self.name!r}: start() while another start() waits for the coordinator")
        self._greeting = asyncio.get_running_loop().create_future()
        try:
            self._dealer.open()
            self._dealer.send(Connect(PROTOCOL_VERSION, self.name, self._member))
            done, _ = await asyncio.wait((self._greeting,), timeout=timeout_s)
            if not done:
                raise DeadlineError(
                    f"no coordinator answered at {self.address} within timeout_s={timeout_s}; is it running there, and "
                    "does this client have the keys of its job?"
                )
            welcome = self._greeting.result()
        except BaseException as exc:
            self._dealer.close("the handshake failed", quietly=isinstance(exc, DeadlineError))
            raise
        finally:
            self._greeting = None
        self._welcome = welcome
        self._state = CoordinatorState(welcome.state)
        self._policy_version = welcome.policy_version
        self._next_barrier = welcome.next_barrier
        self._dealer.heartbeat(welcome.heartbeat_interval_s, welcome.heartbeat_timeout_s)

    async def stop(self) -> None:
        """Disconnect; open requests and calls fail with `ConnectionLostError`. Idempotent."""
        self._dealer.close(f"client {self.name!r} has stopped")
        self._lost(ConnectionLostError(f"{self.address}: client {self.name!r} was stopped"))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def connected(self) -> bool:
        """Whether the handshake is done and the connection is alive."""
        return self._welcome is not None and self.lost is None

    @property
    def lost(self) -> ConnectionLostError | None:
        """Why the connection was lost, or None."""
        return self._session.error

    @property
    def instance(self) -> str | None:
        """Unique id of the coordinator's run; None before `start`."""
        return None if self._welcome is None else self._welcome.instance

    @property
    def next_barrier(self) -> int:
        """Index of the first barrier not known to be passed; 0 before `start`."""
        return self._next_barrier

    @property
    def state(self) -> CoordinatorState | None:
        """Coordinator state at the handshake, updated by this client's own calls only; None before `start`."""
        return self._state

    @property
    def policy_version(self) -> int | None:
        """Policy version at the handshake, updated by this client's own calls only; None before `start`."""
        return self._policy_version

    # --- calls --------------------------------------------------------------------------------------------------

    def _refuse_unless_connected(self) -> None:
        if self.lost is not None:
            raise ConnectionLostError(str(self.lost))
        if self._welcome is None:
            raise ConnectionLostError(f"{self.address}: client {self.name!r} is not connected; await start() first")

    async def _answer(self, call: Call, timeout_s: float, what: str) -> dict[str, Any] | None:
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: Call) -> None:
            if not answered.done():
                answered.set_result(None)

        call.on_done = wake
        try:
            await asyncio.wait((answered,), timeout=timeout_s)
        finally:
            answered.cancel()
            self._session.forget(call)
        if not call.done:
            raise DeadlineError(f"{what}: no answer from the coordinator at {self.address} within {timeout_s} s")
        if call.error is not None:
            raise call.error
        return call.value

    # --- what arrives -------------------------------------------------------------------------------------------

    def _receive(self, message: Message) -> None:
        if self._greeting is None or self._greeting.done():
            self._session.receive(message)
        elif not isinstance(message, ConnectAck):
            raise SerializationError(f"{type(message).__name__} arrived where ConnectAck must: that is no coordinator")
        else:
            mismatch = version_mismatch(message.protocol_version, PROTOCOL_VERSION)
            if mismatch is not None:
                raise SerializationError(mismatch)
            self._greeting.set_result(message)

    def _lost(self, error: ConnectionLostError) -> None:
        self._session.lost(error)
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(error)

    def _refused(self, message: Refused) -> None:
        # Which frame it was is unknown, so its reply would be waited for in vain.
        why = f"the coordinator could not take a frame ({message.code}): {message.text}"
        self._dealer.close(why)
        self._lost(ConnectionLostError(f"{self.address}: {why}; this is a bug or a mix of versions", final=True))
