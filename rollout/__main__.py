"""The command line: `rollout serve`, `rollout doctor` and `rollout top`; also as `python -m rollout ...`.

Exit codes:
    0     stopped by Ctrl-C or SIGTERM while serving; --help, --version
    1     failed while serving, or `rollout doctor` found a fault
    2     could not start with these options
    130   Ctrl-C before serving began, or a second Ctrl-C

Errors in the options are printed as one line on stderr, without a traceback. Arguments, model folder and address are
checked before torch is imported.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from packaging.requirements import Requirement

from rollout.config import InferenceConfig, __version__
from rollout.errors import ConfigError, RolloutError, UnsupportedModelError, did_you_mean
from rollout.observe.metric_table import binary_bytes, short_count

if TYPE_CHECKING:
    from rollout.flags import DoctorOptions, ServeOptions
    from rollout.llm.llm import LLM
    from rollout.server.server import Server

HELP = """usage: rollout COMMAND [OPTIONS]

A rollout engine that samples with the module a training loop steps.

  serve MODEL_DIR   serve a model over HTTP with the routes of OpenAI's API; `rollout serve --help` lists the options
  doctor            say what is installed and works on this machine
  doctor MODEL_DIR  say what the engine will do with a model on this machine; `rollout doctor --help` lists the options
  top ADDRESS       watch a running job by the address of its coordinator (tcp://...)
  --version         print the version
  -h, --help        print this
"""
NEEDED = ("fastapi", "uvicorn", "prometheus_client")
"""The modules that `serve` needs in addition to the package's dependencies. The extra `serve` installs them."""

STOPPED, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. After serving, this function exits the process instead of returning.

    Args:
        arguments: the arguments after the program's name. If None, `sys.argv[1:]`.

    Returns:
        The exit code.

    Raises:
        SystemExit: a command's help or an error in the arguments was printed.
    """
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        if command in ("-h", "--help"):
            print(HELP, end="")
        elif command == "--version":
            print(f"rollout-engine {__version__}")
        elif command == "serve":
            _serve(rest)
        elif command == "doctor":
            return _doctor(rest)
        elif command == "top":
            from rollout.distributed.client.top import main as top

            top(rest)
        else:
            known = ("serve", "doctor", "top", "--version", "--help")
            raise ConfigError(f"{command!r}: no such command; {did_you_mean(command, known, 'see --help')}")
    except RolloutError as exc:
        _say(f"rollout: {_in_one_line(exc)}")
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return STOPPED


def _serve(arguments: Sequence[str]) -> NoReturn:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"`rollout serve` needs {', '.join(missing)}: pip install 'rollout-engine[serve]'")
    from rollout.flags import parse
    from rollout.server.address import listen

    options = parse(arguments, os.environ)
    _check_folder(options.model.model_dir)
    listen(options.server).close()
    try:
        llm = _start(options)
        if options.model.log_requests:
            _print_requests()
        # Exclude the objects of torch and transformers from garbage collection. Visiting them all in a full collection
        # would stall every stream for 0.4 s.
        gc.collect()
        gc.freeze()
        server = llm.serve(options.server, blocking=False)
        code = _wait(server, _summary(server.url, llm, options))
        llm.close()
    except KeyboardInterrupt:
        code = INTERRUPTED
    # Skip torch's orderly teardown, which would take seconds. Our own resources are already closed.
    _leave_at_once(code)


def _print_requests() -> None:
    printed = logging.StreamHandler()
    printed.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    requests = logging.getLogger("rollout.server.requests")
    requests.addHandler(printed)
    requests.setLevel(logging.INFO)
    requests.propagate = False


def _doctor(arguments: Sequence[str]) -> int:
    from rollout.flags import parse_doctor

    options, config = parse_doctor(arguments)
    if options.model_dir is None:
        return _examine_machine(options, config)
    _check_folder(options.model_dir)
    model, _ = _load(options.model_dir, None, options.dtype, options.device)
    from rollout.engine.engine import DynamicInferenceEngine, inspect
    from rollout.engine.parts.explain import decode_trial

    try:
        engine = DynamicInferenceEngine(model, None, config)
    except UnsupportedModelError as exc:
        print(inspect(model, config), flush=True)
        raise UnsupportedModelError(
            f"MODEL_DIR={options.model_dir!r}: the engine does not support it; see above"
        ) from exc
    explanation = engine.explain()
    if options.measure:
        scheduler, vocabulary = engine.context.scheduler, engine.controller.layout.vocab_size
        speed = decode_trial(engine.generate, scheduler, vocabulary, engine.parts.max_sequence_length)
        explanation = replace(explanation, rows=(*explanation.rows, ("speed", speed)))
    print(json.dumps(explanation.as_dict(), indent=2) if options.json else explanation, flush=True)
    return STOPPED


def _examine_machine(options: DoctorOptions, config: InferenceConfig) -> int:
    """Print what is installed, and whether sampling and a coordinator's sockets work here. Return the exit code."""
    rows, code = [*_installed()], STOPPED
    trials: dict[str, Callable[[], list[tuple[str, str]]]] = {
        "sample": partial(_sample, options.device, config),
        "sockets": _open_sockets,
    }
    for title, work in trials.items():
        try:
            rows += work()
        except Exception as exc:  # noqa: BLE001 - the report shows every failed trial
            rows.append((title, f"FAILED: {type(exc).__name__}: {_first_line(exc)}"))
            code = FAILED
    rows.append(("next", "`rollout doctor MODEL_DIR` says what the engine does with your model"))
    text = "\n".join(f"{title:<12}{text}" for title, text in rows)
    print(json.dumps(rows, indent=2) if options.json else text, flush=True)
    return code


def _installed() -> Iterator[tuple[str, str]]:
    """Yield (extra, text) for each extra: its packages with their versions, and how to install missing ones."""
    wanted = [Requirement(each) for each in metadata.requires("rollout-engine") or ()]
    core = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    for extra in ("", "serve", "structured", "peft", "trl", "vision", "report", "top"):
        others = [each for each in wanted if each.marker is not None and each.marker.evaluate({"extra": extra})]
        found, missing = [], []
        for each in others if extra else core:
            try:
                version = metadata.version(each.name)
            except metadata.PackageNotFoundError:
                missing.append(each.name)
                continue
            odd = "" if each.specifier.contains(version, prereleases=True) else f" (supported: {each.specifier})"
            found.append(f"{each.name} {version}{odd}")
        cure = f"{', '.join(missing)} missing: pip install 'rollout-engine[{extra}]'" if missing else ""
        yield extra or "installed", "; ".join(filter(None, [", ".join(found), cure]))


def _sample(device: str, config: InferenceConfig) -> list[tuple[str, str]]:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from rollout.engine.engine import DynamicInferenceEngine
    from rollout.engine.parts.explain import greedy_trial

    _check_device(device)
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    place = device if device != "auto" else "cuda" if gpus else "cpu"
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
    model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes, **layers)).to(place).eval()
    engine = DynamicInferenceEngine(model, None, config)
    page = (line.split(maxsplit=1) for line in str(engine.explain()).splitlines())
    shown = ("forward", "attention", "graphs", "machine", "threads", "compiler", "advice")
    return [
        ("devices", ", ".join(gpus) or f"cpu only: torch {torch.__version__} sees no CUDA device"),
        *((title, text) for title, text in page if title in shown),
        ("sample", f"a tiny random Qwen3 on {place}: {greedy_trial(engine.generate, model)}"),
    ]


