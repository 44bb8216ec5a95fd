"""Tests of LoRA adapters over HTTP: loaded from a folder, named as the model of requests, unloaded while these run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollout import LLM, Advanced, InferenceConfig, SamplingParams, ServerConfig
from rollout.errors import ConfigError, InvalidRequestError
from tests.adapters import adapted, saved_adapter
from tests.engines import BLOCK, gated
from tests.models import greedy, make_model
from tests.server.chat_templates import byte_level
from tests.server.test_control_routes import HEADERS, KEY, PATIENCE_S, ok, until

TOKENIZER = byte_level("qwen2.5")
PROMPT = [5, 6, 7, 8, 9, 10]


def tiny() -> Any:
    return make_model("qwen3", vocab_size=len(TOKENIZER), num_hidden_layers=1, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: saved_adapter(tiny(), base / name, r=rank) for name, rank in (("a", 4), ("b", 2))}


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
def http(house: tuple[LLM, httpx.Client]) -> Iterator[httpx.Client]:
    llm, client = house
    yield client
    for name in llm.lora_adapters:
        llm.unload_lora_adapter(name)


@pytest.fixture
def llm(house: tuple[LLM, httpx.Client]) -> LLM:
    return house[0]


def load(http: httpx.Client, name: str, folder: str, path: str = "/v1/load_lora_adapter", **fields: Any) -> Any:
    return ok(http.post(path, json={"lora_name": name, "lora_path": folder, **fields}))


def tokens(http: httpx.Client, model: str, length: int = 6) -> list[int]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": length, "temperature": 0, "ignore_eos": True}
    reply = ok(http.post("/v1/completions", json=body | {"return_token_ids": True}))
    assert reply["model"] == model
    return list(reply["choices"][0]["token_ids"])


def test_requests_name_an_adapter_as_their_model(llm: LLM, http: httpx.Client, folders: dict[str, str]) -> None:
    version = llm.policy_version
    for name, folder in folders.items():
        # As TRL's client sends it.
        assert load(http, name, folder, load_inplace=False)["policy_version"] == version
    listed = {each["id"]: each for each in ok(http.get("/v1/models"))["data"]}
    assert list(listed) == ["m", "a", "b"]
    assert (listed["a"]["parent"], listed["a"]["root"], listed["m"]["parent"]) == ("m", folders["a"], None)
    assert ok(http.get("/v1/models/b")) == listed["b"]
    answers = {name: tokens(http, name) for name in listed}
    assert answers == {
        "m": greedy(tiny(), PROMPT, 6),
        **{name: greedy(adapted(tiny(), folder), PROMPT, 6) for name, folder in folders.items()},
    }
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    one = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "temperature": 0, "ignore_eos": True}}
    for name in folders:
        by_chat = ok(http.post("/v1/chat/completions", json=chat | {"model": name}))
        assert by_chat["model"] == name
        by_tokens = ok(http.post("/inference/v1/generate", json=one | {"model": name}))
        assert (by_tokens["choices"][0]["token_ids"], by_tokens["model"]) == (answers[name], name)
    streamed = http.post("/v1/completions", json={"model": "a", "prompt": PROMPT, "max_tokens": 1, "stream": True})
    assert '"model":"a"' in streamed.text


def test_an_adapter_takes_the_place_of_another_under_the_next_version(
    llm: LLM, http: httpx.Client, folders: dict[str, str]
) -> None:
    load(http, "a", folders["b"])
    first, version = tokens(http, "a"), llm.policy_version
    refused = http.post("/load_lora_adapter", json={"lora_name": "a", "lora_path": folders["a"]})
    assert (refused.status_code, "is loaded already" in refused.text) == (400, True)
    assert "pass load_inplace=true" in refused.text
    assert load(http, "a", folders["a"], "/load_lora_adapter", load_inplace=True)["policy_version"] == version + 1
    assert llm.policy_version == version + 1
    assert tokens(http, "a") == greedy(adapted(tiny(), folders["a"]), PROMPT, 6) != first


def test_unloading_ends_the_requests_of_an_adapter_by_name(
    llm: LLM, http: httpx.Client, folders: dict[str, str]
) -> None:
    load(http, "a", folders["a"])
    ended: list[httpx.Response] = []
    body = {"model": "a", "prompt": PROMPT, "max_tokens": 2000, "top_p": 0.99, "ignore_eos": True}
    asking = threading.Thread(target=lambda: ended.append(http.post("/v1/completions", json=body)))
    with gated(llm.engine):
        asking.start()
        until(lambda: llm.engine.load[0] > 0)
        unloaded = ok(http.post("/v1/unload_lora_adapter", json={"lora_name": "a"}))
        assert unloaded["aborted"] == 1
        asking.join(PATIENCE_S)
    assert ended[0].status_code == 409
    assert "adapter 'a' was unloaded" in ended[0].json()["error"]["message"]
    assert http.post("/v1/completions", json=body).status_code == 404
    assert tokens(http, "m") == greedy(tiny(), PROMPT, 6)
    again = http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
    assert (again.status_code, again.json()["error"]["param"]) == (404, "lora_name")


def test_what_cannot_be_loaded_is_named(http: httpx.Client, folders: dict[str, str], tmp_path: Path) -> None:
    for fields, said in (
        ({"lora_path": str(tmp_path)}, "must be a folder with adapter_config.json"),
        ({"lora_name": "m"}, "the model itself has this name"),
        ({"lora_name": "a b"}, "lora_name='a b'"),
        ({"base_model_name": "other"}, "must be 'm'"),
        ({"is_3d_lora_weight": True}, "is_3d_lora_weight"),
        ({"lora_path": None}, "lora_path"),
        ({"alpha": 3}, "alpha"),
    ):
        refused = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": folders["a"]} | fields)
        assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True), refused.text
    unknown = http.post("/v1/completions", json={"model": "x", "prompt": PROMPT}).json()["error"]
    assert (unknown["code"], "there is 'm'" in unknown["message"]) == ("model_not_found", True)
    assert http.post("/v1/load_lora_adapter", json={}, headers={"Authorization": "Bearer no"}).status_code == 401


def test_adapters_of_an_llm_without_a_server(folders: dict[str, str]) -> None:
    config = InferenceConfig(
        kv_cache_blocks=256, max_requests=8, advanced=Advanced(block_size_tokens=BLOCK, verify_model=False)
    )
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with LLM(tiny(), TOKENIZER, config) as llm:
        assert llm.load_lora_adapter("a", folders["a"]) == 0
        with pytest.raises(ConfigError, match="is loaded already"):
            llm.load_lora_adapter("a", folders["b"])
        samples = llm.generate([PROMPT] * 2, [params, params.replace(adapter="a")])
        assert [each.generated_tokens for each in samples] == [
            greedy(tiny(), PROMPT, 6),
            greedy(adapted(tiny(), folders["a"]), PROMPT, 6),
        ]
        assert llm.load_lora_adapter("a", folders["b"], replace=True) == 1
        assert (llm.lora_adapters, llm.unload_lora_adapter("a"), llm.lora_adapters) == ({"a": folders["b"]}, 0, {})
        with pytest.raises(InvalidRequestError, match="adapter 'a' is not loaded"):
            llm.generate(PROMPT, params.replace(adapter="a"))
