"""/admin routes: pause, suspend, weight updates, abort. Present only when `ServerConfig.admin` is on.

Always true: a call answers when it is done, not before, with the engine's state and policy version afterwards; what the
engine does not allow now is a 409 with its own words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.errors import ControlError, EngineStateError
from rollout.requests.spans import MAX_VERSION
from rollout.server.errors import ApiError, documented
from rollout.server.serving import Serving
from rollout.state import KVCacheManagementMode


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class SuspendOrder(_Order):
    """How to suspend."""

    mode: Annotated[KVCacheManagementMode | None, Field(strict=False)] = None
    """What becomes of the KV cache. Left out: as each engine is configured."""


class WeightsOrder(_Order):
    """Which weights these are."""

    version: Annotated[int, Field(ge=0, le=MAX_VERSION)] | None = None
    """The policy version from now on, no lower than the present one. Left out: one more. Cached KV is dropped either way."""


def _either(schema: dict[str, Any]) -> None:
    """Describe the two orders that there are, not the fields that they share."""
    fields = schema.pop("properties")
    name = {"type": "string", "minLength": 1, "description": fields["request_id"]["description"]}
    one = {"request_id": name, "all": fields["all"] | {"const": False}}
    everything = {"request_id": {"type": "null"}, "all": fields["all"] | {"const": True}}
    schema["oneOf"] = [
        {"type": "object", "properties": one, "required": ["request_id"], "additionalProperties": False},
        {"type": "object", "properties": everything, "required": ["all"], "additionalProperties": False},
    ]
    del schema["additionalProperties"]


class AbortOrder(_Order):
    """What to abort: one of the two."""

    model_config = ConfigDict(json_schema_extra=_either)

    request_id: Annotated[str, Field(min_length=1)] | None = None
    """The `id` of a reply, `chatcmpl-…` or `cmpl-…`."""
    all: bool = False
    """Everything that is open, over HTTP or not."""

    @model_validator(mode="after")
    def _one_of_two(self) -> AbortOrder:
        if (self.request_id is None) is not self.all:
            raise ValueError("give request_id, or all=true, and not both")
        return self


class _Told(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class EngineReply(_Told):
    """Where the engine stands now."""

    state: str
    """`running`, `paused`, `suspended` …"""
    policy_version: int
    """Of the weights: updates so far, unless a version was named."""


class FlushReply(_Told):
    """What flushing did."""

    flushed_blocks: int
    """KV blocks that are free now."""


class AbortReply(_Told):
    """What aborting did."""

    aborted: int
    """Prompts that were still open; 0 where all had ended."""


def add_admin_routes(app: FastAPI, serving: Serving) -> None:
    """Offer /admin/…; the caller has made sure that it is wanted."""
    router = APIRouter(prefix="/admin", tags=["admin"], responses=documented(409, 504))
    _add_lifecycle(router, serving)
    _add_weights_and_requests(router, serving)
    app.include_router(router)


def _add_lifecycle(router: APIRouter, serving: Serving) -> None:
    llm = serving.llm

    def now() -> EngineReply:
        return EngineReply(state=str(llm.state), policy_version=llm.policy_version)

    @router.post("/pause")
    async def pause() -> EngineReply:
        """Every engine stops at its next step boundary; requests wait."""
        with _conflict():
            await serving.ask(llm.pause)
        return now()

    @router.post("/unpause")
    async def unpause() -> EngineReply:
        """Every engine goes on."""
        with _conflict():
            await serving.ask(llm.unpause)
        return now()

    @router.post("/suspend")
    async def suspend(order: Annotated[SuspendOrder, Body()] = SuspendOrder()) -> EngineReply:  # noqa: B008 - frozen
        """Paused engines give their KV memory back."""
        with _conflict():
            await serving.ask(llm.suspend, order.mode)
        return now()

    @router.post("/resume")
    async def resume() -> EngineReply:
        """Suspended engines take their KV memory again, and are paused."""
        with _conflict():
            await serving.ask(llm.resume)
        return now()

    @router.post("/weights_updated")
    async def weights_updated(order: Annotated[WeightsOrder, Body()] = WeightsOrder()) -> EngineReply:  # noqa: B008 - frozen
        """The weights of every engine have changed: tokens from here on carry the new version."""
        with _conflict():
            await serving.ask(llm.set_policy_version, order.version)
        return now()


def _add_weights_and_requests(router: APIRouter, serving: Serving) -> None:
    @router.post("/flush_prefix_cache")
    async def flush_prefix_cache() -> FlushReply:
        """Forget cached KV blocks that no request holds."""
        return FlushReply(flushed_blocks=await asyncio.to_thread(serving.llm.flush_prefix_cache))

    @router.post("/abort")
    async def abort(order: AbortOrder) -> AbortReply:
        """End one reply's requests, or all."""
        if order.request_id is None:
            return AbortReply(aborted=await serving.ask(serving.llm.abort))
        return AbortReply(aborted=await serving.abort(order.request_id))


@contextmanager
def _conflict() -> Iterator[None]:
    """What is not allowed now, or not in direct mode, in the engine's own words.

    Raises:
        ApiError: 409.
    """
    try:
        yield
    except RuntimeError as exc:
        if type(exc) not in (RuntimeError, EngineStateError, ControlError):
            raise
        raise ApiError(409, str(exc), code="not_allowed_now", headers={"x-should-retry": "false"}) from exc
