"""Control routes under vLLM's names, registered if `ServerConfig.admin` is on; each acts on the engines of all ranks.

    /pause  /resume  /is_paused  /sleep  /wake_up  /is_sleeping
    /abort_requests  /reset_prefix_cache  /update_weights  /update_weight_version  /weight_info
    /server_info  /get_world_size  /version  /v1/load_lora_adapter  /v1/unload_lora_adapter

A route replies after its call has completed. A call that the engine does not allow in its current state is a 409 with the
engine's message. A query parameter of vLLM's that has no effect here accepts only the value that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query
from pydantic import Field, JsonValue, StringConstraints
from starlette.requests import Request

from rollout.config import __version__
from rollout.engine.models.adapters import MAX_ADAPTERS, MAX_RANK
from rollout.errors import ConfigError, ControlError, EngineStateError
from rollout.requests.spans import MAX_VERSION
from rollout.server.bodies import Body, ReplyBody, body_of, body_or_default, documented_body
from rollout.server.errors import ApiError, bad_request, documented
from rollout.server.serving import Serving
from rollout.state import EngineState, KVCacheManagementMode

ABORT_TIMEOUT_S = 5.0
"""Seconds for which a pause by abort waits until the aborted requests have told their clients."""

OpenRequests = Annotated[
    Literal["keep", "wait", "abort"],
    Query(
        description="Requests wait (`keep`). Or those of HTTP finish first (`wait`) or are aborted (`abort`), and new ones "
        "are a 503 until the engines continue."
    ),
]
Off = Annotated[Literal["false", "False", "0"], Query(description="This server does not do that.")]
Text = Annotated[str, Field(min_length=1, max_length=256)]


class UpdateWeightsRequest(Body):
    """Body of `/update_weights`."""

    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder of safetensors on the server's machine, as `save_pretrained` writes it."""
    version: int | None = Field(None, ge=0, le=MAX_VERSION)
    """New policy version, at least the current one. Default: the current one plus 1."""


class WeightVersionRequest(Body):
    """Body of `/update_weight_version`: the program that owns the model has changed its weights."""

    new_version: (
        Annotated[int, Field(ge=0, le=MAX_VERSION)] | Annotated[str, StringConstraints(pattern="^[0-9]{1,18}$")] | None
    ) = None
    """New policy version, at least the current one. Default: the current one plus 1. Cached KV is dropped either way."""


class AbortRequests(Body):
    """Body of `/abort_requests`."""

    request_ids: Annotated[list[Text], Field(max_length=4096)] | None = None
    """Ids of replies: `request_id` of `/inference/v1/generate`, `id` of the others. Null or empty: all requests that came
    over HTTP."""


class LoadAdapterRequest(Body):
    """Body of `/v1/load_lora_adapter`."""

    lora_name: Text
    """Name of the adapter as the `model` of requests, without whitespace and '='."""
    lora_path: Annotated[str, Field(min_length=1, max_length=3072)]
    """Folder on the server's machine, as PEFT's `save_pretrained` writes it."""
    load_inplace: bool | None = None
    """true: replace a loaded adapter of that name, whose requests continue with the new one under the next policy version.
    Otherwise a loaded adapter of that name is an error."""
    base_model_name: str | None = None
    """Null, or the name of the served model."""
    is_3d_lora_weight: Literal[False] | None = None
    """Adapters of fused experts are not served."""
    pinned: bool | None = None
    """Accepted, without effect: adapters stay loaded until they are unloaded."""


class UnloadAdapterRequest(Body):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: Text
    lora_int_id: JsonValue = None
    """Accepted, without effect."""


class EngineReply(ReplyBody):
    """State of the engine after the call."""

    state: str
    """`running`, `paused`, `suspended` …"""
    policy_version: int


class FlushReply(ReplyBody):
    """Result of a flush of the prefix cache."""

    flushed_blocks: int
    """Number of KV blocks freed."""


class AbortReply(ReplyBody):
    """Result of an abort."""

    aborted: int
    """Number of prompts that were still open."""


class ChangeReply(ReplyBody):
    """Result of a change of the weights or of the LoRA adapters."""

    success: bool = True
    message: str
    policy_version: int
    """Policy version after the change."""
    aborted: int = 0
    """Number of samples that ended because their adapter was unloaded."""


