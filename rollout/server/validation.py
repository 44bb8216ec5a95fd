"""Converts pydantic validation errors into one sentence that names field and value."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from rollout.errors import did_you_mean

MAX_REASONS = 4
"""Maximum number of union alternatives listed in a message."""

_NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")

_TAG = re.compile(r"[A-Z][A-Za-z]*$")
"""Location parts that are discriminator tags: the field path continues after them."""

_TAGGED = ("response_format", "format")
"""Fields whose union is told by its `type`, which follows them in a location."""

_ALTERNATIVE = re.compile(r"(str|int|float|bool|bytes|none|dict|list)$|.*[\[\]()-]")
"""Location parts that name another union's alternative, or a key: the field path ends before them."""

MAX_NAME = 80
"""Maximum characters of a field's name in a message."""

_SHOULD = re.compile(r"^[A-Z][a-z]+ should\b")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def explain(errors: Sequence[Any], known: Iterable[str] = ()) -> tuple[str, str | None]:
    """Return (message, field) of the first error; for a union, the message lists what each alternative requires.

    An unknown field is reported before a missing one: it is likely to be the missing one, misspelt.

    Args:
        errors: as returned by `RequestValidationError.errors()`. A field of the query is named as vLLM does, `query.mode`.
        known: fields of the body; the nearest to an unknown one is given, unless that is inside of another.
    """
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    first = unknown[0] if unknown and errors[0]["type"] == "missing" else errors[0]
    field = _field(first)
    if field is None and first["type"] == "missing":
        return "the body is missing: send a JSON object", None
    if field is None:
        shape = first["type"] in _NO_OBJECT
        return ("the body must be a JSON object" if shape else f"the body: {_reason(first)}"), None
    if first["type"] == "extra_forbidden":
        # What is known are the fields of the body itself, not those of the objects in it.
        near = known if len(first["loc"]) == 2 else ()
        cure = did_you_mean(field, near, "see /docs for those there are")
        return f"{field}: there is no such field here; {cure}", field
    if first["type"] == "missing":
        return f"{field}: required, and not there", field
    reasons = dict.fromkeys(_reason(error) for error in errors if _field(error) == field)
    value = "" if isinstance(first["input"], (dict, list)) else f"={_SHORT.repr(first['input'])}"
    return f"{field}{value}: {'; or '.join(list(reasons)[:MAX_REASONS])}", field


def _field(error: Any) -> str | None:
    """Field path of an error: `("body", "messages", 0, "content", "Many", 1, "text")` → `messages[0].content[1].text`."""
    location = error["loc"][1:]
    parts: list[str] = ["query"] if error["loc"][0] == "query" else []
    for position, part in enumerate(location):
        if isinstance(part, int):
            if not parts:
                return None
            parts[-1] += f"[{part}]"
        elif not parts or (error["type"] == "extra_forbidden" and position == len(location) - 1):
            parts.append(part if len(part) <= MAX_NAME else f"{part[:MAX_NAME]}…")
        elif location[position - 1] in _TAGGED:
            continue
        elif _ALTERNATIVE.match(part):
            break
        elif not _TAG.match(part):
            parts.append(part)
    return ".".join(parts) or None


def _reason(error: Any) -> str:
    return _SHOULD.sub("must", str(error["msg"]).removeprefix("Value error, "), count=1)
