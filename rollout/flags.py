"""Command-line flags of `rollout serve` and `rollout doctor`, generated from the configuration dataclasses.

Name, type, default and help of a flag are those of the dataclass field. Parsed options have passed the dataclasses'
validation. No help text or error message contains the API key. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from functools import cache, partial
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from rollout.config import Advanced, CoordinatorConfig, InferenceConfig, ServerConfig, documentation
from rollout.errors import ConfigError, Options, did_you_mean

API_KEY = "ROLLOUT_API_KEY"
"""Environment variable with the API key, read when no flag sets it."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model to serve, and its device."""

    model_dir: str
    """Folder of the model: config.json, *.safetensors and, unless --tokenizer is given, the tokenizer's files."""

    tokenizer: str | None = None
    """Folder of the tokenizer. None: MODEL_DIR."""

    dtype: Dtype = "auto"
    """Dtype of the weights. auto: the dtype they were saved in."""

    device: str = "auto"
    """Device of the model in torch's notation: cpu, cuda, cuda:1, ... auto: cuda if available, else cpu."""

    data_parallel_size: int = 1
    """Number of engines, each with the whole model in a process of its own and, on CUDA, on a device of its own; they share
    the requests. At least 1."""

    use_coordinator: bool = False
    """Start a separate coordinator process, which pause and suspend require. Implied by --admin and
    --data-parallel-size."""

    log_requests: bool = False
    """Print one line per request to stderr when its reply has ended: client, method, path, status, seconds, request id,
    model and tokens."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Validated options of one command line."""

    model: ModelOptions
    server: ServerConfig
    engine: InferenceConfig
    coordinator: CoordinatorConfig | None
    """None: direct mode, without a coordinator process."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Model to examine, and what to print."""

    model_dir: str
    """Folder of the model: config.json and *.safetensors."""

    dtype: Dtype = "auto"
    """Dtype of the weights. auto: the dtype they were saved in."""

    device: str = "auto"
    """Device of the model in torch's notation: cpu, cuda, cuda:1, ... auto: cuda if available, else cpu."""

    measure: bool = True
    """Time a short decode of random tokens; a few seconds."""

    json: bool = False
    """Print JSON."""


_ABOUT_DOCTOR = """Say what the engine will do with a model on this machine, and why.

Layers, fused forward or the reason against it, kernels, KV cache, speed, threads, and advice."""

_ABOUT = f"""Serve a model over HTTP with the routes of OpenAI's API.

Prefer the environment variable {API_KEY}: other users see arguments.

Ctrl-C lets open requests finish, then stops; a second one stops immediately."""


def parse(arguments: Sequence[str], environment: Mapping[str, str], prog: str = "rollout serve") -> ServeOptions:
    """Parse the arguments after `rollout serve`.

    Args:
        environment: where `API_KEY` is looked up if the arguments contain no key; an empty value counts as unset.

    Raises:
        ConfigError: an option is unknown, a value is invalid, or options contradict each other.
        SystemExit: `--help` (0); MODEL_DIR is missing or a value has the wrong type (2). Printed to the terminal.
    """
    known = _parsed(_GROUPS, arguments, prog, _ABOUT)
    model = ModelOptions(**vars(known.model))
    if model.data_parallel_size < 1:
        raise ConfigError(f"--data-parallel-size {model.data_parallel_size}: must be at least 1")
    if known.coordinator.data_parallel_size not in (1, model.data_parallel_size):
        raise ConfigError(
            f"--coordinator.data-parallel-size {known.coordinator.data_parallel_size}: give --data-parallel-size, which "
            "starts the ranks"
        )
    server = vars(known.server)
    server["api_key"] = server["api_key"] or environment.get(API_KEY) or None
    return ServeOptions(
        model=model,
        server=ServerConfig(**server),
        engine=_engine(known),
        coordinator=_coordinator(
            vars(known.coordinator), model.use_coordinator or server["admin"] or model.data_parallel_size > 1
        ),
    )


def parse_doctor(arguments: Sequence[str], prog: str = "rollout doctor") -> tuple[DoctorOptions, InferenceConfig]:
    """Parse the arguments after `rollout doctor`. Raises: see `parse`."""
    known = _parsed(_DOCTOR_GROUPS, arguments, prog, _ABOUT_DOCTOR)
    return DoctorOptions(**vars(known.doctor)), _engine(known)


def _engine(known: Any) -> InferenceConfig:
    return InferenceConfig(**vars(known.engine), advanced=Advanced(**vars(known.advanced)))


def _parsed(groups: Groups, arguments: Sequence[str], prog: str, about: str) -> Any:
    """The fields of every group, unchecked, by its title."""
    _refuse_unknown(arguments, prog, _every_flag(groups))
    known, surplus = tyro.cli(
        _command_line(groups),
        prog=prog,
        args=list(arguments),
        description=about,
        return_unknown_args=True,
        config=(tyro.conf.EnumChoicesFromValues,),
    )
    if surplus:
        raise ConfigError(f"{surplus[0]!r}: a second model; {prog} takes one MODEL_DIR")
    return known