def add_control_routes(app: FastAPI, serving: Serving) -> None:
    """Register the control routes, without checking `ServerConfig.admin`."""
    control, llm = Control(serving), serving.llm
    router = APIRouter(tags=["control"], responses=documented(409, 504))

    @router.post("/pause")
    async def pause(
        mode: OpenRequests = "keep",
        clear_cache: Annotated[
            bool, Query(description="Evict all cached KV blocks that no request references.")
        ] = False,
        wait_for_inflight_requests: Off = "false",
    ) -> EngineReply:
        """Pause every engine at its next step boundary."""
        await control.pause(mode)
        if clear_cache:
            await control.flush()
        return control.now

    @router.post("/resume")
    async def resume() -> EngineReply:
        """Continue every engine, including sleeping ones."""
        return await control.go_on()

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        """Return whether the engines are paused or asleep."""
        return {"is_paused": llm.state != EngineState.RUNNING}

    @router.post("/sleep")
    async def sleep(level: Annotated[Literal["1", "2"], Query()] = "1", mode: OpenRequests = "keep") -> EngineReply:
        """Pause, and release the KV memory: kept on the host (level 1), or computed again (level 2)."""
        await control.pause(mode)
        if llm.state == EngineState.PAUSED:
            kv = KVCacheManagementMode.OFFLOAD if level == "1" else KVCacheManagementMode.RECOMPUTE
            await control.ask(llm.suspend, kv)
        return control.now

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[
            list[Literal["weights", "kv_cache"]] | None,
            Query(description="What to restore; weights are never released. Without: all."),
        ] = None,
    ) -> EngineReply:
        """Restore the KV memory and continue, unless `tags` leaves it out."""
        return control.now if tags and "kv_cache" not in tags else await control.go_on()

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Return whether the KV memory is released."""
        return {"is_sleeping": llm.state == EngineState.SUSPENDED}

    @router.post("/abort_requests", openapi_extra=documented_body(AbortRequests, required=False))
    async def abort_requests(request: Request) -> AbortReply:
        """Abort replies by their ids, or all requests that came over HTTP."""
        order = await body_or_default(serving, request, AbortRequests)
        names = order.request_ids
        ended = [await serving.abort(name) for name in names] if names else [await serving.abort_all()]
        return AbortReply(aborted=sum(ended))

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: Off = "false", reset_external: Off = "false") -> FlushReply:
        """Evict all cached KV blocks that no request references."""
        return await control.flush()

    @router.post("/update_weights", openapi_extra=documented_body(UpdateWeightsRequest), responses=documented(400))
    async def update_weights(request: Request) -> ChangeReply:
        """Load the weights of a folder of safetensors; running requests go on under them."""
        order = await body_of(serving, request, UpdateWeightsRequest)
        with _conflict():
            version = await serving.ask(llm.load_weights, order.weight_dir, order.version)
        return ChangeReply(message=f"loaded {order.weight_dir}", policy_version=version)

    @router.post("/update_weight_version", openapi_extra=documented_body(WeightVersionRequest, required=False))
    async def update_weight_version(request: Request) -> EngineReply:
        """Announce that the weights of every engine have changed: later tokens carry the new policy version."""
        order = await body_or_default(serving, request, WeightVersionRequest)
        version = None if order.new_version is None else int(order.new_version)
        return await control.ask(llm.set_policy_version, version)

    @router.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        """Return the policy version, as text."""
        return {"weight_version": str(llm.policy_version)}

    # vLLM's path, and the one that prime-rl's client asks.
    for prefix in ("/v1", ""):

        @router.post(
            f"{prefix}/load_lora_adapter", openapi_extra=documented_body(LoadAdapterRequest), responses=documented(400)
        )
        async def load_lora_adapter(request: Request) -> ChangeReply:
            """Load a LoRA adapter from a folder on every rank: requests name it as their `model`."""
            return await control.load_adapter(await body_of(serving, request, LoadAdapterRequest))

        @router.post(
            f"{prefix}/unload_lora_adapter",
            openapi_extra=documented_body(UnloadAdapterRequest),
            responses=documented(400, 404),
        )
        async def unload_lora_adapter(request: Request) -> ChangeReply:
            """Unload a LoRA adapter on every rank; its requests end with a 409 that says so."""
            return await control.unload_adapter(await body_of(serving, request, UnloadAdapterRequest))

    @router.get("/get_world_size")
    async def get_world_size() -> dict[str, int]:
        """Return the number of engines."""
        return {"world_size": llm.world_size}

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of this package."""
        return {"version": __version__}

    @router.get("/server_info")
    async def server_info(config_format: Annotated[Literal["json"], Query()] = "json") -> dict[str, Any]:
        """Describe the server where clients look for vLLM's configuration; null is what it does not have."""
        config = {
            "model_config": {"model": serving.model_name, "max_model_len": llm.max_sequence_length},
            "parallel_config": {
                "tensor_parallel_size": llm.tensor_parallel_size,
                "data_parallel_size": llm.world_size,
            },
            "lora_config": {"max_loras": MAX_ADAPTERS, "max_cpu_loras": MAX_ADAPTERS, "max_lora_rank": MAX_RANK},
            "weight_transfer_config": None,
        }
        return {"vllm_config": config, "policy_version": llm.policy_version}

    app.include_router(router)


