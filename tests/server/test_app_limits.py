"""Tests of the server over a real socket and a fake LLM: limits, failures, start and end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from rollout.config import ServerConfig
from rollout.errors import (
    ConfigError,
    ConnectionLostError,
    ControlError,
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    QueueFullError,
    RankLostError,
    RequestAbortedError,
    RequestFailedError,
    RequestTimeoutError,
    StaleRequestError,
    WeightsChangedError,
)
from rollout.server.errors import STATUS_OF, describe
from rollout.server.server import Server
from tests.engines import PATIENCE_S, until
from tests.server.fake_llm import FakeLLM, served
from tests.server.requests_by_hand import ASK, ROOT, asked, error_of, post_bytes, raw, read_all

# --- limits and failures ----------------------------------------------------------------------------------------------


def test_more_samples_than_may_be_open_are_a_429_and_than_can_ever_be_a_400():
    with served(max_open_requests=4) as (llm, server):
        llm.hold()
        with asked(server, n=3) as client:
            until(lambda: llm.num_open >= 1)
            refused = httpx.post(f"{server.url}/v1/completions", json=ASK | {"prompt": [[1], [2]]})
            assert error_of(refused, 429)["code"] == "queue_full"
            assert refused.headers["retry-after"] == "1"
            assert len(llm.submitted) == 1
            llm.release()
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        for _ in range(3):
            assert httpx.post(f"{server.url}/v1/completions", json=ASK | {"prompt": [[1], [2]]}).status_code == 200
        for change in ({"prompt": [[1]] * 5}, {"n": 5}, {"prompt": [[1], [2]], "n": 3}):
            refused = httpx.post(f"{server.url}/v1/completions", json=ASK | change)
            assert "max_open_requests=4" in error_of(refused, 400)["message"]


RAISED = [
    (InvalidRequestError("prompt: too long"), 400),
    (ConfigError("SamplingParams.top_p=7: must be in (0, 1]"), 400),
    (RequestTimeoutError("after 3 s"), 408),
    (RequestAbortedError("aborted"), 409),
    (ControlError("engines are late"), 409),
    (StaleRequestError("stale"), 409),
    (QueueFullError("full"), 429),
    (EngineStateError("stopping"), 503),
    (EngineDeadError("dead"), 503),
    (ConnectionLostError("gone"), 503),
    (WeightsChangedError("changed"), 503),
    (RankLostError("lost"), 503),
    (DeadlineError("late"), 504),
    (RequestFailedError("CUDA error: an illegal address of ours"), 500),
    (ValueError("inside"), 500),
]


@pytest.mark.parametrize(("exc", "status"), RAISED)
def test_every_exception_has_its_status(exc, status):
    error = describe(exc)
    assert error.status == status
    assert ("Retry-After" in error.headers) is (status in (429, 503))
    assert (str(exc).removeprefix("SamplingParams.") in error.message) is (status != 500)
    assert "SamplingParams" not in error.message


def test_every_row_of_the_table_is_tried():
    tried = {kind for exc, _ in RAISED for kind in type(exc).__mro__}
    assert set(STATUS_OF) <= tried


def test_an_unforeseen_failure_is_logged_whole_and_answered_without_the_inside(caplog):
    with served() as (llm, server):
        llm.refuse_with = LookupError("secret of the inside")
        response = httpx.post(f"{server.url}/v1/completions", json=ASK)
        error = error_of(response, 500)
        llm.refuse_with = None
        assert (error["type"], error["code"]) == ("server_error", "internal_error")
        assert "secret" not in response.text
        assert "secret of the inside" in caplog.text
        assert "Traceback" in caplog.text
        assert httpx.post(f"{server.url}/v1/completions", json=ASK).status_code == 200


FUNCTION = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", ASK | {"n" * 2**20: 1}),
    ("/v1/completions", ASK | {"model": "m" * 2**20}),
    ("/v1/completions", ASK | {"logit_bias": {"k" * 2**20: 1}}),
    ("/v1/completions", ASK | {"stop": ["s" * 2**20]}),
    ("/v1/chat/completions", {"messages": [], "metadata": {"k" * 2**20: 1}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "", "x" * 2**20: 1}]}),
    ("/v1/chat/completions", {"messages": [], "tools": FUNCTION, "tool_choice": {"type": "t" * 2**20}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "?"}], "tools": FUNCTION,
                              "tool_choice": {"type": "function", "function": {"name": "f" * 2**20}}}),
    ("/tokenize", {"prompt": "?", "q" * 2**20: 1}),
])  # fmt: skip
def test_no_message_repeats_a_long_name(url: str, path: str, body: dict[str, object]):
    refused = httpx.post(url + path, json=body)
    assert refused.status_code in (400, 404)
    assert len(refused.content) < 4096
    assert len(refused.json()["error"]["param"]) < 200


# --- start and end ----------------------------------------------------------------------------------------------------


def test_a_taken_port_is_named_at_once_and_leaves_nothing(open_house):
    llm, server = open_house
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"ServerConfig\.host=.*, port={port}: already in use"):
        Server(llm, ServerConfig(port=port)).start()
    with pytest.raises(ConfigError, match=r"ServerConfig\.host='192\.0\.2\.1'.*cannot listen"):
        Server(llm, ServerConfig(host="192.0.2.1", insecure=True, port=0)).start()
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_server_starts_once_stops_twice_and_frees_its_port():
    llm = FakeLLM()
    try:
        server = Server(llm, ServerConfig(port=0))
        with pytest.raises(RuntimeError, match=r"call server\.start"):
            _ = server.url
        assert server.start().start() is server
        assert server.running
        port = int(server.url.rpartition(":")[2])
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/health").status_code == 200
            server.close()
            server.close()
            assert not server.running
            with pytest.raises(httpx.TransportError):
                client.get("/health")
        with pytest.raises(RuntimeError, match="build another"):
            server.start()
        with Server(llm, ServerConfig(port=port)) as again:
            assert httpx.get(f"{again.url}/health").status_code == 200
    finally:
        llm.loop.close()


def test_a_server_on_ipv6_has_a_url_too():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    with served(host="::1") as (_, server):
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_stopping_server_lets_requests_end_in_their_grace():
    with (
        served(shutdown_grace_s=PATIENCE_S) as (llm, server),
        asked_held(llm, server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        stopping = pool.submit(server.close)
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the system likes
            until(lambda: raw(server).close())
        llm.release()
        assert b'"Hello"' in read_all(client)
        stopping.result(PATIENCE_S)
        assert llm.aborted.empty()


def test_what_does_not_end_in_the_grace_is_aborted_and_told():
    with (
        served() as (llm, server),
        asked_held(llm, server) as whole,
        asked(server, stream=True) as stream,
    ):
        assert stream.recv(65536)
        until(lambda: llm.num_open >= 2)
        server.close()
        assert {llm.aborted.get_nowait(), llm.aborted.get_nowait()} == {0, 1}
        answer = read_all(whole)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"shutting_down" in answer
        told = read_all(stream)
        assert b"shutting_down" in told
        assert b"[DONE]" not in told


def test_a_loop_that_is_closed_takes_its_server_along():
    llm = FakeLLM()
    server = Server(llm, ServerConfig(port=0)).start()
    url = server.url
    llm.loop.close()
    server.close()
    assert not server.running
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")
    with pytest.raises(RuntimeError, match="close"):
        Server(llm, ServerConfig(port=0)).start()


@contextmanager
def asked_held(llm: FakeLLM, server: Server) -> Iterator[socket.socket]:
    llm.hold()
    with asked(server) as client:
        until(lambda: llm.num_open >= 1)
        yield client


BLOCKING = """
import threading
from rollout.config import ServerConfig
from rollout.server.server import Server
from tests.server.fake_llm import FakeLLM
llm = FakeLLM()
llm.hold()
server = Server(llm, ServerConfig(port=0, shutdown_grace_s=0)).start()
print(server.url, flush=True)
server.wait()
llm.loop.close()
print("ended", server.running, llm.num_open, threading.active_count(), flush=True)
"""


def test_a_blocking_server_ends_in_order_on_a_signal_and_leaves_no_process():
    command, pipe = [sys.executable, "-c", BLOCKING], subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
                body = json.dumps(ASK).encode()
                client.sendall(post_bytes("/v1/completions", body, "Content-Type: application/json"))
                assert httpx.get(f"{url}/health").status_code == 200
                process.send_signal(signal.SIGTERM)
                read_all(client)
            output, errors = process.communicate(timeout=PATIENCE_S)
            assert output.split()[:3] == ["ended", "False", "0"], errors
            assert (process.returncode, errors) == (0, "")
        finally:
            process.kill()
