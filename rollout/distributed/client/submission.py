"""What is checked and packed before a group is submitted: its options, sampling parameters and prompt."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypedDict, get_type_hints

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollout.distributed.protocol.messages import Stretch, Submit
from rollout.errors import InvalidRequestError
from rollout.requests.delta import TOKEN_BYTES
from rollout.sampling_params import SamplingParams

TokenIds = bytes | Sequence[int] | NDArray[Any]
"""Also as little-endian int32 in bytes."""
Prompt = str | TokenIds | Mapping[str, Any]
"""Text, token ids, or what a processor returned for one prompt with images."""


class RequestOptions(TypedDict, total=False):
    """Options of a group besides its prompt and sampling parameters; all are optional."""

    priority: int
    """Higher runs first. Default 0."""
    timeout_s: float | None
    """Deadline in seconds after arrival. Default None: no deadline while any rank is connected."""
    interval: int
    """Tokens per sample between two reports. Default 0 (1 for streams): the coordinator's configured interval."""
    arrival_time: float | None
    """Wall-clock seconds. Default None: now."""
    known: Iterable[Stretch]
    """Tokens received in another session (`OpenGroup.known`), after which generation continues. Default: none."""
    min_policy_version: int
    """Lowest policy version of an engine that may compute it; the group waits for one. Default 0."""


_DEFAULTS: RequestOptions = {
    "priority": 0, "timeout_s": None, "interval": 0, "arrival_time": None, "known": (), "min_policy_version": 0,
}  # fmt: skip

_HINTS = get_type_hints(Submit, include_extras=True)
_RULES = {name: _HINTS[name].__metadata__[0] for name in _DEFAULTS if name != "known"}


def checked(options: RequestOptions) -> RequestOptions:
    """Return the options with the defaults of those that are missing.

    Raises:
        InvalidRequestError: a value that no `Submit` may have, or a `timeout_s` that is not above 0.
        TypeError: an unknown option.
    """
    unknown = [repr(name) for name in options if name not in _DEFAULTS]
    if unknown:
        raise TypeError(f"{', '.join(unknown)}: no option of a request; the options are {', '.join(_DEFAULTS)}")
    complete: RequestOptions = {**_DEFAULTS, **options}
    values: dict[str, Any] = dict(complete)
    for name, rule in _RULES.items():
        if not rule.holds(values[name]):
            raise InvalidRequestError(f"{name}={values[name]!r}: must be {rule.text}")
    timeout_s = complete["timeout_s"]
    if timeout_s is not None and timeout_s <= 0:
        raise InvalidRequestError(f"timeout_s={timeout_s!r}: must be None or a number above 0")
    return complete


@lru_cache(maxsize=256)
def packed_params(params: SamplingParams) -> bytes:
    """Encode as one msgpack value."""
    packed: bytes = msgpack.packb(params.serialize())
    return packed


def int32_tokens(prompt: TokenIds) -> bytes:
    """Pack token ids as little-endian int32.

    Raises:
        InvalidRequestError: none, or not integers in [0, 2**31) in a row.
    """
    if isinstance(prompt, bytes):
        packed = prompt
    elif hasattr(prompt, "__array__"):
        packed = _int32_of_array(np.asarray(prompt))
    else:
        packed = _int32_of_list(prompt)
    if not packed:
        raise InvalidRequestError("a prompt of no tokens: must have at least one; a BOS token will do")
    if len(packed) % TOKEN_BYTES:
        raise InvalidRequestError(f"a prompt of {len(packed)} bytes: must be int32 token ids, {TOKEN_BYTES} bytes each")
    tokens = np.frombuffer(packed, "<i4")
    if tokens.min() < 0:
        raise InvalidRequestError(f"prompt token {tokens.min()}: must lie in [0, 2**31)")
    return packed


def _int32_of_array(tokens: NDArray[Any]) -> bytes:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"a prompt of shape {tokens.shape} and dtype {tokens.dtype}: must be integers in a row"
        )
    for bound in (tokens.min(), tokens.max()) if len(tokens) else ():
        if not 0 <= bound < 2**31:
            raise InvalidRequestError(f"prompt token {bound}: must lie in [0, 2**31)")
    return tokens.astype("<i4").tobytes()


def _int32_of_list(prompt: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(prompt)}i", *prompt)
    except TypeError as exc:
        raise InvalidRequestError(f"prompt of type {type(prompt).__name__}: must be text or token ids ({exc})") from exc
    except struct.error as exc:
        bad = next((token for token in prompt if not _is_int32(token)), None)
        raise InvalidRequestError(f"prompt token {bad!r}: must lie in [0, 2**31) and be an integer") from exc


def _is_int32(token: Any) -> bool:
    return hasattr(token, "__index__") and -(2**31) <= token < 2**31
