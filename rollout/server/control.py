"""Control routes under the names that trainers call: vLLM's. Registered only if `ServerConfig.admin` is on.

/pause  /resume  /is_paused  /sleep  /wake_up  /is_sleeping     the engines of every rank, as /admin does it
/reset_prefix_cache  /update_weights  /server_info  /get_world_size  /version
/v1/load_lora_adapter  /v1/unload_lora_adapter                  also without /v1 (SGLang's), and below /admin
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query
from pydantic import Field, JsonValue
from starlette.requests import Request

from rollout.engine.forward.adapters import MAX_ADAPTERS
from rollout.engine.weights.lora_folder import MAX_RANK
from rollout.requests.spans import MAX_VERSION
from rollout.server.admin import EngineReply, FlushReply, conflict, engine_now
from rollout.server.bodies import ReplyBody, body_of, documented_body
from rollout.server.errors import ApiError, bad_request, documented
from rollout.server.openai.schema import Body
from rollout.server.serving import Serving
from rollout.state import EngineState, KVCacheManagementMode
from rollout.version import __version__


class UpdateWeightsRequest(Body):
    """Body of `/update_weights` and `/update_weights_from_disk`: exactly one folder."""

    weight_dir: str | None = Field(None, min_length=1, max_length=4096)
    """Folder of safetensors on the server's machine, as `save_pretrained` leaves it."""
    model_path: str | None = Field(None, min_length=1, max_length=4096)
    """SGLang's name of the same."""
    version: int | None = Field(None, ge=0, le=MAX_VERSION)
    """New policy version, at least the current one. Default: the current one plus 1."""
    weight_version: Annotated[str, Field(max_length=256)] | None = None
    """Accepted, without effect: a version is an integer here."""
    load_format: Literal["auto", "safetensors"] | None = None
    """Safetensors are the only format."""
    abort_all_requests: bool | None = None
    """true: abort open requests first. Otherwise they go on under the new weights."""
    flush_cache: bool | None = None
    """Accepted, without effect: cached KV of earlier weights is never reused."""
    torch_empty_cache: bool | None = None
    """Accepted, without effect: nothing is allocated for an update."""
    recapture_cuda_graph: bool | None = None
    """Accepted, without effect: graphs are captured again where the weights have moved."""
    is_async: Literal[False] | None = None
    """The reply comes when the weights are loaded."""
    keep_pause: Literal[False] | None = None
    """Engines that were running go on; pause them first, and they stay paused."""


class LoadAdapterRequest(Body):
    """Body of `/v1/load_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the adapter as the `model` of requests, without whitespace and '='."""
    lora_path: Annotated[str, Field(min_length=1, max_length=3072)]
    """Folder on the server's machine, as PEFT's `save_pretrained` leaves it."""
    load_inplace: bool | None = None
    """true: take the place of a loaded adapter of that name, whose requests go on with this one under the next policy
    version. Otherwise it is an error if there is one."""
    base_model_name: str | None = None
    """Null, or the name of the served model."""
    is_3d_lora_weight: Literal[False] | None = None
    """Adapters of fused experts are not served."""
    pinned: bool | None = None
    """Accepted, without effect: adapters stay loaded until they are unloaded."""


