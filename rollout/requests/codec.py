"""Codecs for request fields. A codec is a pair of an encoder and a decoder for one kind of value.

Encoded values are plain (None, bool, int, float, str, bytes, list, dict), so `msgpack.packb(…, use_bin_type=True)`
accepts them and nothing is ever pickled. Long lists of numbers become raw little-endian buffers, which are exact and an
order of magnitude faster than msgpack lists. Decoders validate everything: a malformed value raises `SerializationError`,
and `decode_fields` puts the field's name in front of the message.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from enum import Enum
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgpack
import numpy as np

from rollout.errors import ConfigError, SerializationError
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


class Codec(NamedTuple):
    """A pair of inverse functions. `decode` raises `SerializationError` for values that `encode` cannot produce."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode_fields(owner: object, codecs: Mapping[str, Codec]) -> dict[str, Any]:
    """Encode those attributes of `owner` that `codecs` has an entry for, as a dict from name to plain value."""
    return {name: codec.encode(getattr(owner, name)) for name, codec in codecs.items()}


def decode_fields(owner: str, plain: Any, codecs: Mapping[str, Codec]) -> dict[str, Any]:
    """Decode a dict of fields into keyword arguments; the inverse of `encode_fields`.

    Raises:
        SerializationError: a field is missing, unknown or malformed. The message begins with `owner.field`.
    """
    if not isinstance(plain, dict):
        refuse(owner, plain, "a dict of fields")
    for name in plain:
        if name not in codecs:
            raise SerializationError(f"{owner}.{name}: unknown; the fields are {', '.join(codecs)}")
    decoded = {}
    for name, codec in codecs.items():
        if name not in plain:
            raise SerializationError(f"{owner}.{name}: missing")
        try:
            decoded[name] = codec.decode(plain[name])
        except (SerializationError, ConfigError) as exc:
            raise SerializationError(f"{owner}.{name}: {exc}") from exc
    return decoded


def refuse(what: str, value: object, rule: str) -> NoReturn:
    """Raise a `SerializationError` that names `what`, the received `value`, and the `rule` that the value violates."""
    raise SerializationError(f"{what}: {reprlib.repr(value)[:80]} arrived where {rule} must be")


def unpack_msgpack(what: str, packed: bytes | memoryview, **options: Any) -> Any:
    """Unpack one msgpack value, with `options` for `msgpack.unpackb`. The message of an error begins with `what`."""
    try:
        return msgpack.unpackb(packed, **options)
    # ValueError is the base class of all errors that `unpackb` itself raises. A list as a map key causes TypeError.
    except (ValueError, TypeError, RecursionError) as exc:
        raise SerializationError(
            f"{what}: {len(packed)} bytes that are no msgpack ({type(exc).__name__}: {exc}): cut off?"
        ) from exc


def unpack_joined(what: str, packed: bytes) -> list[Any]:
    """Unpack one or more concatenated msgpack values. The message of a `SerializationError` begins with `what`."""
    reader = msgpack.Unpacker(max_buffer_size=max(1, len(packed)))
    reader.feed(packed)
    values: list[Any] = []
    try:
        while not values or reader.tell() < len(packed):
            values.append(reader.unpack())
    # A truncated value raises OutOfData, and a list as a map key TypeError. Other msgpack errors are ValueErrors here.
    except (msgpack.OutOfData, ValueError, TypeError, RecursionError) as exc:
        raise SerializationError(
            f"{what}: {len(packed)} bytes that are no msgpack ({type(exc).__name__}: {exc})"
        ) from exc
    return values


def optional(codec: Codec) -> Codec:
    """Return a codec that leaves None unchanged and encodes all other values by `codec`."""
    return Codec(
        lambda value: None if value is None else codec.encode(value),
        lambda value: None if value is None else codec.decode(value),
    )


