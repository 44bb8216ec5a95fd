"""The exception hierarchy of the package. Messages name the value, the violated rule and the remedy.

RolloutError
├── ConfigError            (ValueError)    an option is unknown or out of range
├── UnsupportedModelError  (ValueError)    the model uses a feature that the engine cannot reproduce
├── RequestError                           one request finished without a result; has `request_id`
│   ├── InvalidRequestError (ValueError)   rejected at admission, because it can never be served
│   ├── RequestAbortedError                the request was aborted
│   ├── RequestFailedError                 an engine step raised while computing it; see `__cause__`
│   ├── StaleRequestError                  its tokens are older than `max_staleness` allows
│   ├── RequestTimeoutError (TimeoutError) its deadline passed, or no rank was ready for `no_rank_timeout_s`
│   ├── RankLostError                      several ranks died while computing it
│   └── QueueFullError                     a limit on open requests is reached
├── RolloutFailedError                     some samples of a batch failed; has the whole `batch`
├── EngineStateError       (RuntimeError)  the call is not allowed in the engine's current state
├── EngineDeadError        (RuntimeError)  the engine has stopped permanently
├── WeightsChangedError    (RuntimeError)  weights changed without an announced update; has `tensors`
├── DeadlineError          (TimeoutError)  a wait exceeded its deadline
├── ControlError           (RuntimeError)  engines did not complete a control call; has `engines`
├── ConnectionLostError    (ConnectionError) the coordinator is gone, or has closed this connection
├── JournalError           (OSError)       a journal's files cannot be read, written or synced
└── SerializationError     (ValueError)    a received payload has an unexpected shape
"""

from __future__ import annotations

import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from enum import Enum
from typing import Any, ClassVar, NoReturn, Self


def warn_caller(message: str, through: tuple[str, ...] = ()) -> None:
    """Issue a `UserWarning` that points to the nearest calling line outside this package and the packages in `through`."""
    frame, level, inside = sys._getframe(1), 2, {*_OURS, *through}
    while (above := frame.f_back) is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in inside:
        frame, level = above, level + 1
    warnings.warn(message, stacklevel=level)


_OURS = ("rollout", "trainer_hooks", "contextlib")


class RolloutError(Exception):
    """The base class of all exceptions in this package."""


class ConfigError(RolloutError, ValueError):
    """The error raised for a configuration field or sampling parameter that is unknown or out of range."""


class UnsupportedModelError(RolloutError, ValueError):
    """The error raised for a model with a layer or an attention argument that the engine does not support."""


class RequestError(RolloutError):
    """The error raised for one request that finished without a result.

    Attributes:
        request_id: id of the request. None if the request failed before an id was assigned.
    """

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class InvalidRequestError(RequestError, ValueError):
    """The error raised for a request that was rejected at admission because it can never be served."""

    def at(self, place: str = "") -> InvalidRequestError:
        """Return a copy whose message begins with `place`, such as `prompts[0]: `, instead of the engine's request id."""
        return InvalidRequestError(place + re.sub(r"^request [0-9]+: ", "", str(self)), self.request_id)


class RequestAbortedError(RequestError):
    """The error raised for a request that was aborted."""


class RequestFailedError(RequestError):
    """The error raised for a request if the engine step that computed it failed. The original exception is `__cause__`."""


class StaleRequestError(RequestError):
    """The error raised for a request that contains tokens older than `max_staleness` allows."""


class RequestTimeoutError(RequestError, TimeoutError):
    """The error raised for a request whose deadline passed, or for which no rank was ready for `no_rank_timeout_s`."""


class RankLostError(RequestError):
    """The error raised for a request that is not retried, because several ranks died while they were computing it."""


class QueueFullError(RequestError):
    """The error raised for a request that exceeds a limit on open requests. Try again when other requests have finished."""


class RolloutFailedError(RolloutError):
    """The error raised for a batch with failed samples. `batch` contains every row, with failed rows masked out.

    Attributes:
        batch: the `RolloutBatch`. Its `errors` give the cause for each failed row.
    """

    def __init__(self, message: str, batch: object) -> None:
        super().__init__(message)
        self.batch = batch


class EngineStateError(RolloutError, RuntimeError):
    """The error raised by a call that is not allowed in the engine's current state."""


class EngineDeadError(RolloutError, RuntimeError):
    """The error raised by calls to an engine that has stopped permanently. Create a new engine."""


