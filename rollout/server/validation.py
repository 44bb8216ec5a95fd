"""What pydantic found wrong with a body, in one sentence that names the field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

MAX_REASONS = 4
"""Alternatives of a union that are listed."""

_NO_OBJECT = ("model_attributes_type", "model_type", "dict_type")

_ALTERNATIVE = re.compile(r"(str|int|float|bool|bytes|none|dict|list)$|.*[\[\]()-]|[A-Z]")
"""Parts of a location that name an alternative of a union, not a field."""


def explain(errors: Sequence[Any]) -> tuple[str, str | None]:
    """The message and the field of the first error; where a field has several alternatives, what each of them asks for.

    Args:
        errors: as `RequestValidationError.errors()` gives them.
    """
    first = errors[0]
    field = _field(first["loc"])
    if first["type"] == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']} at character {first['loc'][-1]}", None
    if field is None and first["type"] == "missing":
        return "the body is missing: send a JSON object", None
    if field is None:
        shape = first["type"] in _NO_OBJECT
        return ("the body must be a JSON object" if shape else f"the body: {_reason(first)}"), None
    if first["type"] == "extra_forbidden":
        return f"{field}: there is no such field here; see /docs for those there are", field
    reasons = dict.fromkeys(_reason(error) for error in errors if _field(error["loc"]) == field)
    return f"{field}: {'; or '.join(list(reasons)[:MAX_REASONS])}", field


def _field(location: Sequence[str | int]) -> str | None:
    """`("body", "messages", 0, "content")` → `messages[0].content`."""
    parts: list[str] = []
    for part in location[1:]:
        if isinstance(part, int):
            if not parts:
                return None
            parts[-1] += f"[{part}]"
        elif parts and _ALTERNATIVE.match(part):
            break
        else:
            parts.append(part)
    return ".".join(parts) or None


def _reason(error: Any) -> str:
    return str(error["msg"]).removeprefix("Value error, ")
