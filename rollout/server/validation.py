"""Turns pydantic errors into one sentence naming field and value."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Any

MAX_REASONS = 4
"""Alternatives of a union that are listed."""

_NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")

_TAG = re.compile(r"[A-Z][A-Za-z]*$")
"""Parts of a location that name the alternative which a discriminator chose: the field goes on behind it."""

_ALTERNATIVE = re.compile(r"(str|int|float|bool|bytes|none|dict|list)$|.*[\[\]()-]")
"""Parts that name an alternative of another union, or a key: the field ends before it."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """The message and the field of the first error; where a field has several alternatives, what each of them asks for.

    A field that nobody knows comes before one that is missing: it is likely to be the same, misspelt.

    Args:
        errors: as `RequestValidationError.errors()` gives them.
    """
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    first = unknown[0] if unknown and errors[0]["type"] == "missing" else errors[0]
    field = _field(first)
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    if field is None and first["type"] == "missing":
        return "the body is missing: send a JSON object", None
    if field is None:
        shape = first["type"] in _NO_OBJECT
        return ("the body must be a JSON object" if shape else f"the body: {_reason(first)}"), None
    if first["type"] == "extra_forbidden":
        return f"{field}: there is no such field here; see /docs for those there are", field
    if first["type"] == "missing":
        return f"{field}: required, and not there", field
    reasons = dict.fromkeys(_reason(error) for error in errors if _field(error) == field)
    value = "" if isinstance(first["input"], (dict, list)) else f"={_SHORT.repr(first['input'])}"
    return f"{field}{value}: {'; or '.join(list(reasons)[:MAX_REASONS])}", field


def _field(error: Any) -> str | None:
    """`("body", "messages", 0, "content", "Many", 1, "text")` → `messages[0].content[1].text`."""
    location = error["loc"][1:]
    parts: list[str] = []
    for position, part in enumerate(location):
        if isinstance(part, int):
            if not parts:
                return None
            parts[-1] += f"[{part}]"
        elif not parts or (error["type"] == "extra_forbidden" and position == len(location) - 1):
            parts.append(part)
        elif _ALTERNATIVE.match(part):
            break
        elif not _TAG.match(part):
            parts.append(part)
    return ".".join(parts) or None


def _reason(error: Any) -> str:
    return str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "must be", 1)
