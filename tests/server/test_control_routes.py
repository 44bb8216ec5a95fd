"""Tests of the control routes over a real engine: state, prefix cache, weights, aborts, LoRA adapters."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from rollout import LLM, SamplingParams, ServerConfig
from rollout.errors import ConfigError, InvalidRequestError
from tests.adapters import adapted, saved_adapter
from tests.engines import PATIENCE_S, gated, until
from tests.models import greedy
from tests.server.real import ok, small_llm, tiny

KEY = "sk-control"
PROMPT = [5, 6, 7, 8, 9, 10]
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
ENDLESS = {"max_tokens": 2000, "top_p": 0.99, "ignore_eos": True}


@pytest.fixture(scope="module")
def house() -> Iterator[tuple[LLM, httpx.Client]]:
    with small_llm(use_coordinator=True) as llm:
        server = llm.serve(ServerConfig(port=0, api_key=KEY, admin=True, served_model_name="m"), blocking=False)
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S) as client:
            yield llm, client


@pytest.fixture
def llm(house: tuple[LLM, httpx.Client]) -> LLM:
    return house[0]


@pytest.fixture
def http(house: tuple[LLM, httpx.Client]) -> Iterator[httpx.Client]:
    llm, client = house
    yield client
    for name in llm.lora_adapters:
        llm.unload_lora_adapter(name)


@contextmanager
def asking(llm: LLM, http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[list[httpx.Response]]:
    """A request that the engine computes during the block; it has ended after it."""
    ended: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: ended.append(http.post(path, json=body)))
    with gated(llm.engine):
        thread.start()
        until(lambda: llm.engine.load[0] > 0)
        yield ended
        thread.join(PATIENCE_S)


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


def test_the_prefix_cache_is_flushed_alone_or_with_a_pause(llm: LLM, http: httpx.Client):
    for flush in ("/reset_prefix_cache", "/pause?mode=keep&clear_cache=true"):
        llm.generate(PROMPT, SamplingParams(max_tokens=8))
        assert ok(http.post(flush))["flushed_blocks"] > 0
        assert ok(http.post("/reset_prefix_cache"))["flushed_blocks"] == 0
    ok(http.post("/resume"))


def test_the_server_describes_itself_to_trainers(http: httpx.Client):
    info = ok(http.get("/server_info", params={"config_format": "json"}))["vllm_config"]
    assert (info["model_config"]["max_model_len"], info["weight_transfer_config"]) == (2048, None)
    # What TRL's trainer reads to decide that it may send adapters instead of merged weights.
    assert min(info["lora_config"].values()) >= 32
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert ok(http.get("/get_world_size")) == {"world_size": 1}


def sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Weights in two files, as `save_pretrained` leaves large ones."""
    folder.mkdir()
    names, where = list(tensors), {}
    for place in range(2):
        part = {name: tensors[name].contiguous() for name in names[place::2]}
        save_file(part, folder / f"model-{place}.safetensors")
        where |= dict.fromkeys(part, f"model-{place}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_weights_come_from_a_folder_and_what_does_not_fit_changes_nothing(llm: LLM, http: httpx.Client, tmp_path: Path):
    expected, before = tiny(seed=3).state_dict(), llm.policy_version
    sharded(tmp_path / "good", expected)
    sharded(tmp_path / "shape", expected | {"lm_head.weight": torch.zeros(3, 3)})
    sharded(tmp_path / "fewer", dict(list(expected.items())[1:]))
    old = {name: tensor.clone() for name, tensor in llm.model.state_dict().items()}
    for folder, why in (
        ("shape", "in this model"),
        ("fewer", "are missing"),
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


@pytest.mark.parametrize("how", ["id", "all", "pause"])
def test_open_requests_are_aborted(llm: LLM, http: httpx.Client, how: str):
    body = {"token_ids": PROMPT, "request_id": "mine", "sampling_params": ENDLESS}
    with asking(llm, http, "/inference/v1/generate", body) as found:
        if how == "pause":
            ok(http.post("/pause?mode=abort"))
            ok(http.post("/resume"))
        else:
            named = {"request_ids": ["mine"]} if how == "id" else {}
            assert ok(http.post("/abort_requests", json=named))["aborted"] == 1
    assert (found[0].status_code, found[0].json()["error"]["code"]) == (409, "aborted")
    until(lambda: not llm.num_open)


# --- LoRA adapters ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: saved_adapter(tiny(seed=3), base / name, r=rank) for name, rank in (("a", 4), ("b", 2))}


@pytest.fixture
def base(llm: LLM) -> Any:
    """The model without adapters, which the engine samples from."""
    model = tiny(seed=3)
    llm.model.load_state_dict(model.state_dict())
    llm.weights_updated()
    return model


def load(http: httpx.Client, name: str, folder: str, path: str = "/v1/load_lora_adapter", **fields: Any) -> Any:
    return ok(http.post(path, json={"lora_name": name, "lora_path": folder, **fields}))


def tokens(http: httpx.Client, model: str) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "return_token_ids": True}
    reply = ok(http.post("/v1/completions", json=body | GREEDY))
    assert reply["model"] == model
    return list(reply["choices"][0]["token_ids"])


def test_requests_name_an_adapter_as_their_model(llm: LLM, http: httpx.Client, folders: dict[str, str], base: Any):
    version = llm.policy_version
    for name, folder in folders.items():
        # As TRL's client sends it.
        assert load(http, name, folder, load_inplace=False)["policy_version"] == version
    listed = {each["id"]: each for each in ok(http.get("/v1/models"))["data"]}
    assert list(listed) == ["m", "a", "b"]
    assert (listed["a"]["parent"], listed["a"]["root"], listed["m"]["parent"]) == ("m", folders["a"], None)
    assert ok(http.get("/v1/models/b")) == listed["b"]
    answers = {name: tokens(http, name) for name in listed}
    expected = {name: greedy(adapted(tiny(seed=3), folder), PROMPT, 6) for name, folder in folders.items()}
    assert answers == {"m": greedy(base, PROMPT, 6), **expected}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "model": "a"}
    assert ok(http.post("/v1/chat/completions", json=chat | GREEDY))["model"] == "a"
    by_tokens = ok(
        http.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": GREEDY, "model": "a"})
    )
    assert (by_tokens["choices"][0]["token_ids"], by_tokens["model"]) == (answers["a"], "a")


