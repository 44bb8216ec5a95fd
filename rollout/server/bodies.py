"""The reading and parsing of request bodies, with limits on size and time. A large body is parsed off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from starlette.requests import ClientDisconnect, Request

from rollout.config import documentation
from rollout.sampling_params import SamplingParams
from rollout.server.errors import ApiError, ClientGoneError, bad_request, explain
from rollout.server.serving import Serving, or_disconnected

MAX_BODY_BYTES = 32 * 2**20
"""The maximum size of a body, in bytes."""
LARGE = 32 * 1024
"""The size in bytes from which a body is parsed in a thread, so that it does not delay other clients' streams."""


def _described(schema: dict[str, Any]) -> None:
    """Make `schema` allow null for optional and unknown fields, and add the field descriptions in `SamplingParams`."""
    schema["additionalProperties"] = {"type": "null"}
    documented = documentation(SamplingParams)
    for name, option in schema.get("properties", {}).items():
        if name in documented:
            option.setdefault("description", documented[name])
        if name not in schema.get("required", ()):
            said = {word: option.pop(word) for word in ("title", "description", "default") if word in option}
            schema["properties"][name] = {"anyOf": [option, {"type": "null"}]} | said


class Body(BaseModel):
    """A JSON object in a request. A null means the default, and is allowed even in unknown fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False, json_schema_extra=_described
    )

    @model_validator(mode="wrap")
    @classmethod
    def _without_nulls(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, dict):
            value = {name: each for name, each in value.items() if each is not None}
        return validate(value)


T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


async def body_of(serving: Serving, request: Request, model: type[Model], *, required: bool = True) -> Model:
    """Read, parse and validate the body of a request. If it is not `required`, a missing body means all defaults.

    Raises:
        ApiError: 400 if the body does not fit `model`, 408 if it arrives too slowly, 413 if it exceeds `MAX_BODY_BYTES`.
        ClientGoneError: the client disconnected.
    """
    text = await _read(serving, request)
    if not text and required:
        raise bad_request("the body is missing: send a JSON object")
    return await off_the_loop(request, len(text), lambda: _parsed(model, text or b"{}"))


async def _read(serving: Serving, request: Request) -> bytes:
    too_large = ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes: send less", code="body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    text = bytearray()
    timeout_s = serving.config.request_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                text += piece
                if len(text) > MAX_BODY_BYTES:
                    raise too_large
    except ClientDisconnect:
        raise ClientGoneError from None
    except TimeoutError:
        late = f"the body is late: it may take {timeout_s:g} s; send it faster"
        raise ApiError(408, late, headers={"x-should-retry": "false"}) from None
    kind = request.headers.get("content-type", "")
    if text and kind.partition(";")[0].strip().lower() != "application/json":
        raise bad_request(f"Content-Type: {kind[:80] or 'none'}: must be application/json")
    request._body = bytes(text)
    return request._body


def _parsed(model: type[Model], text: bytes) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as exc:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)]
        objects = {name: getattr(each.annotation, "model_fields", ()) for name, each in model.model_fields.items()}
        inside = [f"{name}.{each}" for name, fields in objects.items() for each in fields]
        message, field = explain(errors, [*objects, *inside])
        raise bad_request(message, field) from None


async def off_the_loop(request: Request, size: int, work: Callable[[], T]) -> T:
    """Run `work` and return its result. If the body is large, run it in a thread so that it does not block the event loop.

    Raises `ClientGoneError` if the client disconnects before the thread has finished.

    Args:
        request: a request whose body has been read.
        size: size of the body, in bytes.
    """
    return work() if size < LARGE else await or_disconnected(request, asyncio.to_thread(work))


def documented_body(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}
