"""Error responses in OpenAI's format, and the mapping of exceptions to HTTP statuses.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

An exception that is not in the table `STATUS_OF` becomes a 500 without internal details. A request that exceeds its own
deadline is a 408, not a 504: the server has not failed, so this should not trigger alerts on 5xx statuses.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from rollout.errors import (
    ConfigError,
    ConnectionLostError,
    ControlError,
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    QueueFullError,
    RankLostError,
    RequestAbortedError,
    RequestTimeoutError,
    StaleRequestError,
    WeightsChangedError,
    did_you_mean,
    our_name,
)

CLIENT_GONE = 499
"""The status under which metrics count a client that disconnected; it is never sent."""
MAX_MESSAGE, MAX_PARAM = 3000, 160
"""The maximum number of characters of a message and of a field's name, both of which can quote a client's input."""


class ErrorDetail(BaseModel):
    """The fields of an error in OpenAI's format."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every reply with a status other than 200, except for `/health` and `/ping`."""

    error: ErrorDetail


class ApiError(Exception):
    """An error that becomes an HTTP reply with the given status, headers and fields of `ErrorDetail`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _cut(_PYTHON.sub(lambda found: _HTTP_NAMES.get(found[1], found[1]), message), MAX_MESSAGE)
        self.param = param and _cut(param, MAX_PARAM)
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON object of the reply, which is also the content of an `error` event in a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response, in ASCII because a message may quote a lone surrogate, which UTF-8 cannot encode."""
        return Response(json.dumps(self.body()), self.status, self.headers, "application/json")


class ClientGoneError(ApiError):
    """The error raised when a client has closed its connection; its request is then aborted."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client has closed its connection")


def _cut(text: str, most: int) -> str:
    """Shorten a text to `most` characters by removing its middle. The end, which says how to fix the request, is kept."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def shutting_down() -> ApiError:
    message = "the server is shutting down: send the request elsewhere"
    return ApiError(503, message, code="shutting_down", headers=_LATER)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    504: "timeout_error",
}

_LATER = {"Retry-After": "1"}
_FINAL = {"x-should-retry": "false"}
"""The header that tells OpenAI's client not to retry, because a retry would fail in the same way."""


STATUS_OF: dict[type[BaseException], tuple[int, str | None, dict[str, str]]] = {
    InvalidRequestError: (400, None, {}),
    ConfigError: (400, None, {}),
    RequestTimeoutError: (408, "timeout", _FINAL),
    RequestAbortedError: (409, "aborted", _FINAL),
    StaleRequestError: (409, "stale", {}),
    ControlError: (409, "not_done", _FINAL),
    QueueFullError: (429, "queue_full", _LATER),
    EngineStateError: (503, "engine_state", _LATER),
    EngineDeadError: (503, "engine_dead", _LATER),
    ConnectionLostError: (503, "coordinator_lost", _LATER),
    WeightsChangedError: (503, "weights_changed", _LATER),
    RankLostError: (503, "rank_lost", _LATER),
    DeadlineError: (504, "timeout", _FINAL),
}
"""The (status, code, headers) of the reply for each exception class. The first class in the MRO with an entry applies."""

_INTERNAL = "the server failed at this request; its log says why"

_PYTHON = re.compile(r"\b(?:SamplingParams|RequestOptions|StructuredOutput)\.(\w+)")
_HTTP_NAMES = {
    "structured": "structured_outputs",
    "json_schema": "structured_outputs.json",
    "regex": "structured_outputs.regex",
    "grammar": "structured_outputs.grammar",
    "return_kept_tokens": "return_sampling_mask",
    "adapter": "model",
}
"""A dict from the name of a field in Python to its name in a request body, for the fields whose names differ."""


def describe(exc: BaseException) -> ApiError:
    """Convert an exception to an API error. An exception of an unknown class becomes a 500 without the exception's text."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestValidationError):
        message, param = explain(exc.errors())
        return bad_request(message, param)
    if isinstance(exc, HTTPException):
        return _of_framework(exc)
    status, code, headers = next(
        (STATUS_OF[kind] for kind in type(exc).__mro__ if kind in STATUS_OF), (500, "internal_error", {})
    )
    field = _PYTHON.search(str(exc)) if status == 400 else None
    message = _INTERNAL if status == 500 else str(exc)
    return ApiError(status, message, param=field and _HTTP_NAMES.get(field[1], field[1]), code=code, headers=headers)


def _of_framework(exc: HTTPException) -> ApiError:
    headers = dict(exc.headers or {})
    message = {
        404: "there is nothing at this path: see /docs for the routes",
        405: f"this path does not support the method of the request: use {headers.get('Allow', headers.get('allow'))}",
    }.get(exc.status_code, str(exc.detail))
    return ApiError(exc.status_code, message, headers=headers)


# --- errors in request bodies -----------------------------------------------------------------------------------------

_TAG = re.compile(r"[A-Z][A-Za-z]*$")
"""The pattern of union tags in the locations of pydantic errors. Tags are left out of the field's path."""
_ALTERNATIVE = re.compile(r"(str|int|float|bool|bytes|none|dict|list)$|.*[\[\]()-]")
"""The pattern of union alternatives and keys in the locations of pydantic errors. The field's path ends before them."""

_SHOULD = re.compile(r"^[A-Z][a-z]+ should\b")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def explain(errors: Sequence[Any], known: Iterable[str] = ()) -> tuple[str, str | None]:
    """Return (message, field) for the first error; for a union, the message lists what each alternative requires.

    An unknown field is reported before a missing field, because it is probably the missing field misspelt. The query
    parameter `mode` is reported as `query.mode`, as in vLLM.

    Args:
        errors: validation errors, as `RequestValidationError.errors()` returns them.
        known: names of the body's fields, and of the fields of its objects as `object.field`, for suggestions.
    """
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    first = unknown[0] if unknown and errors[0]["type"] in ("missing", "format") else errors[0]
    field = _field(first)
    if field is None:
        return f"the body must be a JSON object: {_reason(first)}", None
    if first["type"] == "extra_forbidden":
        # Suggest a synonym in any object (`sampling_params.n` for `best_of`), else a similar name in the same object.
        place, _, name = field.rpartition(".")
        ours = _HTTP_NAMES.get(our_name(name), our_name(name))
        same = [key for key in known if key.rpartition(".")[2] == ours and key != place]
        near = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == place]
        cure = f"did you mean {same[0]}?" if same else did_you_mean(name, near, "see /docs for the fields")
        return f"{field}: there is no such field here; {cure}", field
    if first["type"] == "missing":
        return f"{field}: required, and missing", field
    reasons = dict.fromkeys(_reason(error) for error in errors if _field(error) == field)
    value = "" if isinstance(first["input"], (dict, list)) else f"={_SHORT.repr(first['input'])}"
    return f"{field}{value}: {'; or '.join(reasons)}", field


def _field(error: Any) -> str | None:
    """Return the path of the field that a pydantic error is about, or None for the whole body.

    For example, `("body", "messages", 0, "content", "Many", 1)` → `messages[0].content[1]`."""
    location = error["loc"][1:]
    parts: list[str] = ["query"] if error["loc"][0] == "query" else []
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
    return _SHOULD.sub("must", str(error["msg"]).removeprefix("Value error, "), count=1).replace(
        " after validation", ""
    )
