"""Tests of the server over a real socket and a fake LLM: authentication, limits, errors, shutdown."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout.config import ServerConfig
from rollout.errors import (
    ConfigError,
    ConnectionLostError,
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
from rollout.sampling_params import SamplingParams
from rollout.server import connection
from rollout.server.errors import STATUS_OF, describe
from rollout.server.server import Server, serve
from rollout.state import EngineState
from tests.server.fake_llm import FakeLLM, served

DEADLINE_S = 30.0
ROOT = Path(__file__).parent.parent.parent
ASK = {"model": "fakes/one", "prompt": [72, 105]}
KEY = "sk-a-secret"


@pytest.fixture(scope="module")
def open_house() -> Iterator[tuple[FakeLLM, Server]]:
    """A server for tests that leave nothing behind."""
    with served() as both:
        yield both
        assert both[0].aborted.empty()


@pytest.fixture
def url(open_house) -> str:
    return open_house[1].url


def raw(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE_S)


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


# --- the ordinary ways ------------------------------------------------------------------------------------------------


def test_a_request_is_answered_over_a_real_socket(url):
    reply = httpx.post(f"{url}/v1/completions", json=ASK)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == "Hello"


def test_the_model_is_listed_and_found_by_its_name_with_a_slash_in_it(url):
    listed = httpx.get(f"{url}/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["fakes/one"]
    assert listed["data"][0]["created"] <= time.time()
    assert listed["data"][0]["max_model_len"] == 4096
    assert httpx.get(f"{url}/v1/models/fakes/one").json() == listed["data"][0]
    assert httpx.get(f"{url}/v1/models/fakes%2Fone").json() == listed["data"][0]
    assert error_of(httpx.get(f"{url}/v1/models/other"), 404)["code"] == "model_not_found"


def test_health_says_how_the_engine_stands_and_503_when_it_is_gone():
    with served() as (llm, server):
        healthy = httpx.get(f"{server.url}/health")
        assert (healthy.status_code, healthy.json()) == (200, {"status": "running", "policy_version": 0})
        llm.state = EngineState.SUSPENDED
        assert httpx.get(f"{server.url}/health").json()["status"] == "suspended"
        for gone, status in (
            (EngineDeadError("dead"), "dead"),
            (ConnectionLostError("lost"), "coordinator_lost"),
            (EngineStateError("stopped"), "suspended"),
        ):
            llm.gone = gone
            reply = httpx.get(f"{server.url}/health")
            assert (reply.status_code, reply.json()["status"]) == (503, status)
        llm.gone = None


def test_health_is_asked_for_as_load_balancers_do(open_house):
    url = open_house[1].url
    for path in ("/health", "/health/"):
        assert httpx.get(f"{url}{path}").json()["status"] == "running"
        head = httpx.head(f"{url}{path}")
        assert (head.status_code, head.content) == (200, b"")
    with served(api_key=KEY) as (_, server):
        assert [httpx.head(f"{server.url}{path}").status_code for path in ("/health", "/health/")] == [200, 200]


def test_metrics_count_requests_results_and_the_engine_and_stay_out_of_the_process_registry():
    with served() as (llm, server), served() as (_, other):
        for _ in range(3):
            httpx.post(f"{server.url}/v1/completions", json=ASK | {"n": 2})
        httpx.get(f"{server.url}/nowhere")
        text = httpx.get(f"{server.url}/metrics").text
        values = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values["rollout_http_requests_total", "/v1/completions", "200"] == 3
        assert values["rollout_http_requests_total", "other", "404"] == 1
        assert values["rollout_request_generated_tokens_count",] == 6
        assert values["rollout_request_generated_tokens_sum",] == 6 * len("Hello")
        assert values["rollout_request_ttft_seconds_sum",] == 6 * 0.25
        assert values["rollout_generated_tokens_total",] == 7
        assert values["rollout_kv_blocks_free",] == 7
        assert values["rollout_engine_up",] == 1
        assert "rollout_request_generated_tokens_count 0.0" in httpx.get(f"{other.url}/metrics").text
        llm.gone = EngineDeadError("dead")
        assert "rollout_engine_up 0.0" in httpx.get(f"{server.url}/metrics").text
        llm.gone = None


def test_the_description_names_every_status_and_never_422(url):
    document = httpx.get(f"{url}/openapi.json").json()
    assert "422" not in json.dumps(document)
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert not [path for path in document["paths"] if path.startswith("/admin")]
    completion = document["paths"]["/v1/completions"]["post"]["responses"]
    assert {"200", "400", "404", "408", "413", "429", "503"} <= set(completion)
    assert completion["413"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorReply"}
    assert httpx.get(f"{url}/docs").status_code == 200


# --- the key ----------------------------------------------------------------------------------------------------------


def test_without_the_key_only_health_answers():
    with served(api_key=KEY, admin=True) as (llm, server), httpx.Client(base_url=server.url) as client:
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/nowhere"):
            refused = client.get(path)
            assert error_of(refused, 401)["type"] == "authentication_error"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert client.post("/v1/completions", json=ASK).status_code == 401
        assert client.post("/admin/pause").status_code == 401
        assert client.get("/health").status_code == 200
        for wrong in ("Bearer nonsense", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer", "Bearer \xe4\xf6"):
            headers = {"Authorization": wrong.encode("latin-1")}
            assert client.get("/v1/models", headers=headers).status_code == 401, wrong
        twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")]
        assert client.get("/v1/models", headers=twice).status_code == 401
        assert not llm.submitted
        allowed = client.get("/v1/models", headers={"Authorization": f"bearer {KEY}"})
        assert allowed.status_code == 200
        document = client.get("/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
        assert "401" in document["paths"]["/v1/models"]["get"]["responses"]
        assert "401" not in document["paths"]["/health"]["get"]["responses"]


def test_the_key_is_not_shown_where_the_options_are():
    assert KEY not in repr(ServerConfig(api_key=KEY))
    with pytest.raises(ConfigError) as raised:
        ServerConfig(api_key=KEY + " with blanks")
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"host": "0.0.0.0"}, {"host": "example.org"}, {"admin": True}, {"host": ""}, {"port": 65536}, {"port": True},
        {"max_body_mb": 0}, {"max_open_requests": 0}, {"request_timeout_s": float("inf")}, {"stream_interval": 0},
        {"shutdown_grace_s": -1}, {"api_key": ""}, {"served_model_name": ""}, {"insecure": 1},
    ],
)  # fmt: skip
def test_options_out_of_range_or_unsafe_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=rf"ServerConfig\.{next(iter(options))}"):
        ServerConfig(**options)


def test_what_is_unsafe_can_be_asked_for():
    ServerConfig(host="0.0.0.0", api_key=KEY)
    ServerConfig(host="0.0.0.0", admin=True, insecure=True)
    ServerConfig(host="::1")
    ServerConfig(host="127.8.8.8")


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b"{", "application/json", "not valid JSON"),
        (b"", "application/json", "missing"),
        (b"[1]", "application/json", "must be a JSON object"),
        (b"7", "application/json", "must be a JSON object"),
        (b"null", "application/json", "body"),
        (b"{}", "text/plain", "Content-Type: text/plain"),
        (b"{}", "", "Content-Type: none"),
        (b'{"prompt": "\xff"}', "application/json", "not valid UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "application/json", "not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "application/json", "surrogate"),
        (b'{"\\udc00": 1}', "application/json", "surrogate"),
        (b"[" * 100_000, "application/json", "nested too deeply"),
        (b'{"model": ' + b"9" * 5000 + b"}", "application/json", "digits"),
    ],
)
def test_a_body_that_is_no_request_is_a_400_that_says_why(url, body, kind, says):
    headers = {"Content-Type": kind} if kind else {}
    response = httpx.post(f"{url}/v1/completions", content=body, headers=headers)
    assert says in error_of(response, 400)["message"]


def test_escaped_emoji_are_text(url):
    body = json.dumps(ASK | {"user": "\N{GRINNING FACE}"}, ensure_ascii=True)
    assert "\\ud83d" in body
    response = httpx.post(f"{url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"colour": "red"}, "colour"),
        ({"n": 0}, "n"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(url, change, param):
    error = error_of(httpx.post(f"{url}/v1/completions", json=ASK | change), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert re.match(rf"{re.escape(param)}(=.*)?: ", error["message"])


def test_a_misspelt_field_is_named_and_not_only_missed(url):
    error = error_of(httpx.post(f"{url}/v1/completions", json={"promt": "a"}), 400)
    assert (error["param"], "no such field" in error["message"]) == ("promt", True)


def test_a_value_that_is_quoted_is_cut(url):
    error = error_of(httpx.post(f"{url}/v1/completions", json=ASK | {"temperature": "hot" * 10**6}), 400)
    assert "hothot" in error["message"]
    assert len(error["message"]) < 200


def test_a_body_announced_too_large_is_refused_before_any_of_it_is_sent():
    with served(max_body_mb=1) as (llm, server), raw(server) as client:
        headers = ("Content-Type: application/json", "Expect: 100-continue")
        client.sendall(post_bytes("/v1/completions", b"", *headers, length=100 * 2**20))
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert not llm.submitted


def test_a_body_of_100_mb_without_a_length_is_refused_when_the_limit_is_reached():
    with served(max_body_mb=1) as (llm, server):
        sent = 0

        def pieces():
            nonlocal sent
            for _ in range(100):
                sent += 2**20
                yield b" " * 2**20

        with suppress(httpx.WriteError):
            headers = {"Content-Type": "application/json"}
            response = httpx.post(f"{server.url}/v1/completions", content=pieces(), headers=headers, timeout=DEADLINE_S)
            assert error_of(response, 413)["code"] == "body_too_large"
        assert not llm.submitted
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_length_that_lies_harms_nobody():
    with served(request_timeout_s=0.2) as (llm, server):
        body = json.dumps(ASK).encode()
        with raw(server) as short:
            short.sendall(post_bytes("/v1/completions", body, "Content-Type: application/json", length=len(body) - 5))
            assert read_all(short).startswith(b"HTTP/1.1 400 ")
        with raw(server) as long:
            long.sendall(post_bytes("/v1/completions", body, "Content-Type: application/json", length=len(body) + 5))
            assert long.recv(65536).startswith(b"HTTP/1.1 408 ")
        assert not llm.submitted


def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing():
    with served() as (llm, server):
        with raw(server) as client:
            client.sendall(post_bytes("/v1/completions", b'{"pro', "Content-Type: application/json", length=500))
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert not llm.submitted


def test_a_body_may_come_byte_by_byte(open_house):
    body = json.dumps(ASK).encode()
    with raw(open_house[1]) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post_bytes("/v1/completions", body, "Content-Type: application/json", "Connection: close"):
            client.sendall(bytes([byte]))
        assert b'"Hello"' in read_all(client)


# --- what is no proper HTTP -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health HTTP/1.1\r\nHost: here\r\nBroken header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: many\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: here\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_400_in_our_shape_and_the_end_of_the_connection(open_house, request_bytes):
    with raw(open_house[1]) as client:
        client.sendall(request_bytes)
        answer = read_all(client)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 "), answer
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_headers_without_an_end_are_refused(open_house):
    with raw(open_house[1]) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: here\r\nX: ")
        with suppress(OSError):
            for _ in range(64):
                client.sendall(b"x" * 65536)
        assert read_all(client).startswith(b"HTTP/1.1 431 ")


def test_a_connection_that_says_nothing_is_closed(open_house, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    with raw(open_house[1]) as client:
        assert read_all(client) == b""
    with raw(open_house[1]) as client:
        client.sendall(b"GET /hea")
        assert read_all(client) == b""


def test_pipelined_requests_are_answered_in_their_order(open_house):
    one = json.dumps(ASK).encode()
    many = post_bytes("/v1/completions", one, "Content-Type: application/json") * 3
    with raw(open_house[1]) as client:
        client.sendall(many + b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        answers = read_all(client)
    assert answers.count(b"HTTP/1.1 200 OK") == 4
    assert answers.count(b'"Hello"') == 3
    assert answers.endswith(b'{"status":"running","policy_version":0}')


def test_a_client_that_has_sent_more_and_goes_away_aborts_what_was_running():
    ask = post_bytes("/v1/completions", json.dumps(ASK).encode(), "Content-Type: application/json")
    with served() as (llm, server):
        llm.hold()
        with raw(server) as client:
            client.sendall(ask)
            wait_for_requests(llm, 1)
            client.sendall(ask)
        assert llm.aborted.get(timeout=DEADLINE_S) == 0


@pytest.mark.parametrize("cut", [-2, 0, 12])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_offer_of_another_protocol_is_declined_and_the_request_answered(open_house, chunked, cut):
    # As Java's client does with its first request.
    body = json.dumps(ASK).encode()
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(body)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n" + framing + b"\r\n\r\n"
    )
    whole = head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)
    with raw(open_house[1]) as client:
        client.sendall(whole[: len(head) + cut])
        time.sleep(0.02)
        client.sendall(whole[len(head) + cut :])
        answer = read_all(client)
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    assert b'"Hello"' in answer


def test_unknown_paths_and_methods_have_our_shape(url):
    for path in ("/nowhere", "/nowhere/", "/", "//", "/admin/pause/", "/v1/../etc/passwd", "/%00"):
        assert error_of(httpx.get(url + path), 404)["type"] == "not_found_error"
    wrong = httpx.get(f"{url}/v1/completions")
    assert "POST" in error_of(wrong, 405)["message"]
    assert wrong.headers["allow"] == "POST"
    error_of(httpx.request("TRACE", f"{url}/v1/models"), 405)


def test_stopping_on_the_loop_itself_raises_and_the_server_goes_on():
    with served() as (llm, server):

        async def stop() -> None:
            for method in (server.stop, server.wait):
                with pytest.raises(RuntimeError, match="would wait for ever"):
                    method()

        llm.loop.run(stop(), DEADLINE_S)
        assert httpx.post(f"{server.url}/v1/completions", json=ASK).status_code == 200


# --- limits and failures ----------------------------------------------------------------------------------------------


def test_more_samples_than_may_be_open_are_a_429_with_the_time_to_come_back():
    with served(max_open_requests=4) as (llm, server):
        llm.hold()
        body = json.dumps(ASK | {"n": 3}).encode()
        with raw(server) as client:
            client.sendall(post_bytes("/v1/completions", body, "Content-Type: application/json"))
            wait_for_requests(llm, 1)
            refused = httpx.post(f"{server.url}/v1/completions", json=ASK | {"prompt": [[1], [2]]})
            assert error_of(refused, 429)["code"] == "queue_full"
            assert refused.headers["retry-after"] == "1"
            assert len(llm.submitted) == 1
            llm.release()
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        for _ in range(3):
            assert httpx.post(f"{server.url}/v1/completions", json=ASK | {"prompt": [[1], [2]]}).status_code == 200


def test_more_samples_than_can_ever_be_open_are_a_400():
    with served(max_open_requests=4) as (llm, server):
        for change in ({"prompt": [[1]] * 5}, {"n": 5}, {"prompt": [[1], [2]], "n": 3}):
            refused = httpx.post(f"{server.url}/v1/completions", json=ASK | change)
            assert "max_open_requests=4" in error_of(refused, 400)["message"]
        assert not llm.submitted


def test_who_does_not_want_to_wait_for_a_suspended_engine_is_told():
    with served() as (llm, server):
        llm.state = EngineState.SUSPENDED
        refused = httpx.post(f"{server.url}/v1/completions", json=ASK | {"wait_while_suspended": False})
        assert "suspended" in error_of(refused, 503)["message"]
        assert refused.headers["retry-after"] == "1"
        assert httpx.post(f"{server.url}/v1/completions", json=ASK).status_code == 200


RAISED = [
    (InvalidRequestError("prompt: too long"), 400),
    (ConfigError("SamplingParams.top_p=7: must be in (0, 1]"), 400),
    (RequestTimeoutError("after 3 s"), 408),
    (RequestAbortedError("aborted"), 409),
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
    assert (str(exc) in error.message) is (status != 500)


def test_the_table_has_no_row_that_is_not_tried():
    tried = {kind for exc, _ in RAISED for kind in type(exc).__mro__}
    by_body = {"UnicodeEncodeError", "RecursionError", "ControlError"}
    assert {kind.__name__ for kind in STATUS_OF if kind not in tried} == by_body


def test_a_sampling_error_names_its_field():
    with pytest.raises(ConfigError) as raised:
        SamplingParams(top_p=7)
    assert describe(raised.value).param == "top_p"


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


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request_at_once(stream):
    with served() as (llm, server):
        llm.hold()
        body = json.dumps(ASK | {"stream": stream}).encode()
        with raw(server) as client:
            client.sendall(post_bytes("/v1/completions", body, "Content-Type: application/json"))
            if stream:
                assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
            wait_for_requests(llm, 1)
        assert llm.aborted.get(timeout=DEADLINE_S) == 0
        llm.release()
        assert '"/v1/completions",status="499"} 1.0' in httpx.get(f"{server.url}/metrics").text


def wait_for_requests(llm: FakeLLM, number: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while llm.num_open < number:
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- start and end ----------------------------------------------------------------------------------------------------


def test_a_taken_port_is_named_at_once_and_leaves_nothing(open_house):
    llm, server = open_house
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"ServerConfig\.port={port}: .* already in use"):
        serve(llm, ServerConfig(port=port), blocking=False)
    with pytest.raises(ConfigError, match=r"ServerConfig\.host='192\.0\.2\.1'.*cannot listen"):
        serve(llm, ServerConfig(host="192.0.2.1", insecure=True, port=0), blocking=False)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_server_starts_once_stops_twice_and_frees_its_port():
    llm = FakeLLM()
    try:
        server = Server(llm, ServerConfig(port=0))
        with pytest.raises(RuntimeError, match="before start"):
            _ = server.url
        assert server.start().start() is server
        assert server.running
        port = int(server.url.rpartition(":")[2])
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/health").status_code == 200
            server.stop()
            server.stop()
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


@contextmanager
def asked(server: Server, **more: object) -> Iterator[socket.socket]:
    with raw(server) as client:
        body = json.dumps(ASK | more).encode()
        client.sendall(post_bytes("/v1/completions", body, "Content-Type: application/json"))
        yield client


def test_a_stopping_server_lets_requests_end_in_their_grace():
    with served(shutdown_grace_s=DEADLINE_S) as (llm, server), asked_held(llm, server) as client:
        stopping = in_thread(server.stop)
        with pytest.raises(OSError):  # noqa: PT011 - refused or reset, as the system likes
            until_refused(server)
        llm.release()
        assert b'"Hello"' in read_all(client)
        stopping()
        assert llm.aborted.empty()


def test_what_does_not_end_in_the_grace_is_aborted_and_told():
    with (
        served() as (llm, server),
        asked_held(llm, server) as whole,
        asked(server, stream=True) as stream,
        raw(server) as half,
    ):
        half.sendall(post_bytes("/v1/completions", b'{"pro', "Content-Type: application/json", length=500))
        assert stream.recv(65536)
        wait_for_requests(llm, 2)
        server.stop()
        assert {llm.aborted.get_nowait(), llm.aborted.get_nowait()} == {0, 1}
        answer = read_all(whole)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"shutting_down" in answer
        told = read_all(stream)
        assert b"shutting_down" in told
        assert b"[DONE]" not in told
        read_all(half)


def test_a_loop_that_is_closed_takes_its_server_along():
    llm = FakeLLM()
    server = serve(llm, ServerConfig(port=0), blocking=False)
    url = server.url
    llm.loop.close()
    server.stop()
    assert not server.running
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")
    with pytest.raises(RuntimeError, match="close"):
        serve(llm, ServerConfig(port=0), blocking=False)


@contextmanager
def asked_held(llm: FakeLLM, server: Server) -> Iterator[socket.socket]:
    llm.hold()
    with asked(server) as client:
        wait_for_requests(llm, 1)
        yield client


def in_thread(function):
    """Run it beside the test; the result joins, and raises what it raised."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return lambda: future.result(DEADLINE_S)


