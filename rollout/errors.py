"""Exception hierarchy of the package. Messages name the value, the violated rule and the remedy.

RolloutError
├── ConfigError            (ValueError)    an option is unknown or out of range
├── UnsupportedModelError  (ValueError)    the model uses a feature that the engine cannot reproduce
├── RequestError                           one request ended without a result; carries `request_id`
│   ├── InvalidRequestError (ValueError)   rejected at admission: it can never be served
│   ├── RequestAbortedError                the request was aborted
│   ├── RequestFailedError                 the step that computed it raised; the cause is `__cause__`
│   ├── StaleRequestError                  it exceeded `max_staleness`
│   ├── RequestTimeoutError (TimeoutError) its deadline passed, or no rank was ready within `no_rank_timeout_s`
│   ├── RankLostError                      `max_rank_losses` ranks died while computing it
│   └── QueueFullError                     a limit of open requests is reached
├── RolloutFailedError                     some samples of a batch failed; carries the whole `batch`
├── EngineStateError       (RuntimeError)  the call is not allowed in the engine's current state
├── EngineDeadError        (RuntimeError)  the engine has stopped permanently
├── WeightsChangedError    (RuntimeError)  weights changed without an announced update; carries `tensors`
├── DeadlineError          (TimeoutError)  a wait exceeded its deadline
├── ControlError           (RuntimeError)  engines did not complete a control call; carries `engines`
├── ConnectionLostError    (ConnectionError) the coordinator is gone, or has closed this connection
├── JournalError           (OSError)       the storage does not meet a journal's requirements
│   └── DamagedHeaderError                 the header of a journal file is damaged
└── SerializationError     (ValueError)    a received payload has an unexpected shape
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from typing import ClassVar


def warn_caller(message: str) -> None:
    """Issue a `UserWarning` at the line outside of this package that made the call."""
    frame, level = sys._getframe(1), 2
    while (above := frame.f_back) is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
        frame, level = above, level + 1
    warnings.warn(message, stacklevel=level)


_OURS = ("rollout", "trainer_hooks", "contextlib")


class RolloutError(Exception):
    """Base class of all exceptions of this package."""


class ConfigError(RolloutError, ValueError):
    """A configuration field or sampling parameter is unknown or out of range."""


class UnsupportedModelError(RolloutError, ValueError):
    """The model has a layer, or passes an attention argument, that the engine does not support."""


class RequestError(RolloutError):
    """One request ended without a result.

    Attributes:
        request_id: id of the request; None if it failed before an id was assigned.
    """

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class InvalidRequestError(RequestError, ValueError):
    """The request was rejected at admission: it can never be served as it is."""

    def at(self, place: str = "") -> InvalidRequestError:
        """Return the same error with `prompts[0]: `, say, in place of an id that the caller has never seen."""
        return InvalidRequestError(place + re.sub(r"^request [0-9]+: ", "", str(self)), self.request_id)


class RequestAbortedError(RequestError):
    """The request was aborted."""


class RequestFailedError(RequestError):
    """The engine step that computed the request raised; the original exception is `__cause__`."""


class StaleRequestError(RequestError):
    """The request holds tokens older than `max_staleness` allows."""


class RequestTimeoutError(RequestError, TimeoutError):
    """The request's deadline passed, or no rank was ready within `CoordinatorConfig.no_rank_timeout_s`."""


class RankLostError(RequestError):
    """`CoordinatorConfig.max_rank_losses` ranks died while computing the request; it is not assigned again."""


class QueueFullError(RequestError):
    """A limit of open requests is reached; try again when others have finished."""


class RolloutFailedError(RolloutError):
    """Some samples of a batch failed. `batch` holds every row, with failed rows masked out.

    Attributes:
        batch: the `RolloutBatch`; its `errors` name the failed rows and their causes.
    """

    def __init__(self, message: str, batch: object) -> None:
        super().__init__(message)
        self.batch = batch


class EngineStateError(RolloutError, RuntimeError):
    """The call is not allowed in the engine's current state."""


class EngineDeadError(RolloutError, RuntimeError):
    """The engine has stopped permanently; create a new one."""


class WeightsChangedError(RolloutError, RuntimeError):
    """Weights changed without an announced update, or a copy of the weights is out of date.

    Attributes:
        tensors: names of the tensors that differ.
    """

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class DeadlineError(RolloutError, TimeoutError):
    """A wait exceeded its deadline.

    `__notes__`, which tracebacks print, holds the state of this process's engines, connections and threads at that moment,
    if it has any; see `rollout.threads.diagnosis`, which sets `note`.
    """

    note: ClassVar[Callable[[], str]] = staticmethod(str)

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if note := self.note():
            self.add_note(note)


class ControlError(RolloutError, RuntimeError):
    """A control call is not allowed in the current state, or some engines did not complete it.

    Attributes:
        engines: names of the engines that did not complete the call.
    """

    def __init__(self, message: str, engines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.engines = engines


class ConnectionLostError(RolloutError, ConnectionError):
    """The coordinator is gone, or has closed this connection. Raised for every request that was open on it.

    Attributes:
        final: True if reconnecting cannot succeed: the protocol versions differ, or another process uses this peer's
            name.
    """

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class JournalError(RolloutError, OSError):
    """The storage does not meet a journal's requirements, or the journal is not open in this process."""


class DamagedHeaderError(JournalError):
    """The header of a journal file is damaged: the file may hold records, but cannot be appended to."""


class SerializationError(RolloutError, ValueError):
    """A received payload has an unexpected type, field or length."""
