"""Tests of `rollout serve`: flags generated from dataclasses, one-line errors, and a server that really serves."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from transformers import MptConfig, MptForCausalLM

from rollout import __main__ as command_line
from rollout.config import Advanced, CoordinatorAdvanced, CoordinatorConfig, InferenceConfig, ServerConfig, __version__
from rollout.errors import ConfigError, EngineDeadError
from rollout.flags import API_KEY, ModelOptions, ServeOptions, parse
from rollout.state import PrefixCachingCoordinatorPolicy, StalenessPolicy
from tests.models import make_model, make_tokenizer

ROOT = Path(__file__).parent.parent
FLAT = (ModelOptions, ServerConfig, InferenceConfig, Advanced)
PREFIXES = {CoordinatorConfig: "coordinator.", CoordinatorAdvanced: "coordinator.advanced."}


def read(*arguments: str, **environment: str) -> ServeOptions:
    return parse(["model", *arguments], environment)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused command line leaves behind, with exit code 2."""
    assert command_line.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("rollout: ")
    assert err.count("\n") == 1
    return err


# --- flags --------------------------------------------------------------------------------------------------------------


def test_without_flags_every_option_is_the_dataclasss_default():
    options = read()
    assert options.model == ModelOptions(model_dir="model")
    assert options.server == ServerConfig()
    assert options.engine == InferenceConfig()
    assert not options.wants_coordinator
    assert read("--use-coordinator").wants_coordinator


def other_value(field: dataclasses.Field[Any]) -> tuple[list[str], Any]:
    """Return arguments for a value other than the default, and that value."""
    special: dict[str, Any] = {
        "host": "::1", "dtype": "bfloat16", "kv_cache_memory_fraction": 0.25, "max_tokens_per_step": 4096,
        "prefix_caching_eviction_policy": "ref_zero", "prefix_caching_coordinator_policy": "round_robin",
        "kv_cache_management_mode": "persist", "staleness_policy": "mask", "weight_fingerprints": "off",
        "autocast_dtype": "bfloat16", "inference_dtype": "float16",
    }  # fmt: skip
    if field.name in special:
        return [str(special[field.name])], special[field.name]
    if isinstance(field.default, bool):
        return [], not field.default
    if isinstance(field.default, int | float):
        return [str(field.default + 1)], (float if "float" in str(field.type) else int)(field.default + 1)
    return ["5"], 5.0 if "float" in str(field.type) else 5 if "int" in str(field.type) else "5"


@pytest.mark.parametrize("table", [*FLAT, *PREFIXES])
def test_every_field_is_a_flag_of_its_type(table):
    prefix = f"--{PREFIXES.get(table, '')}"
    words, values = [], {}
    for field in dataclasses.fields(table):
        # Exact mode refuses most other options, a host tier those that cache no prefix.
        if field.default is not dataclasses.MISSING and field.name not in (
            "exact",
            "kv_cache_host_memory_gb",
            "advanced",
        ):
            given, values[field.name] = other_value(field)
            name = ("no_" if field.default is True else "") + field.name
            words += [prefix + name.replace("_", "-"), *given]
    options = read(*words, *["--use-coordinator"] * (table in PREFIXES))
    parts = {
        type(part): part for part in (*vars(options).values(), options.engine.advanced, options.coordinator.advanced)
    }
    found = {name: getattr(parts[table], name) for name in values}
    assert found == values
    assert [type(found[name]) for name in values if not isinstance(found[name], str)] == [
        type(value) for value in values.values() if not isinstance(value, str)
    ]


def test_flags_have_names_of_their_own_in_every_spelling():
    names = [field.name for table in FLAT for field in dataclasses.fields(table)]
    assert len(names) == len(set(names))
    assert "coordinator" not in names
    engine = read("--max_requests=3", "--max-staleness", "None", "--kv-cache-host-memory-gb", "2").engine
    assert (engine.max_requests, engine.max_staleness, engine.kv_cache_host_memory_gb) == (3, None, 2.0)
    assert (read("--exact").engine.exact, engine.exact) == (True, False)