class Control:
    """Control calls over one server's engines. Each reaches all ranks, and returns after it has completed."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._llm = serving.llm

    @property
    def now(self) -> EngineReply:
        """State and policy version of the engine."""
        return EngineReply(state=str(self._llm.state), policy_version=self._llm.policy_version)

    async def ask(self, method: Callable[..., Any], *arguments: Any) -> EngineReply:
        """Call a lifecycle method of the LLM; raises `ApiError` 409 if its state does not allow it."""
        with _conflict():
            await self._serving.ask(method, *arguments)
        return self.now

    async def pause(self, mode: Literal["keep", "wait", "abort"]) -> None:
        """Pause the engines, unless they are paused or suspended; `mode` decides on requests that came over HTTP."""
        serving = self._serving
        serving.let_in(mode == "keep")
        with serving.closing():
            if mode == "abort":
                await serving.abort_all()
                await serving.drained(ABORT_TIMEOUT_S)
            elif mode == "wait" and self._llm.state == EngineState.RUNNING:
                await serving.drained(None)
                if not serving.shut:
                    return  # the engines were told to continue meanwhile
            if self._llm.state == EngineState.RUNNING:
                await self.ask(self._llm.pause)
        serving.watch_pause()

    async def go_on(self) -> EngineReply:
        """Restore the KV memory and continue, as far as needed."""
        self._serving.let_in(True)
        if self._llm.state == EngineState.SUSPENDED:
            await self.ask(self._llm.resume)
        if self._llm.state == EngineState.PAUSED:
            await self.ask(self._llm.unpause)
        return self.now

    async def flush(self) -> FlushReply:
        """Evict all cached KV blocks that no request references."""
        with _conflict():
            return FlushReply(flushed_blocks=await self._serving.ask(self._llm.flush_prefix_cache))

    async def load_adapter(self, order: LoadAdapterRequest) -> ChangeReply:
        """Load a LoRA adapter from a folder."""
        served = self._serving.model_name
        if order.lora_name == served:
            raise bad_request(
                f"lora_name={served!r}: the model itself has this name; choose another", param="lora_name"
            )
        if order.base_model_name not in (None, served):
            raise bad_request(f"base_model_name={order.base_model_name!r}: must be {served!r}", param="base_model_name")
        try:
            with _conflict():
                load = partial(self._llm.load_lora_adapter, replace=bool(order.load_inplace))
                version = await self._serving.ask(load, order.lora_name, order.lora_path)
        except ConfigError as exc:
            said = str(exc).replace("SamplingParams.adapter", "lora_name").replace("replace=True", "load_inplace=true")
            raise bad_request(said, param="lora_name" if "lora_name" in said else None) from exc
        return ChangeReply(message=f"loaded {order.lora_name!r} from {order.lora_path}", policy_version=version)

    async def unload_adapter(self, order: UnloadAdapterRequest) -> ChangeReply:
        """Unload a LoRA adapter; requests that name it end with an error."""
        if order.lora_name not in self._llm.lora_adapters:
            raise ApiError(404, f"lora_name={order.lora_name!r}: no such adapter is loaded", param="lora_name")
        with _conflict():
            ended = await self._serving.ask(self._llm.unload_lora_adapter, order.lora_name)
        version = self._llm.policy_version
        return ChangeReply(message=f"unloaded {order.lora_name!r}", policy_version=version, aborted=ended)


@contextmanager
def _conflict() -> Iterator[None]:
    """Turn the engine's refusal of a call, in its current state or in direct mode, into an `ApiError` 409."""
    try:
        yield
    except RuntimeError as exc:
        if type(exc) not in (RuntimeError, EngineStateError, ControlError):
            raise
        raise ApiError(409, str(exc), code="not_allowed_now", headers={"x-should-retry": "false"}) from exc
