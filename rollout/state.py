"""The enums of request status, modes and lifecycle states, and the lifecycle transition tables.

Coordinator:  RUNNING ⇄ PAUSED ⇄ SUSPENDED; STOPPING from PAUSED or SUSPENDED.

Engine:

    RUNNING ──PAUSING──▶ PAUSED ──SUSPENDING──▶ SUSPENDED
       ▲                   │ ▲                      │
       └────UNPAUSING──────┘ └───────RESUMING───────┘
                           │                        │
                           └──────▶ STOPPING ◀──────┘ ──▶ STOPPED
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Self, TypeVar

from rollout.errors import ConfigError

_State = TypeVar("_State", bound=StrEnum)


class Status(IntEnum):
    """The status of one request."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


class FinishReason(StrEnum):
    """The reason why a sample finished."""

    STOP = "stop"
    """The sample ended with an end-of-sequence token, a stop token id or a stop string."""
    LENGTH = "length"
    """The sample reached `max_tokens`, or the maximum sequence length."""
    ABORT = "abort"
    """The request was aborted."""
    STALE = "stale"
    """The sample would have exceeded `max_staleness`, and the staleness policy is `partial`."""
    ERROR = "error"
    """The request failed; its `error` is the cause."""


class KVCacheManagementMode(StrEnum):
    """The handling of the KV cache while the engine is suspended."""

    PERSIST = "persist"
    """The cache stays in device memory."""
    OFFLOAD = "offload"
    """The cache is copied to host memory at `suspend` and back at `resume`; device memory is released."""
    RECOMPUTE = "recompute"
    """The cache is dropped at `suspend` and prefilled again after `resume`; device memory is released."""

    @classmethod
    def parse(cls, mode: Self | str | None) -> Self | None:
        """Return the member with the name `mode`; None stays None. Any other name raises `ConfigError`."""
        try:
            return None if mode is None else cls(mode)
        except ValueError:
            choices = ", ".join(repr(member.value) for member in cls)
            raise ConfigError(f"mode={mode!r}: must be None or one of {choices}") from None


Mode = KVCacheManagementMode | str | None
"""A KV cache mode, the name of a mode, or None for the configured mode."""


class PrefixCachingEvictionPolicy(StrEnum):
    """The rule that decides when an unreferenced KV block is evicted from the prefix cache."""

    LRU = "lru"
    """Blocks are evicted when memory is needed, the least recently used block first."""
    REF_ZERO = "ref_zero"
    """A block is evicted when its last reference is released."""


class PrefixCachingCoordinatorPolicy(StrEnum):
    """The policy by which the coordinator routes a request to a rank."""

    LONGEST_PREFIX = "longest_prefix"
    """A request goes to the rank with the highest score, computed from its cached blocks of the prompt and free slots."""
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    """A request is routed as with `longest_prefix`, but only the first block of the prompt counts as cached."""
    LOAD_BALANCED = "load_balanced"
    """A request goes to the rank with the largest share of free slots or, of several, to the one whose name sorts first."""
    ROUND_ROBIN = "round_robin"
    """A request goes to the next rank in the order of names; after the last rank, the first is next."""


class StalenessPolicy(StrEnum):
    """The handling of a request that would exceed `max_staleness`."""

    PARTIAL = "partial"
    """The request finishes with the tokens that it has and the finish reason `stale`."""
    REQUEUE = "requeue"
    """The request starts again from its prompt."""
    MASK = "mask"
    """The request continues, and its stale tokens are masked out of the loss."""


class EngineState(StrEnum):
    """The lifecycle states of one engine. `wait_until` accepts only `STABLE_ENGINE_STATES`."""

    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    UNPAUSING = "unpausing"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"


STABLE_ENGINE_STATES = frozenset({EngineState.RUNNING, EngineState.PAUSED, EngineState.SUSPENDED, EngineState.STOPPED})


class CoordinatorState(StrEnum):
    """The lifecycle states of the coordinator."""

    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    STOPPING = "stopping"


class ControlSignal(StrEnum):
    """A signal that triggers a lifecycle transition."""

    PAUSE = "pause"
    UNPAUSE = "unpause"
    SUSPEND = "suspend"
    RESUME = "resume"
    STOP = "stop"


_TRANSITIONS = (
    # Columns: signal, states before, state during, state after, and states in which the signal has no effect. A
    # coordinator has no state "stopped", so it stays in "stopping".
    ("pause", "running", "pausing", "paused", "paused suspended"),
    ("unpause", "paused", "unpausing", "running", "running"),
    ("suspend", "paused", "suspending", "suspended", "suspended"),
    ("resume", "suspended", "resuming", "paused", "paused running"),
    ("stop", "paused suspended", "stopping", "stopped", "stopping stopped"),
)


def _states(kind: type[_State], names: str) -> frozenset[_State]:
    return frozenset(state for state in kind if state.value in names.split())


COORDINATOR_TRANSITIONS = {
    ControlSignal(signal): (
        _states(CoordinatorState, before),
        CoordinatorState(through if to == "stopped" else to),
        _states(CoordinatorState, idle),
    )
    for signal, before, through, to, idle in _TRANSITIONS
}
"""A dict from signal to (source states, target state, states in which the signal has no effect)."""

ENGINE_TRANSITIONS = {
    ControlSignal(signal): (
        _states(EngineState, before),
        EngineState(through),
        EngineState(to),
        _states(EngineState, idle),
    )
    for signal, before, through, to, idle in _TRANSITIONS
}
"""A dict from signal to (source states, intermediate state, target state, states in which the signal has no effect)."""
