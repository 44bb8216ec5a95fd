"""ASGI middleware for error replies and authentication. The API key is checked before any byte of a body is read."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
import uuid
from email.utils import formatdate

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.config import ServerConfig
from rollout.errors import RequestAbortedError
from rollout.server.errors import ApiError, ClientGoneError, describe, shutting_down
from rollout.server.serving import Serving

LOGGED_PATH = 200
"""The maximum number of characters of a path in the request log."""
OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths that require no API key, because load balancers and container platforms poll them without one."""

_log = logging.getLogger(__name__)
_requests = logging.getLogger("rollout.server.requests")

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")


class Boundary:
    """The outermost middleware, which converts exceptions to error replies, and counts and logs all replies."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request up to the last byte of its reply."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, request_id = time.perf_counter(), 0, _request_id(scope)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ours = [(b"date", formatdate(usegmt=True).encode()), (b"x-request-id", request_id.encode())]
                message["headers"] = [*message["headers"], *ours]
            await send(message)

        try:
            if self._serving.stopping:
                raise shutting_down()
            await self._app(scope, receive, watched)
        except ClientGoneError as exc:
            status = exc.status
        except asyncio.CancelledError:
            # Reply with 503 if no reply has begun: the server shut down while the request's body was still arriving.
            if not status:
                await shutting_down().response()(scope, receive, watched)
        except Exception as exc:
            if status:
                raise
            await self._explain(exc, scope, request_id).response()(scope, receive, watched)
        finally:
            self._serving.ended(scope)
            seconds = time.perf_counter() - began
            self._serving.counters.replied(_endpoint(scope), status, seconds)
            if _requests.isEnabledFor(logging.INFO):
                _requests.info(f"{_line(scope)} {status or '-'} {seconds:.3f}s {request_id}")

    def _explain(self, exc: Exception, scope: Scope, request_id: str) -> ApiError:
        if self._serving.stopping and isinstance(exc, RequestAbortedError):
            return shutting_down()
        error = describe(exc)
        if error.status == 500:
            _log.error("%s %s failed (%s)", scope["method"], scope["path"], request_id, exc_info=exc)
        return error


class Auth:
    """A check of the API key. If no key is configured, it rejects requests that another site's page makes a browser send.

    Such a page could otherwise reach a server on loopback: not all requests need a CORS preflight, and the page's host
    name may resolve to this machine.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._key = None if config.api_key is None else config.api_key.encode()
        self._host = config.host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward an allowed request; raise `ApiError` 401 for a wrong or missing key, 403 for another site's request."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            if self._key is not None:
                self._check(scope, self._key)
            else:
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
            if origin.partition("://")[2] not in headers.getlist("host"):
                raise ApiError(403, f"Origin: {origin[:80]}: without an API key, must be this server; give a key")

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


def _endpoint(scope: Scope) -> str:
    """Return the route's path, such as `/v1/models/{model}`; "other" for unknown paths and rejected requests."""
    return getattr(scope.get("route"), "path", "other")


def _request_id(scope: Scope) -> str:
    """Return the client's `x-request-id` if it is short and printable, otherwise a new id."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    return given[0].decode() if given and _REQUEST_ID.fullmatch(given[0]) else uuid.uuid4().hex


def _line(scope: Scope) -> str:
    client = "-" if scope.get("client") is None else "{}:{}".format(*scope["client"])
    path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")[:LOGGED_PATH]
    return f"{client} {scope['method']} {path}"


def _name(host: str) -> str:
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_local(host: str) -> bool:
    """Return whether a `Host` header is an IP address or a local name.

    A name without a dot is local, because no site on the internet has such a name."""
    name = _name(host).lower().removesuffix(".")
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return "." not in name or name.endswith(".localhost")