class WeightsChangedError(RolloutError, RuntimeError):
    """The error raised if weights changed without an announced update, or if a copy of the weights is out of date.

    Attributes:
        tensors: names of the tensors that differ.
    """

    def __init__(self, message: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class DeadlineError(RolloutError, TimeoutError):
    """The error raised when a wait exceeds its deadline.

    Tracebacks print its `__notes__`, which describe this process's engines, connections and threads at the time of the
    error. `rollout.threads.diagnosis` sets `note` to a function that returns this description.
    """

    note: ClassVar[Callable[[], str]] = staticmethod(str)

    def __init__(self, message: str) -> None:
        super().__init__(message)
        if note := DeadlineError.note():
            self.add_note(note)


class ControlError(RolloutError, RuntimeError):
    """The error raised by a control call that is not allowed in the current state, or that some engines did not complete.

    Attributes:
        engines: names of the engines that did not complete the call.
    """

    def __init__(self, message: str, engines: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.engines = engines


class ConnectionLostError(RolloutError, ConnectionError):
    """The error raised for a connection whose coordinator is gone or has closed it, and for each request open on it.

    Attributes:
        final: whether reconnecting cannot succeed, because protocol versions differ or another process uses this peer's
            name.
    """

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class JournalError(RolloutError, OSError):
    """The error raised for a journal whose files cannot be read, written or synced, or that is not open in this process."""


class SerializationError(RolloutError, ValueError):
    """The error raised for a received payload with an unexpected type, field or length."""


# --- unknown names ------------------------------------------------------------------------------------------------------

_SAME_AS = {
    "SamplingParams": {
        "n": "num_generations num_return_sequences num_samples best_of",
        "max_tokens": "max_new_tokens max_completion_length max_length max_completion_tokens response_length",
        "min_tokens": "min_new_tokens min_length",
        "temperature": "do_sample",
        "top_k": "topk",
        "stop": "stop_strings stop_sequences",
        "stop_token_ids": "eos_token_id eos_token_ids",
        "logit_bias": "suppress_tokens bad_words bad_words_ids sequence_bias",
        "structured": "structured_outputs guided_decoding guided_json guided_regex json_schema regex response_format",
        "adapter": "lora_request lora_path lora_name",
    },
    "InferenceConfig": {
        "kv_cache_memory_fraction": "gpu_memory_utilization vllm_gpu_memory_utilization mem_fraction_static",
        "kv_cache_memory_gb": "kv_cache_memory_bytes",
        "kv_cache_blocks": "num_gpu_blocks_override",
        "kv_cache_host_memory_gb": "swap_space kv_offloading_size",
        "max_sequence_length": "max_model_len max_seq_len max_seq_length context_length vllm_max_model_length",
        "max_requests": "max_num_seqs max_running_requests max_batch_size",
        "max_tokens_per_step": "max_num_batched_tokens chunked_prefill_size",
        "block_size_tokens": "block_size page_size",
        "inference_dtype": "dtype torch_dtype",
        "inference_device": "device",
    },
    "RolloutBatch": {
        "texts": "responses completions text outputs completion",
        "input_ids": "tokens token_ids sequences prompt_ids completion_ids response_ids",
        "logprobs": "log_probs logps old_logprobs old_per_token_logps sampling_logps output_scores",
        "response_mask": "completion_mask loss_mask action_mask mask",
        "policy_versions": "versions weight_versions",
    },
    "rollout": {
        "RolloutManager": "RolloutEngine Rollout Engine",
        "InferenceConfig": "RolloutConfig EngineConfig EngineArgs",
        "LLM": "LLMEngine",
        "AsyncLLM": "AsyncLLMEngine",
    },
}
"""A dict from each class (or "rollout") to a dict from its names to synonyms in transformers, TRL, vLLM, SGLang, verl."""

_OUR_NAMES = {
    theirs: (ours, owner)
    for owner, names in _SAME_AS.items()
    for ours, others in names.items()
    for theirs in (ours, *others.split())
}


def our_name(name: str) -> str:
    """Return this package's name for another library's `name`, or `name` itself if there is none."""
    return _OUR_NAMES.get(name, (name,))[0]


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return a "did you mean" question that suggests a synonym or the nearest known names, or else `otherwise`.

    If the suggested option belongs to another class in this package, the question names that class.

    Args:
        name: the unknown name or command-line flag.
        known: the known names.
        otherwise: text to return if no known name is similar.
        most: maximum number of names in the question.
        cutoff: minimum similarity, in [0, 1], as in `difflib.get_close_matches`.
    """
    choices = list(known)
    ours, owner = _OUR_NAMES.get(name.removeprefix("--").replace("-", "_"), (name, ""))
    here = f"--{ours.replace('_', '-')}" if name.startswith("--") else ours
    if here in choices:
        near = [here]
    elif owner in ("SamplingParams", "InferenceConfig"):
        near = [f"{ours} of {owner}"]
    else:
        near = get_close_matches(name, choices, n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def unknown_attribute(owner: object, name: str) -> NoReturn:
    """Raise `AttributeError` for an unknown attribute. Classes use this function as their `__getattr__`.

    Raises:
        AttributeError: always; the message gives the nearest name.
    """
    kind = type(owner)
    public = [each for each in dir(kind) if not each.startswith("_")]
    public += getattr(kind, "__dataclass_fields__", {})
    cure = "" if name.startswith("_") else f"; {did_you_mean(name, public, f'see help({kind.__name__})')}"
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}{cure}", name=name, obj=owner)


class NamedOptions:
    """The base class of option dataclasses, which rejects unknown option names.

    Raises:
        ConfigError: a keyword argument is not an option. The message suggests the nearest option, also from nested
            dataclasses.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the names of the options. `__init__` checks the values."""
        table = {each.name: each.default for each in fields(cls)}  # type: ignore[arg-type]
        if options.keys() <= table.keys():
            return super().__new__(cls)
        nested = {
            each.name: f"{cls.__name__}({name}={type(default).__name__}({each.name}={{!r}}))"
            for name, default in table.items()
            if isinstance(default, NamedOptions)
            for each in fields(default)  # type: ignore[arg-type]
        }
        name = next(each for each in options if each not in table)
        if name in nested:
            raise ConfigError(f"{cls.__name__}.{name}: an advanced option; give {nested[name].format(options[name])}")
        cure = did_you_mean(name, [*table, *nested], f"the options are {', '.join(table)}")
        for each, code in nested.items():
            if cure == f"did you mean {each}?":
                cure = f"did you mean {code.format(options[name])}?"
        raise ConfigError(f"{cls.__name__}.{name}: there is no such option; {cure}")


# --- rules for the values of options ------------------------------------------------------------------------------------

Rule = tuple[Callable[[Any], bool], str]
"""A function that tests whether a value is allowed, and a description of the allowed values."""

Rules = Mapping[Rule, tuple[str, ...]]
"""A dict from each rule to the names of the options that it applies to."""


def is_int(value: object) -> bool:
    """Return whether a value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether a value is an integer or a float; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def or_none(rule: Rule) -> Rule:
    """Return a rule that allows None and every value that `rule` allows."""
    return lambda value: value is None or rule[0](value), f"None or {rule[1]}"


def one_of(*choices: str | None) -> Rule:
    return lambda value: value in choices, f"one of {', '.join(map(repr, choices))}"


AT_LEAST_1: Rule = (lambda value: is_int(value) and value >= 1, "an integer of at least 1")
ABOVE_0: Rule = (lambda value: is_number(value) and value > 0, "a number above 0")
FINITE: Rule = (lambda value: is_number(value) and 0 < value < math.inf, "a finite number above 0")
SEED: Rule = (lambda value: is_int(value) and 0 <= value < 2**63, "an integer in [0, 2**63)")
ADDRESS: Rule = (is_text, "an address")


class Options(NamedOptions):
    """The base class of option dataclasses that validate both the names and the values of options.

    Rules for booleans and enums are derived from the defaults. `_rules` contains the other rules.
    """

    _rules: ClassVar[Rules] = {}

    def __post_init__(self) -> None:
        ruled = set[str]()
        for (holds, rule), names in self._rules.items():
            ruled.update(names)
            for name in names:
                self._check(name, holds(getattr(self, name)), rule)
        for option in fields(self):  # type: ignore[arg-type]
            if isinstance(option.default, bool) and option.name not in ruled:
                self._check(option.name, isinstance(getattr(self, option.name), bool), "True or False")
            elif isinstance(option.default, Enum):
                self._choose(option.name, type(option.default))

    def _check(self, name: str, ok: bool, rule: str) -> None:
        if not ok:
            raise ConfigError(f"{type(self).__name__}.{name}={getattr(self, name)!r}: must be {rule}")

    def _choose(self, name: str, kind: type[Enum]) -> None:
        try:
            object.__setattr__(self, name, kind(getattr(self, name)))
        except ValueError as exc:
            choices = ", ".join(repr(member.value) for member in kind)
            raise ConfigError(
                f"{type(self).__name__}.{name}={getattr(self, name)!r}: must be one of {choices}"
            ) from exc

    def replace(self, **changes: Any) -> Self:
        """Return a copy with the fields in `changes` replaced. The copy is validated again."""
        return replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all options, in definition order."""
        return tuple(field.name for field in fields(cls))  # type: ignore[arg-type]
