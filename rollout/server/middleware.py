"""ASGI middleware: error boundary, authentication, body limits.

    Boundary   converts exceptions to replies, counts replies, refuses requests during shutdown
    Auth       checks the API key; without one, refuses requests from pages of other sites
    Body       reads the whole body within its size and time limits; refuses what is not JSON text
    HeadAsGet  runs a HEAD request as GET

`cross_origin` precedes them if pages of other origins are allowed: a preflight has no key. No byte of a body is read before
the key has been checked, and no more is buffered than the limit allows.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from email.utils import formatdate

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.config import ServerConfig
from rollout.errors import RequestAbortedError
from rollout.server.bodies import Amount, off_the_loop
from rollout.server.errors import ApiError, ClientGoneError, bad_request, describe, shutting_down, too_busy
from rollout.server.serving import LOG, SEND_BODY, RequestLog, Serving

LINGER_S = 2.0
"""Seconds for which the remaining body of a refused request is read and dropped: closing immediately could lose the
reply."""
UNFINISHED_BODIES = 4
"""Maximum size of all unfinished bodies together, as a multiple of `max_body_mb`."""
PROGRESS_BYTES = 64 * 1024
STALL_TIMEOUT_S = 30.0
"""Seconds in which `PROGRESS_BYTES` more of a body must arrive, or its end."""
LOGGED_PATH = 200
"""Characters of a path that the request log shows."""
OPEN_PATHS = frozenset({"/health", "/health/", "/ping", "/ping/"})
"""Paths that require no key: load balancers and container platforms request them."""

_log = logging.getLogger(__name__)
_requests = logging.getLogger("rollout.server.requests")

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")

_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
"""JSON escape of a surrogate: half of a valid pair (emoji), or alone, which is not valid text."""


class Boundary:
    """Converts exceptions to error replies and counts all replies."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request up to the last byte of its reply."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        about = RequestLog(_request_id(scope))
        LOG.set(about)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ours = [(b"date", formatdate(usegmt=True).encode()), (b"x-request-id", about.request_id.encode())]
                message["headers"] = [*message["headers"], *ours]
            await send(message)

        scope[SEND_BODY] = send
        try:
            if self._serving.stopping:
                raise shutting_down()
            await self._app(scope, receive, watched)
        except ClientGoneError as exc:
            status = exc.status
        except asyncio.CancelledError:
            # Shutdown, and an abort of all requests whose bodies are incomplete.
            if not status:
                aborted = ApiError(409, "the request was aborted before it was complete", code="aborted")
                await _answer(shutting_down() if self._serving.stopping else aborted, scope, receive, watched)
        except Exception as exc:
            if status:
                raise
            await _answer(self._explain(exc, scope), scope, receive, watched)
        finally:
            self._serving.ended(scope)
            seconds = time.perf_counter() - began
            self._serving.counters.replied(_endpoint(scope), status, seconds)
            if self._serving.config.log_requests:
                _requests.info(_line(scope, status, seconds, about))

    def _explain(self, exc: Exception, scope: Scope) -> ApiError:
        if self._serving.stopping and isinstance(exc, RequestAbortedError):
            return shutting_down()
        error = describe(exc)
        if error.status == 500:
            _log.error("%s %s failed (%s)", scope["method"], scope["path"], LOG.get().request_id, exc_info=exc)
        return error


