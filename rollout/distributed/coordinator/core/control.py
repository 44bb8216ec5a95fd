"""Control calls and barriers: pending answers per call, deadlines, completion. No I/O, no clock.

A call completes when every engine that was there when it was made has answered; an engine that is lost meanwhile is no
longer waited for. A barrier completes when every member has come to it; a member that is lost is no longer waited for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout.distributed.coordinator.core.heap import LazyHeap
from rollout.distributed.coordinator.core.peers import Peers, shortened
from rollout.distributed.coordinator.core.requests import NO_BARRIER, ClientPeer, RankPeer
from rollout.distributed.protocol.fields import FLUSH_PREFIX_CACHE, SET_VERSION
from rollout.distributed.protocol.messages import Barrier, BarrierDone, Command, CommandAck, Control, ControlDone
from rollout.state import COORDINATOR_TRANSITIONS, ControlSignal, CoordinatorState

MAX_NAMES = 8
"""Members that are named one by one."""

MAX_CALLS = 64
"""Of one client, open at once."""

MAX_TIMEOUT_S = 30 * 86400.0
"""Longest deadline of a call."""


@dataclass(eq=False)
class Call:
    """One control call on its way."""

    client: bytes
    call_id: int
    signal: str
    deadline: float
    timeout_s: float
    awaited: dict[bytes, str]
    """Engines that have not answered: identity → name."""
    failures: dict[str, str] = field(default_factory=dict)
    """Engine name → what it could not do."""
    amount: int = 0
    """What the engines have told so far."""


class ControlPlane:
    """State and policy version of the job, and the calls that move them.

    Args:
        on_stopped: called when every engine has stopped, or STOP's deadline has passed, before its caller is told.
    """

    def __init__(self, peers: Peers, on_stopped: Callable[[], None]) -> None:
        self._on_stopped = on_stopped
        self.state = CoordinatorState.RUNNING
        self.policy_version = 0
        self._peers = peers
        self._calls: dict[int, Call] = {}
        self._of_client: dict[bytes, set[int]] = defaultdict(set)
        self._awaited_of: dict[bytes, set[int]] = defaultdict(set)
        """Engine → the calls that it has not answered."""
        self._deadlines = LazyHeap[int](lambda command_id: command_id in self._calls)
        self._next_command = 0

    @property
    def stopped(self) -> bool:
        """STOP has been asked for and every engine has answered, or its deadline has passed."""
        return self.state is CoordinatorState.STOPPING and not any(
            call.signal == ControlSignal.STOP for call in self._calls.values()
        )

    def call(self, client: ClientPeer, message: Control, now: float) -> None:
        """Relay a call to every engine, or refuse it."""
        refusal = self._too_much(client, message) or self._move(message)
        if refusal is not None:
            self._peers.say(client, ControlDone(message.call_id, "ControlError", shortened(refusal)))
            return
        command_id = self._next_command
        self._next_command += 1
        ranks = list(self._peers.ranks.values())
        self._calls[command_id] = Call(
            client.identity,
            message.call_id,
            message.signal,
            now + message.timeout_s,
            message.timeout_s,
            {rank.identity: rank.name for rank in ranks},
        )
        self._of_client[client.identity].add(command_id)
        self._deadlines.put(now + message.timeout_s, command_id)
        for rank in ranks:
            self._awaited_of[rank.identity].add(command_id)
            self._peers.say(rank, Command(command_id, message.signal, message.argument))
        self._settle(command_id)

    def _too_much(self, client: ClientPeer, message: Control) -> str | None:
        if message.timeout_s > MAX_TIMEOUT_S:
            return f"{message.signal}(timeout_s={message.timeout_s}): at most {MAX_TIMEOUT_S:.0f}, 30 days"
        if len(self._of_client.get(client.identity, ())) >= MAX_CALLS:
            return f"{message.signal}: {MAX_CALLS} calls of this client are open; wait for some, or set a shorter timeout_s"
        return None

    def _move(self, message: Control) -> str | None:
        if message.signal == SET_VERSION:
            version = message.argument
            if type(version) is not int or version < self.policy_version:
                return f"set_version({version!r}): must be an integer of at least {self.policy_version}; versions only rise"
            if self.state is CoordinatorState.STOPPING:
                return "set_version() while stopping: allowed before; start another coordinator"
            self.policy_version = version
            return None
        if message.signal == FLUSH_PREFIX_CACHE:
            stopping = self.state is CoordinatorState.STOPPING
            return "flush_prefix_cache while stopping: allowed before; start another coordinator" if stopping else None
        signal = ControlSignal(message.signal)
        acts_in, leads_to, harmless_in = COORDINATOR_TRANSITIONS[signal]
        if self.state in acts_in:
            self.state = leads_to
        elif self.state not in harmless_in:
            allowed = " or ".join(sorted(state.value for state in acts_in))
            cure = "resume first" if self.state is CoordinatorState.SUSPENDED else "pause first"
            if self.state is CoordinatorState.STOPPING:
                cure = "start another coordinator"
            return f"{signal.value} while {self.state.value}: allowed when {allowed}; {cure}"
        return None

    def acknowledged(self, rank: RankPeer, message: CommandAck) -> None:
        """One engine has done its part, or could not."""
        call = self._calls.get(message.command_id)
        if call is None or call.awaited.pop(rank.identity, None) is None:
            return
        call.amount += message.amount
        self._awaited_of[rank.identity].discard(message.command_id)
        if message.error is not None:
            call.failures[rank.name] = shortened(message.error)
        self._settle(message.command_id)

    def lost(self, identity: bytes) -> None:
        """A peer has gone: nobody waits for it, and it waits for nothing. A STOP that it asked for goes on."""
        for command_id in self._of_client.pop(identity, ()):
            if self._calls[command_id].signal != ControlSignal.STOP:
                self._forget(command_id)
        for command_id in self._awaited_of.pop(identity, ()):
            del self._calls[command_id].awaited[identity]
            self._settle(command_id)

    def next_deadline(self) -> float:
        """When a call is due."""
        due = self._deadlines.head_key()
        return float("inf") if due is None else float(due)

    def expire(self, now: float) -> None:
        """End the calls whose deadline has passed, naming the engines that have not answered."""
        while (command_id := self._deadlines.head()) is not None and self._calls[command_id].deadline <= now:
            call = self._calls[command_id]
            late = sorted(call.awaited.values())
            text = f"{call.signal}: {_some_of(late)} did not answer within {call.timeout_s} s"
            text += f"; {_failed(call)}" if call.failures else "; all others have"
            self._end(command_id, "ControlError", text, sorted({*late, *call.failures}))

    def _settle(self, command_id: int) -> None:
        call = self._calls[command_id]
        if call.awaited:
            return
        if not call.failures:
            self._end(command_id, None, "", [])
            return
        self._end(command_id, "ControlError", f"{call.signal}: {_failed(call)}", sorted(call.failures))

    def _end(self, command_id: int, error: str | None, text: str, engines: list[str]) -> None:
        call = self._forget(command_id)
        if call.signal == ControlSignal.STOP:
            self._on_stopped()
        client = self._peers.clients.get(call.client)
        if client is not None:
            self._peers.say(client, ControlDone(call.call_id, error, shortened(text), engines, call.amount))

    def _forget(self, command_id: int) -> Call:
        call = self._calls.pop(command_id)
        if (own := self._of_client.get(call.client)) is not None:
            own.discard(command_id)
        for identity in call.awaited:
            self._awaited_of[identity].discard(command_id)
        return call


def _failed(call: Call) -> str:
    return "; ".join(f"{name}: {why}" for name, why in sorted(call.failures.items()))


class Barriers:
    """Members come to numbered barriers; each is told when all have come.

    One whose session is lost may come back at once, with another, so it is waited for during a grace.
    """

    def __init__(self, peers: Peers, size: int) -> None:
        self._peers = peers
        self._size = size
        self._departed: set[int] = set()
        self._awaited_until: dict[int, float] = {}
        """Members whose session was lost."""
        self._words: dict[bytes, Barrier] = {}
        """What each member said last."""
        self.passed = NO_BARRIER
        """The furthest barrier that every member has come to."""

    def joined(self, client: ClientPeer) -> None:
        """A member has connected; it starts at the next barrier."""
        client.barrier = client.answered = self.passed
        self._departed.discard(_place(client))
        self._awaited_until.pop(_place(client), None)

    def left(self, client: ClientPeer, awaited_until: float) -> None:
        """A member has gone: the others wait for it until then, and no longer."""
        self._awaited_until[_place(client)] = awaited_until
        self._words.pop(client.identity, None)

    def expire(self, now: float) -> None:
        """Wait no longer for members that have not come back in time."""
        gone = [place for place, until in self._awaited_until.items() if until <= now]
        for place in gone:
            del self._awaited_until[place]
            self._departed.add(place)
        if gone:
            self._settle()

    def come(self, client: ClientPeer, message: Barrier) -> None:
        """A member stands at a barrier."""
        client.barrier = max(client.barrier, message.index)
        # Whoever asks again has lost the answer, with an earlier session.
        client.answered = min(client.answered, message.index - 1)
        if client.member is not None:
            self._words[client.identity] = message
        self._settle()

    def missing(self) -> list[str]:
        """Members that the furthest one waits for."""
        members = self._members()
        furthest = max((member.barrier for member in members), default=self.passed)
        late = sorted(member.name for member in members if member.barrier < furthest)
        absent = self._size - len(self._departed) - len(members)
        return late + [f"{absent} that have not connected"] * (absent > 0)

    def _members(self) -> list[ClientPeer]:
        return [client for client in self._peers.clients.values() if client.member is not None]

    def _settle(self) -> None:
        members = self._members()
        if not members or len(members) < self._size - len(self._departed):
            return
        self.passed = max(self.passed, min(member.barrier for member in members))
        differences: dict[int, str] = {}
        for member in members:
            reached = min(member.barrier, self.passed)
            if reached > member.answered:
                member.answered = reached
                if reached not in differences:
                    differences[reached] = self._differences(reached)
                self._peers.say(member, BarrierDone(reached, differences[reached]))

    def _differences(self, index: int) -> str:
        said: dict[str, list[str]] = defaultdict(list)
        for member in sorted(self._members(), key=lambda member: member.name):
            word = self._words.get(member.identity)
            if word is not None and word.index == index:
                said[f"{word.what or 'a barrier'} at policy version {word.policy_version}"].append(member.name)
        if len(said) < 2:
            return ""
        return "; ".join(f"{_some_of(names)}: {word}" for word, names in said.items())


def _place(member: ClientPeer) -> int:
    assert member.member is not None
    return member.member


def _some_of(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES])
    return shown if len(names) <= MAX_NAMES else f"{shown} and {len(names) - MAX_NAMES} more"