def until_refused(server: Server) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        raw(server).close()
        time.sleep(0.005)


BLOCKING = """
import sys, threading
from rollout.config import ServerConfig
from rollout.server import Server
from tests.server.fake_llm import FakeLLM
llm = FakeLLM()
llm.hold()
server = Server(llm, ServerConfig(port=0, shutdown_grace_s=float(sys.argv[1]))).start()
print(server.url, flush=True)
server.wait()
llm.loop.close()
print("ended", server.running, llm.num_open, threading.active_count(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_blocking_server_ends_in_order_on_a_signal_and_leaves_no_process(number):
    with blocking_server("0") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as client:
            body = json.dumps(ASK).encode()
            client.sendall(post_bytes("/v1/completions", body, "Content-Type: application/json"))
            assert httpx.get(f"{url}/health").status_code == 200
            process.send_signal(number)
            read_all(client)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert output.split()[:3] == ["ended", "False", "0"], errors
        assert (process.returncode, errors) == (0, "")


def test_a_second_ctrl_c_does_not_wait_for_the_grace():
    with blocking_server("600") as (process, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as client:
            body = json.dumps(ASK | {"stream": True}).encode()
            client.sendall(post_bytes("/v1/completions", body, "Content-Type: application/json"))
            assert client.recv(65536)
            process.send_signal(signal.SIGINT)
            with suppress(OSError):
                while True:
                    socket.create_connection((host, int(port)), timeout=DEADLINE_S).close()
                    time.sleep(0.005)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode != 0
        assert "KeyboardInterrupt" in errors


@contextmanager
def blocking_server(grace: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", BLOCKING, grace]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout
            url = process.stdout.readline().strip()
            assert url, process.stderr and process.stderr.read()
            yield process, url
        finally:
            process.kill()
