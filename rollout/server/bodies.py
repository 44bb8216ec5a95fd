"""Parses request bodies with a bounded number of JSON values; large bodies in a thread, off the event loop.

Work in a thread stops when the client disconnects. The largest bodies share a few threads of their own, so that smaller
ones do not wait for them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from starlette.requests import Request

from rollout.errors import did_you_mean
from rollout.server.chat_template.prompt_ids import Stop
from rollout.server.errors import ApiError, bad_request, explain
from rollout.server.serving import Serving, or_disconnected

LARGE = 32 * 1024
"""Bytes from which a body is parsed in a thread, so that other clients' streams are not blocked."""
HUGE = 2**20
"""Bytes from which a body is parsed in one of the few threads reserved for such bodies."""
MAX_ITEMS = 1_000_000
"""Maximum items of all lists and objects of a body together: at most half a second of parsing."""
MAX_MEMBERS = 100_000
"""Maximum members of all objects together, and maximum number of lists and objects: each costs as much as ten items."""
MAX_FIELDS = 256
"""Maximum fields of the body itself, unknown ones included."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A JSON string; may be unterminated, so that invalid JSON is scanned only once."""


class ReplyBody(BaseModel):
    """Base of replies."""

    model_config = ConfigDict(use_attribute_docstrings=True)


def _nulls_allowed(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = {"type": "null"}


class Body(BaseModel):
    """JSON object whose unknown fields must be null."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        json_schema_extra=_nulls_allowed,
    )

    @model_validator(mode="wrap")
    @classmethod
    def _without_unknown_nulls(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, dict):
            value = {name: each for name, each in value.items() if each is not None or name in cls.model_fields}
        return validate(value)


T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


class Amount:
    """Counter of the values in JSON texts before parsing; several texts add up."""

    def __init__(self) -> None:
        self.items = self.members = self.containers = 0

    def add(self, text: bytes) -> None:
        """Add the values of one text; raises `ApiError` 413 if a limit is exceeded."""
        before = self.items, self.members, self.containers
        # A quick count includes commas in strings; the exact one follows only if that exceeds a limit.
        if self._exceeded_by(text):
            self.items, self.members, self.containers = before
            # More strings than items, members and containers are allowed exceed a limit anyway.
            if not self._exceeded_by(_STRING.sub(b"", text, count=2 * MAX_ITEMS)):
                return
            raise ApiError(
                413,
                f"the body has more than {MAX_ITEMS} items in lists, {MAX_MEMBERS} members of objects or {MAX_MEMBERS} "
                "lists and objects: send it in several requests",
                code="body_too_large",
            )

    def _exceeded_by(self, text: bytes) -> bool:
        self.items += text.count(b",")
        self.members += text.count(b":")
        self.containers += text.count(b"[") + text.count(b"{")
        return self.items > MAX_ITEMS or max(self.members, self.containers) > MAX_MEMBERS


def parsed(model: type[Model], text: bytes) -> Model:
    """Parse and validate a body whose values `Amount` has counted; raises `ApiError` 400 that names the invalid field."""
    body = _json(text)
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    if len(body) > MAX_FIELDS:
        raise bad_request(f"the body has {len(body)} fields: must have at most {MAX_FIELDS}; see /docs for the fields")
    try:
        return model.model_validate(body)
    except ValidationError as exc:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)]
        message, field = explain(errors, model.model_fields)
        raise bad_request(message, field) from None


def _json(text: bytes) -> Any:
    if not text:
        raise bad_request("the body is missing: send a JSON object")
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        where = f"line {exc.lineno}, column {exc.colno} (character {exc.pos})"
        raise bad_request(f"the body is not valid JSON: {exc.msg} at {where}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply: flatten it") from None
    except ValueError as exc:
        raise bad_request(f"the body is not valid JSON: {str(exc).partition('; use sys.')[0]}") from None


async def refuse_unread(request: Request) -> None:
    """Dependency of all routes: raise `ApiError` 400 for query parameters and fields that the route does not read.

    The error never contains a value: queries may contain secrets."""
    route: APIRoute = request.scope["route"]
    known = [each.alias for each in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            elsewhere = "it has none: fields go into the body, as JSON" if request.method == "POST" else "it has none"
            cure = did_you_mean(name[:80], known, f"it has {', '.join(known)}" if known else elsewhere)
            raise bad_request(f"{name[:80]}: no query parameter of {route.path}; {cure}", f"query.{name[:80]}")
    takes_body = route.body_field is not None or "requestBody" in (route.openapi_extra or {})
    if request.method == "POST" and not takes_body and (text := await request.body()):
        try:
            parsed(_NoFields, text)
        except ApiError as exc:
            if exc.param not in known:
                raise
            raise bad_request(
                f"{exc.param}: goes into the query, as in {route.path}?{exc.param}=...", exc.param
            ) from None


class _NoFields(Body):
    """An empty object, or one of nulls."""


async def body_of(serving: Serving, request: Request, model: type[Model]) -> Model:
    """Read, parse and validate the body of a request; raises as `parsed`, and `ClientGoneError`."""
    text = await request.body()
    return await off_the_loop(serving, request, len(text), lambda _: parsed(model, text))


async def body_or_default(serving: Serving, request: Request, model: type[Model]) -> Model:
    """Read a body like `body_of`, for a request whose body may be left out."""
    return await body_of(serving, request, model) if await request.body() else model()


async def off_the_loop(serving: Serving, request: Request, size: int, work: Callable[[Stop], T]) -> T:
    """Return the result of work whose duration grows with the body: run inline if the body is small, else in a thread.

    Args:
        request: its body has been read.
        size: bytes of the body.
        work: called with a `Stop`, which is set if the client disconnects; that raises `ClientGoneError`.
    """
    stop = Stop()
    if size < LARGE:
        return work(stop)
    threads = serving.threads_for_huge_bodies if size >= HUGE else None
    try:
        return await or_disconnected(request, asyncio.get_running_loop().run_in_executor(threads, partial(work, stop)))
    finally:
        stop.set()


def documented_body(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is parsed by `body_of`, or by `body_or_default`."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}
