"""The command line of `rollout serve`, generated from the configuration's dataclasses.

Always true: a flag's name, type, default and help are the field's; nothing is written twice. What comes back has passed
the dataclasses' own checks. A key comes in but never goes out: no help and no message shows it. Loads no torch.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from functools import cache, partial
from itertools import pairwise
from textwrap import dedent
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from rollout.config import CoordinatorConfig, InferenceConfig, ServerConfig
from rollout.errors import ConfigError

API_KEY = "ROLLOUT_API_KEY"
"""The environment variable that holds the key, where no flag does."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is served, and where it runs."""

    model_dir: str
    """Folder of the model: config.json, *.safetensors and, unless --tokenizer says otherwise, the tokenizer's files."""

    tokenizer: str | None = None
    """Folder of the tokenizer. None: MODEL_DIR."""

    dtype: Dtype = "auto"
    """Of the weights. auto: as they were saved."""

    device: str = "auto"
    """Where the model runs, as torch names it: cpu, cuda, cuda:1 … auto: cuda if there is one, else cpu."""

    use_coordinator: bool = False
    """Run the coordinator as a process of its own, which pause and suspend need; --admin implies it."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a command line says, checked."""

    model: ModelOptions
    server: ServerConfig
    engine: InferenceConfig
    coordinator: CoordinatorConfig | None
    """None: direct mode, without a coordinator's process."""


_ABOUT = f"""Serve a model over HTTP with the routes of OpenAI's API.

The key is better given as {API_KEY}: everyone sees a process's arguments.

Ctrl-C lets open requests end, then stops; a second one stops at once."""


def parse(arguments: Sequence[str], environment: Mapping[str, str], prog: str = "rollout serve") -> ServeOptions:
    """Read the arguments after `rollout serve`.

    Args:
        environment: where `API_KEY` is looked up if the arguments have no key; an empty one counts as none.

    Raises:
        ConfigError: an option is unknown, a value breaks a rule, or options contradict each other.
        SystemExit: `--help` (0); MODEL_DIR is missing or a value is of another type (2). Said on the terminal.
    """
    _refuse_unknown(arguments, prog)
    known, surplus = tyro.cli(
        _command_line(),
        prog=prog,
        args=list(arguments),
        description=_ABOUT,
        return_unknown_args=True,
        config=(tyro.conf.EnumChoicesFromValues,),
    )
    if surplus:
        raise ConfigError(f"{surplus[0]!r}: a second model; {prog} takes one MODEL_DIR")
    model = ModelOptions(**vars(known.model))
    server = vars(known.server)
    server["api_key"] = server["api_key"] or environment.get(API_KEY) or None
    return ServeOptions(
        model=model,
        server=ServerConfig(**server),
        engine=InferenceConfig(**vars(known.engine)),
        coordinator=_coordinator(vars(known.coordinator), model.use_coordinator or server["admin"]),
    )


def in_flags(message: str) -> str:
    """An error that names a field of a configuration, with the flags that a command line has for its fields."""
    for _, table, prefix in _GROUPS:
        if f"{table.__name__}." in message:
            every = [option.name for option in fields(table)]
            # A word of a sentence may be a field's name too, but not one with an underscore, nor one with a value.
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


def _refuse_unknown(arguments: Sequence[str], prog: str) -> None:
    """Names the option alone: what follows it may be a key."""
    known = _every_flag()
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if not re.match(r"--?[a-zA-Z]", name) or name in known or name.startswith("--tyro-"):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        cure = f"did you mean {near[0]}?" if near else f"`{prog} --help` lists them"
        raise ConfigError(f"{name}: no such option; {cure}")


# --- the dataclasses as tyro reads them ---------------------------------------------------------------------------------

_GROUPS: tuple[tuple[str, type, str], ...] = (
    ("model", ModelOptions, ""),
    ("server", ServerConfig, ""),
    ("engine", InferenceConfig, ""),
    ("coordinator", CoordinatorConfig, "coordinator."),
)
"""Title, fields, and what stands before their names: the coordinator has fields that the engine and the server have."""


_TYPE_FORM: Any = Annotated
_WITHOUT_PREFIX: Any = tyro.conf.OmitArgPrefixes
_POSITIONAL: Any = tyro.conf.Positional


@cache
def _command_line() -> Any:
    groups = [(title, _unchecked(options, prefix), prefix) for title, options, prefix in _GROUPS]
    return make_dataclass(
        "Serve", [(title, flags if prefix else _WITHOUT_PREFIX[flags]) for title, flags, prefix in groups]
    )


def _unchecked(options: type, prefix: str) -> type:
    """The same fields without the checks, so that whoever checks them says it in one line; and with help that flows."""
    types = get_type_hints(options)
    flags: list[tuple[str, Any, Any]] = []
    for option in fields(options):
        text = re.sub(
            r"`(\w+)`",
            lambda name: _flag(name[1], prefix) if name[1] in types else name[0],
            _documentation(options)[option.name],
        )
        if option.default is MISSING:
            named = tyro.conf.arg(help=text, metavar=option.name.upper())
            flags.append((option.name, _POSITIONAL[_TYPE_FORM[types[option.name], named]], field()))
        else:
            named = tyro.conf.arg(help=text)
            flags.append((option.name, _TYPE_FORM[types[option.name], named], field(default=option.default)))
    first_sentence = (options.__doc__ or "").partition(". ")[0].rstrip(".") + "."
    return make_dataclass(options.__name__, flags, namespace={"__doc__": first_sentence})


@cache
def _every_flag() -> tuple[str, ...]:
    options = [
        (prefix, option) for _, table, prefix in _GROUPS for option in fields(table) if option.default is not MISSING
    ]
    names = [_flag(option.name, prefix) for prefix, option in options]
    negated = [_flag("no_" + option.name, prefix) for prefix, option in options if isinstance(option.default, bool)]
    return ("-h", "--help", *names, *negated)


def _flag(name: str, prefix: str) -> str:
    return "--" + prefix + name.replace("_", "-")


@cache
def _documentation(options: type) -> dict[str, str]:
    """The string under each field, as one paragraph."""
    (definition,) = ast.parse(dedent(inspect.getsource(options))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        option.target.id: " ".join(below.value.value.split())
        for option, below in pairwise(definition.body)
        if isinstance(option, ast.AnnAssign)
        and isinstance(option.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }
