"""Control routes with the same names as vLLM's, registered if `ServerConfig.admin` is on. Each acts on all ranks' engines.

    /pause  /resume  /is_paused  /sleep  /wake_up  /is_sleeping
    /abort_requests  /reset_prefix_cache  /update_weights  /update_weight_version
    /v1/load_lora_adapter  /v1/unload_lora_adapter  /server_info  /get_world_size

A route replies once its action has completed. If the engine's current state does not allow the action, the reply is a 409
with the engine's message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query
from pydantic import ConfigDict, Field, StringConstraints
from starlette.requests import Request

from rollout.engine.models.adapters import MAX_ADAPTERS, MAX_RANK
from rollout.errors import ConfigError, ControlError, EngineStateError
from rollout.requests.spans import MAX_VERSION
from rollout.server.bodies import Body, body_of, documented_body
from rollout.server.errors import ApiError, bad_request
from rollout.server.serving import Serving
from rollout.state import EngineState, KVCacheManagementMode

ABORT_TIMEOUT_S = 5.0
"""Seconds that a pause with mode `abort` waits for the aborted requests' replies to be sent."""

OpenRequests = Annotated[
    Literal["keep", "wait", "abort"],
    Query(
        description="Requests wait (`keep`). Or those of HTTP finish first (`wait`) or are aborted (`abort`), and new ones "
        "are a 503 until the engines continue."
    ),
]
Text = Annotated[str, Field(min_length=1, max_length=256)]


class UpdateWeightsRequest(Body):
    """The body of `/update_weights`."""

    weight_dir: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder of safetensors on the server's machine, as written by `save_pretrained`."""
    version: int | None = Field(None, ge=0, le=MAX_VERSION)
    """Policy version of the new weights, at least the current version. Default: the current version plus 1."""


class WeightVersionRequest(Body):
    """The body of `/update_weight_version`, which announces that the program that owns the model has changed the weights."""

    new_version: (
        Annotated[int, Field(ge=0, le=MAX_VERSION)] | Annotated[str, StringConstraints(pattern="^[0-9]{1,18}$")] | None
    ) = None
    """New policy version, at least the current version. Default: the current version plus 1. Cached KV is always dropped."""


class AbortRequests(Body):
    """The body of `/abort_requests`."""

    request_ids: Annotated[list[Text], Field(max_length=4096)] | None = None
    """Ids of the replies to abort: `request_id` in replies of `/inference/v1/generate`, `id` in other replies. If null or
    empty, all requests that arrived over HTTP are aborted."""


class LoadAdapterRequest(Body):
    """The body of `/v1/load_lora_adapter`. Other vLLM fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    lora_name: Text
    """Name of the adapter, which requests give as their `model`. It must not contain white space or '='."""
    lora_path: Annotated[str, Field(min_length=1, max_length=3072)]
    """Folder on the server's machine, as written by PEFT's `save_pretrained`."""
    load_inplace: bool = False
    """Whether to replace a loaded adapter of the same name. Requests that use it then continue with the new adapter,
    under the next policy version. If false, a loaded adapter of the same name is an error."""


class UnloadAdapterRequest(Body):
    """The body of `/v1/unload_lora_adapter`. Other vLLM fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    lora_name: Text


Reply = dict[str, Any]
"""The reply of a control route: the engine's `state` and `policy_version` after the call, the number of `aborted` requests,
and the number of evicted KV blocks (`flushed_blocks`)."""


