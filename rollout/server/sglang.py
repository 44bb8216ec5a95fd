"""SGLang's native routes, as slime and AReaL call them.

    /generate  /health_generate  /model_info  /get_model_info                          always
    /pause_generation  /continue_generation  /abort_request  /flush_cache              only if `ServerConfig.admin` is on
    /release_memory_occupation  /resume_memory_occupation

A request that is aborted while it runs is answered with what it has so far, and the finish reason `abort`.
"""

from __future__ import annotations

from base64 import b64encode
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from rollout.distributed.client.text_stream import TextDelta
from rollout.errors import InvalidRequestError, RequestAbortedError
from rollout.sampling_params import SamplingParams
from rollout.server.bodies import LARGE, body_of, body_or_default, documented_body, off_the_loop
from rollout.server.chat_template.prompt_ids import PromptTokenizer, Stop
from rollout.server.control import AbortReply, Control, EngineReply, FlushReply
from rollout.server.errors import ApiError, bad_request, documented
from rollout.server.openai import generation as calls
from rollout.server.openai.logprobs import finite
from rollout.server.openai.samples import merged, staleness
from rollout.server.openai.schema import (
    INT32,
    MAX_N,
    MAX_STOPS,
    Absent,
    Body,
    RequestFields,
    StopString,
    TokenId,
    TokenIds,
)
from rollout.server.serving import Serving, or_disconnected
from rollout.server.sse import encode
from rollout.state import FinishReason
from rollout.structured_output import StructuredOutput

DEFAULT_NEW_TOKENS = 128


class SGLangParams(Body):
    """Sampling parameters of SGLang."""

    n: int | None = Field(None, ge=1, le=MAX_N)
    max_new_tokens: int | None = Field(None, ge=0, le=INT32)
    """Maximum number of tokens of a sample. Default 128."""
    min_new_tokens: int | None = Field(None, ge=0, le=INT32)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=INT32)
    """-1 or 0: all."""
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOPS)
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    """Keep the stop string in the text."""
    skip_special_tokens: bool | None = None
    """Accepted, without effect on ids; the text never shows special tokens."""
    spaces_between_special_tokens: bool | None = None
    """Accepted, without effect."""
    sampling_seed: int | None = Field(None, ge=0, le=2**63 - 1)
    json_schema: str | None = None
    """The text is JSON that fits this schema."""
    regex: str | None = None
    """The text matches this expression."""

    def sampling_params(self, **decided: Any) -> SamplingParams:
        """Build the request's `SamplingParams`.

        Raises:
            ConfigError: the values contradict each other.
        """
        given = {name: getattr(self, name) for name in type(self).model_fields if getattr(self, name) is not None}
        asked = {_NAMES.get(name, name): value for name, value in given.items() if name not in _NOT_SAMPLING}
        if asked.get("top_k") == -1:
            asked["top_k"] = 0
        if self.json_schema is not None or self.regex is not None:
            asked["structured"] = StructuredOutput(json_schema=self.json_schema, regex=self.regex)
        return SamplingParams(**asked | decided)


_NAMES = {"min_new_tokens": "min_tokens", "no_stop_trim": "include_stop_str_in_output", "sampling_seed": "seed"}
_NOT_SAMPLING = {"max_new_tokens", "skip_special_tokens", "spaces_between_special_tokens", "json_schema", "regex"}