def _open_sockets() -> list[tuple[str, str]]:
    from rollout.config import CoordinatorConfig
    from rollout.distributed.coordinator.launch import launch_coordinator

    began = time.monotonic()
    handle = launch_coordinator(CoordinatorConfig())
    handle.stop(10)
    return [("sockets", f"a coordinator process listened at {handle.address}; {time.monotonic() - began:.1f} s")]


def _wait(server: Server, summary: str) -> int:
    try:
        server.wait(lambda: print(summary, flush=True))
    except RolloutError as exc:
        _say(f"rollout: {_in_one_line(exc)}")
        return FAILED
    _say("stopped")
    return STOPPED


# --- checks before the slow imports -------------------------------------------------------------------------------------


def _check_folder(name: str) -> None:
    folder = Path(name)
    if not folder.is_dir():
        cure = "" if folder.exists() else f"; a model of the Hub comes here by `hf download {name} --local-dir FOLDER`"
        raise ConfigError(f"MODEL_DIR={name!r}: no such folder{cure}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"MODEL_DIR={name!r}: has no config.json; give the folder that save_pretrained() wrote")


# --- loading the model --------------------------------------------------------------------------------------------------


def _start(options: ServeOptions) -> LLM:
    from rollout.llm.llm import LLM

    began = time.monotonic()
    told = options.model
    folder = Path(told.model_dir)
    size = sum(file.stat().st_size for pattern in ("*.safetensors", "*.bin") for file in folder.glob(pattern))
    _say(f"loading {folder}: {binary_bytes(size)} of weights")
    model, tokenizer = _load(told.model_dir, told.tokenizer, told.dtype, told.device)
    _say(f"loaded in {time.monotonic() - began:.1f} s; starting the engine")
    return LLM(
        model,
        tokenizer,
        options.engine,
        use_coordinator=options.wants_coordinator,
        coordinator_config=options.coordinator if options.wants_coordinator else None,
    )


def _check_device(device: str) -> None:
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {device}: torch sees no CUDA device; use --device cpu")


def _load(folder: str, tokenizer: str | None, dtype: str, device: str) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers.utils.logging import disable_progress_bar

    from rollout.engine.weights.folder import load_model

    disable_progress_bar()
    _check_device(device)
    try:
        return load_model(folder, tokenizer, dtype=dtype, device=device)
    except RolloutError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as exc:
        raise ConfigError(f"{folder}: cannot be loaded: {_first_line(exc)}") from exc


def _summary(url: str, llm: LLM, options: ServeOptions) -> str:
    parameters = sum(parameter.numel() for parameter in llm.model.parameters())
    first = next(llm.model.parameters())
    stats = llm.stats()
    tokens = int(stats["kv_blocks_total"]) * options.engine.advanced.block_size_tokens
    name = options.server.served_model_name or options.model.model_dir
    return (
        f"{url} serves {name}: {short_count(parameters)} parameters in "
        f"{str(first.dtype).removeprefix('torch.')} on {first.device}, KV pool of {tokens:,} tokens "
        f"({binary_bytes(stats['kv_device_bytes'])}); Ctrl-C stops"
    )


# --- printing to the terminal -------------------------------------------------------------------------------------------


def _in_one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())


def _first_line(exc: BaseException) -> str:
    return next(iter(str(exc).strip().splitlines()), type(exc).__name__)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _leave_at_once(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