class Auth:
    """Checks the API key. If there is none, refuses requests that a browser sends for a page of another site.

    Such a page reaches a server on loopback by a request that needs no preflight, or under a name of its own that resolves
    to this machine.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._key = None if config.api_key is None else config.api_key.encode()
        self._host = config.host
        self._origins = _origins(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on an authenticated request; others raise `ApiError` 401 or, if there is no key, 403."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            if self._key is not None:
                self._check(scope, self._key)
            elif "*" not in self._origins:
                self._check_site(Headers(scope=scope))
        await self._app(scope, receive, send)

    def _check_site(self, headers: Headers) -> None:
        for host in headers.getlist("host"):
            if not (_is_local(host) or _name(host) == self._host):
                message = (
                    f"Host: {host[:80]}: without an API key, must be an address or localhost; use one, or give a key"
                )
                raise ApiError(403, message)
        for origin in headers.getlist("origin"):
            if origin not in self._origins and origin.partition("://")[2] not in headers.getlist("host"):
                raise ApiError(
                    403,
                    f"Origin: {origin[:80]}: without an API key, must be one of --cors-origins; add it, or give a key",
                )

    @staticmethod
    def _check(scope: Scope, key: bytes) -> None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, sent = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if not (hmac.compare_digest(sent.strip(), key) and scheme.lower() == b"bearer"):
            message = "the API key is wrong" if given else "an API key is needed"
            raise ApiError(
                401,
                f"{message}: send the header `Authorization: Bearer KEY`",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


class WholeBody:
    """Reads the whole body of a POST request, within `max_body_mb` and `request_timeout_s`; checks that it is JSON text."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._max_bytes = int(serving.config.max_body_mb * 2**20)
        self._timeout_s = serving.config.request_timeout_s
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and pass it on as one message, which only a disconnect can follow.

        Raises:
            ApiError: 400, not JSON text; 413, too many values. While the body still arrives, errors are sent, not raised:
                408, it is late; 413, it is too large; 503, all unfinished bodies are too large.
            ClientGoneError: the client disconnected before the body was complete.
        """
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        task = asyncio.current_task()
        assert task is not None
        self._serving.reading.add(task)
        try:
            body = await self._read(headers, receive)
        except _RefusedBodyError as refused:
            await _refuse(refused.error, receive, send)
            return
        finally:
            self._serving.reading.discard(task)
        request = Request(scope, receive)
        await off_the_loop(self._serving, request, len(body), lambda _: _check_text(headers, body))
        first: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal first
            message, first = first, None
            return message or await receive()

        await self._app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        length, goal = 0, PROGRESS_BYTES
        now = asyncio.get_running_loop().time
        end = now() + self._timeout_s
        try:
            async with asyncio.timeout_at(min(end, now() + STALL_TIMEOUT_S)) as limit:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    piece = message.get("body", b"")
                    length += len(piece)
                    self._serving.unread += len(piece)
                    if length > self._max_bytes:
                        raise self._too_large()
                    if self._serving.unread > UNFINISHED_BODIES * self._max_bytes:
                        raise _RefusedBodyError(
                            too_busy("the bodies of other requests fill the room for unfinished ones")
                        )
                    chunks.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
                    if length >= goal:
                        goal = length + PROGRESS_BYTES
                        limit.reschedule(min(end, now() + STALL_TIMEOUT_S))
        except TimeoutError:
            late = (
                f"the body is late: it may take {self._timeout_s:g} s, and each {PROGRESS_BYTES} bytes of it "
                f"{STALL_TIMEOUT_S:g} s; send it faster"
            )
            raise _RefusedBodyError(ApiError(408, late, headers={"x-should-retry": "false"})) from None
        finally:
            self._serving.unread -= length
            chunks.clear()  # a traceback holds this frame until the refusal has been sent

    def _too_large(self) -> _RefusedBodyError:
        message = f"the body has more than {self._max_bytes} bytes: send less, or raise max_body_mb of the server"
        return _RefusedBodyError(ApiError(413, message, code="body_too_large"))


class HeadAsGet:
    """Runs a HEAD request as GET; the server below still has HEAD and leaves the reply's body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        inner = dict(scope, method="GET")
        try:
            await self._app(inner, receive, send)
        finally:
            if "route" in inner:
                scope["route"] = inner["route"]


class WithoutSlash:
    """Default of a router: routes an unknown path again without its trailing slashes.

    A redirect would drop the key of some clients, and the body of others.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._not_found = router.default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] == "http" and path.endswith("/") and path.rstrip("/"):
            scope["path"] = path.rstrip("/")
            await self._router(scope, receive, send)
        else:
            await self._not_found(scope, receive, send)


class _RefusedBodyError(Exception):
    """A body that is refused before it has been received completely."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


def _check_text(headers: Headers, body: bytes) -> None:
    """Check content type, UTF-8, number of values and lone surrogates of a body; the last raise `UnicodeEncodeError`."""
    if not body:
        return
    declared = headers.get("content-type", "")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise bad_request(f"Content-Type: {declared[:80] or 'none'}: must be application/json")
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise bad_request(f"the body is not valid UTF-8: byte {exc.start} ({exc.reason})") from None
    Amount().add(body)
    if _HALF_A_PAIR.search(body):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return  # the endpoint's error message is more specific
        json.dumps(value, ensure_ascii=False).encode()


async def _answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    await error.response()(scope, receive, send)


async def _refuse(error: ApiError, receive: Receive, send: Send) -> None:
    """Send the error to a client that may still be sending, then close the connection."""
    response = error.response()
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    try:
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _endpoint(scope: Scope) -> str:
    """Path of the route, such as `/v1/models/{model}`; "other" for unknown paths and requests refused before routing."""
    return getattr(scope.get("route"), "path", "other")


def _request_id(scope: Scope) -> str:
    """The client's `x-request-id` if it fits into a log line, else a new one."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    return given[0].decode() if given and _REQUEST_ID.fullmatch(given[0]) else uuid.uuid4().hex


def _line(scope: Scope, status: int, seconds: float, about: RequestLog) -> str:
    """Line of the request log: client, method, path as sent (without query), status, seconds, id; then, if the request
    generates, its model and its tokens (prompt + completion)."""
    client = "-" if scope.get("client") is None else "{}:{}".format(*scope["client"])
    path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:LOGGED_PATH]
    line = f"{client} {scope['method']} {path} {status or '-'} {seconds:.3f}s {about.request_id}"
    return line if about.model is None else f"{line} {about.model} {about.prompt_tokens}+{about.completion_tokens}"


def cross_origin(config: ServerConfig) -> list[Middleware]:
    """Middleware that lets the pages of `ServerConfig.cors_origins` call the server; [] if there are none."""
    if not (origins := _origins(config)):
        return []
    return [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])]


def _origins(config: ServerConfig) -> list[str]:
    return [origin.strip() for origin in (config.cors_origins or "").split(",") if origin.strip()]


def _name(host: str) -> str:
    """Host name or address of a `Host` header, without its port."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_local(host: str) -> bool:
    """Whether a `Host` header is an address, or a name without a dot, which no site on the internet can have."""
    name = _name(host).lower().removesuffix(".")
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return "." not in name or name.endswith(".localhost")
