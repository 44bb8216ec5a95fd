"""`SamplingParams`: sampling options of one request, validated at construction. Defaults are defined here only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Self

import numpy as np

from rollout.errors import ConfigError, SerializationError
from rollout.names import NamedOptions
from rollout.structured_output import StructuredOutput

MIN_TEMPERATURE = 1e-6
"""Lowest temperature above 0: below it, float32 logits divided by the temperature overflow."""

LARGEST, LEAST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
"""Largest finite and smallest normal positive float32: logits are processed in float32."""

MAX_KEPT_TOKENS = 4096
"""Largest `top_k` with `return_kept_tokens`: bounds what is stored per token to 16 KiB."""

ADAPTER_NAME = "None or a name of at most 256 characters, without whitespace, control characters and '='"
_ADAPTER_NAME = re.compile(r"[^\s\x00-\x1f\x7f=\ud800-\udfff]{1,256}")

MAX_LISTED = 128
MAX_SALT = 1024
"""Characters of a `cache_salt`."""
_SEPARATOR = "\0" * (MAX_SALT + 1)
"""Stands between adapter and salt in a `prefix_share`: longer than any salt, so that no salt names an adapter's share."""

ORDINARY_LOGIT = 1e6
"""Assumed upper bound of the absolute logits of a working model."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams(NamedOptions):
    """Sampling options of one prompt and its n completions. Frozen; validated at construction.

    Numbers may be numpy scalars and are stored as Python numbers; `stop` and `stop_token_ids` are stored as tuples.
    Logits are processed in this order: `logit_bias`, `min_tokens`, `structured`, repetition, presence and frequency
    penalties, `temperature`, `top_k`, `top_p`, `min_p`.

    Raises:
        ConfigError: (a `ValueError`) an option is unknown, or a value out of range; names field, value and rule.
    """

    n: int = 1
    """Number of completions of the prompt. At least 1."""

    temperature: float = 1.0
    """Divisor of the logits: 0, or at least 1e-6. 0: exact greedy decoding."""

    top_k: int = 0
    """Keep the k likeliest tokens. 0: off."""

    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least this value, in (0, 1]. 1: off."""

    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the likeliest token's, in [0, 1]. 0: off."""

    repetition_penalty: float = 1.0
    """Penalty on tokens of prompt and completion: positive logits are divided by it, negative ones multiplied. Above 0;
    values above 1 make repetition less likely. 1: off."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that the completion contains, in [-2, 2]. 0: off."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the completion, in [-2, 2]. 0: off."""

    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    """Token id → value added to its logit; a large negative value, such as -1e9, bans the token. None: no bias."""

    max_tokens: int = 256
    """Maximum number of tokens of a completion. 0: process the prompt only, sample no token."""

    min_tokens: int = 0
    """End-of-sequence and stop token ids are not sampled before this many tokens. At most `max_tokens`."""

    stop: tuple[str, ...] = ()
    """Strings that end the completion, also where they begin or end inside a token. A plain `str` is one stop string."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the completion, in addition to the model's end-of-sequence ids."""

    ignore_eos: bool = False
    """Continue after an end-of-sequence token."""

    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""

    seed: int | None = None
    """Seed of the random streams, in [0, 2**63); each of the n samples derives its own stream. None: assigned by the
    engine from its base seed."""

    logprobs: int | None = None
    """Log-probs to return per generated token. None: none requested. 0: the sampled token's. k: also those of the k
    likeliest tokens."""

    logprob_token_ids: tuple[int, ...] = ()
    """Token ids, at most 128, whose log-probs are returned per generated token in place of the likeliest tokens'. `logprobs`
    becomes their number."""

    prompt_logprobs: int | None = None
    """The same for prompt tokens, from the second token on (the first has no log-prob)."""

    logprobs_mode: str = "processed"
    """Distribution of the log-probs. `processed`: the one sampled from (greedy: at temperature 1). `raw`: softmax of the
    model's logits. `tempered`: softmax(logits / temperature), without penalties, biases and filters."""

    return_kept_tokens: bool = False
    """Return for each generated token the ids that `structured`, `top_k`, `top_p` and `min_p` left to draw it from, so
    that a trainer can compute the log-prob of that distribution (`rollout.algorithms.replay_logprobs`). Needs one of these
    and a temperature above 0. Bounds the sets: `top_k` is at most 4096, and becomes 4096 if it is 0."""
    structured: StructuredOutput | None = None
    """Constraint on the text: a JSON schema, a regular expression or a grammar. None: any text."""

    cache_salt: str | None = None
    """Name of a share of the prefix cache, of at most 1024 characters: KV is reused among requests of equal salt only, so
    that the time of a reply tells nothing about the prompts of others. None: the share without a name."""

    adapter: str | None = None
    """Name of a LoRA adapter that the engine has loaded (`LLM.load_lora_adapter`), to compute the sample with. None: the
    model as it stands."""

    def __post_init__(self) -> None:
        for name, (convert, rule) in _RULES.items():
            given = getattr(self, name)
            try:
                object.__setattr__(self, name, convert(given))
            except ConfigError:
                raise
            except (TypeError, ValueError, OverflowError):
                raise ConfigError(f"SamplingParams.{name}={given!r}: must be {rule}") from None
        if self.structured is not None and self.ignore_eos:
            raise ConfigError(
                "SamplingParams.ignore_eos=True: must be False with structured, whose text an end-of-text token ends"
            )
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"SamplingParams.min_tokens={self.min_tokens}: must be at most max_tokens={self.max_tokens}"
            )
        if self.logprob_token_ids:
            object.__setattr__(self, "logprobs", len(self.logprob_token_ids))
        if self.return_kept_tokens:
            self._bound_kept_tokens()

    def _bound_kept_tokens(self) -> None:
        if self.greedy:
            raise ConfigError(
                "SamplingParams.return_kept_tokens with temperature=0: the likeliest token is taken and its log-prob is "
                "that of temperature 1 without filters; leave it out, or sample with top_k=1"
            )
        if not self.truncated and self.structured is None:
            raise ConfigError(
                "SamplingParams.return_kept_tokens without top_k, top_p or min_p: any token can be drawn, and log-probs "
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
        """Whether `top_k`, `top_p` or `min_p` restricts what can be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def extremes(self) -> str:
        """Name the parameters that can make logits overflow float32, with their values; "" if none can."""
        bias = max((self.logit_bias or {}).values(), key=abs, default=0.0)
        penalty = max(self.repetition_penalty, 1 / self.repetition_penalty)
        if (ORDINARY_LOGIT + abs(bias)) * penalty / (self.temperature or 1.0) <= LARGEST:
            return ""
        named = {"repetition_penalty": self.repetition_penalty, "temperature": self.temperature or 1.0}
        return ", ".join(
            [f"logit_bias {bias:g}"] * (bias != 0)
            + [f"{name} {value:g}" for name, value in named.items() if value != 1]
        )

    @property
    def prefix_share(self) -> str | None:
        """What KV of equal tokens is kept apart by in the prefix cache; None: nothing."""
        return prefix_share(self.cache_salt, self.adapter)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed, validated again."""
        return replace(self, **changes)

    def serialize(self) -> dict[str, Any]:
        """Return all fields by name, in types that msgpack can encode.

        `logit_bias` becomes [token id, bias] pairs, because a strict msgpack reader refuses integer keys.
        """
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("stop", "stop_token_ids", "logprob_token_ids"):
            plain[name] = list(plain[name])
        if self.structured is not None:
            plain["structured"] = self.structured.serialize()
        if self.logit_bias is not None:
            plain["logit_bias"] = [[token, bias] for token, bias in self.logit_bias.items()]
        return plain

    @classmethod
    def deserialize(cls, plain: Mapping[str, Any]) -> Self:
        """Inverse of `serialize`; missing fields take their defaults.

        Raises:
            SerializationError: `plain` is not a mapping.
            ConfigError: an unknown field, or a value out of range.
        """
        if not isinstance(plain, Mapping):
            raise SerializationError(f"SamplingParams: a {type(plain).__name__} arrived where a dict of fields must be")
        return cls(**plain)


# A converter returns the value to store, or raises; the error message comes from the rule beside it in `_RULES`.


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


def _listed_ids(value: Any) -> tuple[int, ...]:
    ids = _stop_ids(value)
    _demand(len(set(ids)) == len(ids) <= MAX_LISTED)
    return ids


def _biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    pairs = value.items() if isinstance(value, Mapping) else value
    return {_integer(token): _number(bias) for token, bias in pairs}


def _salt(value: Any) -> str | None:
    if value is None:
        return None
    _demand(isinstance(value, str) and len(value) <= MAX_SALT)
    value.encode()  # a lone surrogate has no hash
    return str(value)


def prefix_share(cache_salt: str | None, adapter: str | None) -> str | None:
    """`SamplingParams.prefix_share` of these fields."""
    if adapter is None:
        return cache_salt
    return f"{adapter}{_SEPARATOR}{cache_salt or ''}"


def _adapter(value: Any) -> str | None:
    if value is None:
        return None
    _demand(isinstance(value, str) and _ADAPTER_NAME.fullmatch(value) is not None)
    return str(value)


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
    "logprob_token_ids": (_listed_ids, f"a list of at most {MAX_LISTED} token ids, each once"),
    "prompt_logprobs": (_optional, "None or an integer in [0, 2**31)"),
    "logprobs_mode": (_mode, "'processed', 'raw' or 'tempered'"),
    "return_kept_tokens": (_truth, "True or False"),
    "structured": (StructuredOutput.read, "None or a StructuredOutput"),
    "cache_salt": (_salt, "None or a text of at most 1024 characters"),
    "adapter": (_adapter, ADAPTER_NAME),
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
