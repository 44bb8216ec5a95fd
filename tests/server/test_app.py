"""Tests of the server over a real socket and a fake LLM: routes, the key, bodies, malformed HTTP."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout.config import ServerConfig
from rollout.errors import ConfigError, ConnectionLostError, EngineDeadError, EngineStateError
from rollout.server import bodies
from rollout.state import EngineState
from tests.engines import PATIENCE_S
from tests.server.fake_llm import served
from tests.server.requests_by_hand import ASK, KEY, error_of, post_bytes, raw, read_all

# --- the ordinary ways ------------------------------------------------------------------------------------------------


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


def test_the_description_has_every_error_in_one_shape_and_never_422(url):
    document = httpx.get(f"{url}/openapi.json").json()
    assert "422" not in json.dumps(document)
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert not [path for path in document["paths"] if path in ("/pause", "/update_weights")]
    completion = document["paths"]["/v1/completions"]["post"]["responses"]
    assert set(completion) == {"200", "default"}
    assert completion["default"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ErrorReply"}
    assert httpx.get(f"{url}/docs").status_code == 200


# --- the key ----------------------------------------------------------------------------------------------------------


def test_without_the_key_only_health_answers():
    with served(api_key=KEY, admin=True) as (llm, server), httpx.Client(base_url=server.url) as client:
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/nowhere"):
            refused = client.get(path)
            assert error_of(refused, 401)["type"] == "authentication_error"
            assert refused.headers["www-authenticate"] == "Bearer"
        assert client.post("/v1/completions", json=ASK).status_code == 401
        assert client.post("/pause").status_code == 401
        assert client.get("/health").status_code == 200
        for wrong in ("Bearer nonsense", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer", "Bearer \xe4\xf6"):
            headers = {"Authorization": wrong.encode("latin-1")}
            assert client.get("/v1/models", headers=headers).status_code == 401, wrong
        twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")]
        assert client.get("/v1/models", headers=twice).status_code == 401
        assert not llm.submitted
        allowed = client.get("/v1/models", headers={"Authorization": f"bearer {KEY}"})
        assert allowed.status_code == 200


def test_the_key_is_not_shown_where_the_options_are():
    assert KEY not in repr(ServerConfig(api_key=KEY))
    with pytest.raises(ConfigError) as raised:
        ServerConfig(api_key=KEY + " with blanks")
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"host": "0.0.0.0"}, {"host": "example.org"}, {"admin": True}, {"host": ""}, {"port": 65536}, {"port": True},
        {"max_open_requests": 0}, {"request_timeout_s": float("inf")},
        {"shutdown_grace_s": -1}, {"api_key": ""}, {"served_model_name": ""}, {"insecure": 1},
    ],
)  # fmt: skip
def test_options_out_of_range_or_unsafe_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=rf"ServerConfig\.{next(iter(options))}"):
        ServerConfig(**options)
    for safe in ({"host": "0.0.0.0", "api_key": KEY}, {"host": "0.0.0.0", "insecure": True}, {"host": "127.8.8.8"}):
        ServerConfig(**safe)


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (b"{", "application/json", "Invalid JSON"),
        (b"", "application/json", "missing"),
        (b"[1]", "application/json", "must be a JSON object"),
        (b"7", "application/json", "must be a JSON object"),
        (b"null", "application/json", "body"),
        (b"{}", "text/plain", "Content-Type: text/plain"),
        (b"{}", "", "Content-Type: none"),
        (b'{"prompt": "\xff"}', "application/json", "invalid unicode"),
        (b'{"prompt": "\xed\xa0\x80"}', "application/json", "invalid unicode"),
        (b'{"prompt": "\\ud800"}', "application/json", "hex escape"),
        (b'{"\\udc00": 1}', "application/json", "hex escape"),
        (b"[" * 100_000, "application/json", "recursion limit"),
        (b'{"model": ' + b"9" * 5000 + b"}", "application/json", "out of range"),
        (b'{"promt": "a"}', "application/json", "promt: there is no such field here; did you mean prompt?"),
        (b'{"prompt": "a", "response_format": {}}', "application/json", "did you mean structured_outputs?"),
        (b'{"prompt": "a", "n": 0}', "application/json", "n=0: must be greater than or equal to 1"),
        (b'{"prompt": []}', "application/json", "prompt: must have at least 1 item, not 0"),
        (b'{"prompt": [1], "temperature": "' + b"hot" * 10**6 + b'"}', "application/json", "hothot"),
    ],
)
def test_a_body_that_is_no_request_is_a_400_that_says_why(url, body, kind, says):
    headers = {"Content-Type": kind} if kind else {}
    response = httpx.post(f"{url}/v1/completions", content=body, headers=headers)
    message = error_of(response, 400)["message"]
    assert says in message
    assert len(message) < 200


def test_a_body_announced_too_large_is_refused_before_any_of_it_is_sent(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 2**20)
    with served() as (llm, server), raw(server) as client:
        headers = ("Content-Type: application/json", "Expect: 100-continue")
        client.sendall(post_bytes("/v1/completions", b"", *headers, length=100 * 2**20))
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
        assert not llm.submitted


def test_a_body_of_100_mb_without_a_length_is_refused_when_the_limit_is_reached(monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 2**20)
    with served() as (llm, server):
        sent = 0

        def pieces():
            nonlocal sent
            for _ in range(100):
                sent += 2**20
                yield b" " * 2**20

        with suppress(httpx.WriteError):
            headers = {"Content-Type": "application/json"}
            response = httpx.post(f"{server.url}/v1/completions", content=pieces(), headers=headers, timeout=PATIENCE_S)
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


def test_unknown_paths_and_methods_have_our_shape(url):
    for path in ("/nowhere", "/nowhere/", "/", "//", "/pause/", "/v1/../etc/passwd", "/%00"):
        assert error_of(httpx.get(url + path), 404)["type"] == "not_found_error"
    wrong = httpx.get(f"{url}/v1/completions")
    assert "POST" in error_of(wrong, 405)["message"]
    assert wrong.headers["allow"] == "POST"
    error_of(httpx.request("TRACE", f"{url}/v1/models"), 405)


def test_stopping_on_the_loop_itself_raises_and_the_server_goes_on():
    with served() as (llm, server):

        async def stop() -> None:
            for method in (server.close, server.wait):
                with pytest.raises(RuntimeError, match="would never return"):
                    method()

        llm.loop.run_sync(stop(), PATIENCE_S)
        assert httpx.post(f"{server.url}/v1/completions", json=ASK).status_code == 200
