"""The translation of a transformers `generate` call into `SamplingParams`. An unsupported call raises `NotServed`.

`generate` merges some eighty options into two lists before it samples: logits processors and stopping criteria. Only these
lists are read. Their elements are recognised by exact type, because a subclass may behave differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria

from rollout import ConfigError, SamplingParams

BANNED = -1e9
"""The logit bias that keeps a suppressed token from being sampled."""
PENALTIES, TEMPERATURE, TOP_K, TOP_P, MIN_P, LAST = range(6)
STAGES: dict[type, int] = {
    RepetitionPenaltyLogitsProcessor: PENALTIES,
    MinLengthLogitsProcessor: PENALTIES,
    MinNewTokensLengthLogitsProcessor: PENALTIES,
    SuppressTokensLogitsProcessor: PENALTIES,
    InfNanRemoveLogitsProcessor: PENALTIES,
    TemperatureLogitsWarper: TEMPERATURE,
    TopKLogitsWarper: TOP_K,
    TopPLogitsWarper: TOP_P,
    MinPLogitsWarper: MIN_P,
    LogitNormalization: LAST,
}
"""A dict from logits processor class to its place in the engine's order. Classes with equal places may be in any order."""
CACHES = ("cache", "past_key_values", "cache_params")
"""The names of the KV cache argument: since transformers 5.24, in earlier versions, and in models without attention."""
COMPUTED = frozenset({
    *CACHES, "attention_mask", "position_ids", "use_cache", "logits_to_keep", "token_type_ids",
    "mm_token_type_ids", "mm_encoder_outputs", "tokenizer",
})  # fmt: skip
"""The model arguments that need no check: `generate` computes them, or they follow from token ids or stopping criteria."""


class NotServed(Exception):  # noqa: N818 - reports a decision, not an error
    """The exception for a `generate` call that the engine does not support; the message gives the reason."""


def check_arguments(config: GenerationConfig, streamer: object, given: dict[str, Any]) -> None:
    """Check the arguments of `generate` that are neither logits processors nor stopping criteria.

    Raises:
        NotServed: an argument is not supported; the message names it.
    """
    if streamer is not None:
        raise NotServed("streamer=")
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name):
            raise NotServed(f"{name}=True")
    if config.is_assistant:
        raise NotServed("the model is the assistant of another one")
    if any(getattr(given.get(name), "_is_user_defined", False) for name in CACHES):
        raise NotServed("a KV cache of the caller")
    for name, value in given.items():
        if name not in COMPUTED and value is not None and value is not False:
            raise NotServed(f"{name}=")


def sampling_params(
    config: GenerationConfig,
    processors: Iterable[Any],
    criteria: Iterable[Any],
    width: int,
    padding: Tensor,
    vocab: int,
) -> tuple[SamplingParams, StopStringCriteria | None]:
    """Return the sampling parameters for one sample, and the stop-string criterion (None without stop strings).

    Args:
        config: generation configuration that `processors` and `criteria` were made from.
        processors: the logits processors.
        criteria: the stopping criteria.
        width: number of columns of the padded prompts.
        padding: int64 [N], number of padded columns on the left of each prompt.
        vocab: number of tokens in the model's vocabulary.

    Raises:
        NotServed: a processor, a criterion or a value is not supported; the message names it.
    """
    length, eos, stop = _stopping(criteria, vocab)
    if length <= width:
        raise NotServed("no token is asked for")
    options: dict[str, Any] = {"max_tokens": length - width, "stop_token_ids": eos, "ignore_eos": True, "logprobs": 0}
    if config.do_sample:
        options["logprobs_mode"] = "tempered"
    else:
        options["temperature"] = 0.0
    _process(options, list(processors), set(eos), width, padding, vocab)
    options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
    try:
        return SamplingParams(**options), stop
    except ConfigError as error:
        raise NotServed(str(error)) from None


def _stopping(criteria: Iterable[Any], vocab: int) -> tuple[int, tuple[int, ...], StopStringCriteria | None]:
    length: int | None = None
    eos: tuple[int, ...] | None = None
    stop: StopStringCriteria | None = None
    for each in criteria:
        if type(each) is MaxLengthCriteria and length is None:
            length = int(each.max_length)
        elif type(each) is EosTokenCriteria and eos is None:
            eos = _ids(each.eos_token_id, vocab)
        elif type(each) is StopStringCriteria and stop is None:
            stop = each
        else:
            raise NotServed(f"stopping criterion {type(each).__name__}")
    if length is None:
        raise NotServed("no maximum length")
    if stop is not None and eos is None:
        # Reject stop strings without end-of-sequence ids: without ids, `generate` does not pad finished rows, so a row
        # continues after its stop string until all rows have one.
        raise NotServed("stop strings without an eos_token_id")
    return length, eos or (), stop


def _process(
    options: dict[str, Any], processors: Sequence[Any], eos: set[int], width: int, padding: Tensor, vocab: int
) -> None:
    sampled = "temperature" not in options
    types = [type(each) for each in processors]
    stages = [STAGES.get(each, -1) for each in types]
    for each, stage in zip(types, stages, strict=True):
        if stage < 0 or types.count(each) > 1:
            raise NotServed(f"logits processor {each.__name__}{' twice' if stage >= 0 else ''}")
    if stages != sorted(stages):
        raise NotServed(f"logits processors in the order {', '.join(each.__name__ for each in types)}")
    for each in processors:
        match each:
            case RepetitionPenaltyLogitsProcessor():
                _check_ignored(each.prompt_ignore_length, padding)
                options["repetition_penalty"] = each.penalty
            case MinLengthLogitsProcessor() | MinNewTokensLengthLogitsProcessor():
                if set(_ids(each.eos_token_id, vocab)) != eos:
                    raise NotServed(f"{type(each).__name__} with other end-of-sequence ids than the stopping criterion")
                new = type(each) is MinNewTokensLengthLogitsProcessor
                least = each.prompt_length_to_skip + each.min_new_tokens if new else each.min_length
                options["min_tokens"] = max(options.get("min_tokens", 0), least - width)
            case SuppressTokensLogitsProcessor():
                options["logit_bias"] = dict.fromkeys(_ids(each.suppress_tokens, vocab), BANNED)
            case TemperatureLogitsWarper() if sampled:
                options["temperature"] = each.temperature
            case TopKLogitsWarper() | TopPLogitsWarper() | MinPLogitsWarper() if sampled:
                name = {TOP_K: "top_k", TOP_P: "top_p", MIN_P: "min_p"}[STAGES[type(each)]]
                if each.filter_value != -float("inf") or getattr(each, "min_tokens_to_keep", 1) > 1:
                    raise NotServed(f"{type(each).__name__} with min_tokens_to_keep or filter_value")
                options[name] = getattr(each, name)


def _check_ignored(ignored: int | Tensor | None, padding: Tensor) -> None:
    """Check that a repetition penalty ignores exactly the padding of each row, and so covers the whole prompt."""
    if not torch.equal(torch.as_tensor(0 if ignored is None else ignored).to(padding).expand_as(padding), padding):
        raise NotServed("a repetition penalty of a part of the prompt, or of padding")


def _ids(tokens: Any, vocab: int) -> tuple[int, ...]:
    """Return the ids in `tokens` (a tensor or list) below the vocabulary size `vocab`. Other ids cannot be sampled."""
    return tuple(token for token in torch.as_tensor(tokens).flatten().tolist() if 0 <= token < vocab)
