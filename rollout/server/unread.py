"""Refuses what a route would ignore: query parameters it does not have, and the body of a route that takes none."""

from __future__ import annotations

from fastapi.routing import APIRoute
from starlette.requests import Request

from rollout.errors import did_you_mean
from rollout.server.bodies import parsed
from rollout.server.errors import ApiError, bad_request
from rollout.server.openai.schema import Body


async def refuse_unread(request: Request) -> None:
    """Check one request against its route; a dependency of all routes.

    Raises:
        ApiError: 400, naming the query parameter or field, never its value: secrets travel in queries.
    """
    route: APIRoute = request.scope["route"]
    known = [each.alias for each in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            elsewhere = "it has none: fields go into the body, as JSON" if request.method == "POST" else "it has none"
            cure = did_you_mean(name[:80], known, f"it has {', '.join(known)}" if known else elsewhere)
            raise bad_request(f"{name[:80]}: no query parameter of {route.path}; {cure}", f"query.{name[:80]}")
    takes_body = route.body_field is not None or "requestBody" in (route.openapi_extra or {})
    if request.method == "POST" and not takes_body and (text := await request.body()):
        try:
            parsed(_NoFields, text)
        except ApiError as exc:
            if exc.param not in known:
                raise
            raise bad_request(
                f"{exc.param}: goes into the query, as in {route.path}?{exc.param}=...", exc.param
            ) from None


class _NoFields(Body):
    """An empty object, or one of nulls."""