def test_an_adapter_takes_the_place_of_another_under_the_next_version(
    llm: LLM, http: httpx.Client, folders: dict[str, str], base: Any
):
    load(http, "a", folders["b"])
    first, version = tokens(http, "a"), llm.policy_version
    refused = http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": folders["a"]})
    assert (refused.status_code, "is loaded already" in refused.text) == (400, True)
    assert "pass load_inplace=true" in refused.text
    assert load(http, "a", folders["a"], "/load_lora_adapter", load_inplace=True)["policy_version"] == version + 1
    assert tokens(http, "a") == greedy(adapted(base, folders["a"]), PROMPT, 6) != first


def test_unloading_ends_the_requests_of_an_adapter_by_name(llm: LLM, http: httpx.Client, folders: dict[str, str]):
    load(http, "a", folders["a"])
    body = {"model": "a", "prompt": PROMPT} | ENDLESS
    with asking(llm, http, "/v1/completions", body) as ended:
        assert ok(http.post("/v1/unload_lora_adapter", json={"lora_name": "a"}))["aborted"] == 1
    assert ended[0].status_code == 409
    assert "adapter 'a' was unloaded" in ended[0].json()["error"]["message"]
    assert http.post("/v1/completions", json=body).status_code == 404
    again = http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
    assert (again.status_code, again.json()["error"]["param"]) == (404, "lora_name")


def test_what_cannot_be_loaded_is_named(http: httpx.Client, folders: dict[str, str], tmp_path: Path):
    for fields, said in (
        ({"lora_path": str(tmp_path)}, "must be a folder with adapter_config.json"),
        ({"lora_name": "m"}, "the model itself has this name"),
        ({"lora_name": "a b"}, "lora_name='a b'"),
        ({"lora_path": None}, "lora_path"),
    ):
        refused = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": folders["a"]} | fields)
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text


def test_adapters_of_an_llm_without_a_server(folders: dict[str, str]):
    params = SamplingParams(**GREEDY)
    with small_llm(tiny(seed=3)) as llm:
        assert llm.load_lora_adapter("a", folders["a"]) == 0
        with pytest.raises(ConfigError, match="is loaded already"):
            llm.load_lora_adapter("a", folders["b"])
        samples = llm.generate([PROMPT] * 2, [params, params.replace(adapter="a")])
        models = tiny(seed=3), adapted(tiny(seed=3), folders["a"])
        assert [each.generated_tokens for each in samples] == [greedy(model, PROMPT, 6) for model in models]
        assert llm.load_lora_adapter("a", folders["b"], replace=True) == 1
        assert (llm.lora_adapters, llm.unload_lora_adapter("a"), llm.lora_adapters) == ({"a": folders["b"]}, 0, {})
        with pytest.raises(InvalidRequestError, match="adapter 'a' is not loaded"):
            llm.generate(PROMPT, params.replace(adapter="a"))
