"""The checks of a GRPOTrainer's configuration, and its translation to sampling parameters.

The checks read attributes of the trainer and its GRPOConfig without changing them. An unsupported option raises an error
that names it.
"""

from __future__ import annotations

import inspect
import warnings
from contextlib import suppress
from dataclasses import fields
from typing import Any

from torch import nn

from rollout.errors import ConfigError
from rollout.sampling_params import FILTERS, SHAPING, SamplingParams
from rollout.state import KVCacheManagementMode, Mode
from trainer_hooks.rewards import NOT_PASSED, RewardPool
from trainer_hooks.trl_images import placeholders

_SEAMS = (
    "rollout_func",
    "use_vllm",
    "eos_token_ids",
    "_tokenize_prompts",
    "_generate_single_turn",
    "_generate_and_score_completions",
    "_calculate_rewards",
)
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "stop_strings": "stop"}
_DECIDED = {"n", "seed", "ignore_eos", "logprobs", "prompt_logprobs", "logprobs_mode", "return_kept_tokens"}
_CHOICES = {field.name for field in fields(SamplingParams)} - _DECIDED
_BY_TOKEN = ("token_truncate", "token_mask")


def sampling_params(trainer: Any, *, replay: bool = False) -> SamplingParams:
    """Return a GRPOConfig's sampling parameters, for one completion per prompt.

    `generation_kwargs` may use the names of `SamplingParams` and transformers' `do_sample`, `max_new_tokens`,
    `min_new_tokens` and `stop_strings`.

    Log-probs are over the trainer's distribution, softmax(logits / temperature), even if sampling is restricted (`top_k`) or
    reweighted (`repetition_penalty`). With log-probs over the restricted distribution, a completion's importance weights
    would vanish, and nothing would be learnt. With `replay`, rollout and trainer both use the restricted distribution.

    Raises:
        ConfigError: an option is unsupported, or a value is out of range.
    """
    params = _asked(trainer)
    if replay:
        return params.replace(return_kept_tokens=True)
    if banned := placeholders(trainer):
        # Ban placeholder tokens, as TRL's own generation does. The trained distribution keeps them, and the log-probs
        # include their probability.
        params = params.replace(logit_bias=dict.fromkeys(banned, -100.0) | (params.logit_bias or {}))
    return params.replace(logprobs_mode="tempered") if banned or params.shaping() else params


def _asked(trainer: Any) -> SamplingParams:
    asked = {
        "temperature": trainer.temperature,
        "max_tokens": trainer.max_completion_length,
    } | {name: value for name in SHAPING if (value := getattr(trainer, name, None)) is not None}
    given = dict(trainer.args.generation_kwargs or {})
    if not given.pop("do_sample", True):
        # Express greedy sampling as top_k=1: with temperature 0, log-probs would be at temperature 1, not the
        # trainer's.
        asked |= FILTERS | {"top_k": 1}
    for name, value in given.items():
        known = _RENAMED.get(name, name)
        if known not in _CHOICES:
            raise ConfigError(
                f"GRPOConfig.generation_kwargs[{name!r}]={value!r}: this rollout cannot do it; leave it out (known are "
                f"do_sample, {', '.join(sorted({*_RENAMED, *_CHOICES}))})"
            )
        asked[known] = value
    # Use the trainer's end-of-sequence ids instead of the engine's: TRL uses them to detect truncated completions.
    stop = (*trainer.eos_token_ids, *(asked.pop("stop_token_ids", None) or ()))
    return SamplingParams(**asked, stop_token_ids=stop, ignore_eos=True, logprobs=0)


def warn_of_shaping(trainer: Any, stacklevel: int, why_not_replayed: str = "") -> None:
    """Warn if completions are not sampled from the distribution whose log-probs the trainer computes.

    Args:
        stacklevel: number of stack frames from this function up to the line that the warning points to.
        why_not_replayed: why the tokens kept by truncation are not replayed, and the remedy. Empty without truncation.
    """
    params = _asked(trainer)
    # Do not warn about greedy sampling: equal completions have advantage 0, so their log-probs do not matter.
    if params.top_k != 1 and (shaping := params.shaping()):
        shown = ", ".join(shaping)
        warnings.warn(
            f"{shown}: completions are drawn from another distribution than the one that is trained. Importance weights "
            "between the two would vanish with the length and stop the learning, so TRL gets log-probs of the trained "
            "one: what is sampled here is trained on as if it were drawn from that, as with TRL's own generation, "
            "and TRL corrects what the two forwards differ by. To train what is sampled, sample by temperature alone "
            "(top_k=0, top_p=1.0, min_p=None, repetition_penalty=1.0), or use attach() with top_k, top_p or min_p, which "
            f"then replays kept tokens{f' (not so here, {why_not_replayed})' if why_not_replayed else ''}",
            stacklevel=stacklevel + 1,
        )


