"""`SamplingParams`: validated sampling options. A default is written once, here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Self

import numpy as np

from rollout.errors import ConfigError, SerializationError

MIN_TEMPERATURE = 1e-6
"""The lowest temperature that samples: below it, tempered fp32 logits overflow. 0 is greedy."""

LARGEST, LEAST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
"""What float32, in which logits are processed, holds: beyond the one lies inf, below the other 0."""

ORDINARY_LOGIT = 1e6
"""No model that works has larger ones."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the n completions of one prompt are sampled.

    Numbers may be numpy scalars; they are stored as Python's. `stop` and `stop_token_ids` are stored as tuples. The
    logits are processed in this order: logit_bias, min_tokens, repetition, presence and frequency penalties,
    temperature, top_k, top_p, min_p.

    Raises:
        ConfigError: (a `ValueError`) a value is out of range; names field, value and rule.
    """

    n: int = 1
    """Completions of the prompt."""

    temperature: float = 1.0
    """Divides the logits. 0: greedy, exactly."""

    top_k: int = 0
    """Keep the k likeliest tokens. 0: off."""

    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities reach this sum. 1: off."""

    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the likeliest. 0: off."""

    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and completion less likely (divides positive logits, multiplies negative ones)."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token the completion contains."""

    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once per occurrence in the completion."""

    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these token ids."""

    max_tokens: int = 256
    """Most tokens of a completion, 256 unless asked for otherwise. 0: the prompt only, no token."""

    min_tokens: int = 0
    """No end-of-sequence or stop token id before this many tokens."""

    stop: tuple[str, ...] = ()
    """Strings that end the completion, tokens that straddle them included. A single string is one stop string."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the completion, beside the end-of-sequence ids of the model."""

    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""

    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""

    seed: int | None = None
    """Seed of the random stream. None: the engine gives one. Sample i of n has its own stream of the same seed."""

    logprobs: int | None = None
    """None: no log-probs asked for. 0: of the sampled token. k: of the k likeliest tokens as well."""

    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on."""

    logprobs_mode: str = "processed"
    """`processed`: of the distribution sampled from (greedy: at temperature 1). `raw`: of the model's own logits.
    `tempered`: of these at the temperature, without what penalties, biases and filters make of them."""

    def __post_init__(self) -> None:
        for name, (convert, rule) in _RULES.items():
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, convert(given))
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f"SamplingParams.{name}={given!r}: must be {rule}") from None
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"SamplingParams.min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    def extremes(self) -> str:
        """The parameters that can take ordinary logits beyond float32, with their values; empty if none can."""
        bias = max((self.logit_bias or {}).values(), key=abs, default=0.0)
        penalty = max(self.repetition_penalty, 1 / self.repetition_penalty)
        if (ORDINARY_LOGIT + abs(bias)) * penalty / (self.temperature or 1.0) <= LARGEST:
            return ""
        named = {"repetition_penalty": self.repetition_penalty, "temperature": self.temperature or 1.0}
        return ", ".join(
            [f"logit_bias {bias:g}"] * (bias != 0)
            + [f"{name} {value:g}" for name, value in named.items() if value != 1]
        )

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def serialize(self) -> dict[str, Any]:
        """Every field by name, in types msgpack knows.

        `logit_bias` travels as [token id, bias] pairs, because a strict msgpack reader refuses integer keys.
        """
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["stop"], plain["stop_token_ids"] = list(self.stop), list(self.stop_token_ids)
        if self.logit_bias is not None:
            plain["logit_bias"] = [[token, bias] for token, bias in self.logit_bias.items()]
        return plain

    @classmethod
    def deserialize(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of `serialize`; a field left out has its default.

        Raises:
            SerializationError: not a dict.
            ConfigError: an unknown field, or a value out of range.
        """
        if not isinstance(plain, Mapping):
            raise SerializationError(f"SamplingParams: a {type(plain).__name__} arrived where a dict of fields must be")
        known = [item.name for item in fields(cls)]
        for name, value in plain.items():
            if name not in known:
                raise ConfigError(f"SamplingParams.{name}={value!r}: unknown; the fields are {', '.join(known)}")
        return cls(**plain)


