"""The command-line flags of `rollout serve` and `rollout doctor`: fields of configuration dataclasses, parsed by tyro.

No help text or error message contains the API key. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from shutil import get_terminal_size
from textwrap import wrap
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro
from tyro.conf import OmitArgPrefixes, Positional, arg

from rollout.config import (
    Advanced,
    CoordinatorAdvanced,
    CoordinatorConfig,
    InferenceConfig,
    ServerConfig,
    documentation,
)
from rollout.errors import ConfigError, did_you_mean

API_KEY = "ROLLOUT_API_KEY"
"""The environment variable that contains the API key. It is read if no flag sets the key."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model to serve, and its device."""

    model_dir: Positional[Annotated[str, arg(metavar="MODEL_DIR")]]
    """Folder of the model, with config.json, *.safetensors and, unless --tokenizer is given, the tokenizer's files."""

    tokenizer: str | None = None
    """Folder of the tokenizer. If None, the model's folder."""

    dtype: Dtype = "auto"
    """Dtype of the weights. `auto` is the dtype that they were saved in."""

    device: str = "auto"
    """Device of the model in torch's notation, such as cpu, cuda or cuda:1. `auto` is cuda if available, else cpu."""

    use_coordinator: bool = False
    """Start a separate coordinator process, which pause and suspend require. --admin implies this flag."""

    log_requests: bool = False
    """Print one line to stderr when a reply is complete: client, method, path, status, seconds, request id."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The validated options of a `rollout serve` command."""

    model: OmitArgPrefixes[ModelOptions]
    server: OmitArgPrefixes[ServerConfig]
    engine: OmitArgPrefixes[InferenceConfig]
    coordinator: CoordinatorConfig
    """Options of the coordinator. Their flags have a prefix, because engine and server have options with the same names."""

    @property
    def wants_coordinator(self) -> bool:
        """Whether a coordinator process is started. If False, the server calls the engine directly."""
        return self.model.use_coordinator or self.server.admin


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The model to examine, and what to print."""

    model_dir: Positional[Annotated[str | None, arg(metavar="[MODEL_DIR]")]] = None
    """Folder of the model, with config.json and *.safetensors. If None, say what is installed and works on this machine."""

    dtype: Dtype = "auto"
    """Dtype of the weights. `auto` is the dtype that they were saved in."""

    device: str = "auto"
    """Device of the model in torch's notation, such as cpu, cuda or cuda:1. `auto` is cuda if available, else cpu."""

    measure: bool = True
    """Measure the speed of a short decode of random tokens, which takes a few seconds."""

    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class _Doctor:
    doctor: OmitArgPrefixes[DoctorOptions]
    engine: OmitArgPrefixes[InferenceConfig]


_ABOUT = f"""Serve a model over HTTP with the routes of OpenAI's API.

Prefer the environment variable {API_KEY}: other users can read arguments.

Ctrl-C lets open requests finish, then stops; a second one stops immediately."""

_ABOUT_DOCTOR = """Say what the engine will do with a model on this machine, and why.

Layers, fused forward or the reason against it, kernels, KV cache, speed, threads, and advice."""

_COMMON: list[tuple[type, str]] = [
    *((ModelOptions, name) for name in ("tokenizer", "dtype", "device", "log_requests")),
    *((ServerConfig, name) for name in ("host", "port", "api_key", "served_model_name", "chat_template", "admin")),
    *((InferenceConfig, name) for name in ("kv_cache_memory_gb", "max_sequence_length", "max_requests", "seed")),
]
"""The options that `rollout serve --help` lists, as (class, field name)."""


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> ServeOptions:
    """Parse the arguments after `rollout serve`.

    Args:
        environment: environment variables. The value of `API_KEY` is the key if no argument sets one. Empty means unset.

    Raises:
        ConfigError: an option is unknown, or options contradict each other.
        SystemExit: the help was requested (status 0), or MODEL_DIR is missing or a value is invalid (status 2).
    """
    if "--help" in arguments or "-h" in arguments:
        print(_short_help())
        raise SystemExit(0)
    key = environment.get(API_KEY)
    given = [*(["--api-key", key] if key else []), *arguments]
    options = _parsed(ServeOptions, ["--help" if each == "--help-all" else each for each in given], "serve", _ABOUT)
    if not options.wants_coordinator and options.coordinator != CoordinatorConfig():
        raise ConfigError("--coordinator.*: there is no coordinator; give --use-coordinator as well")
    return options


def parse_doctor(arguments: Sequence[str]) -> tuple[DoctorOptions, InferenceConfig]:
    """Parse the arguments after `rollout doctor`. Raise `ConfigError` or `SystemExit` in the same cases as `parse`."""
    options = _parsed(_Doctor, arguments, "doctor", _ABOUT_DOCTOR)
    return options.doctor, options.engine


def _parsed(kind: type[T], arguments: Sequence[str], command: str, about: str) -> T:
    prog = f"rollout {command}"
    known = _flags(kind)
    for argument in arguments:
        # Show only the name in the error, because the value may be a key.
        name = argument.partition("=")[0].replace("_", "-")
        if re.match(r"--?[a-zA-Z]", name) and name not in known:
            raise ConfigError(f"{name}: no such option; {did_you_mean(name, known, f'`{prog} --help` lists them')}")
    return tyro.cli(kind, prog=prog, args=list(arguments), description=about, config=(tyro.conf.EnumChoicesFromValues,))


def _flags(kind: type[Any]) -> list[str]:
    tables: dict[str, Any] = dict(get_type_hints(kind)) | {"advanced": Advanced}
    if "coordinator" in tables:
        tables["coordinator.advanced"] = CoordinatorAdvanced
    names = [
        f"--{f'{title}.' * title.startswith('coordinator')}{no}{each.name}".replace("_", "-")
        for title, table in tables.items()
        for each in fields(table)
        for no in ("", "no_")
    ]
    return ["-h", "--help", *names]


def _short_help() -> str:
    lines = ["usage: rollout serve MODEL_DIR [OPTIONS]", "", _ABOUT, ""]
    for table, name in _COMMON:
        default = getattr(table, name)
        first = documentation(table)[name].partition(". ")[0].rstrip(" .,")
        text = f"  {'--' + name.replace('_', '-'):<24}{first}{'' if default in (None, False) else f' (default: {default})'}"
        lines += wrap(text, get_terminal_size().columns, subsequent_indent=" " * 26)
    return "\n".join([*lines, "", "`rollout serve --help-all` explains every option."])