def add_control_routes(app: FastAPI, serving: Serving) -> None:
    """Register the control routes, without checking `ServerConfig.admin`."""
    control, llm = Control(serving), serving.llm
    router = APIRouter(tags=["control"])

    @router.post("/pause")
    async def pause(
        mode: OpenRequests = "keep",
        clear_cache: Annotated[
            bool, Query(description="Evict all cached KV blocks that no request references.")
        ] = False,
    ) -> Reply:
        """Pause every engine at its next step boundary."""
        await control.pause(mode)
        return control.now(flushed_blocks=await control.ask(llm.flush_prefix_cache) if clear_cache else 0)

    @router.post("/resume")
    async def resume() -> Reply:
        """Resume every engine that is paused or asleep."""
        return await control.go_on()

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        """Return whether the engines are paused or asleep."""
        return {"is_paused": llm.state != EngineState.RUNNING}

    @router.post("/sleep")
    async def sleep(level: Annotated[Literal["1", "2"], Query()] = "1", mode: OpenRequests = "keep") -> Reply:
        """Pause every engine and release its KV memory. Level 1 copies the KV to the host; level 2 drops it."""
        await control.pause(mode)
        if llm.state == EngineState.PAUSED:
            await control.ask(
                llm.suspend, KVCacheManagementMode.OFFLOAD if level == "1" else KVCacheManagementMode.RECOMPUTE
            )
        return control.now()

    @router.post("/wake_up")
    async def wake_up(
        tags: Annotated[
            list[Literal["weights", "kv_cache"]] | None,
            Query(description="What to restore; weights are never released. Without: all."),
        ] = None,
    ) -> Reply:
        """Restore the KV memory and resume the engines, unless `tags` excludes the KV cache."""
        return control.now() if tags and "kv_cache" not in tags else await control.go_on()

    @router.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Return whether the KV memory is released."""
        return {"is_sleeping": llm.state == EngineState.SUSPENDED}

    @router.post("/abort_requests", openapi_extra=documented_body(AbortRequests, required=False))
    async def abort_requests(request: Request) -> Reply:
        """Abort replies by their ids, or abort all requests that arrived over HTTP."""
        names = (await body_of(serving, request, AbortRequests, required=False)).request_ids
        ended = [await serving.abort(name) for name in names] if names else [await serving.abort_all()]
        return control.now(aborted=sum(ended))

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Reply:
        """Evict all cached KV blocks that no request references."""
        return control.now(flushed_blocks=await control.ask(llm.flush_prefix_cache))

    @router.post("/update_weights", openapi_extra=documented_body(UpdateWeightsRequest))
    async def update_weights(request: Request) -> Reply:
        """Load the weights in a folder of safetensors; running requests continue with them."""
        order = await body_of(serving, request, UpdateWeightsRequest)
        await control.ask(llm.load_weights, order.weight_dir, order.version)
        return control.now()

    @router.post("/update_weight_version", openapi_extra=documented_body(WeightVersionRequest, required=False))
    async def update_weight_version(request: Request) -> Reply:
        """Announce that the weights of every engine have changed. Tokens sampled later have the new policy version."""
        version = (await body_of(serving, request, WeightVersionRequest, required=False)).new_version
        await control.ask(llm.set_policy_version, None if version is None else int(version))
        return control.now()

    # Serve two paths: vLLM's, and the one that prime-rl's client uses.
    @router.post("/v1/load_lora_adapter", openapi_extra=documented_body(LoadAdapterRequest))
    @router.post("/load_lora_adapter", openapi_extra=documented_body(LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> Reply:
        """Load a LoRA adapter from a folder on every rank. Requests use it by giving its name as their `model`."""
        return await control.load_adapter(await body_of(serving, request, LoadAdapterRequest))

    @router.post("/v1/unload_lora_adapter", openapi_extra=documented_body(UnloadAdapterRequest))
    @router.post("/unload_lora_adapter", openapi_extra=documented_body(UnloadAdapterRequest))
    async def unload_lora_adapter(request: Request) -> Reply:
        """Unload a LoRA adapter on every rank. Requests that use it fail with a 409 that gives the reason."""
        name = (await body_of(serving, request, UnloadAdapterRequest)).lora_name
        if name not in llm.lora_adapters:
            raise ApiError(404, f"lora_name={name!r}: no such adapter is loaded", param="lora_name")
        return control.now(aborted=await control.ask(llm.unload_lora_adapter, name))

    @router.get("/get_world_size")
    async def get_world_size() -> dict[str, int]:
        """Return the number of engines."""
        return {"world_size": llm.world_size}

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Describe the server in the form of vLLM's configuration; values that this server does not have are null."""
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
    """The control calls of one server. Each call acts on the engines of all ranks, and returns once it has completed."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._llm = serving.llm

    def now(self, **done: int) -> Reply:
        """Return the reply of a completed call: the engine's state and policy version, and the counts in `done`."""
        told = {"state": str(self._llm.state), "policy_version": self._llm.policy_version}
        return told | {"aborted": 0, "flushed_blocks": 0} | done

    async def ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the LLM; raise `ApiError` 409 if the engine's state forbids it or its coordinator is missing."""
        try:
            return await self._serving.ask(method, *arguments)
        except RuntimeError as exc:
            if type(exc) not in (RuntimeError, EngineStateError, ControlError):
                raise
            raise ApiError(409, str(exc), code="not_allowed_now", headers={"x-should-retry": "false"}) from exc

    async def pause(self, mode: Literal["keep", "wait", "abort"]) -> None:
        """Pause the engines unless they are paused or suspended already.

        Args:
            mode: what happens to open HTTP requests: they stay open ("keep"), finish before the pause ("wait") or are
                aborted ("abort").
        """
        serving = self._serving
        serving.let_in(mode == "keep")
        with serving.closing():
            if mode == "abort":
                await serving.abort_all()
                await serving.drained(ABORT_TIMEOUT_S)
            elif mode == "wait" and self._llm.state == EngineState.RUNNING:
                await serving.drained(None)
                if not serving.shut:
                    return  # Another call has resumed the engines meanwhile, so the pause is cancelled.
            if self._llm.state == EngineState.RUNNING:
                await self.ask(self._llm.pause)

    async def go_on(self) -> Reply:
        """Resume the engines, after restoring their KV memory if it was released."""
        self._serving.let_in(True)
        if self._llm.state == EngineState.SUSPENDED:
            await self.ask(self._llm.resume)
        if self._llm.state == EngineState.PAUSED:
            await self.ask(self._llm.unpause)
        return self.now()

    async def load_adapter(self, order: LoadAdapterRequest) -> Reply:
        """Load a LoRA adapter from the folder that `order` names; raise `ApiError` 400 if this is not possible."""
        served = self._serving.model_name
        if order.lora_name == served:
            raise bad_request(
                f"lora_name={served!r}: the model itself has this name; choose another", param="lora_name"
            )
        try:
            load = partial(self._llm.load_lora_adapter, replace=order.load_inplace)
            await self.ask(load, order.lora_name, order.lora_path)
        except ConfigError as exc:
            said = str(exc).replace("SamplingParams.adapter", "lora_name").replace("replace=True", "load_inplace=true")
            raise bad_request(said, param="lora_name" if "lora_name" in said else None) from exc
        return self.now()