# A converter returns the value as it is stored, or raises; the message comes from the rule beside it in `_RULES`.


def _demand(holds: bool) -> None:
    if not holds:
        raise ValueError


def _integer(value: Any, low: int = 0, high: int = 2**31 - 1) -> int:
    _demand(isinstance(value, Integral) and not isinstance(value, bool))
    number = int(value)
    _demand(low <= number <= high)
    return number


def _number(value: Any, within: Callable[[float], bool] = lambda number: True) -> float:
    _demand(isinstance(value, Real) and not isinstance(value, bool))
    number = float(value)
    _demand(abs(number) <= LARGEST and within(number))
    return number


def _truth(value: Any) -> bool:
    _demand(isinstance(value, bool | np.bool_))
    return bool(value)


def _mode(value: Any) -> str:
    _demand(isinstance(value, str) and value in ("processed", "raw", "tempered"))
    return str(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else tuple(value)
    _demand(all(isinstance(string, str) and string for string in strings))
    return strings


def _stop_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(_integer(token) for token in value)


def _biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else value
    return {_integer(token): _number(bias) for token, bias in pairs}


def _optional(value: Any) -> int | None:
    return None if value is None else _integer(value)


_RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "n": (lambda value: _integer(value, low=1), "an integer in [1, 2**31)"),
    "temperature": (
        lambda value: _number(value, lambda number: number == 0 or number >= MIN_TEMPERATURE),
        f"0 (greedy) or a number in [{MIN_TEMPERATURE}, {LARGEST:.2g}]",
    ),
    "top_k": (_integer, "an integer in [0, 2**31); 0 switches it off"),
    "top_p": (lambda value: _number(value, lambda number: 0 < number <= 1), "a number in (0, 1]; 1 switches it off"),
    "min_p": (lambda value: _number(value, lambda number: 0 <= number <= 1), "a number in [0, 1]; 0 switches it off"),
    "repetition_penalty": (
        lambda value: _number(value, lambda number: number >= LEAST),
        f"a number in [{LEAST:.2g}, {LARGEST:.2g}]; 1 switches it off",
    ),
    "presence_penalty": (lambda value: _number(value, lambda number: abs(number) <= 2), "a number in [-2, 2]"),
    "frequency_penalty": (lambda value: _number(value, lambda number: abs(number) <= 2), "a number in [-2, 2]"),
    "logit_bias": (
        _biases,
        f"a dict of token id to a bias within {LARGEST:.2g} of 0; a large negative one, such as -1e9, bans the token",
    ),
    "max_tokens": (_integer, "an integer in [0, 2**31)"),
    "min_tokens": (_integer, "an integer in [0, 2**31)"),
    "stop": (_stop_strings, "a string or a list of strings, none of them empty"),
    "stop_token_ids": (_stop_ids, "a list of token ids (integers of at least 0)"),
    "ignore_eos": (_truth, "True or False"),
    "include_stop_str_in_output": (_truth, "True or False"),
    "seed": (
        lambda value: None if value is None else _integer(value, high=2**63 - 1),
        "None or an integer in [0, 2**63)",
    ),
    "logprobs": (_optional, "None or an integer in [0, 2**31)"),
    "prompt_logprobs": (_optional, "None or an integer in [0, 2**31)"),
    "logprobs_mode": (_mode, "'processed', 'raw' or 'tempered'"),
}


def one_each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Sampling parameters per prompt, of those for all `count` prompts, of one each, or of None (defaults).

    Raises:
        ConfigError: their number is not `count`.
        TypeError: one is no `SamplingParams`.
    """
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    each = list(given)
    if len(each) != count:
        raise ConfigError(f"sampling_params has {len(each)} entries for {count} prompts: pass one for all, or one each")
    for index, value in enumerate(each):
        if not isinstance(value, SamplingParams):
            raise TypeError(f"sampling_params[{index}]={value!r}: must be a SamplingParams")
    return each