def in_flags(message: str) -> str:
    """Replace configuration field names in an error message by their command-line flags."""
    for _, table, prefix in _GROUPS:
        if f"{table.__name__}." in message:
            every = [option.name for option in _single(table)]
            # An ordinary word may equal a field name; one with an underscore, or followed by a value, is certainly a field.
            certain = "|".join(name for name in every if "_" in name)
            named = rf"\b(?:{table.__name__}\.)?(?:({'|'.join(every)})(?==)|({certain})\b)(?:=True\b)?"
            return re.sub(named, partial(_as_flag, prefix), message)
    return message


def _as_flag(prefix: str, found: re.Match[str]) -> str:
    return _flag(found[1] or found[2], prefix)


def _coordinator(flags: dict[str, Any], wanted: bool) -> CoordinatorConfig | None:
    config = CoordinatorConfig(**flags)
    if wanted:
        return config
    for name in config.names():
        if getattr(config, name) != getattr(CoordinatorConfig(), name):
            raise ConfigError(f"{_flag(name, 'coordinator.')}: there is no coordinator; give --use-coordinator as well")
    return None


def _refuse_unknown(arguments: Sequence[str], prog: str, known: Sequence[str]) -> None:
    """Raise `ConfigError` for an unknown option. Only its name is shown: the value may be a key."""
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if not re.match(r"--?[a-zA-Z]", name) or name in known or name.startswith("--tyro-"):
            continue
        raise ConfigError(f"{name}: no such option; {did_you_mean(name, known, f'`{prog} --help` lists them')}")


# --- the dataclasses as tyro reads them ---------------------------------------------------------------------------------

Groups = tuple[tuple[str, type, str], ...]

_GROUPS: Groups = (
    ("model", ModelOptions, ""),
    ("server", ServerConfig, ""),
    ("engine", InferenceConfig, ""),
    ("advanced", Advanced, ""),
    ("coordinator", CoordinatorConfig, "coordinator."),
)
"""Title, dataclass and flag prefix; the coordinator's is prefixed because the engine and the server have equal names."""

_DOCTOR_GROUPS: Groups = (("doctor", DoctorOptions, ""), ("engine", InferenceConfig, ""), ("advanced", Advanced, ""))


_TYPE_FORM: Any = Annotated
_WITHOUT_PREFIX: Any = tyro.conf.OmitArgPrefixes
_POSITIONAL: Any = tyro.conf.Positional


@cache
def _command_line(groups: Groups) -> Any:
    tables = [(title, _unchecked(options, prefix), prefix) for title, options, prefix in groups]
    return make_dataclass(
        "Flags", [(title, flags if prefix else _WITHOUT_PREFIX[flags]) for title, flags, prefix in tables]
    )


def _unchecked(options: type, prefix: str) -> type:
    """Return a dataclass with the same fields but without validation, which `parse` runs later; help is one paragraph."""
    types = get_type_hints(options)
    flags: list[tuple[str, Any, Any]] = []
    for option in _single(options):
        text = re.sub(
            r"`(\w+)`",
            lambda name: _flag(name[1], prefix) if name[1] in types else name[0],
            documentation(options)[option.name],
        )
        if option.default is MISSING:
            named = tyro.conf.arg(help=text, metavar=option.name.upper())
            flags.append((option.name, _POSITIONAL[_TYPE_FORM[types[option.name], named]], field()))
        else:
            named = tyro.conf.arg(help=text)
            # A switch, even if Python takes a further value, as `exact` does.
            kind = bool if isinstance(option.default, bool) else types[option.name]
            flags.append((option.name, _TYPE_FORM[kind, named], field(default=option.default)))
    first_sentence = (options.__doc__ or "").partition(". ")[0].rstrip(".") + "."
    return make_dataclass(options.__name__, flags, namespace={"__doc__": first_sentence})


@cache
def _every_flag(groups: Groups) -> tuple[str, ...]:
    options = [
        (prefix, option) for _, table, prefix in groups for option in _single(table) if option.default is not MISSING
    ]
    names = [_flag(option.name, prefix) for prefix, option in options]
    negated = [_flag("no_" + option.name, prefix) for prefix, option in options if isinstance(option.default, bool)]
    return ("-h", "--help", *names, *negated)


def _single(table: type) -> list[Field[Any]]:
    """Options of one value each, without a nested dataclass, which is a group of its own."""
    return [option for option in fields(table) if not isinstance(option.default, Options)]


def _flag(name: str, prefix: str) -> str:
    return "--" + prefix + name.replace("_", "-")
