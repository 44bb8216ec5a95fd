"""The ASGI application of one LLM: its routes and its OpenAPI description.

- /v1/chat/completions  /v1/completions  /v1/models    OpenAI's API, with additional fields
- /inference/v1/generate  /tokenize                    token ids in and out, as in vLLM
- /health  /ping                                       for monitoring; these require no key
- /metrics                                             metrics for Prometheus
- /docs  /openapi.json                                 a page that describes all routes, and its JSON source
- /pause  /resume  /update_weights  …                  control of the engines; only if `ServerConfig.admin` is on
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from rollout.config import ServerConfig
from rollout.errors import ConfigError, ConnectionLostError, EngineDeadError, RolloutError
from rollout.server.chat_template.conversation import Conversation
from rollout.server.control import (
    AbortRequests,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
    WeightVersionRequest,
    add_control_routes,
)
from rollout.server.errors import ErrorReply, describe
from rollout.server.middleware import OPEN_PATHS, Auth, Boundary
from rollout.server.openai.chat import add_chat_routes
from rollout.server.openai.chat_schema import ChatRequest, ChatTokensRequest
from rollout.server.openai.completions import add_completion_routes
from rollout.server.openai.logprobs import TokenTexts
from rollout.server.openai.schema import CompletionRequest
from rollout.server.openai.tokens import GenerateRequest, TokenizeRequest, add_token_routes
from rollout.server.prometheus import CONTENT_TYPE, RequestMetrics
from rollout.server.serving import Serving
from rollout.state import EngineState

_DESCRIPTION = """OpenAI's API over a rollout engine inside a trainer. In addition to OpenAI's fields, every choice contains
the token ids, their sampling log-probs and their policy versions (`rollout`; omitted with `return_rollout=false`). A
conversation sent back with these ids is continued from them instead of being tokenised again."""


_PARSED_BODIES = (
    ChatRequest, ChatTokensRequest, CompletionRequest, GenerateRequest, TokenizeRequest, AbortRequests,
    UpdateWeightsRequest, WeightVersionRequest, LoadAdapterRequest, UnloadAdapterRequest,
)  # fmt: skip
"""The types of the request bodies that endpoints parse themselves. `openapi` adds them, because FastAPI does not."""


def build_app(llm: Any, config: ServerConfig | None = None) -> FastAPI:
    """Build the application; `app.state.serving` is the state that its endpoints share.

    Args:
        llm: the `LLM`, `AsyncLLM` or `JobLLM` to serve.
        config: options of the server. If None, the defaults are used.

    Raises:
        ConfigError: the chat template cannot be read.
    """
    config = config or ServerConfig()
    serving = Serving(
        llm=llm,
        config=config,
        model_name=config.served_model_name or _own_name(llm.model),
        counters=RequestMetrics(llm),
        conversation=_conversation(llm, _template(config.chat_template)),
        texts=TokenTexts(llm.tokenizer),
    )
    app = bare_app(serving)
    add_chat_routes(app, serving)
    add_completion_routes(app, serving)
    add_token_routes(app, serving)
    add_model_routes(app, serving)
    add_watching_routes(app, serving)
    if config.admin:
        add_control_routes(app, serving)
    return app


def bare_app(serving: Serving) -> FastAPI:
    """Build the application without endpoints, but with authentication, error handling and OpenAPI description."""
    app = _DescribedApp(
        title="rollout",
        version="1",
        description=_DESCRIPTION,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        middleware=[Middleware(Boundary, serving=serving), Middleware(Auth, config=serving.config)],
        exception_handlers={HTTPException: _tell, RequestValidationError: _tell},
    )
    app.state.serving = serving
    return app


def add_model_routes(app: FastAPI, serving: Serving) -> None:
    """Register `/v1/models` and `/v1/models/{model}`."""

    def described(name: str) -> dict[str, Any]:
        base = None if name == serving.model_name else serving.model_name
        folder = name if base is None else serving.llm.lora_adapters[name]
        room = serving.llm.max_sequence_length
        reply = {
            "id": name,
            "object": "model",
            "created": serving.created,
            "owned_by": "rollout",
            "max_model_len": room,
        }
        return reply | {"parent": base, "root": folder}

    @app.get("/v1/models", tags=["models"])
    async def models() -> dict[str, Any]:
        """List the served model and the loaded LoRA adapters, as OpenAI and vLLM do."""
        names = (serving.model_name, *serving.llm.lora_adapters)
        return {"object": "list", "data": [described(name) for name in names]}

    # Match the whole path: a model name may contain slashes, which some clients send unescaped.
    @app.get("/v1/models/{model:path}", tags=["models"])
    async def model(model: str) -> dict[str, Any]:
        """Return the served model or a LoRA adapter by its name."""
        return described(serving.adapter_of(model) or serving.model_name)


def add_watching_routes(app: FastAPI, serving: Serving) -> None:
    """Register `/health`, its alias `/ping`, and `/metrics`."""

    async def health() -> Response:
        """Return `status` and `policy_version`. The HTTP status is 200 while the engine is alive, otherwise 503.

        `status` is the engine's state (`running`, `paused`, `suspended`, …), `dead` or `coordinator_lost`. A paused or
        suspended engine is alive. The route requires no key."""
        status, alive = _health(serving.llm)
        reply = {"status": status, "policy_version": serving.llm.policy_version}
        return JSONResponse(reply, 200 if alive else 503)

    for path, method in (("/health", "GET"), ("/health", "HEAD"), ("/ping", "GET"), ("/ping", "POST")):
        app.add_api_route(path, health, methods=[method], tags=["watching"])

    @app.get("/metrics", tags=["watching"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(serving.counters.text(), media_type=CONTENT_TYPE)


def _health(llm: Any) -> tuple[str, bool]:
    try:
        llm.refuse_when_over()
    except EngineDeadError:
        return "dead", False
    except ConnectionLostError:
        return "coordinator_lost", False
    except RolloutError:
        return str(EngineState(llm.state)), False
    return str(EngineState(llm.state)), True


async def _tell(_: Request, exc: Exception) -> Response:
    return describe(exc).response()


class _DescribedApp(FastAPI):
    """A FastAPI application that documents the same error reply for every route. An invalid body is a 400, never a 422."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema:
            return self.openapi_schema
        document = get_openapi(title=self.title, version=self.version, description=self.description, routes=self.routes)
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        for unused in ("HTTPValidationError", "ValidationError"):
            schemas.pop(unused, None)
        # Add the schemas of bodies that endpoints parse themselves, which FastAPI does not document.
        for model in (*_PARSED_BODIES, ErrorReply):
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(schema.pop("$defs", {}))
            schemas[model.__name__] = schema
        needs_key = self.state.serving.config.api_key is not None
        if needs_key:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = {"description": "Error", "content": error}
                if needs_key and path in OPEN_PATHS:
                    operation["security"] = []
        self.openapi_schema = document
        return document


def _conversation(llm: Any, template: str | None) -> Conversation | None:
    if llm.tokenizer is None:
        return None
    controller = llm.controller
    return Conversation(
        llm.tokenizer,
        template or controller.chat_template,
        vocab_size=controller.layout.vocab_size,
        end_token_ids=controller.eos_token_ids,
        room=lambda: llm.max_sequence_length,
        process=controller.process if controller.takes_images else None,
    )


def _own_name(model: Any) -> str:
    return getattr(getattr(model, "config", None), "_name_or_path", None) or type(model).__name__


def _template(given: str | None) -> str | None:
    """Return the text of a chat template: `given` itself if it is a template, otherwise the content of the file `given`."""
    if given is None or any(mark in given for mark in "{}\n"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"ServerConfig.chat_template={given!r}: must be a Jinja template or a file that holds one: {exc}"
        ) from exc
