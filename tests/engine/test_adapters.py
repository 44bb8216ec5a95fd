"""Tests of LoRA adapters that requests name: each request gets its own, and one without gets what it always got."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout import SamplingParams
from rollout.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from tests.adapters import adapted, saved_adapter
from tests.engine.cuts import CUTS, lived
from tests.engines import assert_greedy, finish, greedily, make_engine, steps, token_ids
from tests.models import make_model

PROMPT = token_ids(9)
OPTIONS: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"r": 2, "target_modules": ["gate_proj", "o_proj", "v_proj"]},
    "rs": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 32}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("adapters")
    return {name: saved_adapter(make_model("qwen3"), base / name, **options) for name, options in OPTIONS.items()}


@pytest.fixture(scope="module")
def trained(folders: dict[str, str]) -> dict[str | None, Any]:
    """Return the results of a trainer with each adapter, and without any."""
    models: dict[str | None, Any] = {name: adapted(make_model("qwen3"), folder) for name, folder in folders.items()}
    return models | {None: make_model("qwen3")}


def engine_with(folders: dict[str, str], **options: Any) -> Any:
    engine = make_engine(make_model("qwen3"), **options)
    for name, folder in folders.items():
        assert engine.load_adapter(name, folder) == 3 * len(OPTIONS[name].get("target_modules", "qvd"))
    return engine


def answers(engine: Any, length: int = 8, prompt: list[int] = PROMPT) -> dict[str | None, Any]:
    """The greedy completion of a prompt without an adapter and with each, all at once."""
    names = [None, *engine.adapters.folders]
    numbers = [engine.add_request(prompt, greedily(length, adapter=name)) for name in names]
    ended = finish(engine)
    return {name: ended[number, 0] for name, number in zip(names, numbers, strict=True)}


def test_requests_of_one_batch_get_what_the_trainer_computes_with_their_adapter(
    folders: dict[str, str], trained: dict[str | None, Any]
) -> None:
    engine = engine_with(folders)
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    found = answers(engine)
    assert len({tuple(request.generated_tokens) for request in found.values()}) == 4, "an adapter has no effect"
    for name, request in found.items():
        assert_greedy(trained[name], request)
    # Without an adapter: to the bit what an engine that knows of none samples.
    (alone,) = make_engine(make_model("qwen3")).generate([PROMPT], greedily(8))
    assert found[None].generated_log_probs == alone.generated_log_probs
    after = engine.model.state_dict()
    assert all(torch.equal(before.pop(name), tensor) for name, tensor in after.items())
    assert not before
    assert all("forward" not in vars(module) for module in engine.model.modules())


@pytest.mark.parametrize("cut", ["little memory", "chunks", "offload", "recompute"])
def test_an_adapter_stays_with_its_request_when_it_moves(
    folders: dict[str, str], trained: dict[str | None, Any], cut: str
) -> None:
    names = [None, *folders]

    def ask(engine: Any) -> None:
        for name in names:
            engine.add_request(PROMPT, greedily(20, adapter=name))

    done, engine = lived(partial(engine_with, folders), ask, CUTS[cut])
    assert engine.stats()[CUTS[cut].counter] > 0
    for number, name in enumerate(names):
        assert_greedy(trained[name], done[number, 0])


def test_cached_prefixes_are_of_one_adapter_only(folders: dict[str, str], trained: dict[str | None, Any]) -> None:
    engine = engine_with(folders)
    for again in (False, True):
        for name in (None, "a", "b"):
            (request,) = engine.generate([PROMPT], greedily(4, adapter=name))
            assert (request.num_cached_tokens > 0) is again
            assert_greedy(trained[name], request)
    salted = SamplingParams(cache_salt="a")
    assert salted.prefix_share != SamplingParams(adapter="a").prefix_share
    assert SamplingParams(adapter="a", cache_salt="b").prefix_share != SamplingParams(adapter="a").prefix_share


def test_unloading_ends_the_requests_of_the_adapter_and_no_other(
    folders: dict[str, str], trained: dict[str | None, Any]
) -> None:
    engine = engine_with({name: folders[name] for name in ("a", "b")})
    engine.generate([PROMPT], greedily(8, adapter="a"))
    numbers = {name: engine.add_request(PROMPT, greedily(8, adapter=name, n=2)) for name in (None, "a", "b")}
    ended = steps(engine, 3)
    assert (engine.unload_adapter("a"), engine.unload_adapter("a")) == (2, 0)
    with pytest.raises(InvalidRequestError, match=r"adapter 'a' is not loaded \(loaded: 'b'\)"):
        engine.add_request(PROMPT, greedily(8, adapter="a"))
    found = finish(engine, ended)
    for index in range(2):
        assert "adapter 'a' was unloaded" in str(found[numbers["a"], index].error)
        for name in (None, "b"):
            assert_greedy(trained[name], found[numbers[name], index])
    # Another adapter of that name finds no KV of the first.
    engine.load_adapter("a", folders["rs"])
    (request,) = engine.generate([PROMPT], greedily(8, adapter="a"))
    assert_greedy(trained["rs"], request)


def test_requests_in_flight_go_on_with_the_adapter_that_replaces_theirs(folders: dict[str, str]) -> None:
    engine = engine_with({"a": folders["a"]})
    number = engine.add_request(PROMPT, greedily(9, adapter="a"))
    ended = steps(engine, 4)
    engine.load_adapter("a", folders["b"])
    engine.weights_updated()
    found = finish(engine, ended)[number, 0]
    assert found.error is None
    assert found.policy_spans.tolist()[-9:] == [0] * 4 + [1] * 5
    other = make_engine(make_model("qwen3"))
    other.load_adapter("b", folders["b"])
    (again,) = other.generate([found.prompt_tokens], greedily(9, adapter="b"))
    (first,) = engine.generate([found.prompt_tokens], greedily(9, adapter="a"))
    assert first.generated_log_probs == again.generated_log_probs


def spoiled(folder: str, target: Path, **changes: Any) -> str:
    """A copy of an adapter with another configuration."""
    target.mkdir()
    for path in Path(folder).iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | changes))
    return str(target)


@pytest.mark.parametrize(("changes", "why"), [
    ({"use_dora": True}, "use_dora=True: only plain LoRA"), ({"bias": "all"}, "bias='all': only plain LoRA"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"peft_type": "IA3"}, "must be an object with peft_type='LORA'"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': only"), ({"lora_alpha": None}, "lora_alpha=None"),
])  # fmt: skip
def test_an_adapter_that_is_no_plain_lora_is_refused(
    folders: dict[str, str], tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    engine = engine_with({"a": folders["a"]})
    with pytest.raises(ConfigError, match=why):
        engine.load_adapter("a", spoiled(folders["a"], tmp_path / "spoiled", **changes))
    assert engine.adapters.folders == {"a": folders["a"]}


def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(folders: dict[str, str], tmp_path: Path) -> None:
    engine = engine_with({})
    one, two = torch.zeros(1, 1), torch.zeros(1, 1)
    part = "base_model.model.model.layers.0.self_attn.q_proj"
    for number, (tensors, why) in enumerate((
        ({f"{part}.lora_A.weight": one, f"{part}.lora_B.weight": two}, "do not fit a layer of 48 inputs and 64 outputs"),
        ({f"{part}.lora_A.weight": one}, "lora_B is missing"),
        ({"base_model.model.lm_head.lora_A.weight": one}, "it is the output layer"),
        ({"base_model.model.model.lora_A.weight": one}, "it is Qwen3Model"),
        ({"base_model.model.model.layers.9.lora_A.weight": one}, "there is no such module"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": one}, "is not a lora_A or lora_B"),
        ({}, "is empty"),
    )):  # fmt: skip
        folder = Path(spoiled(folders["a"], tmp_path / str(number)))
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=why):
            engine.load_adapter("x", folder)
    for folder in (tmp_path / "nowhere", Path("x" * 999)):
        with pytest.raises(ConfigError, match="must be a folder with"):
            engine.load_adapter("x", folder)
    with pytest.raises(ConfigError, match="adapter='a=b': must be None or a name"):
        engine.load_adapter("a=b", folders["a"])
    assert not engine.adapters.folders


@pytest.mark.parametrize(("model", "options", "why"), [
    ("qwen3", {"exact": True}, "exact mode"), ("falcon_h1", {}, "recurrent layers"),
    ("adapted", {}, "its own PEFT layers"),
])  # fmt: skip
def test_models_whose_requests_cannot_name_adapters_are_named(
    folders: dict[str, str], model: str, options: dict[str, Any], why: str
) -> None:
    made = adapted(make_model("qwen3"), folders["a"]) if model == "adapted" else make_model(model)
    with pytest.raises(UnsupportedModelError, match=why):
        make_engine(made, **options).load_adapter("a", folders["a"])