def help_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        command_line.main(["serve", flag])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_the_help_lists_what_is_common_and_all_of_it_when_asked(monkeypatch, capsys):
    monkeypatch.setenv(API_KEY, "a-secret-of-mine")
    short = help_text(monkeypatch, capsys, "--help")
    assert len(re.findall(r"^  --", short, re.MULTILINE)) == 14
    assert "--max-requests          Maximum number of active" in short
    assert "`rollout serve --help-all` explains every option." in short
    text = help_text(monkeypatch, capsys, "--help-all")
    assert max(len(line) for line in (short + text).splitlines()) <= 80
    titles = re.findall(r"^[╭─ ]*([\w.]+) options[╮─ ]*$", text, re.MULTILINE)
    assert titles == ["model", "server", "engine", "engine.advanced", "coordinator", "coordinator.advanced"]
    assert "a-secret-of-mine" not in short + text
    assert API_KEY in text
    flowing = " ".join(" ".join(line.strip("│| ") for line in text.splitlines()).split())
    for sentence in (
        "--max-requests INT Maximum number of active (running) sequences. At least 1. (default: 256)",
        "--cuda-graphs, --no-cuda-graphs",
        "Options of the HTTP server.",
    ):
        assert sentence in flowing


def test_the_help_costs_no_torch():
    program = """
import sys
from rollout.__main__ import main
try:
    main(["serve", "--help"])
except SystemExit:
    print([name for name in ("torch", "transformers", "fastapi", "uvicorn", "numpy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_misspelt_flag_is_an_error_that_suggests_the_right_one(capsys):
    line = refusal(capsys, "serve", "model", "--max-reqests", "5")
    assert "--max-reqests: no such option; did you mean --max-requests?" in line
    line = refusal(capsys, "serve", "model", "--frobnicate")
    assert "--frobnicate: no such option; `rollout serve --help` lists them" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model", "--max-requests", "five"], ["--max-requests", "five"]),
        (["model", "--max-requests", "-5"], ["max_requests=-5", "at least 1"]),
        (["model", "--admin"], ["the control routes need"]),
        (["model", "--api-key", "S3CRET with a space"], ["ServerConfig.api_key"]),
        (["model", "--staleness-policy", "never"], ["--staleness-policy", *StalenessPolicy]),
        (["--port", "1"], ["MODEL_DIR"]),
        (["model", "other"], ["other"]),
    ],
)
def test_a_value_of_another_type_or_no_model_is_said_with_the_choices(arguments, said, capsys):
    with pytest.raises(SystemExit) as left:
        command_line.main(["serve", *arguments])
    assert left.value.code == 2
    err = capsys.readouterr().err
    assert all(str(word) in err for word in said)
    assert "S3CRET" not in err


# --- the key ------------------------------------------------------------------------------------------------------------


def test_the_key_comes_from_the_flag_or_else_from_the_environment():
    assert read(**{API_KEY: "of-the-environment"}).server.api_key == "of-the-environment"
    assert read("--api-key", "of-the-flag", **{API_KEY: "of-the-environment"}).server.api_key == "of-the-flag"
    assert read(**{API_KEY: ""}).server.api_key is None
    assert read("--host", "0.0.0.0", **{API_KEY: "key"}).server.host == "0.0.0.0"


@pytest.mark.parametrize("arguments", ["model --apikey S3CRET", "--apikey=S3CRET model", "-api-key S3CRET model"])
def test_no_refusal_shows_a_key(arguments, capsys):
    assert "S3CRET" not in refusal(capsys, "serve", *arguments.split())


# --- the coordinator ----------------------------------------------------------------------------------------------------


def test_admin_implies_the_coordinator():
    options = read("--admin", "--coordinator.prefix-caching-coordinator-policy", "round_robin", **{API_KEY: "key"})
    assert options.wants_coordinator
    assert options.coordinator.prefix_caching_coordinator_policy is PrefixCachingCoordinatorPolicy.ROUND_ROBIN


def test_an_option_of_a_coordinator_that_is_not_there_is_refused(capsys):
    line = refusal(capsys, "serve", "model", "--coordinator.advanced.max-open-mb", "5")
    assert "--coordinator.*: there is no coordinator; give --use-coordinator as well" in line


# --- commands -----------------------------------------------------------------------------------------------------------


def test_a_command_is_needed_and_the_right_one_suggested(capsys):
    assert command_line.main([]) == command_line.main(["--help"]) == command_line.main(["--version"]) == 0
    assert capsys.readouterr().out == command_line.HELP * 2 + f"rollout-engine {__version__}\n"
    for wrong, cure in (("sevre", "did you mean serve?"), ("docter", "did you mean doctor?"), ("x", "see --help")):
        assert f"{wrong!r}: no such command; {cure}" in refusal(capsys, wrong)


def test_a_missing_extra_is_named_with_its_installation(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "find_spec", lambda name: None if name == "uvicorn" else object())
    line = refusal(capsys, "serve", "--help")
    assert line == "rollout: `rollout serve` needs uvicorn: pip install 'rollout-engine[serve]'\n"


# --- what cannot be served ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "llama"
    make_model("llama").save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def test_a_folder_that_holds_no_model_is_refused_before_anything_is_loaded(tmp_path, capsys):
    line = refusal(capsys, "serve", "some/model")
    assert "MODEL_DIR='some/model': no such folder; a model of the Hub comes here by `hf download some/model" in line
    assert "has no config.json" in refusal(capsys, "serve", str(tmp_path))
    (tmp_path / "file").touch()
    assert "no such folder\n" in refusal(capsys, "serve", str(tmp_path / "file"))


def test_a_taken_port_and_an_address_elsewhere_are_refused_before_anything_is_loaded(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(capsys, "serve", str(folder), "--port", str(port))
    assert f"port={port}: already in use; choose another port, or 0 for a free one" in line
    line = refusal(capsys, "serve", str(folder), "--insecure", "--host", "203.0.113.1")
    assert "'203.0.113.1', port=8000: cannot listen there" in line
    line = refusal(capsys, "serve", str(folder), "--insecure", "--host", "no.such.host.invalid")
    assert "'no.such.host.invalid', port=8000: cannot listen there" in line


DAMAGES: dict[str, Callable[[Path], object]] = {
    "unknown architecture": lambda folder: (folder / "config.json").write_text('{"model_type": "perceptron"}'),
    "broken config": lambda folder: (folder / "config.json").write_text("{"),
    "torn weights": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_model_that_cannot_be_loaded_is_one_line(damage, folder, tmp_path, capsys):
    damaged = tmp_path / "model"
    shutil.copytree(folder, damaged)
    DAMAGES[damage](damaged)
    assert command_line.main(["serve", str(damaged), "--port", "0"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"rollout: {damaged}: cannot be loaded: ")


def test_a_device_that_is_not_there_is_one_line(folder, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command_line.main(["serve", str(folder), "--port", "0", "--device", "cuda:1"]) == 2
    assert "--device cuda:1: torch sees no CUDA device; use --device cpu" in capsys.readouterr().err


# --- starting and stopping ----------------------------------------------------------------------------------------------


class FakeServer:
    url = "http://127.0.0.1:8000"

    def __init__(self, ends: Callable[[], None]) -> None:
        self._ends = ends

    def wait(self, announce: Callable[[], None]) -> None:
        announce()
        self._ends()


class FakeLLM:
    """Stands where `rollout.llm.llm.LLM` does: what it was built with, and how its server ends."""

    ends: Callable[[], None]
    built: list[FakeLLM]
    frozen: list[bool]
    """Whether it was served, whenever the garbage collector was told to leave alone what there is."""

    def __init__(self, model: Any, tokenizer: Any, config: InferenceConfig, **options: Any) -> None:
        self.model, self.tokenizer, self.config, self.options = model, tokenizer, config, options
        self.shut_down = False
        self.built.append(self)

    def serve(self, config: ServerConfig, *, blocking: bool) -> FakeServer:
        assert not blocking
        if config.port == 1:
            raise ConfigError("the address is taken")
        self.served = config
        return FakeServer(type(self).ends)

    def stats(self) -> dict[str, float]:
        return {"kv_blocks_total": 100, "kv_device_bytes": 3 * 2**20}

    def close(self) -> None:
        self.shut_down = True


@pytest.fixture
def started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[FakeLLM]]]:
    """Run `serve` on the folder with a fake LLM: the exit code, and the LLMs that were built."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    def start(*arguments: str, ends: Callable[[], None] = lambda: None) -> tuple[int, list[FakeLLM]]:
        fake = type("Fake", (FakeLLM,), {"ends": staticmethod(ends), "built": [], "frozen": []})
        monkeypatch.setattr("rollout.llm.llm.LLM", fake)
        monkeypatch.setattr("rollout.server.address.listen", lambda config: socket.socket())
        monkeypatch.setattr(command_line, "_leave_at_once", leave)
        # What the other tests have made must stay collectable.
        monkeypatch.setattr(command_line.gc, "freeze", lambda: fake.frozen.append(hasattr(fake.built[0], "served")))
        try:
            return command_line.main(["serve", str(folder), *arguments]), fake.built
        except SystemExit as left:
            return int(str(left.code)), fake.built

    return start