def check_rewards(trainer: Any) -> None:
    """Check that reward functions accept TRL's arguments, before anything is sampled.

    Raises:
        TypeError: a reward function does not accept the arguments; the message names the function and its signature.
    """
    columns = set(getattr(trainer.train_dataset, "column_names", None) or ()) - {"prompt", "completion"}
    names = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"} | columns
    for reward in trainer.reward_funcs:
        if isinstance(reward, nn.Module):
            continue
        passed = names - NOT_PASSED if isinstance(reward, RewardPool) else names
        with suppress(ValueError):
            signature = inspect.signature(reward)
            try:
                signature.bind(**dict.fromkeys(passed))
            except TypeError as error:
                name = getattr(reward, "__name__", type(reward).__name__)
                raise TypeError(
                    f"reward function {name}{signature} ({error}): TRL calls it with {', '.join(sorted(passed))}, by name; "
                    "take those that you use, and **kwargs"
                ) from None


def check_trainer(trainer: Any, model: nn.Module) -> None:
    """Check that `trainer` is a GRPOTrainer that trains `model` and uses no other generation backend.

    Raises:
        TypeError: `trainer` lacks GRPOTrainer attributes that the integration needs.
        ValueError: `trainer` trains another model, or uses another generation backend.
    """
    missing = [name for name in _SEAMS if not hasattr(trainer, name)]
    if missing:
        raise TypeError(
            f"{type(trainer).__name__} has no {', '.join(missing)}: it must be a GRPOTrainer of TRL 1.16 (or a later "
            "one that kept them)"
        )
    if not any(module is model for module in trainer.model.modules()):
        raise ValueError(
            f"this trainer trains another {type(trainer.model).__name__} than the {type(model).__name__} that "
            "samples: build the rollout of it, RolloutManager(trainer.model, tokenizer, ...)"
        )
    if trainer.use_vllm:
        raise ValueError("this trainer generates with vLLM: set GRPOConfig.use_vllm=False, the rollout takes its place")
    if trainer.use_transformers_continuous_batching:
        raise ValueError(
            "this trainer generates by continuous batching: set GRPOConfig.use_transformers_continuous_batching=False, "
            "the rollout takes its place"
        )


def check_choices(trainer: Any, mode: Mode, on_error: str) -> None:
    """Check `mode`, `on_error` and GRPOConfig's sampling options.

    Raises:
        ConfigError: an option is unknown or unsupported; the message names it.
        ValueError: the trainer has tools, and `on_error` is "mask".
    """
    KVCacheManagementMode.parse(mode)
    if on_error not in ("raise", "mask"):
        raise ConfigError(f"on_error={on_error!r}: must be 'raise' or 'mask'")
    if on_error == "mask" and trainer.tools:
        raise ValueError(
            f"on_error='mask': this trainer has {len(trainer.tools)} tools, whose later turns TRL would generate "
            "itself; use on_error='raise'"
        )
    sampling_params(trainer)


def correction_mode(trainer: Any, stacklevel: int) -> str:
    """Return `vllm_importance_sampling_mode`. If the loss does not support it, warn and return a token-level mode."""
    asked = str(trainer.vllm_importance_sampling_mode)
    # Replace sequence-level modes, which this loss type does not support. GRPOTrainer itself rejects them, but only if
    # constructed with vLLM, and GRPOConfig's default is one of them.
    if trainer.loss_type != "vespo" or not trainer.vllm_importance_sampling_correction or asked in _BY_TOKEN:
        return asked
    warnings.warn(
        f"vllm_importance_sampling_mode={asked!r}: loss_type='vespo' is corrected token by token, and is so here, by "
        f"{_BY_TOKEN[0]!r}; set GRPOConfig's to it, to {_BY_TOKEN[1]!r}, or vllm_importance_sampling_correction=False",
        stacklevel=stacklevel + 1,
    )
    return _BY_TOKEN[0]
