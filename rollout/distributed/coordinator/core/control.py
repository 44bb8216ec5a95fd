"""Control calls and barriers: pending answers, deadlines and completion. No I/O, no clock.

A call completes when every engine that was registered at the start of the call has answered or was lost. A barrier completes
when all `data_parallel_size` members have arrived. It waits for a lost member only for a grace period.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from rollout.distributed.coordinator.core.peers import Peers, shortened
from rollout.distributed.coordinator.core.requests import NO_BARRIER, ClientPeer, RankPeer
from rollout.distributed.protocol.fields import GIVEN_UP, SET_VERSION, UPKEEP
from rollout.distributed.protocol.messages import Barrier, BarrierDone, Command, CommandAck, Control, ControlDone
from rollout.state import COORDINATOR_TRANSITIONS, ControlSignal, CoordinatorState


@dataclass(eq=False)
class Call:
    """A pending control call."""

    client: bytes
    call_id: int
    signal: str
    deadline: float
    timeout_s: float
    awaited: dict[bytes, str]
    """The engines that have not answered: identity → name."""
    failures: dict[str, str] = field(default_factory=dict)
    """The engines at which the call failed: name → error."""
    amount: int = 0
    """The sum of `CommandAck.amount` over the answers so far."""


class ControlPlane:
    """The state and policy version of the job, and the control calls that change them.

    Args:
        peers: the connected clients and ranks.
        on_stopped: called when every engine has stopped or the deadline of STOP has passed, before STOP is answered.
    """

    def __init__(self, peers: Peers, on_stopped: Callable[[], None]) -> None:
        self._on_stopped = on_stopped
        self.state = CoordinatorState.RUNNING
        self.policy_version = 0
        self._peers = peers
        self._calls: dict[int, Call] = {}
        self._next_command = 0

    @property
    def stopped(self) -> bool:
        """Whether STOP was requested, and every engine has answered or the deadline of STOP has passed."""
        return self.state is CoordinatorState.STOPPING and not any(
            call.signal == ControlSignal.STOP for call in self._calls.values()
        )

    def call(self, client: ClientPeer, message: Control, now: float) -> None:
        """Send a control call to every engine, or reject the call with a reason."""
        refusal = self._move(message)
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
        for rank in ranks:
            self._peers.say(rank, Command(command_id, message.signal, message.argument))
        self._settle(command_id)

    def _move(self, message: Control) -> str | None:
        if message.signal == SET_VERSION:
            version = message.argument
            if type(version) is not int or version < self.policy_version:
                return f"set_version({version!r}): must be an integer of at least {self.policy_version}; versions only rise"
            if self.state is CoordinatorState.STOPPING:
                return "set_version() while stopping: allowed before; start another coordinator"
            self.policy_version = version
            return None
        if message.signal in UPKEEP:
            stopping = self.state is CoordinatorState.STOPPING
            return f"{message.signal} while stopping: allowed before; start another coordinator" if stopping else None
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
        """Handle the reply of one rank's engine to a control call."""
        call = self._calls.get(message.command_id)
        if call is None or call.awaited.pop(rank.identity, None) is None:
            return
        call.amount += message.amount
        if message.error is not None:
            call.failures[rank.name] = shortened(message.error)
        self._settle(message.command_id)

    def lost(self, identity: bytes) -> None:
        """Handle the loss of a peer. Do not wait for an engine's answers any more; drop a client's calls, except STOP."""
        for command_id, call in list(self._calls.items()):
            if call.client == identity and call.signal != ControlSignal.STOP:
                del self._calls[command_id]
            elif call.awaited.pop(identity, None) is not None:
                self._settle(command_id)

    def next_deadline(self) -> float:
        """Return the earliest deadline of a pending call, or infinity if no call is pending."""
        return min((call.deadline for call in self._calls.values()), default=float("inf"))

    def expire(self, now: float) -> None:
        """Fail the calls whose deadline has passed; the error names the engines that have not answered."""
        for command_id, call in [each for each in self._calls.items() if each[1].deadline <= now]:
            late = sorted(call.awaited.values())
            text = f"{call.signal}: {', '.join(late)} did not answer within {call.timeout_s} s"
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
        call = self._calls.pop(command_id)
        if call.signal == ControlSignal.STOP:
            self._on_stopped()
        client = self._peers.clients.get(call.client)
        if client is not None:
            self._peers.say(client, ControlDone(call.call_id, error, shortened(text), engines, call.amount))


def _failed(call: Call) -> str:
    return "; ".join(f"{name}: {why}" for name, why in sorted(call.failures.items()))


class Barriers:
    """The numbered barriers at which members wait for each other. A member is the client of one rank's training loop.

    A member whose session was lost may reconnect during a grace period. During this period barriers wait for the member.

    Args:
        peers: the connected clients and ranks.
        size: the number of members of the job.
    """

    def __init__(self, peers: Peers, size: int) -> None:
        self._peers = peers
        self._size = size
        self._departed: set[int] = set()
        self._awaited_until: dict[int, float] = {}
        """The members whose session was lost: rank → end of the grace period."""
        self.passed = NO_BARRIER
        """The highest barrier at which every member has arrived."""

    def joined(self, client: ClientPeer) -> None:
        """Add a member that has connected. Its next barrier is the first barrier that not all members have reached."""
        client.barrier = client.answered = self.passed
        self._departed.discard(_place(client))
        self._awaited_until.pop(_place(client), None)

    def left(self, client: ClientPeer, awaited_until: float) -> None:
        """Mark a member as disconnected. Barriers wait for the member until the time `awaited_until`."""
        self._awaited_until[_place(client)] = awaited_until

    def expire(self, now: float) -> None:
        """Remove members whose grace period has passed."""
        gone = [place for place, until in self._awaited_until.items() if until <= now]
        for place in gone:
            del self._awaited_until[place]
            self._departed.add(place)
        if gone:
            self._settle()

    def come(self, client: ClientPeer, message: Barrier) -> None:
        """Register a member's arrival at a barrier."""
        client.catching_up = client.catching_up and message.index <= self.passed
        client.barrier = max(client.barrier, message.index)
        # Answer the arrival again, even if it was answered before: a member repeats its arrival if the reply was lost.
        client.answered = min(client.answered, message.index - 1)
        client.word = message
        self._settle()

    def missing(self) -> list[str]:
        """Return the names of the members that have not arrived at the highest barrier that any member has reached.

        If some members are not connected, the last entry gives the number of these members."""
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
            word = member.word
            if word is not None and word.index == index and word.what != GIVEN_UP:
                said[f"{word.what or 'a barrier'} at policy version {word.policy_version}"].append(member.name)
        if len(said) < 2:
            return ""
        return shortened("; ".join(f"{', '.join(names)}: {word}" for word, names in said.items()))


def _place(member: ClientPeer) -> int:
    assert member.member is not None
    return member.member