class SGLangRequest(RequestFields):
    """Body of `POST /generate`: one prompt, as text or as token ids."""

    prompt_field = "input_ids"

    text: str | None = None
    """The prompt."""
    input_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    """The prompt's token ids."""
    sampling_params: SGLangParams = Field(default_factory=lambda: SGLangParams.model_validate({}))
    return_logprob: bool | None = None
    """Include `output_token_logprobs`."""
    logprob_start_len: int | None = Field(None, ge=-1, le=INT32)
    """Accepted, without effect: log-probs of the prompt are not returned here."""
    top_logprobs_num: int | None = Field(None, ge=0, le=20)
    """Include `output_top_logprobs`, of this many likeliest tokens."""
    return_text_in_logprobs: bool | None = None
    """Accepted; the text of a token in log-probs is always null."""
    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the request, for `/abort_request`. Null: one is made."""
    stream: Literal[False] | None = None
    """Streams are served by `/v1/completions` and `/inference/v1/generate`."""
    image_data: Absent = None
    lora_path: str | None = None
    """Name of a loaded LoRA adapter. Null: the model itself, or what `model` names."""
    return_routed_experts: bool | None = None
    """Include `routed_experts` in `meta_info`: base64 of int32 [positions, layers, k], the positions of prompt and
    completion but the last. Needs an engine with `record_routes`."""

    @model_validator(mode="after")
    def _one_prompt(self) -> SGLangRequest:
        if (self.text is None) is (self.input_ids is None):
            raise PydanticCustomError("one_of", "needs either text or input_ids")
        return self

    @property
    def samples(self) -> int:
        """Samples of the prompt."""
        return self.sampling_params.n or 1


class PauseGeneration(Body):
    """Body of `/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] | None = None
    """`abort` (default): open requests are answered with what they have. The others: they go on afterwards."""


class ContinueGeneration(Body):
    """Body of `/continue_generation`."""

    torch_empty_cache: bool | None = None
    """Accepted, without effect: a pause allocates nothing."""


class ReleaseMemory(Body):
    """Body of `/release_memory_occupation`."""

    tags: list[Literal["kv_cache"]] | None = None
    """What to release: the KV memory is all that can be; weights stay."""


class ResumeMemory(Body):
    """Body of `/resume_memory_occupation`."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None
    """What to restore; only the KV memory was released. Null: all."""


class AbortRequest(Body):
    """Body of `/abort_request`."""

    rid: str | None = Field(None, min_length=1, max_length=256)
    """Name of the request."""
    abort_all: bool | None = None
    """true: abort every request that came over HTTP."""
    abort_message: JsonValue = None
    """Accepted, without effect."""


class ModelInfoReply(BaseModel):
    """The served model, in SGLang's words."""

    model_config = ConfigDict(use_attribute_docstrings=True, protected_namespaces=())

    model_path: str
    tokenizer_path: str
    is_generation: bool
    weight_version: str
    """The policy version, as text."""


def add_sglang_routes(app: FastAPI, serving: Serving) -> None:
    """Register the routes that generate and describe."""
    tokenizer = serving.llm.tokenizer
    reader = None if tokenizer is None else PromptTokenizer(tokenizer, lambda: serving.llm.max_sequence_length)
    router = APIRouter(tags=["sglang"])

    @router.post("/generate", response_model=None, responses=calls.ERRORS, openapi_extra=documented_body(SGLangRequest))
    async def generate(request: Request) -> Response:
        """Generate completions of one prompt; a list of replies if `n` is above 1."""
        body = await body_of(serving, request, SGLangRequest)
        calls.admit(serving, request, body, 1)
        constrained = body.sampling_params.json_schema or body.sampling_params.regex
        size = len(await request.body()) if constrained is None else LARGE
        prompt, params = await off_the_loop(serving, request, size, lambda stop: _prepared(serving, body, reader, stop))
        replies = await or_disconnected(request, _replies(serving, body, prompt, params))
        if len(replies) > 1:
            return await calls.json_reply(replies)
        return Response(encode(replies[0]), media_type="application/json")

    @router.get("/health_generate", responses=documented(503))
    async def health_generate() -> dict[str, str]:
        """200 while the engine serves requests."""
        serving.llm.refuse_when_over()
        return {"status": str(serving.llm.state)}

    async def model_info() -> ModelInfoReply:
        """Describe the model."""
        name = serving.model_name
        weights = str(serving.llm.policy_version)
        return ModelInfoReply(model_path=name, tokenizer_path=name, is_generation=True, weight_version=weights)

    for path in ("/model_info", "/get_model_info"):
        router.add_api_route(path, model_info)

    app.include_router(router)


def add_sglang_control(app: FastAPI, serving: Serving) -> None:
    """Register the control routes, without checking `ServerConfig.admin`."""
    control = Control(serving)
    router = APIRouter(tags=["sglang"], responses=documented(409, 504))

    @router.post("/pause_generation", openapi_extra=documented_body(PauseGeneration, required=False))
    async def pause_generation(request: Request) -> EngineReply:
        """Pause every engine at its next step boundary."""
        order = await body_or_default(serving, request, PauseGeneration)
        return await control.pause(abort=order.mode in (None, "abort"))

    @router.post("/continue_generation", openapi_extra=documented_body(ContinueGeneration, required=False))
    async def continue_generation(request: Request) -> EngineReply:
        """Continue every engine."""
        await body_or_default(serving, request, ContinueGeneration)
        return await control.go_on()

    @router.post("/release_memory_occupation", openapi_extra=documented_body(ReleaseMemory, required=False))
    async def release_memory_occupation(request: Request) -> EngineReply:
        """Pause, and release the KV memory as each engine is configured to; open requests go on afterwards."""
        await body_or_default(serving, request, ReleaseMemory)
        return await control.sleep(None)

    @router.post("/resume_memory_occupation", openapi_extra=documented_body(ResumeMemory, required=False))
    async def resume_memory_occupation(request: Request) -> EngineReply:
        """Restore the KV memory and continue, unless `tags` leaves it out."""
        order = await body_or_default(serving, request, ResumeMemory)
        return await control.wake(order.tags)

    @router.post("/abort_request", openapi_extra=documented_body(AbortRequest))
    async def abort_request(request: Request) -> AbortReply:
        """Abort one request by its `rid`, or all."""
        order = await body_of(serving, request, AbortRequest)
        if order.rid is None and not order.abort_all:
            raise bad_request("the body needs rid, or abort_all=true", param="rid")
        return await control.abort(order.rid)

    async def flush_cache(
        timeout: Annotated[float, Query(ge=0, description="Without effect: nothing is waited for.")] = 0,
    ) -> FlushReply:
        """Evict all cached KV blocks that no request references."""
        return await control.flush()

    # SGLang has both. Routes of their own, so that each has an operation id of its own.
    for method in ("GET", "POST"):
        router.add_api_route("/flush_cache", flush_cache, methods=[method])

    app.include_router(router)


def _prepared(
    serving: Serving, body: SGLangRequest, reader: PromptTokenizer | None, stop: Stop
) -> tuple[list[int], SamplingParams]:
    if body.return_routed_experts and not serving.llm.config.record_routes:
        raise bad_request(
            "return_routed_experts=true: the engine records no routes; start it with record_routes, on a mixture of experts",
            param="return_routed_experts",
        )
    try:
        if body.input_ids is not None:
            prompt = body.input_ids
        elif reader is None:
            raise bad_request("the model has no tokenizer: send input_ids", param="text")
        else:
            prompt = reader.ids(body.text or "", "text", stop)
        wanted = body.sampling_params.max_new_tokens
        params = body.sampling_params.sampling_params(
            cache_salt=body.cache_salt,
            adapter=serving.adapter_of(body.lora_path, "lora_path") or serving.adapter_of(body.model),
            max_tokens=calls.tokens_left(serving, prompt, DEFAULT_NEW_TOKENS if wanted is None else wanted),
            logprobs=body.top_logprobs_num or 0 if body.return_logprob else None,
        )
        return prompt, calls.checked(serving, params)
    except InvalidRequestError as exc:
        raise calls.refused(exc, body) from exc


async def _replies(
    serving: Serving, body: SGLangRequest, prompt: list[int], params: SamplingParams
) -> list[dict[str, Any]]:
    """Read the samples as a stream, so that an abort leaves what there is."""
    name = serving.name_of_reply("gen", body.rid)
    streams = await calls.begin(serving, body, [(prompt, params)], growing=True)
    parts: dict[int, list[TextDelta]] = {index: [] for index in range(params.n)}
    cached = 0
    try:
        async with aclosing(calls.deltas_of(serving, name, streams, params.n)) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)
        cached = streams[0].results[0].num_cached_tokens
    except RequestAbortedError:
        pass
    except ApiError as exc:
        if exc.code != "aborted":
            raise
    version = serving.llm.policy_version
    return [_reply(name, body, prompt, index, parts[index], cached, version) for index in sorted(parts)]


def _reply(
    name: str, body: SGLangRequest, prompt: list[int], index: int, parts: list[TextDelta], cached: int, version: int
) -> dict[str, Any]:
    (whole,) = merged(parts) if parts else [TextDelta(index, "", [], [], [])]
    meta: dict[str, Any] = {
        "id": name,
        "finish_reason": _finish_reason(whole),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(whole.token_ids),
        "cached_tokens": cached,
        "weight_version": str(version),
        "policy_versions": whole.policy_versions,
        "policy_staleness": staleness(whole, version),
    }
    if body.return_logprob:
        pairs = zip(whole.log_probs, whole.token_ids, strict=True)
        meta["output_token_logprobs"] = [[finite(log_prob), token, None] for log_prob, token in pairs]
    if body.return_routed_experts and whole.routed_experts is not None:
        meta["routed_experts"] = b64encode(whole.routed_experts.astype("<i4").tobytes()).decode("ascii")
    if body.return_logprob and body.top_logprobs_num:
        rows = whole.top_log_probs or []
        meta["output_top_logprobs"] = [[[finite(value), token, None] for token, value in row] for row in rows]
    return {"text": whole.text, "output_ids": whole.token_ids, "meta_info": meta}


def _finish_reason(delta: TextDelta) -> dict[str, Any]:
    if delta.finish_reason is None:
        return {"type": "abort", "message": "the request was aborted"}
    if delta.finish_reason == FinishReason.STOP:
        return {"type": "stop", "matched": delta.stop_reason}
    return {"type": "length", "length": len(delta.token_ids)}