def test_what_the_command_line_says_reaches_the_model_the_engine_and_the_server(started, folder, capsys):
    code, (llm,) = started(
        "--dtype", "bfloat16", "--device", "cpu", "--max-requests", "7", "--served-model-name", "mine"
    )
    out, err = capsys.readouterr()
    assert code == 0
    assert llm.shut_down
    assert llm.frozen == [False], "frozen before the server answers"
    assert llm.config == InferenceConfig(max_requests=7)
    assert llm.options == {"use_coordinator": False, "coordinator_config": None}
    assert llm.tokenizer is not None
    assert out == (
        "http://127.0.0.1:8000 serves mine: 71.9 k parameters in bfloat16 on cpu, KV pool of 1,600 tokens (3.0 MiB); "
        "Ctrl-C stops\n"
    )
    assert f"loading {folder}: " in err
    assert err.splitlines()[-1] == "stopped"


def test_the_coordinators_options_reach_it(started):
    _, (llm,) = started("--use-coordinator", "--coordinator.seed", "9")
    assert llm.options == {"use_coordinator": True, "coordinator_config": CoordinatorConfig(seed=9)}


def test_ctrl_c_that_will_not_wait_is_130_a_dead_engine_1_and_a_taken_address_2(started, capsys):
    def impatient() -> None:
        raise KeyboardInterrupt

    def dead() -> None:
        raise EngineDeadError("the engine has\nstopped")

    assert started(ends=impatient)[0] == 130
    assert started(ends=dead)[0] == 1
    assert capsys.readouterr().err.splitlines()[-1] == "rollout: the engine has stopped"
    assert started("--port", "1")[0] == 2
    assert capsys.readouterr().err.splitlines()[-1] == "rollout: the address is taken"


