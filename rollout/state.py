"""Statuses, states and transition tables of the package.

Coordinator:  RUNNING ⇄ PAUSED ⇄ SUSPENDED, and STOPPING from the last two.

Engine:

    RUNNING ──PAUSING──▶ PAUSED ──SUSPENDING──▶ SUSPENDED
       ▲                   │ ▲                      │
       └────UNPAUSING──────┘ └───────RESUMING───────┘
                           │                        │
                           └──────▶ STOPPING ◀──────┘ ──▶ STOPPED
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Self

from rollout.errors import ConfigError


class Status(IntEnum):
    """Where one request stands."""

    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


class FinishReason(StrEnum):
    """Why a request produced its last token."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    STALE = "stale"
    ERROR = "error"


class KVCacheManagementMode(StrEnum):
    """What becomes of the KV cache at `suspend`."""

    PERSIST = "persist"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"

    @classmethod
    def parse(cls, mode: Self | str | None) -> Self | None:
        """The member of this name; None stays None.

        Raises:
            ConfigError: there is no such mode.
        """
        try:
            return None if mode is None else cls(mode)
        except ValueError:
            choices = ", ".join(repr(member.value) for member in cls)
            raise ConfigError(f"mode={mode!r}: must be None or one of {choices}") from None


Mode = KVCacheManagementMode | str | None
"""A mode, its name, or None for the configured one."""


class PrefixCachingEvictionPolicy(StrEnum):
    """When a cached block that nobody references loses its content."""

    LRU = "lru"
    REF_ZERO = "ref_zero"


class PrefixCachingCoordinatorPolicy(StrEnum):
    """How the coordinator chooses a rank."""

    LONGEST_PREFIX = "longest_prefix"
    FIRST_PREFIX_BLOCK = "first_prefix_block"
    LOAD_BALANCED = "load_balanced"
    ROUND_ROBIN = "round_robin"


class StalenessPolicy(StrEnum):
    """What becomes of a request whose oldest token is older than `max_staleness`."""

    PARTIAL = "partial"
    REQUEUE = "requeue"
    MASK = "mask"


class EngineState(StrEnum):
    """Lifecycle of one engine. The stable ones can be waited for."""

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
    """Lifecycle of the coordinator."""

    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    STOPPING = "stopping"


class ControlSignal(StrEnum):
    """What moves a lifecycle."""

    PAUSE = "pause"
    UNPAUSE = "unpause"
    SUSPEND = "suspend"
    RESUME = "resume"
    STOP = "stop"


# signal → (states it acts in, state it leads to, states in which it changes nothing)
COORDINATOR_TRANSITIONS: dict[
    ControlSignal, tuple[frozenset[CoordinatorState], CoordinatorState, frozenset[CoordinatorState]]
] = {
    ControlSignal.PAUSE: (
        frozenset({CoordinatorState.RUNNING}),
        CoordinatorState.PAUSED,
        frozenset({CoordinatorState.PAUSED, CoordinatorState.SUSPENDED}),
    ),
    ControlSignal.UNPAUSE: (
        frozenset({CoordinatorState.PAUSED}),
        CoordinatorState.RUNNING,
        frozenset({CoordinatorState.RUNNING}),
    ),
    ControlSignal.SUSPEND: (
        frozenset({CoordinatorState.PAUSED}),
        CoordinatorState.SUSPENDED,
        frozenset({CoordinatorState.SUSPENDED}),
    ),
    ControlSignal.RESUME: (
        frozenset({CoordinatorState.SUSPENDED}),
        CoordinatorState.PAUSED,
        frozenset({CoordinatorState.PAUSED, CoordinatorState.RUNNING}),
    ),
    ControlSignal.STOP: (
        frozenset({CoordinatorState.PAUSED, CoordinatorState.SUSPENDED}),
        CoordinatorState.STOPPING,
        frozenset({CoordinatorState.STOPPING}),
    ),
}

# The same table for an engine: signal → (acts in, passes through, leads to, harmless in).
ENGINE_TRANSITIONS: dict[
    ControlSignal, tuple[frozenset[EngineState], EngineState, EngineState, frozenset[EngineState]]
] = {
    ControlSignal.PAUSE: (
        frozenset({EngineState.RUNNING}),
        EngineState.PAUSING,
        EngineState.PAUSED,
        frozenset({EngineState.PAUSED, EngineState.SUSPENDED}),
    ),
    ControlSignal.UNPAUSE: (
        frozenset({EngineState.PAUSED}),
        EngineState.UNPAUSING,
        EngineState.RUNNING,
        frozenset({EngineState.RUNNING}),
    ),
    ControlSignal.SUSPEND: (
        frozenset({EngineState.PAUSED}),
        EngineState.SUSPENDING,
        EngineState.SUSPENDED,
        frozenset({EngineState.SUSPENDED}),
    ),
    ControlSignal.RESUME: (
        frozenset({EngineState.SUSPENDED}),
        EngineState.RESUMING,
        EngineState.PAUSED,
        frozenset({EngineState.PAUSED, EngineState.RUNNING}),
    ),
    ControlSignal.STOP: (
        frozenset({EngineState.PAUSED, EngineState.SUSPENDED}),
        EngineState.STOPPING,
        EngineState.STOPPED,
        frozenset({EngineState.STOPPING, EngineState.STOPPED}),
    ),
}
