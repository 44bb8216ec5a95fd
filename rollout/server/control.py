"""Control routes under vLLM's names. Registered only if `ServerConfig.admin` is on; each acts on the engines of all ranks.

    /pause  /resume  /is_paused  /sleep  /wake_up  /is_sleeping
    /abort_requests  /reset_prefix_cache  /update_weights  /update_weight_version  /weight_info
    /server_info  /get_world_size  /version  /v1/load_lora_adapter  /v1/unload_lora_adapter

A route replies after its call has completed. A call that the engine does not allow in its current state is a 409 with the
engine's message. Query parameters of vLLM's that would change nothing here take only the value that says so.
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

OpenRequests = Annotated[
    Literal["keep", "wait", "abort"],
    Query(
        description="Requests wait (`keep`). Or those of HTTP finish first (`wait`) or are aborted (`abort`), and new ones "
        "are a 503 until the engines continue."
    ),
]
ABORT_TIMEOUT_S = 5.0
"""Seconds for which a pause by abort waits until the aborted requests have told their clients."""

Off = Annotated[Literal["false", "False", "0"], Query(description="This server does not do that.")]


class UpdateWeightsRequest(Body):
    """Body of `/update_weights`."""

    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder of safetensors on the server's machine, as `save_pretrained` leaves it."""
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

    request_ids: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=4096)] | None = (
        None
    )
    """Ids of replies: `request_id` of `/inference/v1/generate`, `id` of the others. Null or empty: all requests that came
    over HTTP."""


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


class EngineReply(ReplyBody):
    """State of the engine after the call."""

    state: str
    """`running`, `paused`, `suspended` …"""
    policy_version: int
    """Policy version of the weights: the number of updates so far, unless set explicitly."""


class FlushReply(ReplyBody):
    """Result of a flush of the prefix cache."""

    flushed_blocks: int
    """Number of KV blocks freed."""


class AbortReply(ReplyBody):
    """Result of an abort."""

    aborted: int
    """Number of prompts that were still open; 0 if all had ended."""


class AdapterReply(ReplyBody):
    """Result of loading or unloading a LoRA adapter."""

    success: bool = True
    message: str
    policy_version: int
    """Policy version, which an adapter that takes the place of another has raised."""
    aborted: int = 0
    """Number of samples that have ended because their adapter was unloaded."""


class WeightsReply(ReplyBody):
    """Result of a weight update."""

    success: bool
    message: str
    policy_version: int
    """Policy version of the new weights."""


def add_control_routes(app: FastAPI, serving: Serving) -> None:
    """Register the control routes, without checking `ServerConfig.admin`."""
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
        return {"is_paused": serving.llm.state != EngineState.RUNNING}

    @router.post("/sleep")
    async def sleep(level: Annotated[Literal["1", "2"], Query()] = "1", mode: OpenRequests = "keep") -> EngineReply:
        """Pause, and release the KV memory: kept on the host (level 1), or computed again (level 2)."""
        await control.pause(mode)
        if serving.llm.state == EngineState.PAUSED:
            kv = KVCacheManagementMode.OFFLOAD if level == "1" else KVCacheManagementMode.RECOMPUTE
            await control.ask(serving.llm.suspend, kv)
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
        return {"is_sleeping": serving.llm.state == EngineState.SUSPENDED}

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

    _add_weights(router, serving, control)
    _add_descriptions(router, serving)
    app.include_router(router)


def _add_weights(router: APIRouter, serving: Serving, control: Control) -> None:
    @router.post("/update_weights", openapi_extra=documented_body(UpdateWeightsRequest), responses=documented(400))
    async def update_weights(request: Request) -> WeightsReply:
        """Load the weights of a folder of safetensors; running requests go on under them."""
        order = await body_of(serving, request, UpdateWeightsRequest)
        with _conflict():
            version = await serving.ask(serving.llm.load_weights, order.weight_dir, order.version)
        return WeightsReply(success=True, message=f"loaded {order.weight_dir}", policy_version=version)

    @router.post("/update_weight_version", openapi_extra=documented_body(WeightVersionRequest, required=False))
    async def update_weight_version(request: Request) -> EngineReply:
        """Announce that the weights of every engine have changed: later tokens carry the new policy version."""
        order = await body_or_default(serving, request, WeightVersionRequest)
        version = None if order.new_version is None else int(order.new_version)
        return await control.ask(serving.llm.set_policy_version, version)

    @router.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        """Return the policy version, as text."""
        return {"weight_version": str(serving.llm.policy_version)}

    # vLLM's path, and the one that prime-rl's client asks.
    for prefix in ("/v1", ""):

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
    async def get_world_size() -> dict[str, int]:
        """Return the number of engines."""
        return {"world_size": serving.llm.world_size}

    @router.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of this package."""
        return {"version": __version__}

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
        """Call a lifecycle method of the LLM.

        Raises:
            ApiError: 409, the call is not allowed in the present state.
        """
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

    async def load_adapter(self, order: LoadAdapterRequest) -> AdapterReply:
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
        return AdapterReply(message=f"loaded {order.lora_name!r} from {order.lora_path}", policy_version=version)

    async def unload_adapter(self, order: UnloadAdapterRequest) -> AdapterReply:
        """Unload a LoRA adapter; requests that name it end with an error."""
        if order.lora_name not in self._llm.lora_adapters:
            raise ApiError(404, f"lora_name={order.lora_name!r}: no such adapter is loaded", param="lora_name")
        with _conflict():
            ended = await self._serving.ask(self._llm.unload_lora_adapter, order.lora_name)
        version = self._llm.policy_version
        return AdapterReply(message=f"unloaded {order.lora_name!r}", policy_version=version, aborted=ended)


@contextmanager
def _conflict() -> Iterator[None]:
    """Translate the engine's refusal of a call, in its current state or in direct mode, into a 409.

    Raises:
        ApiError: 409 with the engine's message.
    """
    try:
        yield
    except RuntimeError as exc:
        if type(exc) not in (RuntimeError, EngineStateError, ControlError):
            raise
        raise ApiError(409, str(exc), code="not_allowed_now", headers={"x-should-retry": "false"}) from exc
