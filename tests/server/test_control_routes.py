"""Tests of the control routes over a real engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from rollout import LLM, Advanced, InferenceConfig, SamplingParams, ServerConfig
from tests.engines import BLOCK, gated
from tests.models import make_model
from tests.server.chat_templates import byte_level

KEY = "sk-control"
TOKENIZER = byte_level("qwen2.5")
PROMPT = [5, 6, 7, 8, 9, 10]
HEADERS = {"Authorization": f"Bearer {KEY}"}
PATIENCE_S = 60.0


def tiny(seed: int = 0) -> Any:
    return make_model("qwen3", seed, vocab_size=len(TOKENIZER), num_hidden_layers=1, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def house() -> Iterator[tuple[LLM, httpx.Client]]:
    config = InferenceConfig(
        kv_cache_blocks=1024,
        max_requests=8,
        max_tokens_per_step=64,
        advanced=Advanced(block_size_tokens=BLOCK, verify_model=False),
    )
    with LLM(tiny(), TOKENIZER, config, use_coordinator=True) as llm:
        server = llm.serve(ServerConfig(port=0, api_key=KEY, admin=True, served_model_name="m"), blocking=False)
        with httpx.Client(base_url=server.url, headers=HEADERS, timeout=PATIENCE_S) as client:
            yield llm, client


@pytest.fixture
def llm(house: tuple[LLM, httpx.Client]) -> LLM:
    return house[0]


@pytest.fixture
def http(house: tuple[LLM, httpx.Client]) -> httpx.Client:
    return house[1]


def ok(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Weights in two files, as `save_pretrained` leaves large ones."""
    folder.mkdir()
    names, where = list(tensors), {}
    for place in range(2):
        part = {name: tensors[name].contiguous() for name in names[place::2]}
        save_file(part, folder / f"model-{place}.safetensors")
        where |= dict.fromkeys(part, f"model-{place}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(("stop", "go", "state"), [
    ("/pause?mode=keep", "/resume", "paused"), ("/sleep?level=1", "/wake_up", "suspended"),
    ("/sleep?level=2", "/resume", "suspended"),
])  # fmt: skip
def test_engines_are_stopped_and_continued_twice_without_harm(http: httpx.Client, stop: str, go: str, state: str):
    for _ in range(2):
        assert ok(http.post(stop))["state"] == state
    assert ok(http.get("/is_paused")) == {"is_paused": True}
    assert ok(http.get("/is_sleeping")) == {"is_sleeping": state == "suspended"}
    for _ in range(2):
        assert ok(http.post(go))["state"] == "running"
    assert ok(http.get("/is_paused")) == {"is_paused": False}


def test_tags_say_what_wakes_and_options_without_effect_are_refused(http: httpx.Client):
    ok(http.post("/sleep?level=1&mode=abort"))
    assert ok(http.post("/wake_up?tags=weights"))["state"] == "suspended"
    assert ok(http.post("/wake_up?tags=weights&tags=kv_cache"))["state"] == "running"
    for order, param in (
        ("/wake_up?tags=scheduling", "query.tags[0]"),
        ("/sleep?level=0", "query.level"),
        ("/sleep?mode=never", "query.mode"),
        ("/pause?mode=invalid", "query.mode"),
    ):
        refused = http.post(order)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert ok(http.get("/is_paused")) == {"is_paused": False}


def test_a_pause_may_clear_the_prefix_cache(llm: LLM, http: httpx.Client):
    llm.generate(PROMPT, SamplingParams(max_tokens=8))
    ok(http.post("/pause?mode=keep&clear_cache=true"))
    assert ok(http.post("/reset_prefix_cache"))["flushed_blocks"] == 0
    ok(http.post("/resume"))


def test_the_server_describes_itself_to_trainers(http: httpx.Client):
    info = ok(http.get("/server_info", params={"config_format": "json"}))["vllm_config"]
    assert (info["model_config"]["max_model_len"], info["weight_transfer_config"]) == (2048, None)
    # What TRL's trainer reads to decide that it may send adapters instead of merged weights.
    assert min(info["lora_config"].values()) >= 32
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert ok(http.get("/get_world_size")) == {"world_size": 1}


def test_the_prefix_cache_is_flushed(llm: LLM, http: httpx.Client):
    llm.generate(PROMPT, SamplingParams(max_tokens=8))
    assert ok(http.post("/reset_prefix_cache"))["flushed_blocks"] > 0
    assert ok(http.post("/reset_prefix_cache"))["flushed_blocks"] == 0


def test_weights_come_from_a_folder_and_what_does_not_fit_changes_nothing(llm: LLM, http: httpx.Client, tmp_path: Path):
    expected, before = tiny(seed=3).state_dict(), llm.policy_version
    sharded(tmp_path / "good", expected)
    sharded(tmp_path / "shape", expected | {"lm_head.weight": torch.zeros(3, 3)})
    sharded(tmp_path / "fewer", dict(list(expected.items())[1:]))
    old = {name: tensor.clone() for name, tensor in llm.model.state_dict().items()}
    for folder, why in (
        ("shape", "in this model"),
        ("fewer", "are not there"),
        ("nowhere", "must be a folder"),
        ("x" * 999, "cannot be read"),
    ):
        refused = http.post("/update_weights", json={"weight_dir": str(tmp_path / folder)})
        assert refused.status_code == 400
        assert why in refused.json()["error"]["message"]
    assert all(torch.equal(old[name], tensor) for name, tensor in llm.model.state_dict().items())
    assert llm.policy_version == before
    ok(http.post("/update_weights", json={"weight_dir": str(tmp_path / "good")}))
    assert all(torch.equal(expected[name], tensor) for name, tensor in llm.model.state_dict().items())
    told = ok(http.post("/update_weights", json={"weight_dir": str(tmp_path / "good"), "version": before + 9}))
    assert told["policy_version"] == llm.policy_version == before + 9
    assert http.post("/update_weights", json={}).json()["error"]["param"] == "weight_dir"


@pytest.mark.parametrize("how", ["id", "all", "pause"])
def test_open_requests_are_aborted(llm: LLM, http: httpx.Client, how: str):
    params = {"max_tokens": 2000, "top_p": 0.99, "ignore_eos": True}
    body = {"token_ids": PROMPT, "request_id": "mine", "sampling_params": params}
    found: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: found.append(http.post("/inference/v1/generate", json=body)))
    with gated(llm.engine):
        asking.start()
        until(lambda: llm.engine.load[0] > 0)
        if how == "pause":
            ok(http.post("/pause?mode=abort"))
            ok(http.post("/resume"))
        else:
            named = {"request_ids": ["mine"]} if how == "id" else {}
            assert ok(http.post("/abort_requests", json=named))["aborted"] == 1
        asking.join(PATIENCE_S)
    assert (found[0].status_code, found[0].json()["error"]["code"]) == (409, "aborted")
    until(lambda: not llm.num_open)


def test_control_needs_admin_and_its_key(http: httpx.Client, llm: LLM):
    assert http.post("/pause", headers={"Authorization": "Bearer no"}).status_code == 401
    assert http.get("/is_paused", headers={"Authorization": "Bearer no"}).status_code == 401
