"""The sampling options of one request, `SamplingParams` and `StructuredOutput`, which are validated at construction.

Defaults are defined here only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from inspect import Parameter, iscoroutinefunction, signature
from numbers import Integral, Real
from typing import Any, NamedTuple, Self, TypeVar, cast

import numpy as np

from rollout.errors import ConfigError, NamedOptions, SerializationError, did_you_mean, our_name, warn_caller

MIN_TEMPERATURE = 1e-6
"""The lowest temperature above 0. Dividing float32 logits by a lower one can overflow."""

LARGEST, LEAST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
"""The largest finite and the smallest positive normal float32. Options are bounded by them because logits are float32."""

MAX_KEPT_TOKENS = 4096
"""The largest `top_k` with `return_kept_tokens`. It bounds the ids stored per token to 16 KiB."""


MAX_SALT = 1024
"""The maximum number of characters of a `cache_salt`."""
_SEPARATOR = "\0" * (MAX_SALT + 1)
"""The separator between adapter and salt in a `prefix_share`. No salt contains it, because it is longer than any salt."""

LOGPROBS_MODES = ("processed", "raw", "tempered")
"""The allowed values of `logprobs_mode`."""


# --- structured output ---------------------------------------------------------------------------------------------------

MAX_CHARACTERS = 2**18
"""The maximum number of characters in a schema, expression or grammar. It limits how much one request can slow others."""

WHITESPACE = r"[ \t\r\n]{1,20}"
"""The white space allowed between the parts of JSON. Without the bound, some models would write white space forever."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutput(NamedOptions):
    """A constraint on the text of a completion, given by exactly one of the fields. Requires the package extra `structured`.

    Tokens that would violate the constraint get probability 0 before temperature and filters apply. Processed log-probs are
    over the resulting distribution. The completion finishes when the constraint is complete, even before `min_tokens`.

    Raises:
        ConfigError: (a `ValueError`) none or several fields are given, or the given one is malformed. Whether a constraint
            compiles is checked only when a request is added.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    """JSON schema that the text must satisfy, given as JSON text, a mapping or a bool. It is stored as text."""

    regex: str | None = None
    """Regular expression that the whole text must match, in Rust's syntax without look-around."""

    grammar: str | None = None
    """Context-free grammar that the text must satisfy, in llguidance's dialect of Lark."""

    def __post_init__(self) -> None:
        if isinstance(self.json_schema, Mapping | bool):
            object.__setattr__(self, "json_schema", _json_text(self.json_schema))
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"StructuredOutput: {', '.join(given) or 'nothing'} is given: must be one of {', '.join(_CONSTRAINTS)}"
            )
        (name,) = given
        value = getattr(self, name)
        if not isinstance(value, str) or not value or len(value) > MAX_CHARACTERS:
            raise ConfigError(
                f"StructuredOutput.{name}={value!r:.80}: must be a text of 1 to {MAX_CHARACTERS} characters"
            )
        if name == "json_schema":
            _check_schema(value)

    @classmethod
    def of_choices(cls, choices: Sequence[str]) -> Self:
        """Return the constraint that the text is one of `choices`.

        Raises:
            ConfigError: there are no choices, a choice is empty or not a string, or the choices are too long together.
        """
        if isinstance(choices, str) or not choices or not all(isinstance(each, str) and each for each in choices):
            raise ConfigError(f"choices={choices!r:.80}: must be a list of texts, none of them empty")
        grammar = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
        if len(grammar) > MAX_CHARACTERS:
            raise ConfigError(f"choices of {len(grammar)} characters: must have at most {MAX_CHARACTERS} together")
        return cls(grammar=grammar)

    @property
    def kind(self) -> str:
        """The name of the field that is set: `json_schema`, `regex` or `grammar`."""
        return next(name for name in _CONSTRAINTS if getattr(self, name) is not None)

    def serialize(self) -> dict[str, str]:
        """Return a dict with the name and the value of the field that is set."""
        return {self.kind: getattr(self, self.kind)}

    @classmethod
    def read(cls, given: Any) -> Self | None:
        """Return a constraint or None from `given`, which is a constraint, the result of `serialize`, or None.

        Raises:
            ConfigError: see `StructuredOutput`.
            TypeError: `given` has another type.
        """
        if given is None or isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise TypeError
        return cls(**given)


