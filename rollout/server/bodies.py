"""Request bodies: bounded parsing, off the event loop where they are large.

Always true: no more than so many values are parsed, however large a body may be; what takes a thread is given up when its
client goes away, and the largest bodies wait for one another, not smaller ones for them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from rollout.server.chat_template.prompt_ids import Stop
from rollout.server.errors import ApiError, bad_request
from rollout.server.serving import Serving, or_disconnected
from rollout.server.validation import explain

LARGE = 32 * 1024
"""Bytes from which on a body is read by a thread, so that other clients' streams go on meanwhile."""

HUGE = 2**20
"""Bytes from which on it is read by one of few threads that read nothing else."""

MAX_ITEMS = 1_000_000
"""Most items of all lists and objects of a body together: half a second of parsing at most."""

MAX_MEMBERS = 100_000
"""Most members of all its objects together, and most lists and objects: each costs as much as ten items."""

MAX_FIELDS = 256
"""Most fields of the body itself, those that do not exist counted."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""A JSON string; also one that never ends, so that text that is no JSON is looked through once as well."""

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


class Amount:
    """Values of JSON texts, counted before they are parsed; several texts add up."""

    def __init__(self) -> None:
        self.items = self.members = self.containers = 0

    def add(self, text: bytes) -> None:
        """Count one more text.

        Raises:
            ApiError: 413: there are too many.
        """
        before = self.items, self.members, self.containers
        # Commas in strings are counted too, which does no harm where there are few.
        self._count(text)
        if not self._too_many():
            return
        self.items, self.members, self.containers = before
        end = 0
        for string in _STRING.finditer(text):
            self._count(text[end : string.start()])
            end = string.end()
            self._refuse()
        self._count(text[end:])
        self._refuse()

    def _count(self, text: bytes) -> None:
        # What nearly always stands between two strings, of which there may be a million.
        if text == b",":
            self.items += 1
            return
        self.items += text.count(b",")
        self.members += text.count(b":")
        self.containers += text.count(b"[") + text.count(b"{")

    def _too_many(self) -> bool:
        return self.items > MAX_ITEMS or max(self.members, self.containers) > MAX_MEMBERS

    def _refuse(self) -> None:
        if self._too_many():
            raise ApiError(
                413,
                f"the body has more than {MAX_ITEMS} items in lists, {MAX_MEMBERS} members of objects or {MAX_MEMBERS} "
                "lists and objects: send it in several requests",
                code="body_too_large",
            )


def parsed(model: type[Model], text: bytes) -> Model:
    """A body as its model.

    Args:
        text: of which `Amount` has been counted.

    Raises:
        ApiError: 400, with the field that is wrong.
    """
    body = _json(text)
    if not isinstance(body, dict):
        raise bad_request("the body must be a JSON object")
    if len(body) > MAX_FIELDS:
        raise bad_request(
            f"the body has {len(body)} fields: must have at most {MAX_FIELDS}; see /docs for those there are"
        )
    try:
        return model.model_validate(body)
    except ValidationError as exc:
        message, field = explain([{**error, "loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)])
        raise bad_request(message, field) from None


def _json(text: bytes) -> Any:
    if not text:
        raise bad_request("the body is missing: send a JSON object")
    try:
        return json.loads(text)
    except json.JSONDecodeError as exc:
        raise bad_request(f"the body is not valid JSON: {exc.msg} at character {exc.pos}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply: flatten it") from None
    except ValueError as exc:
        raise bad_request(f"the body is not valid JSON: {exc}") from None


async def body_of(serving: Serving, request: Request, model: type[Model]) -> Model:
    """The body of a request. Raises: as `parsed`, and ClientGoneError."""
    text = await request.body()
    return await off_the_loop(serving, request, len(text), lambda _: parsed(model, text))


async def off_the_loop(serving: Serving, request: Request, size: int, work: Callable[[Stop], T]) -> T:
    """The result of work that takes time in proportion to a body.

    Args:
        request: whose body has been read.
        size: of the body, in bytes.
        work: is told when to stop.

    Raises:
        ClientGoneError: nobody waits for it any more.
    """
    stop = Stop()
    if size < LARGE:
        return work(stop)
    threads = serving.threads_for_huge_bodies if size >= HUGE else None
    try:
        return await or_disconnected(request, asyncio.get_running_loop().run_in_executor(threads, partial(work, stop)))
    finally:
        stop.set()


def documented_body(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads such a body."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