def list_of(codec: Codec) -> Codec:
    """Return a codec for lists whose items `codec` encodes."""

    def decode(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            refuse("list", value, "a list")
        return [codec.decode(item) for item in value]

    return Codec(lambda value: [codec.encode(item) for item in value], decode)


def member_of(kind: type[Enum]) -> Codec:
    """Return a codec for members of an enum, which are encoded as their values."""

    def decode(value: Any) -> Enum:
        # Compare types first: True == 1, but a bool is not the value of a member.
        if type(value) not in (int, str):
            refuse(kind.__name__, value, f"one of {[member.value for member in kind]}")
        try:
            return kind(value)
        except ValueError:
            refuse(kind.__name__, value, f"one of {[member.value for member in kind]}")

    return Codec(lambda member: member.value, decode)


def _plain(rule: str, encode: Callable[[Any], Any], *types: type) -> Codec:
    def decode(value: Any) -> Any:
        # Compare with type(), not isinstance(): True must not pass as an integer.
        if type(value) not in types:
            refuse(types[0].__name__, value, rule)
        return encode(value)

    return Codec(encode, decode)


def _buffer(dtype: str) -> Codec:
    width = np.dtype(dtype).itemsize

    def decode(value: Any) -> list[Any]:
        if not isinstance(value, bytes) or len(value) % width:
            refuse(dtype, value, f"a bytes object of {width}-byte little-endian numbers")
        numbers: list[Any] = np.frombuffer(value, dtype).tolist()
        return numbers

    return Codec(lambda value: np.asarray(value, dtype).tobytes(), decode)


INT = _plain("an integer", index, int)
FLOAT = _plain("a number", float, float, int)
STR = _plain("a string", str, str)
BOOL = _plain("a bool", bool, bool)
STR_OR_INT = _plain("a string or an integer", lambda value: value if isinstance(value, str) else index(value), str, int)
INTS = _buffer("<i8")
FLOATS = _buffer("<f8")
OPAQUE = Codec(lambda value: value, lambda value: value)
"""A codec that leaves every value unchanged. msgpack must be able to encode the value."""


def _encode_top_n(rows: list[list[tuple[int, float]]]) -> dict[str, bytes]:
    return {
        "counts": INTS.encode([len(row) for row in rows]),
        "token_ids": INTS.encode([token for row in rows for token, _ in row]),
        "log_probs": FLOATS.encode([log_prob for row in rows for _, log_prob in row]),
    }


def _decode_top_n(value: Any) -> list[list[tuple[int, float]]]:
    columns = decode_fields("top_n", value, {"counts": INTS, "token_ids": INTS, "log_probs": FLOATS})
    counts, token_ids, log_probs = columns["counts"], columns["token_ids"], columns["log_probs"]
    if any(count < 0 for count in counts) or not sum(counts) == len(token_ids) == len(log_probs):
        refuse("top_n", (sum(counts), len(token_ids), len(log_probs)), "as many token ids and log-probs as counted")
    pairs = iter(zip(token_ids, log_probs, strict=True))
    return [[next(pairs) for _ in range(count)] for count in counts]


TOP_N = Codec(_encode_top_n, _decode_top_n)
"""A codec for lists of (token id, log-prob), one list per position, encoded as three flat buffers."""


def _encode_array(array: np.ndarray[Any, Any]) -> list[Any]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(little.shape), little.tobytes()]


def _array(dtypes: str, rule: str) -> Codec:
    """Return a codec for arrays whose dtype matches the regex `dtypes`, which must exclude objects (they need pickle)."""

    def decode(value: Any) -> np.ndarray[Any, Any]:
        dtype, shape, data = _dtype_shape_data("array", value)
        if not re.fullmatch(dtypes, dtype):
            refuse("array", dtype, rule)
        _check_size("array", shape, np.dtype(dtype).itemsize, data)
        # Copy the data: `frombuffer` returns a read-only array, and the fields of a request must be writable.
        return np.frombuffer(data, dtype).reshape(shape).copy()

    return Codec(_encode_array, decode)


def serialize_tensor(tensor: torch.Tensor) -> list[Any]:
    """Encode a tensor as [dtype name, shape, row-major bytes]; bfloat16 is supported.

    The bytes are in the host's byte order, little-endian wherever torch is supported. The device is not encoded.
    """
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), flat.view(torch.uint8).numpy().tobytes()]


def deserialize_tensor(plain: list[Any]) -> torch.Tensor:
    """Decode a CPU tensor that owns its memory; the inverse of `serialize_tensor`.

    Raises:
        SerializationError: `plain` is malformed, its dtype is unknown, or its bytes do not fit its shape.
    """
    import torch

    name, shape, data = _dtype_shape_data("tensor", plain)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        refuse("tensor", name, "the name of a torch dtype, such as bfloat16")
    _check_size("tensor", shape, dtype.itemsize, data)
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if data:
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return tensor


def _dtype_shape_data(what: str, value: Any) -> tuple[str, list[int], bytes]:
    rule = "[dtype, shape, bytes]"
    if not isinstance(value, list | tuple) or len(value) != 3:
        refuse(what, value, rule)
    dtype, shape, data = value
    if not isinstance(dtype, str) or not isinstance(shape, list | tuple) or not isinstance(data, bytes):
        refuse(what, value, rule)
    if any(type(size) is not int or size < 0 for size in shape):
        refuse(what, shape, "a shape")
    return dtype, list(shape), data


def _check_size(what: str, shape: list[int], width: int, data: bytes) -> None:
    if math.prod(shape) * width != len(data):
        refuse(what, f"{len(data)} bytes", f"{width} bytes for each element of shape {shape}")


INT_ARRAY = _array(r"<[iu][248]|\|[iu]1", "an integer dtype, such as <i2")
FLOAT_ARRAY = _array("<f4", "<f4")
TENSOR = Codec(serialize_tensor, deserialize_tensor)


def _decode_tensors(value: Any) -> dict[str, torch.Tensor]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        refuse("tensors", value, "a dict of tensors by name")
    return {name: deserialize_tensor(each) for name, each in value.items()}


TENSORS = Codec(lambda value: {name: serialize_tensor(each) for name, each in value.items()}, _decode_tensors)
"""A codec for dicts from names to tensors, which encodes each tensor by `serialize_tensor`."""
SAMPLING_PARAMS = Codec(SamplingParams.serialize, SamplingParams.deserialize)
SPANS = Codec(VersionSpans.serialize, VersionSpans.deserialize)