def json_rule(schema: Any, *, lenient: bool = False) -> str:
    """Return the body of a grammar rule for JSON that fits `schema`. If `lenient`, ignore unsupported schema keywords."""
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": lenient}}
    return f"%json {json.dumps(schema)}"


_CONSTRAINTS = tuple(item.name for item in fields(StructuredOutput))


def _json_text(schema: Any) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"StructuredOutput.json_schema={schema!r:.80}: must be a JSON schema: {exc}") from exc


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"StructuredOutput.json_schema={text!r:.80}: must be a JSON schema: {exc}") from exc
    if not isinstance(schema, dict | bool):
        raise ConfigError(f"StructuredOutput.json_schema={text!r:.80}: must be a JSON schema, an object or a bool")


# --- options ---------------------------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """A kind of option. `convert` returns the value to store, or raises; `rule` describes valid values in messages."""

    convert: Callable[[Any], Any]
    rule: str


def _demand(holds: bool) -> None:
    if not holds:
        raise ValueError


def _integer(low: int = 0, high: int = 2**31, note: str = "") -> _Kind:
    def convert(value: Any) -> int:
        _demand(isinstance(value, Integral) and not isinstance(value, bool))
        number = int(value)
        _demand(low <= number < high)
        return number

    return _Kind(convert, f"an integer in [{low}, 2**{high.bit_length() - 1}){note}")


def _number(rule: str, within: Callable[[float], bool] = lambda number: True) -> _Kind:
    def convert(value: Any) -> float:
        _demand(isinstance(value, Real) and not isinstance(value, bool))
        number = float(value)
        _demand(abs(number) <= LARGEST and within(number))
        return number

    return _Kind(convert, f"a number in {rule}")


def _text(pattern: str, rule: str) -> _Kind:
    def convert(value: Any) -> str:
        _demand(isinstance(value, str) and re.fullmatch(pattern, value) is not None)
        return str(value)

    return _Kind(convert, rule)


def _or_none(kind: _Kind) -> _Kind:
    return _Kind(lambda value: None if value is None else kind.convert(value), f"None or {kind.rule}")


