"""Tests of /admin: off by default, behind the key, with the engine's state rules."""

from __future__ import annotations

import json

import httpx
import pytest

from rollout.state import EngineState, KVCacheManagementMode
from tests.server.fake_llm import served
from tests.server.requests_by_hand import ASK, DEADLINE_S, KEY, asked, error_of, read_all, wait_for_requests

PATHS = ("pause", "unpause", "suspend", "resume", "weights_updated", "flush_prefix_cache", "abort",
         "load_lora_adapter", "unload_lora_adapter")  # fmt: skip


@pytest.fixture
def admin():
    with (
        served(admin=True, api_key=KEY) as (llm, server),
        httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}) as client,
    ):
        yield llm, client


def test_without_being_switched_on_nothing_of_it_is_there():
    with served() as (llm, server):
        for path in PATHS:
            error_of(httpx.post(f"{server.url}/admin/{path}", json={}), 404)
        assert not llm.calls


def test_it_is_described_when_it_is_there(admin):
    _, client = admin
    paths = client.get("/openapi.json").json()["paths"]
    assert {path for path in paths if path.startswith("/admin/")} == {f"/admin/{path}" for path in PATHS}
    assert {"200", "400", "401", "409", "503"} <= set(paths["/admin/pause"]["post"]["responses"])


def test_the_lifecycle_moves_and_every_answer_says_where_it_is(admin):
    llm, client = admin
    assert client.post("/admin/pause").json() == {"state": "paused", "policy_version": 0}
    assert client.post("/admin/suspend", json={"mode": "offload"}).json()["state"] == "suspended"
    assert client.post("/admin/weights_updated").json()["policy_version"] == 1
    assert client.post("/admin/weights_updated", json={"version": 7}).json()["policy_version"] == 7
    assert client.post("/admin/resume").json()["state"] == "paused"
    assert client.post("/admin/unpause", json={}).json() == {"state": "running", "policy_version": 7}
    assert client.post("/admin/suspend").json()["state"] == "suspended"
    modes = [call[1] for call in llm.calls if call[0] == "suspend"]
    assert modes == [KVCacheManagementMode.OFFLOAD, None]
    assert client.post("/admin/flush_prefix_cache").json() == {"flushed_blocks": 3}
    llm.state = EngineState.RUNNING


def test_what_direct_mode_does_not_have_is_a_409_in_its_own_words(admin):
    llm, client = admin
    llm.direct = True
    for path in ("pause", "unpause", "suspend", "resume"):
        assert f"llm.engine.{path}()" in error_of(client.post(f"/admin/{path}"), 409)["message"]
    assert client.post("/admin/weights_updated").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("suspend", {"mode": "shred"}, "mode"),
        ("weights_updated", {"version": -1}, "version"),
        ("weights_updated", {"version": "2"}, "version"),
        ("abort", {"request_id": 7}, "request_id"),
        ("abort", {"everything": True}, "everything"),
        ("abort", {}, None),
        ("abort", {"request_id": "cmpl-1", "all": True}, None),
    ],
)
def test_an_order_that_makes_no_sense_is_a_400(admin, path, body, param):
    assert error_of(admin[1].post(f"/admin/{path}", json=body), 400)["param"] == param


def test_a_reply_is_aborted_by_the_id_its_client_sees_and_no_other_is(admin):
    llm, client = admin
    llm.hold()
    with client.stream("POST", "/v1/completions", json=ASK | {"stream": True, "prompt": [[1], [2]]}) as stream:
        lines = stream.iter_lines()
        reply_id = json.loads(next(lines).removeprefix("data: "))["id"]
        other = llm.loop.run_sync(submit_one(llm), DEADLINE_S)
        assert client.post("/admin/abort", json={"request_id": "cmpl-unknown"}).json() == {"aborted": 0}
        assert client.post("/admin/abort", json={"request_id": reply_id}).json() == {"aborted": 2}
        rest = "\n".join(lines)
    assert '"code":"aborted"' in rest.replace(" ", "")
    assert "[DONE]" not in rest
    assert not other.done()
    assert client.post("/admin/abort", json={"request_id": reply_id}).json() == {"aborted": 0}
    assert client.post("/admin/abort", json={"all": True}).json() == {"aborted": 1}
    assert other.done()


async def submit_one(llm):
    return llm.submit([3])


def test_aborting_everything_answers_who_waits():
    with served(admin=True, insecure=True) as (llm, server):
        llm.hold()
        with asked(server) as client:
            wait_for_requests(llm, 1)
            assert httpx.post(f"{server.url}/admin/abort", json={"all": True}).json() == {"aborted": 1}
            client.settimeout(DEADLINE_S)
            assert client.recv(65536).startswith(b"HTTP/1.1 409 ")
            client.shutdown(1)
            read_all(client)
