"""Tests of the control routes under vLLM's and SGLang's names, and of SGLang's `/generate`, over a real engine."""

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

from rollout import LLM, InferenceConfig, SamplingParams, ServerConfig
from tests.engines import BLOCK, gated
from tests.models import make_model
from tests.server.chat_templates import byte_level

KEY = "sk-control"
TOKENIZER = byte_level("qwen2.5")
PROMPT = [5, 6, 7, 8, 9, 10]
HEADERS = {"Authorization": f"Bearer {KEY}"}
PATIENCE_S = 60.0
SGLANGS = {"load_format": "auto", "abort_all_requests": False, "weight_version": "9", "is_async": False, "flush_cache": True,
           "torch_empty_cache": False, "keep_pause": False, "recapture_cuda_graph": False}  # fmt: skip
"""Fields that SGLang's own client sends beside the folder."""


def tiny(seed: int = 0) -> Any:
    return make_model("qwen3", seed, vocab_size=len(TOKENIZER), num_hidden_layers=1, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def house() -> Iterator[tuple[LLM, httpx.Client]]:
    config = InferenceConfig(
        kv_cache_blocks=1024, block_size_tokens=BLOCK, max_requests=8, max_tokens_per_step=64, verify_model=False
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
    ("/sleep?level=2", "/resume", "suspended"), ("/pause_generation", "/continue_generation", "paused"),
    ("/release_memory_occupation", "/resume_memory_occupation", "suspended"),
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
    assert ok(http.post("/resume_memory_occupation", json={"tags": ["weights", "cuda_graph"]}))["state"] == "suspended"
    assert ok(http.post("/wake_up?tags=weights&tags=kv_cache"))["state"] == "running"
    for order, param in (
        ("/wake_up?tags=scheduling", "tags[0]"),
        ("/sleep?level=0", "level"),
        ("/sleep?mode=wait", "mode"),
        ("/pause?wait_for_inflight_requests=true", "wait_for_inflight_requests"),
        ("/reset_prefix_cache?reset_running_requests=true", "reset_running_requests"),
    ):
        refused = http.post(order)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert http.post("/release_memory_occupation", json={"tags": ["weights"]}).status_code == 400
    assert ok(http.get("/is_paused")) == {"is_paused": False}


def test_a_pause_may_clear_the_prefix_cache(llm: LLM, http: httpx.Client):
    llm.generate(PROMPT, SamplingParams(max_tokens=8))
    ok(http.post("/pause?mode=keep&clear_cache=true&wait_for_inflight_requests=false"))
    assert ok(http.post("/reset_prefix_cache?reset_running_requests=false"))["flushed_blocks"] == 0
    ok(http.post("/continue_generation", json={"torch_empty_cache": True}))


def test_the_server_describes_itself_to_trainers(http: httpx.Client):
    info = ok(http.get("/server_info", params={"config_format": "json"}))["vllm_config"]
    assert (info["model_config"]["max_model_len"], info["weight_transfer_config"]) == (2048, None)
    # What TRL's trainer reads to decide that it may send adapters instead of merged weights.
    assert min(info["lora_config"].values()) >= 32
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert ok(http.get("/get_world_size")) == {"world_size": 1}
    assert ok(http.get("/get_model_info"))["is_generation"]
    assert ok(http.get("/health_generate"))["status"] == "running"
    assert ok(http.get("/version"))["version"]


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache?timeout=5"])
def test_the_prefix_cache_is_flushed(llm: LLM, http: httpx.Client, path: str):
    llm.generate(PROMPT, SamplingParams(max_tokens=8))
    assert ok(http.post(path))["flushed_blocks"] > 0
    assert ok(http.post(path))["flushed_blocks"] == 0


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
    told = ok(
        http.post(
            "/update_weights_from_disk", json={"model_path": str(tmp_path / "good"), "version": before + 9} | SGLANGS
        )
    )
    assert (told["success"], told["policy_version"], llm.policy_version) == (True, before + 9, before + 9)
    assert http.post("/update_weights", json={}).json()["error"]["param"] == "weight_dir"


def test_sglangs_generate_gives_ids_and_log_probs(llm: LLM, http: httpx.Client):
    params = {"max_new_tokens": 7, "temperature": 0.8, "sampling_seed": 4, "top_k": -1, "n": 2, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "top_logprobs_num": 2}
    replies = ok(http.post("/generate", json=body))
    expected = llm.generate(
        PROMPT, SamplingParams(max_tokens=7, temperature=0.8, seed=4, n=2, ignore_eos=True, logprobs=2)
    )
    for reply, sample in zip(replies, expected, strict=True):
        meta = reply["meta_info"]
        assert (
            reply["output_ids"] == [token for _, token, _ in meta["output_token_logprobs"]] == sample.generated_tokens
        )
        assert [value for value, _, _ in meta["output_token_logprobs"]] == pytest.approx(
            sample.generated_log_probs, abs=1e-4
        )
        assert meta["finish_reason"] == {"type": "length", "length": 7}
        assert (reply["text"], meta["weight_version"]) == (sample.generated_text, str(llm.policy_version))
        assert [len(row) for row in meta["output_top_logprobs"]] == [2] * 7
    constrained = ok(http.post("/generate", json={"text": "hi", "sampling_params": {"regex": "ab{3}"}}))
    assert (constrained["text"], constrained["meta_info"]["finish_reason"]["type"]) == ("abbb", "stop")


@pytest.mark.parametrize("how", ["rid", "all", "pause"])
def test_an_aborted_request_is_answered_with_what_it_has(llm: LLM, http: httpx.Client, how: str):
    body = {"input_ids": PROMPT, "rid": "mine", "return_logprob": True,
            "sampling_params": {"max_new_tokens": 2000, "top_p": 0.99, "ignore_eos": True}}  # fmt: skip
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.append(ok(http.post("/generate", json=body))))
    with gated(llm.engine):
        asking.start()
        # Where they are read: an abort overtakes tokens that are still on their way from the engine.
        until(lambda: any(any(group._tokens.lengths.values()) for group in list(llm.service._groups.values()) if group))
        if how == "pause":
            ok(http.post("/pause_generation", json={"mode": "abort"}))
            ok(http.post("/continue_generation"))
        else:
            ok(http.post("/abort_request", json={"rid": "mine"} if how == "rid" else {"abort_all": True}))
        asking.join(PATIENCE_S)
    (reply,) = found
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) < 2000
    until(lambda: not llm.num_open)


def test_control_needs_admin_and_its_key(http: httpx.Client, llm: LLM):
    assert http.post("/pause", headers={"Authorization": "Bearer no"}).status_code == 401
    assert http.post("/pause?mode=wait").status_code == 400
    assert http.post("/abort_request", json={}).json()["error"]["param"] == "rid"
    assert http.post("/generate", json={"text": "a", "input_ids": [1]}).status_code == 400
    assert http.post("/generate", json={"text": "a", "lora_path": "x"}).json()["error"]["param"] == "lora_path"
