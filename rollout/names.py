"""Errors for unknown names, with the nearest known one or our name for it: `did_you_mean`, `NamedOptions`, `SAME_AS`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NoReturn, Self

from rollout.errors import ConfigError

SAME_AS = {
    "n": "num_generations num_return_sequences num_samples best_of",
    "max_tokens": "max_new_tokens max_completion_length max_length max_completion_tokens response_length",
    "min_tokens": "min_new_tokens min_length",
    "temperature": "do_sample",
    "stop": "stop_strings stop_sequences",
    "stop_token_ids": "eos_token_id eos_token_ids",
    "logit_bias": "suppress_tokens bad_words bad_words_ids sequence_bias",
    "structured": "structured_outputs guided_decoding guided_json guided_regex json_schema regex response_format",
    "adapter": "lora_request lora_path lora_name",
    "logprobs": "log_probs logps old_logprobs old_per_token_logps sampling_logps output_scores",
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
    "speculation": "speculative_config num_speculative_tokens",
    "texts": "responses completions text outputs completion",
    "input_ids": "tokens token_ids sequences prompt_ids completion_ids response_ids",
    "response_mask": "completion_mask loss_mask action_mask mask",
    "policy_versions": "versions weight_versions",
    "RolloutManager": "RolloutEngine Rollout Engine",
    "InferenceConfig": "RolloutConfig EngineConfig EngineArgs",
    "LLM": "LLMEngine",
    "AsyncLLM": "AsyncLLMEngine",
}
"""Our name → names of the same thing in transformers, TRL, vLLM, SGLang and verl."""

_OURS = {theirs: ours for ours, names in SAME_AS.items() for theirs in names.split()}


def our_name(name: str) -> str:
    """Return this package's name for what other libraries call `name`; `name` itself if it is no such name."""
    return _OURS.get(name, name)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """Return a question that gives the known names that are the same as or nearest to `name`, or `otherwise`.

    Args:
        most: how many names to give.
        cutoff: least similarity, in [0, 1], as in `difflib.get_close_matches`.
    """
    choices = list(known)
    near = [ours] if (ours := our_name(name)) in choices else get_close_matches(name, choices, n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def unknown_attribute(owner: object, name: str) -> NoReturn:
    """Refuse an attribute; for `__getattr__` of a class.

    Raises:
        AttributeError: always; gives the nearest name.
    """
    kind = type(owner)
    public = [each for each in dir(kind) if not each.startswith("_")]
    public += getattr(kind, "__dataclass_fields__", {})
    cure = "" if name.startswith("_") else f"; {did_you_mean(name, public, f'see help({kind.__name__})')}"
    raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}{cure}", name=name, obj=owner)


class NamedOptions:
    """Base of dataclasses of options.

    Raises:
        ConfigError: a keyword argument is none of the options; gives the nearest one.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the names; values are checked by `__init__`."""
        known = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                cure = did_you_mean(name, known, f"the options are {', '.join(known)}")
                raise ConfigError(f"{cls.__name__}.{name}: there is no such option; {cure}")
        return super().__new__(cls)
