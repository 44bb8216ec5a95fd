"""Requests byte by byte, and what a server answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from rollout.server.server import Server
from tests.engines import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
ASK = {"model": "fakes/one", "prompt": [72, 105]}
KEY = "sk-a-secret"


def raw(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def read_all(connected: socket.socket) -> bytes:
    """Until the server closes."""
    pieces = []
    with suppress(ConnectionResetError):
        while piece := connected.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def post_bytes(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@contextmanager
def asked(server: Server, **more: object) -> Iterator[socket.socket]:
    with raw(server) as client:
        body = json.dumps(ASK | more).encode()
        client.sendall(post_bytes("/v1/completions", body, "Content-Type: application/json"))
        yield client
