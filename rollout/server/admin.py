"""/admin routes: pause, suspend, weight updates, abort. Registered only if `ServerConfig.admin` is on.

A route replies after the call has completed, with the engine's state and policy version. A call that the engine does not
allow in its current state is a 409 with the engine's message.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, FastAPI
from pydantic import ConfigDict, Field, model_validator
from starlette.requests import Request

from rollout.requests.spans import MAX_VERSION
from rollout.server.bodies import body_of, body_or_default, documented_body
from rollout.server.control import AbortReply, Control, EngineReply, FlushReply
from rollout.server.errors import documented
from rollout.server.openai.schema import Body
from rollout.server.serving import Serving
from rollout.state import KVCacheManagementMode


class SuspendOrder(Body):
    """Body of `/admin/suspend`."""

    mode: Annotated[KVCacheManagementMode | None, Field(strict=False)] = None
    """Handling of the KV cache. Default: the configured mode of each engine."""


class WeightsOrder(Body):
    """Body of `/admin/weights_updated`."""

    version: Annotated[int, Field(ge=0, le=MAX_VERSION)] | None = None
    """New policy version, at least the current one. Default: the current one plus 1. Cached KV is dropped either way."""


def _either(schema: dict[str, Any]) -> None:
    """JSON schema of `AbortOrder` as `oneOf`: either `request_id`, or `all=true`."""
    fields = schema.pop("properties")
    name = {"type": "string", "minLength": 1, "description": fields["request_id"]["description"]}
    one = {"request_id": name, "all": fields["all"] | {"const": False}}
    everything = {"request_id": {"type": "null"}, "all": fields["all"] | {"const": True}}
    schema["oneOf"] = [
        {"type": "object", "properties": one, "required": ["request_id"], "additionalProperties": False},
        {"type": "object", "properties": everything, "required": ["all"], "additionalProperties": False},
    ]
    del schema["additionalProperties"]


class AbortOrder(Body):
    """Body of `/admin/abort`: exactly one of `request_id` and `all`."""

    model_config = ConfigDict(json_schema_extra=_either)

    request_id: Annotated[str, Field(min_length=1)] | None = None
    """`id` of a reply: `chatcmpl-…` or `cmpl-…`."""
    all: bool = False
    """Abort all open requests, also those that did not come over HTTP."""

    @model_validator(mode="after")
    def _one_of_two(self) -> AbortOrder:
        if (self.request_id is None) is not self.all:
            raise ValueError("give request_id, or all=true, and not both")
        return self


def add_admin_routes(app: FastAPI, serving: Serving) -> None:
    """Register the /admin routes, without checking `ServerConfig.admin`."""
    llm, control = serving.llm, Control(serving)
    router = APIRouter(prefix="/admin", tags=["admin"], responses=documented(409, 504))

    @router.post("/pause")
    async def pause() -> EngineReply:
        """Pause every engine at its next step boundary; requests wait."""
        return await control.ask(llm.pause)

    @router.post("/unpause")
    async def unpause() -> EngineReply:
        """Continue every paused engine."""
        return await control.ask(llm.unpause)

    @router.post("/suspend", openapi_extra=documented_body(SuspendOrder, required=False))
    async def suspend(request: Request) -> EngineReply:
        """Suspend paused engines: release their KV memory as `mode` specifies."""
        order = await body_or_default(serving, request, SuspendOrder)
        return await control.ask(llm.suspend, order.mode)

    @router.post("/resume")
    async def resume() -> EngineReply:
        """Restore the KV memory of suspended engines; they are paused afterwards."""
        return await control.ask(llm.resume)

    @router.post("/weights_updated", openapi_extra=documented_body(WeightsOrder, required=False))
    async def weights_updated(request: Request) -> EngineReply:
        """Announce that the weights of every engine have changed: later tokens carry the new policy version."""
        order = await body_or_default(serving, request, WeightsOrder)
        return await control.ask(llm.set_policy_version, order.version)

    @router.post("/flush_prefix_cache")
    async def flush_prefix_cache() -> FlushReply:
        """Evict all cached KV blocks that no request references."""
        return await control.flush()

    @router.post("/abort", openapi_extra=documented_body(AbortOrder))
    async def abort(request: Request) -> AbortReply:
        """Abort the requests of one reply, or all open requests."""
        order = await body_of(serving, request, AbortOrder)
        if order.request_id is None:
            return AbortReply(aborted=await serving.ask(llm.abort))
        return await control.abort(order.request_id)

    app.include_router(router)
