"""Every exception this package raises on purpose. Each names the value, the rule and the cure.

RolloutError
├── ConfigError            (ValueError)    an option is unknown or out of range
├── UnsupportedModelError  (ValueError)    the model does something the engine cannot honour
├── RequestError                           one request ended without a result; carries `request_id`
│   ├── InvalidRequestError (ValueError)   refused at admission: it can never be served
│   ├── RequestAbortedError                somebody aborted it
│   ├── RequestFailedError                 the step that computed it raised; the cause is `__cause__`
│   ├── StaleRequestError                  older than `max_staleness` allows
│   ├── RequestTimeoutError (TimeoutError) its own deadline passed, or no rank was there for too long
│   ├── RankLostError                      it was on one rank after another when they died
│   └── QueueFullError                     its client has as many open requests as it may
├── RolloutFailedError                     some samples of a batch failed; carries the whole `batch`
├── EngineStateError       (RuntimeError)  this call is not allowed in the engine's present state
├── EngineDeadError        (RuntimeError)  the engine has stopped for good
├── WeightsChangedError    (RuntimeError)  weights changed and nobody said so; carries `tensors`
├── DeadlineError          (TimeoutError)  a wait passed its deadline
├── ControlError           (RuntimeError)  engines have not done what a control call asked; carries `engines`
├── ConnectionLostError    (ConnectionError) the coordinator is gone, or has given this connection up
├── JournalError           (OSError)       the disk does not do what a journal needs
│   └── DamagedHeaderError                 one of its files cannot be continued
└── SerializationError     (ValueError)    a received payload does not have the shape it must have
"""

from __future__ import annotations


class RolloutError(Exception):
    """Root of the tree."""


class ConfigError(RolloutError, ValueError):
    """A configuration or sampling field is unknown or out of range."""


class UnsupportedModelError(RolloutError, ValueError):
    """The model has a layer or passes an attention argument that the engine cannot honour."""


class RequestError(RolloutError):
    """One request ended without a result.

    Attributes:
        request_id: the request (None before one was given out).
    """

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class InvalidRequestError(RequestError, ValueError):
    """Refused at admission: this request can never be served as asked."""


class RequestAbortedError(RequestError):
    """Somebody aborted the request."""


class RequestFailedError(RequestError):
    """The step that computed this request raised; the original exception is `__cause__`."""


class StaleRequestError(RequestError):
    """The request holds tokens older than `max_staleness` allows."""


class RequestTimeoutError(RequestError, TimeoutError):
    """The request's own deadline passed, or no rank was there for too long."""


class RankLostError(RequestError):
    """Rank after rank died while it was there; it is not given to yet another."""


class QueueFullError(RequestError):
    """Its client has as many open requests as it may."""


class RolloutFailedError(RolloutError):
    """Some samples of a batch failed. Nothing is lost: `batch` holds every row, failed rows masked out.

    Attributes:
        batch: the `RolloutBatch`, whose `errors` name what failed.
    """

    def __init__(self, message: str, batch: object) -> None:
        super().__init__(message)
        self.batch = batch


class EngineStateError(RolloutError, RuntimeError):
    """The call is not allowed in the engine's present state."""


class EngineDeadError(RolloutError, RuntimeError):
    """The engine has stopped for good; build another."""


class WeightsChangedError(RolloutError, RuntimeError):
    """Weights are not what they were when the optimizer last stepped, or a copy of them is not what they are.

    Attributes:
        tensors: names of those that differ.
    """

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class DeadlineError(RolloutError, TimeoutError):
    """A wait passed its deadline."""


class ControlError(RolloutError, RuntimeError):
    """A control call is not allowed now, or some engines have not done it.

    Attributes:
        engines: names of the engines that have not.
    """

    def __init__(self, message: str, engines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.engines = engines


class ConnectionLostError(RolloutError, ConnectionError):
    """The coordinator is gone, or has given this connection up: what was open on it fails with this.

    Attributes:
        final: trying again is of no use: it speaks another protocol version, or another process has this one's name.
    """

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class JournalError(RolloutError, OSError):
    """The disk does not do what a journal needs, or the journal is not open here; the message has the cure."""


class DamagedHeaderError(JournalError):
    """A file of a journal that may have records, but cannot be continued."""


class SerializationError(RolloutError, ValueError):
    """A received payload does not have the shape it must have."""
