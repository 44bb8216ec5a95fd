"""Tests of the control routes over a fake engine: off by default, behind the key, with the engine's state rules."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rollout.state import EngineState, KVCacheManagementMode
from tests.engines import PATIENCE_S, until
from tests.server.fake_llm import served
from tests.server.requests_by_hand import ASK, KEY, error_of

PATHS = ("pause", "resume", "sleep", "wake_up", "abort_requests", "reset_prefix_cache", "update_weights",
         "update_weight_version", "v1/load_lora_adapter", "v1/unload_lora_adapter")  # fmt: skip


@pytest.fixture
def admin():
    with (
        served(admin=True, api_key=KEY) as (llm, server),
        httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as client,
    ):
        llm.serving = server._serving
        yield llm, client


def test_the_routes_are_there_and_described_only_if_switched_on(admin):
    with served() as (llm, server):
        for path in PATHS:
            error_of(httpx.post(f"{server.url}/{path}", json={}), 404)
        assert not llm.calls
    assert {f"/{path}" for path in PATHS} <= set(admin[1].get("/openapi.json").json()["paths"])


def test_the_lifecycle_moves_and_every_answer_says_where_it_is(admin):
    llm, client = admin
    assert client.post("/pause").json() == {"state": "paused", "policy_version": 0, "aborted": 0, "flushed_blocks": 0}
    assert client.post("/sleep?level=1").json()["state"] == "suspended"
    assert client.post("/update_weight_version").json()["policy_version"] == 1
    assert client.post("/update_weight_version", json={"new_version": "7"}).json()["policy_version"] == 7
    assert client.post("/wake_up").json()["state"] == "running"
    assert client.post("/sleep?level=2").json()["state"] == "suspended"
    assert client.post("/resume").json()["state"] == "running"
    modes = [call[1] for call in llm.calls if call[0] == "suspend"]
    assert modes == [KVCacheManagementMode.OFFLOAD, KVCacheManagementMode.RECOMPUTE]
    assert client.post("/reset_prefix_cache").json()["flushed_blocks"] == 3


def test_what_direct_mode_does_not_have_is_a_409_in_its_own_words(admin):
    llm, client = admin
    llm.direct = True
    for path, method, state in (
        ("pause", "pause", EngineState.RUNNING),
        ("sleep", "suspend", EngineState.PAUSED),
        ("wake_up", "resume", EngineState.SUSPENDED),
        ("resume", "unpause", EngineState.PAUSED),
    ):
        llm.state = state
        assert f"llm.engine.{method}()" in error_of(client.post(f"/{path}"), 409)["message"]
    assert client.post("/update_weight_version").status_code == 200
    llm.state = EngineState.RUNNING


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("update_weight_version", {"new_version": -1}, "new_version"),
        ("update_weight_version", {"new_version": "two"}, "new_version"),
        ("abort_requests", {"request_ids": "cmpl-1"}, "request_ids"),
        ("abort_requests", {"request_ids": [7]}, "request_ids[0]"),
        ("abort_requests", {"everything": True}, "everything"),
        ("update_weights", {}, "weight_dir"),
        ("update_weights", {"weight_dir": "a", "version": "2"}, "version"),
    ],
)
def test_an_order_that_makes_no_sense_is_a_400(admin, path, body, param):
    assert error_of(admin[1].post(f"/{path}", json=body), 400)["param"] == param


def test_a_reply_is_aborted_by_the_id_its_client_sees_and_no_other_is(admin):
    llm, client = admin
    llm.hold()
    with client.stream("POST", "/v1/completions", json=ASK | {"stream": True, "prompt": [[1], [2]]}) as stream:
        lines = stream.iter_lines()
        reply_id = json.loads(next(lines).removeprefix("data: "))["id"]
        other = llm.loop.run_sync(submit_one(llm), PATIENCE_S)
        assert client.post("/abort_requests", json={"request_ids": ["cmpl-unknown"]}).json()["aborted"] == 0
        assert client.post("/abort_requests", json={"request_ids": ["cmpl-x", reply_id]}).json()["aborted"] == 2
        rest = "\n".join(lines)
    *chunks, done = [line.removeprefix("data: ") for line in rest.split("\n") if line]
    reasons = {c["index"]: c["finish_reason"] for chunk in chunks for c in json.loads(chunk)["choices"]}
    assert (reasons, done) == ({0: "abort", 1: "abort"}, "[DONE]")
    assert client.post("/abort_requests", json={"request_ids": [reply_id]}).json()["aborted"] == 0
    assert client.post("/abort_requests", json={"request_ids": []}).json()["aborted"] == 0
    assert not other.done(), "a request of the program itself is not one of HTTP"
    assert llm.loop.run_sync(llm.abort(), PATIENCE_S) == 1


async def submit_one(llm):
    return llm.submit([3])


# --- pauses, as vLLM's suite `rl/state_transitions` has them -----------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_come_during_a_pause_by_abort_or_wait_are_a_503_and_otherwise_wait(admin, stream):
    llm, client = admin
    body = ASK | {"stream": stream}
    for mode in ("abort", "wait"):
        for path in ("pause", "sleep"):
            assert client.post(f"/{path}", params={"mode": mode}).status_code == 200
            refused = client.post("/v1/completions", json=body)
            assert error_of(refused, 503)["code"] == "engine_state"
            assert refused.headers["retry-after"] == "1"
            assert client.post("/resume").json()["state"] == "running"
            assert client.post("/v1/completions", json=body).status_code == 200
    client.post("/pause?mode=wait")
    client.post("/pause?mode=keep")
    assert client.post("/v1/completions", json=body).status_code == 200, "taken; the fake computes even while paused"
    client.post("/pause?mode=abort")
    llm.state = EngineState.RUNNING  # the program itself lets the engines continue
    assert client.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_lets_open_requests_wait_or_finish_or_aborts_them(admin, mode):
    llm, client = admin
    llm.hold()
    with (
        ThreadPoolExecutor(2) as threads,
        client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as open_one,
    ):
        until(lambda: llm.num_open >= 1)
        pausing = threads.submit(client.post, "/pause", params={"mode": mode})
        if mode == "wait":
            until(lambda: llm.serving.shut)
            assert client.post("/v1/completions", json=ASK).status_code == 503
            assert not pausing.done()
            assert client.get("/is_paused").json() == {"is_paused": False}
            llm.release()
        if mode == "keep":
            assert pausing.result(PATIENCE_S).json()["state"] == "paused"
            assert llm.num_open == 1
            llm.release()
        *_, last, done = [line.removeprefix("data: ") for line in open_one.iter_lines() if line]
        assert (json.loads(last)["choices"][0]["finish_reason"], done) == (
            "abort" if mode == "abort" else "stop",
            "[DONE]",
        )
        assert pausing.result(PATIENCE_S).json()["state"] == "paused"
    assert client.get("/is_paused").json() == {"is_paused": True}
    client.post("/resume")


def test_a_pause_that_waits_is_ended_by_resume(admin):
    llm, client = admin
    llm.hold()
    with ThreadPoolExecutor(2) as threads:
        asking = threads.submit(client.post, "/v1/completions", json=ASK)
        until(lambda: llm.num_open >= 1)
        pausing = threads.submit(client.post, "/pause?mode=wait")
        until(lambda: llm.serving.shut)
        client.post("/resume")
        assert pausing.result(PATIENCE_S).json()["state"] == "running"
        llm.release()
        assert asking.result(PATIENCE_S).status_code == 200
    assert client.post("/v1/completions", json=ASK).status_code == 200