def _truth(value: Any) -> bool:
    _demand(isinstance(value, bool | np.bool_))
    return bool(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else tuple(value)
    _demand(all(isinstance(string, str) and string for string in strings))
    return strings


def _ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(map(_WHOLE.convert, value))


def _biases(value: Any) -> dict[int, float]:
    pairs = value.items() if isinstance(value, Mapping) else value
    return {_WHOLE.convert(token): _ANY.convert(bias) for token, bias in pairs}


_WHOLE, _ANY, _SWITCH = _integer(), _number(f"within {LARGEST:.2g} of 0"), _Kind(_truth, "True or False")
_OCCURRENCE = _number("[-2, 2]", lambda number: abs(number) <= 2)

FILTER, PENALTY = "filter", "penalty"
"""The roles of an option. A filter restricts which tokens can be drawn; a penalty changes the logits of earlier tokens."""


def _option(
    default: Any,
    kind: _Kind,
    role: str | None = None,
    *,
    stored: str | None = None,
    host: str | None = None,
    hash: bool | None = None,
) -> Any:
    """Declare a field of `SamplingParams`, with `kind`, `role` (FILTER, PENALTY or None), `stored` and `host` as metadata.

    Args:
        stored: dtype of the copy of the option that the engine keeps on the device for each running sequence, or None.
        host: dtype of the copy that it keeps on the host, or None.
    """
    return field(default=default, hash=hash, metadata={"kind": kind, "role": role, "stored": stored, "host": host})


@dataclass(frozen=True, kw_only=True)
class SamplingParams(NamedOptions):
    """The sampling options of a prompt and its n completions. Frozen; validated at construction.

    Numbers may be numpy scalars and are stored as Python numbers; `stop` and `stop_token_ids` are stored as tuples.
    Logits are processed in this order: `logit_bias`, `min_tokens`, `structured`, repetition, presence and frequency
    penalties, `temperature`, `top_k`, `top_p`, `min_p`.

    Raises:
        ConfigError: (a `ValueError`) an option is unknown or out of range. The message gives field, value and rule.
    """

    n: int = _option(1, _integer(low=1))
    """Number of completions of the prompt, at least 1."""

    temperature: float = _option(
        1.0,
        _number(
            f"[{MIN_TEMPERATURE}, {LARGEST:.2g}], or 0 (greedy)",
            lambda number: number == 0 or number >= MIN_TEMPERATURE,
        ),
        stored="float32",
    )
    """Divisor of the logits, at least 1e-6; or 0, for exact greedy decoding."""

    top_k: int = _option(0, _integer(note="; 0 switches it off"), FILTER, stored="int64")
    """Keep only the k most likely tokens. 0 turns this off."""

    top_p: float = _option(
        1.0, _number("(0, 1]; 1 switches it off", lambda number: 0 < number <= 1), FILTER, stored="float64"
    )
    """Keep the smallest set of most likely tokens with at least this total probability, in (0, 1]. 1 turns this off."""

    min_p: float = _option(
        0.0, _number("[0, 1]; 0 switches it off", lambda number: 0 <= number <= 1), FILTER, stored="float32"
    )
    """Keep tokens whose probability is at least this fraction of the most likely token's, in [0, 1]. 0 turns this off."""

    repetition_penalty: float = _option(
        1.0,
        _number(f"[{LEAST:.2g}, {LARGEST:.2g}]; 1 switches it off", lambda number: number >= LEAST),
        PENALTY,
        stored="float32",
    )
    """Penalty on tokens that the prompt or the completion contains: their positive logits are divided by it, negative ones
    multiplied. Above 0. Values above 1 make repetition less likely; 1 turns this off."""

    presence_penalty: float = _option(0.0, _OCCURRENCE, PENALTY, stored="float32")
    """Value subtracted once from the logit of every token that the completion contains, in [-2, 2]. 0 turns this off."""

    frequency_penalty: float = _option(0.0, _OCCURRENCE, PENALTY, stored="float32")
    """Value subtracted from a token's logit once per occurrence in the completion, in [-2, 2]. 0 turns this off."""

    logit_bias: dict[int, float] | None = _option(  # noqa: RUF009 - declares a field
        None, _or_none(_Kind(_biases, f"a dict of token id to {_ANY.rule}")), host="int32", hash=False
    )
    """Dict from token id to the value added to its logit. A large negative value, such as -1e9, bans the token."""

    max_tokens: int = _option(256, _WHOLE, host="int32")
    """Maximum number of tokens in a completion. If 0, the prompt is processed, but no token is sampled."""

    min_tokens: int = _option(0, _WHOLE, host="int32")
    """Number of completion tokens before an end-of-sequence or stop token id may be sampled. At most `max_tokens`."""

    stop: tuple[str, ...] = _option((), _Kind(_stop_strings, "a string or a list of strings, none of them empty"))
    """Strings that finish the completion, even if they begin or end inside a token. A plain `str` is one stop string."""

    stop_token_ids: tuple[int, ...] = _option((), _Kind(_ids, "a list of token ids (integers of at least 0)"))
    """Token ids that finish the completion, in addition to the model's end-of-sequence ids."""

    ignore_eos: bool = _option(False, _SWITCH)
    """Continue after an end-of-sequence token."""

    include_stop_str_in_output: bool = _option(False, _SWITCH)
    """Keep the stop string at the end of the text."""

    seed: int | None = _option(None, _or_none(_integer(high=2**63)), stored="int64")
    """Seed of the random streams, in [0, 2**63). Each of the n samples derives its own stream from it. If None, the engine
    derives a seed from its base seed."""

    logprobs: int | None = _option(None, _or_none(_WHOLE), host="int32")
    """Number of log-probs to return per generated token. None returns none, 0 only the sampled token's, and k also those of
    the k most likely tokens."""

    prompt_logprobs: int | None = _option(None, _or_none(_WHOLE), host="int32")
    """Number of log-probs to return per prompt token, like `logprobs` for generated tokens. The first token has none."""

    logprobs_mode: str = _option(
        "processed", _text("|".join(LOGPROBS_MODES), f"one of {', '.join(map(repr, LOGPROBS_MODES))}"), stored="int8"
    )
    """Distribution of the log-probs. `processed` is the sampling distribution (at temperature 1 if greedy). `raw` is the
    softmax of the model's logits. `tempered` is softmax(logits / temperature), without penalties, biases and filters."""

    return_kept_tokens: bool = _option(False, _SWITCH, stored="bool")
    """Return, for each generated token, the ids that it was drawn from: the tokens left by `structured`, `top_k`, `top_p`
    and `min_p`. A trainer can then compute log-probs over that set (`rollout.algorithms.replay_logprobs`). Requires one of
    these options and a temperature above 0. `top_k` is then at most 4096, and 0 becomes 4096."""
    structured: StructuredOutput | None = _option(  # noqa: RUF009 - declares a field
        None, _Kind(StructuredOutput.read, "None or a StructuredOutput")
    )
    """Constraint on the text: a JSON schema, a regular expression or a grammar. If None, any text is allowed."""

    cache_salt: str | None = _option(
        None, _or_none(_text(rf"(?s:[^\ud800-\udfff]{{0,{MAX_SALT}}})", f"a text of at most {MAX_SALT} characters"))
    )
    """Text that separates prefix caches, at most 1024 characters long. KV is reused only among requests with the same salt,
    so reply times reveal nothing about prompts under other salts. If None, KV is reused among requests without a salt."""

    adapter: str | None = _option(
        None,
        _or_none(
            _text(
                r"[^\s\x00-\x1f\x7f=\ud800-\udfff]{1,256}",
                "a name of at most 256 characters, without whitespace, control characters and '='",
            )
        ),
    )
    """Name of the LoRA adapter to sample with, which `LLM.load_lora_adapter` has loaded. If None, the model's own active
    adapters apply."""

    def __post_init__(self) -> None:
        for name, option in _OPTIONS:
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, option["kind"].convert(given))
            except ConfigError:
                raise
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f"SamplingParams.{name}={given!r}: must be {option['kind'].rule}") from None
        if self.structured is not None and self.ignore_eos:
            raise ConfigError(
                "SamplingParams.ignore_eos=True: must be False with structured, whose text an end-of-text token ends"
            )
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"SamplingParams.min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}"
            )
        if self.return_kept_tokens:
            self._bound_kept_tokens()

    def _bound_kept_tokens(self) -> None:
        if self.greedy:
            raise ConfigError(
                "SamplingParams.return_kept_tokens with temperature=0: the most likely token is taken and its log-prob is "
                "that of temperature 1 without filters; leave it out, or sample with top_k=1"
            )
        if not self.truncated and self.structured is None:
            raise ConfigError(
                f"SamplingParams.return_kept_tokens without {' or '.join(FILTERS)}: any token can be drawn, and log-probs "
                "need no replay; leave it out, or set one of them"
            )
        if self.top_k > MAX_KEPT_TOKENS:
            raise ConfigError(
                f"SamplingParams.top_k={self.top_k}: must be at most {MAX_KEPT_TOKENS} with return_kept_tokens, which holds "
                "the ids of every set"
            )
        object.__setattr__(self, "top_k", self.top_k or MAX_KEPT_TOKENS)

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy: temperature 0."""
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether a filter (`FILTERS`) restricts the tokens that can be drawn."""
        return any(getattr(self, name) != off for name, off in FILTERS.items())

    def shaping(self, names: Iterable[str] | None = None) -> list[str]:
        """Return the options, as `name=value`, by which sampling differs from softmax(logits / temperature).

        Args:
            names: names of the options to check. If None, all of them.
        """
        chosen = SHAPING if names is None else {name: SHAPING[name] for name in names}
        return [f"{name}={value!r}" for name, off in chosen.items() if (value := getattr(self, name)) != off]

    @property
    def prefix_share(self) -> str | None:
        """The key under which the prefix cache stores this request's KV. Equal tokens share KV only under equal keys."""
        return prefix_share(self.cache_salt, self.adapter)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the fields in `changes` replaced. The copy is validated again."""
        return replace(self, **changes)

    def serialize(self) -> dict[str, Any]:
        """Return all fields by name, in types that msgpack can encode.

        `logit_bias` becomes [token id, bias] pairs, because a strict msgpack reader rejects integer keys.
        """
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("stop", "stop_token_ids"):
            plain[name] = list(plain[name])
        if self.structured is not None:
            plain["structured"] = self.structured.serialize()
        if self.logit_bias is not None:
            plain["logit_bias"] = [[token, bias] for token, bias in self.logit_bias.items()]
        return plain

    @classmethod
    def deserialize(cls, plain: Mapping[str, Any]) -> Self:
        """Decode the result of `serialize`. Missing fields get their defaults.

        Raises:
            SerializationError: `plain` is not a mapping.
            ConfigError: a field is unknown, or a value is out of range.
        """
        if not isinstance(plain, Mapping):
            raise SerializationError(f"SamplingParams: a {type(plain).__name__} arrived where a dict of fields must be")
        return cls(**plain)


def prefix_share(cache_salt: str | None, adapter: str | None) -> str | None:
    """Return the key for sharing cached KV (`SamplingParams.prefix_share`) for a salt and an adapter name."""
    if adapter is None:
        return cache_salt
    return f"{adapter}{_SEPARATOR}{cache_salt or ''}"


_OPTIONS = [(each.name, each.metadata) for each in fields(SamplingParams)]


def _defaults(role: str) -> dict[str, Any]:
    return {each.name: each.default for each in fields(SamplingParams) if each.metadata["role"] == role}


FILTERS = _defaults(FILTER)
"""The options that restrict which tokens can be drawn, each with the value that turns it off."""
PENALTIES = _defaults(PENALTY)
"""The options that penalise tokens of the sequence, each with the value that turns it off."""
SHAPING = FILTERS | PENALTIES | {"logit_bias": None, "min_tokens": 0, "structured": None}
"""The options by which sampling can differ from softmax(logits / temperature), each with the value that turns it off."""
MIRRORED = [
    (name, option["stored"] or option["host"], option["stored"] is not None)
    for name, option in _OPTIONS
    if option["stored"] or option["host"]
]
"""The options that the engine stores for every running sequence, as (name, dtype, whether stored on the device)."""


def warn_of_equal_samples(params: SamplingParams, n: int) -> None:
    """Warn if several greedy samples of a prompt are requested, since they would all be equal."""
    if params.greedy and n > 1:
        warn_caller(
            f"n={n} with temperature=0: all samples of a prompt are equal, so their advantages are 0; set "
            "SamplingParams(temperature=1.0), or n=1"
        )


def one_each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Return one object for each of `count` prompts. `given` is one for all prompts, one per prompt, or None (defaults).

    Raises:
        ConfigError: `given` is a sequence whose length is not `count`.
        TypeError: `given` or one of its elements is not a `SamplingParams`.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, Sequence):
        raise TypeError(f"sampling_params={given!r:.200}: {_must_be(given)}")
    each = list(given)
    if len(each) != count:
        raise ConfigError(f"sampling_params has {len(each)} entries for {count} prompts: pass one for all, or one each")
    for index, value in enumerate(each):
        if not isinstance(value, SamplingParams):
            raise TypeError(f"sampling_params[{index}]={value!r:.200}: {_must_be(value)}")
    return each


def _must_be(given: object) -> str:
    # Read only the fields that were set. A transformers GenerationConfig without `do_sample` is greedy.
    known = given if isinstance(given, Mapping) else getattr(given, "to_diff_dict", dict)()
    names = SamplingParams.__dataclass_fields__
    options = {
        our_name(name): value for name, value in known.items() if name != "do_sample" and our_name(name) in names
    }
    if known and not known.get("do_sample", isinstance(given, Mapping)):
        options["temperature"] = 0
    try:
        SamplingParams(**options)
    except ConfigError:
        options = {}
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items()) or "n=4, max_tokens=256, temperature=0.7"
    return f"must be a SamplingParams: SamplingParams({shown})"


Called = TypeVar("Called", bound=Callable[..., Any])


def takes_options(method: Called) -> Called:
    """Decorate a method to accept `SamplingParams` fields as keyword arguments, in place of `sampling_params`.

    Raises:
        TypeError: a keyword is unknown, or fields are combined with `sampling_params`.
    """
    shape = signature(method)
    known = [name for name, each in shape.parameters.items() if each.kind is not Parameter.VAR_KEYWORD]
    options = [each.name for each in fields(SamplingParams)]

    def resolved(args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        given = {name: named.pop(name) for name in [*named] if name not in known}
        for name in given.keys() - set(options):
            cure = did_you_mean(
                name, [*known, *options], f"the arguments are {', '.join(known[1:])}, or SamplingParams'"
            )
            raise TypeError(f"{method.__name__}() got an unexpected keyword argument {name!r}; {cure}")
        if given:
            shown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            if shape.bind_partial(*args, **named).arguments.get("sampling_params") is not None:
                raise TypeError(
                    f"{method.__name__}() got sampling_params and {shown}: pass one, such as SamplingParams({shown})"
                )
            named["sampling_params"] = SamplingParams(**given)
        return named

    @wraps(method)
    def checked(*args: Any, **named: Any) -> Any:
        return method(*args, **resolved(args, named))

    @wraps(method)
    async def awaited(*args: Any, **named: Any) -> Any:
        return await method(*args, **resolved(args, named))

    return cast(Called, awaited if iscoroutinefunction(method) else checked)
