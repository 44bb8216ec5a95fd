"""The base class of messages, and the types of message fields: annotations with rules that are checked on decoding.

Checks use `type()` and not `isinstance()`, because True must not pass as an integer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

from rollout.errors import SerializationError
from rollout.requests.delta import TOKEN_BYTES
from rollout.state import ControlSignal, CoordinatorState, EngineState

SET_VERSION = "set_version"
"""The control call that sets the policy version. The argument is the version. The call is not a lifecycle signal."""
GIVEN_UP = "given up"
"""The `Barrier.what` of a member whose collective call failed. It is not compared with the other members' calls."""
FLUSH_PREFIX_CACHE = "flush_prefix_cache"
"""The control call that evicts the cached blocks that no request uses, on every engine and whatever its state."""
LOAD_WEIGHTS = "load_weights"
"""The control call that loads weights into every engine, whatever the engine's state. The argument is the folder."""
LOAD_ADAPTER = "load_adapter"
"""The control call that loads a LoRA adapter into every engine, whatever its state. The argument is `NAME=FOLDER`."""
UNLOAD_ADAPTER = "unload_adapter"
"""The control call that unloads a LoRA adapter from every engine, whatever its state. Requests that use the adapter
fail. The argument is the adapter's name."""
UPKEEP = (FLUSH_PREFIX_CACHE, LOAD_WEIGHTS, LOAD_ADAPTER, UNLOAD_ADAPTER)
"""The control calls that change neither an engine's state nor the policy version."""
Check = Callable[[Any], bool]


class Rule(NamedTuple):
    """The validation rule of a field: a description in words, and a function that checks a value."""

    text: str
    holds: Check


def is_count(value: Any) -> bool:
    """Return whether a value is an integer in [0, 2**63)."""
    return type(value) is int and 0 <= value < 2**63


def _seconds(value: Any) -> bool:
    return type(value) in (float, int) and value == value and abs(value) != float("inf")


def _name(value: Any) -> bool:
    return type(value) is str and len(value) <= 256


def _path(value: Any) -> bool:
    return type(value) is str and len(value) <= 4096


def _bytes_of(width: int) -> Check:
    return lambda value: type(value) is bytes and not len(value) % width


def _all(holds: Check) -> Check:
    return lambda value: type(value) is list and all(map(holds, value))


def _or_none(holds: Check) -> Check:
    return lambda value: value is None or holds(value)


# Check columns with C-level operations on the whole list: a Python call per entry would take most of the decoding time.


def _only(values: Iterable[Any], *kinds: type) -> bool:
    return set(map(type, values)) <= set(kinds)


def _counts(value: Any) -> bool:
    return type(value) is list and _all_counts(value)


def _all_counts(values: list[Any]) -> bool:
    return not values or (_only(values, int) and min(values) >= 0 and max(values) < 2**63)


def _all_runs(value: Any) -> bool:
    if type(value) is not list or not _only(value, list):
        return False
    odd = all(len(row) % 2 for row in value)
    return odd and _all_counts(list(chain.from_iterable(value))) and all(all(row[2::2]) for row in value)


def _is(kind: type) -> Check:
    return lambda value: type(value) is kind


def _in(choices: Iterable[str]) -> Check:
    allowed = frozenset(str(choice) for choice in choices)
    return lambda value: type(value) is str and value in allowed


Count = Annotated[int, Rule("an integer in [0, 2**63)", is_count)]
OptionalCount = Annotated[int | None, Rule("None or an integer in [0, 2**63)", _or_none(is_count))]
Seconds = Annotated[float, Rule("a finite number of seconds", _seconds)]
OptionalSeconds = Annotated[float | None, Rule("None or a finite number of seconds", _or_none(_seconds))]
Flag = Annotated[bool, Rule("a bool", _is(bool))]
Name = Annotated[str, Rule("a string of at most 256 characters", _name)]
Names = Annotated[list[str], Rule("a list of strings of at most 256 characters", _all(_name))]
Text = Annotated[str, Rule("a string", _is(str))]
OptionalText = Annotated[str | None, Rule("None or a string", _or_none(_is(str)))]
Blob = Annotated[bytes, Rule("bytes", _is(bytes))]
Tokens = Annotated[bytes, Rule("little-endian int32 in bytes", _bytes_of(TOKEN_BYTES))]
LogProbs = Annotated[bytes, Rule("little-endian float32 in bytes", _bytes_of(TOKEN_BYTES))]
Hashes = Annotated[bytes, Rule("little-endian int64 in bytes", _bytes_of(8))]
SecondsPairs = Annotated[bytes, Rule("pairs of little-endian float32 in bytes", _bytes_of(8))]
Prompt = Annotated[
    bytes | str,
    Rule(
        "a string, or little-endian int32 in bytes", lambda value: type(value) is str or _bytes_of(TOKEN_BYTES)(value)
    ),
]
Counts = Annotated[list[int], Rule("a list of integers in [0, 2**63)", _counts)]
Versions = Annotated[
    list[list[int]],
    Rule("per sample [version of the prompt, version, count, version, count, …], counts above 0", _all_runs),
]
Columns = Annotated[dict[str, list[Any]], Rule("a table of columns", _is(dict))]
Signal = Annotated[str, Rule("a control signal", _in([*ControlSignal, SET_VERSION, *UPKEEP]))]
Argument = Annotated[
    int | str | None,
    Rule("None, a string of at most 4,096 characters or an integer", lambda v: v is None or _path(v) or is_count(v)),
]
EngineStateName = Annotated[str, Rule("the name of an engine state", _in(EngineState))]
CoordinatorStateName = Annotated[str, Rule("the name of a coordinator state", _in(CoordinatorState))]
Table = Annotated[dict[str, Any], Rule("a table", _is(dict))]
Priority = Annotated[int, Rule("an integer in [-2**31, 2**31]", lambda v: type(v) is int and abs(v) <= 2**31)]
BarrierNumber = Annotated[int, Rule("an integer in [0, 2**62)", lambda v: is_count(v) and v < 2**62)]


class LostFramesError(SerializationError):
    """Raised for a frame or token out of sequence: earlier frames or tokens were lost with a connection."""


class Message:
    """The base class of all messages."""

    __slots__ = ()
    header: ClassVar[int]
    """The number of the message type on the wire."""
    way: ClassVar[str]
    """The direction in which the message is sent, as "sender → receiver"."""


MESSAGES: dict[int, type[Message]] = {}
"""The message types: header → class."""
M = TypeVar("M", bound=Message)


@dataclass_transform(field_specifiers=(field,))
def message(header: int, way: str) -> Callable[[type[M]], type[M]]:
    """Return a decorator that turns a class into a dataclass and registers it in `MESSAGES`.

    Args:
        header: number of the message type on the wire.
        way: direction in which the message is sent, as "sender → receiver".
    """

    def register(kind: type[M]) -> type[M]:
        made = dataclass(slots=True)(kind)
        made.header, made.way = header, way
        MESSAGES[header] = made
        return made

    return register