class UnloadAdapterRequest(Body):
    """Body of `/v1/unload_lora_adapter`."""

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the adapter."""
    lora_int_id: JsonValue = None
    """Accepted, without effect: the name says which."""


class AdapterReply(ReplyBody):
    """Result of loading or unloading a LoRA adapter."""

    success: bool = True
    message: str
    policy_version: int
    """Policy version, which an adapter that takes the place of another has raised."""
    aborted: int = 0
    """Number of samples that have ended because their adapter was unloaded."""


class PausedReply(ReplyBody):
    """Whether the engines are paused."""

    is_paused: bool


class SleepingReply(ReplyBody):
    """Whether the KV memory is released."""

    is_sleeping: bool


class WorldReply(ReplyBody):
    """Number of engines."""

    world_size: int
    """Engines that compute for this server."""


class VersionReply(ReplyBody):
    """Version of this package."""

    version: str


class WeightsReply(ReplyBody):
    """Result of a weight update."""

    success: bool
    message: str
    policy_version: int
    """Policy version of the new weights."""


class Control:
    """What both dialects ask of the engines. Every call reaches all ranks, and replies after it has completed."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._llm = serving.llm

    async def pause(self, *, abort: bool = False) -> EngineReply:
        """Pause the engines. No-op if they are paused or suspended."""
        with conflict():
            if abort:
                await self._serving.abort_all()
            if self._llm.state == EngineState.RUNNING:
                await self._serving.ask(self._llm.pause)
        return engine_now(self._llm)

    async def go_on(self) -> EngineReply:
        """Restore the KV memory and continue, as far as needed."""
        with conflict():
            if self._llm.state == EngineState.SUSPENDED:
                await self._serving.ask(self._llm.resume)
            if self._llm.state == EngineState.PAUSED:
                await self._serving.ask(self._llm.unpause)
        return engine_now(self._llm)

    async def sleep(self, mode: KVCacheManagementMode | None) -> EngineReply:
        """Pause the engines and release their KV memory."""
        await self.pause()
        with conflict():
            if self._llm.state == EngineState.PAUSED:
                await self._serving.ask(self._llm.suspend, mode)
        return engine_now(self._llm)

    async def flush(self) -> FlushReply:
        """Evict all cached KV blocks that no request references."""
        with conflict():
            return FlushReply(flushed_blocks=await asyncio.to_thread(self._llm.flush_prefix_cache))

    async def load(self, order: UpdateWeightsRequest) -> WeightsReply:
        """Load weights from a folder."""
        if (order.weight_dir is None) is (order.model_path is None):
            raise bad_request("the body needs weight_dir, the folder of the weights", param="weight_dir")
        folder = order.weight_dir or order.model_path
        with conflict():
            if order.abort_all_requests:
                await self._serving.abort_all()
            version = await asyncio.to_thread(self._llm.load_weights, folder, order.version)
        return WeightsReply(success=True, message=f"loaded {folder}", policy_version=version)

    async def load_adapter(self, order: LoadAdapterRequest) -> AdapterReply:
        """Load a LoRA adapter from a folder."""
        served = self._serving.model_name
        if order.lora_name == served:
            raise bad_request(
                f"lora_name={served!r}: the model itself has this name; choose another", param="lora_name"
            )
        if order.base_model_name not in (None, served):
            raise bad_request(f"base_model_name={order.base_model_name!r}: must be {served!r}", param="base_model_name")
        with conflict():
            load = partial(self._llm.load_lora_adapter, replace=bool(order.load_inplace))
            version = await asyncio.to_thread(load, order.lora_name, order.lora_path)
        return AdapterReply(message=f"loaded {order.lora_name!r} from {order.lora_path}", policy_version=version)

    async def unload_adapter(self, order: UnloadAdapterRequest) -> AdapterReply:
        """Unload a LoRA adapter; requests that name it end with an error."""
        if order.lora_name not in self._llm.lora_adapters:
            raise ApiError(404, f"lora_name={order.lora_name!r}: no such adapter is loaded", param="lora_name")
        with conflict():
            ended = await asyncio.to_thread(self._llm.unload_lora_adapter, order.lora_name)
        version = self._llm.policy_version
        return AdapterReply(message=f"unloaded {order.lora_name!r}", policy_version=version, aborted=ended)

    @property
    def world_size(self) -> int:
        """Number of engines."""
        return int(self._llm.world_size)

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that compute each forward together."""
        return int(self._llm.tensor_parallel_size)


def add_control_routes(app: FastAPI, serving: Serving) -> None:
    """Register vLLM's control routes, without checking `ServerConfig.admin`."""
    control = Control(serving)
    router = APIRouter(tags=["control"], responses=documented(409, 504))

    @router.post("/pause")
    async def pause(mode: Annotated[Literal["keep", "abort"], Query()] = "keep") -> EngineReply:
        """Pause every engine at its next step boundary: requests wait (`keep`) or are aborted (`abort`)."""
        return await control.pause(abort=mode == "abort")

    @router.post("/resume")
    async def resume() -> EngineReply:
        """Continue every engine, also a sleeping one."""
        return await control.go_on()

    @router.get("/is_paused")
    async def is_paused() -> PausedReply:
        """Whether the engines are paused or asleep."""
        return PausedReply(is_paused=serving.llm.state != EngineState.RUNNING)

    @router.post("/sleep")
    async def sleep(level: Annotated[Literal["1", "2"], Query()] = "1") -> EngineReply:
        """Pause, and release the KV memory: kept on the host (level 1), or computed again (level 2)."""
        return await control.sleep(KVCacheManagementMode.OFFLOAD if level == "1" else KVCacheManagementMode.RECOMPUTE)

    @router.post("/wake_up")
    async def wake_up() -> EngineReply:
        """Restore the KV memory and continue."""
        return await control.go_on()

    @router.get("/is_sleeping")
    async def is_sleeping() -> SleepingReply:
        """Whether the KV memory is released."""
        return SleepingReply(is_sleeping=serving.llm.state == EngineState.SUSPENDED)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> FlushReply:
        """Evict all cached KV blocks that no request references."""
        return await control.flush()

    for path in ("/update_weights", "/update_weights_from_disk"):

        @router.post(path, openapi_extra=documented_body(UpdateWeightsRequest), responses=documented(400))
        async def update_weights(request: Request) -> WeightsReply:
            """Load the weights of a folder of safetensors; running requests go on under them."""
            return await control.load(await body_of(serving, request, UpdateWeightsRequest))

    for prefix in ("/v1", "", "/admin"):

        @router.post(
            f"{prefix}/load_lora_adapter", openapi_extra=documented_body(LoadAdapterRequest), responses=documented(400)
        )
        async def load_lora_adapter(request: Request) -> AdapterReply:
            """Load a LoRA adapter from a folder on every rank: requests name it as their `model`."""
            return await control.load_adapter(await body_of(serving, request, LoadAdapterRequest))

        @router.post(
            f"{prefix}/unload_lora_adapter",
            openapi_extra=documented_body(UnloadAdapterRequest),
            responses=documented(400, 404),
        )
        async def unload_lora_adapter(request: Request) -> AdapterReply:
            """Unload a LoRA adapter on every rank; its requests end with a 409 that says so."""
            return await control.unload_adapter(await body_of(serving, request, UnloadAdapterRequest))

    _add_descriptions(router, serving, control)
    app.include_router(router)


def _add_descriptions(router: APIRouter, serving: Serving, control: Control) -> None:
    @router.get("/get_world_size")
    async def get_world_size() -> WorldReply:
        """Return the number of engines."""
        return WorldReply(world_size=control.world_size)

    @router.get("/version")
    async def version() -> VersionReply:
        """Return the version of this package."""
        return VersionReply(version=__version__)

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Describe the server where clients look for vLLM's configuration; null is what it does not have."""
        config = {
            "model_config": {"model": serving.model_name, "max_model_len": serving.llm.max_sequence_length},
            "parallel_config": {
                "tensor_parallel_size": control.tensor_parallel_size,
                "data_parallel_size": control.world_size,
            },
            "lora_config": {"max_loras": MAX_ADAPTERS, "max_cpu_loras": MAX_ADAPTERS, "max_lora_rank": MAX_RANK},
            "weight_transfer_config": None,
        }
        return {"vllm_config": config, "policy_version": serving.llm.policy_version}
