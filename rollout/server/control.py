"""What the control routes of every dialect (`admin`, `vllm`, `sglang`) ask of the engines, with bodies and replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from rollout.errors import ControlError, EngineStateError
from rollout.requests.spans import MAX_VERSION
from rollout.server.bodies import ReplyBody
from rollout.server.errors import ApiError, bad_request
from rollout.server.openai.schema import Body
from rollout.server.serving import Serving
from rollout.state import EngineState, KVCacheManagementMode


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


class Control:
    """Control calls over one server's engines. Each reaches all ranks, and replies after it has completed."""

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

    async def pause(self, *, abort: bool = False, flush: bool = False) -> EngineReply:
        """Pause the engines. No-op if they are paused or suspended.

        Args:
            abort: abort the requests that came over HTTP first.
            flush: afterwards evict all cached KV blocks that no request references.
        """
        if abort:
            await self._serving.abort_all()
        if self._llm.state == EngineState.RUNNING:
            await self.ask(self._llm.pause)
        if flush:
            await self.flush()
        return self.now

    async def go_on(self) -> EngineReply:
        """Restore the KV memory and continue, as far as needed."""
        if self._llm.state == EngineState.SUSPENDED:
            await self.ask(self._llm.resume)
        if self._llm.state == EngineState.PAUSED:
            await self.ask(self._llm.unpause)
        return self.now

    async def wake(self, tags: Sequence[str] | None) -> EngineReply:
        """Restore the KV memory and continue; no-op if `tags` names other memory only, which is never released."""
        return self.now if tags and "kv_cache" not in tags else await self.go_on()

    async def sleep(self, mode: KVCacheManagementMode | None, *, abort: bool = False) -> EngineReply:
        """Pause the engines and release their KV memory; `mode` None: as each engine is configured."""
        await self.pause(abort=abort)
        if self._llm.state == EngineState.PAUSED:
            await self.ask(self._llm.suspend, mode)
        return self.now

    async def flush(self) -> FlushReply:
        """Evict all cached KV blocks that no request references."""
        with _conflict():
            return FlushReply(flushed_blocks=await self._serving.ask(self._llm.flush_prefix_cache))

    async def abort(self, reply_id: str | None) -> AbortReply:
        """Abort the requests of one reply; None: all that came over HTTP."""
        serving = self._serving
        return AbortReply(aborted=await (serving.abort_all() if reply_id is None else serving.abort(reply_id)))

    async def load(self, order: UpdateWeightsRequest) -> WeightsReply:
        """Load weights from a folder."""
        if (order.weight_dir is None) is (order.model_path is None):
            raise bad_request("the body needs weight_dir, the folder of the weights", param="weight_dir")
        folder = order.weight_dir or order.model_path
        if order.abort_all_requests:
            await self._serving.abort_all()
        with _conflict():
            version = await self._serving.ask(self._llm.load_weights, folder, order.version)
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
        with _conflict():
            load = partial(self._llm.load_lora_adapter, replace=bool(order.load_inplace))
            version = await self._serving.ask(load, order.lora_name, order.lora_path)
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