# --- the real thing -----------------------------------------------------------------------------------------------------


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "rollout", *arguments],
        cwd=ROOT,
        env={**psutil.Process().environ(), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job that a shell started in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=300)


def test_a_folder_is_served_with_its_coordinator_until_ctrl_c_and_nothing_is_left(folder):
    """The signal comes as soon as the address is known: the same moment in which a script would send it."""
    options = "--port 0 --admin --served-model-name tiny --kv-cache-blocks 64 --max-sequence-length 1024 --log-requests"
    with process("serve", str(folder), *options.split(), **{API_KEY: "S3CRET"}) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert " serves tiny: 71.9 k parameters in float32 on cpu, KV pool of 1,024 tokens" in line
        family = psutil.Process(child.pid).children(recursive=True)
        url = line.split()[0]
        assert httpx.get(f"{url}/v1/models").status_code == 401
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer S3CRET"}, timeout=300) as client:
            reply = client.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 4})
            assert len(reply.json()["choices"][0]["rollout"]["token_ids"]) == 4
            assert client.post("/pause").status_code == 200
            assert client.post("/resume").status_code == 200
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0
        assert err.splitlines()[-1] == "stopped"
        assert "S3CRET" not in line + out + err
        assert "max_sequence_length" in err
        assert "Loading weights" not in err
        assert re.search(r" POST /v1/completions 200 \d+\.\d+s [0-9a-f]{32}\n", err)
        assert family, "the coordinator is a process of its own"
        _, alive = psutil.wait_procs(family, timeout=300)
        assert not alive


def test_ctrl_c_while_it_loads_is_130_without_a_traceback(folder):
    with process("serve", str(folder), "--port", "0") as child:
        assert child.stderr is not None
        assert "loading" in child.stderr.readline()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=120)
        assert child.returncode == 130
        assert "Traceback" not in err


# --- rollout doctor -----------------------------------------------------------------------------------------------------


def test_the_doctor_prints_a_page_or_json_and_takes_the_engines_options(folder, capsys):
    assert command_line.main(["doctor", str(folder), "--kv-cache-blocks", "12", "--device", "cpu"]) == 0
    page = capsys.readouterr().out
    assert f"{12 * InferenceConfig().advanced.block_size_tokens:,} tokens fit, in 12 blocks" in page
    assert "decode of 2 sequences of 32 tokens" in page
    assert command_line.main(["doctor", str(folder), "--json", "--no-measure", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "speed" not in found
    assert found["layers"]


def test_the_doctor_refuses_what_it_has_no_use_for_and_models_that_are_none(capsys, tmp_path):
    assert "--port: no such option" in refusal(capsys, "doctor", str(tmp_path), "--port", "1")
    assert "no config.json" in refusal(capsys, "doctor", str(tmp_path))
    sizes = {"vocab_size": 97, "d_model": 48, "n_layers": 2, "n_heads": 4}
    MptForCausalLM(MptConfig(**sizes)).save_pretrained(tmp_path)
    assert command_line.main(["doctor", str(tmp_path), "--device", "cpu"]) != 0
    shown = capsys.readouterr()
    assert "MISSING  MptForCausalLM: 0 of 2 layers go through" in shown.out
    assert "the engine does not support it; see above" in shown.err
