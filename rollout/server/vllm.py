"""Control routes under vLLM's names. Registered only if `ServerConfig.admin` is on.

/pause  /resume  /is_paused  /sleep  /wake_up  /is_sleeping     the engines of every rank, as /admin does it
/reset_prefix_cache  /update_weights  /server_info  /get_world_size  /version
/v1/load_lora_adapter  /v1/unload_lora_adapter                  also without /v1 (SGLang's), and below /admin

Query parameters of vLLM's that would change nothing here take only the value that says so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query
from starlette.requests import Request

from rollout.engine.forward.adapters import MAX_ADAPTERS
from rollout.engine.weights.lora_folder import MAX_RANK
from rollout.server.bodies import ReplyBody, body_of, documented_body
from rollout.server.control import (
    AdapterReply,
    Control,
    EngineReply,
    FlushReply,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
    WeightsReply,
)
from rollout.server.errors import documented
from rollout.server.serving import Serving
from rollout.state import EngineState, KVCacheManagementMode
from rollout.version import __version__

OpenRequests = Annotated[
    Literal["keep", "abort"], Query(description="Open requests wait (`keep`), or those of HTTP are aborted (`abort`).")
]
Off = Annotated[Literal["false", "False", "0"], Query(description="This server does not do that.")]


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


def add_vllm_control(app: FastAPI, serving: Serving) -> None:
    """Register vLLM's control routes, without checking `ServerConfig.admin`."""
    control = Control(serving)
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
        return await control.pause(abort=mode == "abort", flush=clear_cache)

    @router.post("/resume")
    async def resume() -> EngineReply:
        """Continue every engine, also a sleeping one."""
        return await control.go_on()

    @router.get("/is_paused")
    async def is_paused() -> PausedReply:
        """Whether the engines are paused or asleep."""
        return PausedReply(is_paused=serving.llm.state != EngineState.RUNNING)

    @router.post("/sleep")
    async def sleep(level: Annotated[Literal["1", "2"], Query()] = "1", mode: OpenRequests = "keep") -> EngineReply:
        """Pause, and release the KV memory: kept on the host (level 1), or computed again (level 2)."""
        kv = KVCacheManagementMode.OFFLOAD if level == "1" else KVCacheManagementMode.RECOMPUTE
        return await control.sleep(kv, abort=mode == "abort")

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[
            list[Literal["weights", "kv_cache"]] | None,
            Query(description="What to restore; weights are never released. Without: all."),
        ] = None,
    ) -> EngineReply:
        """Restore the KV memory and continue, unless `tags` leaves it out."""
        return await control.wake(tags)

    @router.get("/is_sleeping")
    async def is_sleeping() -> SleepingReply:
        """Whether the KV memory is released."""
        return SleepingReply(is_sleeping=serving.llm.state == EngineState.SUSPENDED)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: Off = "false", reset_external: Off = "false") -> FlushReply:
        """Evict all cached KV blocks that no request references."""
        return await control.flush()

    _add_weights(router, serving, control)
    _add_descriptions(router, serving)
    app.include_router(router)


def _add_weights(router: APIRouter, serving: Serving, control: Control) -> None:
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


def _add_descriptions(router: APIRouter, serving: Serving) -> None:
    @router.get("/get_world_size")
    async def get_world_size() -> WorldReply:
        """Return the number of engines."""
        return WorldReply(world_size=serving.llm.world_size)

    @router.get("/version")
    async def version() -> VersionReply:
        """Return the version of this package."""
        return VersionReply(version=__version__)

    @router.get("/server_info")
    async def server_info(config_format: Annotated[Literal["json"], Query()] = "json") -> dict[str, Any]:
        """Describe the server where clients look for vLLM's configuration; null is what it does not have."""
        config = {
            "model_config": {"model": serving.model_name, "max_model_len": serving.llm.max_sequence_length},
            "parallel_config": {
                "tensor_parallel_size": serving.llm.tensor_parallel_size,
                "data_parallel_size": serving.llm.world_size,
            },
            "lora_config": {"max_loras": MAX_ADAPTERS, "max_cpu_loras": MAX_ADAPTERS, "max_lora_rank": MAX_RANK},
            "weight_transfer_config": None,
        }
        return {"vllm_config": config, "policy_version": serving.llm.policy_version}
