"""The names that users and ports of other engines rely on: classes, fields, attributes, methods and values of enums.

About twenty of them have no caller inside the package, so that a search for dead code would remove them.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

import rollout
from rollout.threads.loop_thread import LoopThread

NAMES = {
    "SamplingParams": """
        n temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty logit_bias max_tokens
        min_tokens stop stop_token_ids ignore_eos include_stop_str_in_output seed logprobs prompt_logprobs logprobs_mode
        serialize deserialize""",
    "InferenceRequest": """
        request_id prompt sampling_params inference_parameters prompt_tokens arrival_time status encoder_prompt
        generated_text segments generated_segments generated_sequence_lengths generated_tokens prompt_log_probs
        generated_log_probs prompt_top_n_logprobs generated_top_n_logprobs generated_length tpot serialize deserialize""",
    "DynamicInferenceRequest": """
        remaining_prompt_tokens remaining_prompt_length policy_staleness kv_cache_staleness latency ttft routing_indices
        finished_chunk_token_count stop_word_ids block_size_tokens enable_prefix_caching precomputed_block_hashes events
        event_add_engine generated_tokens tracked_metadata get_metadata_types add_event_add_engine add_event_add_context
        add_event_generated_token add_event_pause add_event_evict add_event_finish add_event_fail add_event_error_transient
        add_event_error_nontransient succeeded failed increment_staleness""",
    "VLMInferenceRequest": "num_img_embeddings_per_tile imgs num_tiles decoder_seq_length",
    "DynamicInferenceEvent": "timestamp type payload serialize deserialize __str__",
    "DynamicInferenceRequestRecord": """
        from_request __getitem__ request_id latency increment_staleness checkpoint merge serialize deserialize requests""",
    "DynamicInferenceEngine": """
        add_request abort_request step generate pause unpause suspend resume stats wait_until policy_version state""",
    "DynamicInferenceContext": "",
    "BlockAllocator": "",
    "TextGenerationController": "fill_segments",
    "DataParallelInferenceCoordinator": """
        get_next_data_parallel_rank get_best_data_parallel_rank compute_request_hashes _update_rank_hashes _remove_engine
        _send_to_engine detokenize start stop entrypoint""",
    "CoordinatorConfig": """
        data_parallel_size tokenizer inference_coordinator_port deterministic_mode block_size_tokens enable_prefix_caching
        prefix_caching_coordinator_policy schedule_output_path""",
    "InferenceClient": """
        start add_request add_request_streaming abort_request pause_engines unpause_engines suspend_engines resume_engines
        stop_engines stop""",
    "LLM": """
        generate engine context controller is_primary_rank pause unpause suspend resume shutdown wait_for_shutdown serve
        __enter__ __exit__""",
    "AsyncLLM": """
        generate engine context controller is_primary_rank pause unpause suspend resume shutdown wait_for_shutdown serve
        __aenter__ __aexit__""",
    "RolloutManager": """
        generate suspended metrics submit as_completed pause unpause suspend resume weights_updated policy_version state_dict
        load_state_dict close""",
    "RolloutBatch": """
        input_ids attention_mask position_ids response_mask logprobs policy_versions policy_staleness group_ids
        finish_reasons texts packed __len__ __getitem__""",
    "PackedRollouts": "cu_seqlens input_ids position_ids",
}
"""Class → attributes, fields and methods that it must have."""

MEMBERS = {
    "Status": {
        "WAITING_IN_QUEUE": 1, "ACTIVE_AND_GENERATING_TOKENS": 2, "ACTIVE_BUT_NOT_GENERATING_TOKENS": 3, "COMPLETED": 4,
        "FAILED": 5,
    },
    "DynamicInferenceEventType": [
        "ADD_ENGINE", "ADD_CONTEXT", "GENERATED_TOKEN", "PAUSE", "EVICT", "FINISH", "FAIL", "ERROR_TRANSIENT",
        "ERROR_NONTRANSIENT",
    ],
    "CoordinatorState": ["RUNNING", "PAUSED", "SUSPENDED", "STOPPING"],
    "EngineState": [
        "RUNNING", "PAUSING", "PAUSED", "UNPAUSING", "SUSPENDING", "SUSPENDED", "RESUMING", "STOPPING", "STOPPED",
    ],
    "PrefixCachingCoordinatorPolicy": ["LONGEST_PREFIX", "FIRST_PREFIX_BLOCK", "LOAD_BALANCED", "ROUND_ROBIN"],
    "PrefixCachingEvictionPolicy": ["LRU", "REF_ZERO"],
    "KVCacheManagementMode": ["PERSIST", "OFFLOAD", "RECOMPUTE"],
}  # fmt: skip

PARAMETERS = {
    "LLM": "model tokenizer inference_config use_coordinator coordinator_host coordinator_port",
    "AsyncLLM": "model tokenizer inference_config use_coordinator coordinator_host coordinator_port",
    "LLM.serve": "config blocking",
    "RolloutManager": "model tokenizer config",
    "RolloutManager.generate": "prompts sampling_params min_groups",
    "RolloutManager.suspend": "mode",
    "InferenceClient.start": "timeout_s",
    "InferenceClient.add_request": "prompt sampling_params",
    "DynamicInferenceRequestRecord.increment_staleness": "policy_only",
    "DynamicInferenceRequestRecord.checkpoint": "tokenizer",
    "DynamicInferenceRequestRecord.merge": "tokenizer",
    "DynamicInferenceRequest.add_event_generated_token": """
        token_id blocks_total blocks_hashed_total blocks_hashed_active blocks_ref_count""",
    "DataParallelInferenceCoordinator.get_best_data_parallel_rank": "hashes",
    "DataParallelInferenceCoordinator.compute_request_hashes": "prompt",
}

DEFAULTS = {
    "n": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "logit_bias": None, "min_tokens": 0, "ignore_eos": False, "include_stop_str_in_output": False,
    "seed": None, "logprobs": None, "prompt_logprobs": None, "logprobs_mode": "processed",
}  # fmt: skip


def fields_of(owner: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else set()


@pytest.mark.parametrize("name", NAMES)
def test_a_class_has_every_attribute_and_method(name: str) -> None:
    owner = getattr(rollout, name)
    known = {*dir(owner), *fields_of(owner)}
    assert [each for each in NAMES[name].split() if each not in known] == []


@pytest.mark.parametrize("name", MEMBERS)
def test_an_enum_has_its_members_and_values(name: str) -> None:
    found = {member.name: member.value for member in getattr(rollout, name)}
    expected = MEMBERS[name]
    assert found == expected if isinstance(expected, dict) else list(found) == expected


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_signature_has_its_parameters(name: str) -> None:
    target: Any = rollout
    for part in name.split("."):
        target = getattr(target, part)
    missing = set(PARAMETERS[name].split()) - set(inspect.signature(target).parameters)
    assert not missing


def test_the_defaults_of_sampling_are_as_written() -> None:
    params = rollout.SamplingParams()
    assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
    with pytest.raises(ValueError, match="temperature=-1"):
        rollout.SamplingParams(temperature=-1)


def test_the_functions_and_constants_of_block_hashes_are_there() -> None:
    assert (rollout.HASH_PRIME, rollout.HASH_BASE) == (2305843009213693951, 31)
    assert rollout.compute_block_hashes_batched([], 4) == []
    assert callable(rollout.serialize_tensor)
    assert callable(rollout.deserialize_tensor)


def test_an_llm_bridges_to_its_private_loop_by_run_sync() -> None:
    assert set(inspect.signature(LoopThread.run_sync).parameters) == {"self", "coroutine", "timeout_s"}


def test_no_module_of_the_package_is_named_like_a_public_function() -> None:
    """Once imported, such a module would be what `rollout.<name>` gives."""
    root = Path(rollout.__file__).parent
    modules = {path.stem for path in root.glob("*.py")} | {path.parent.name for path in root.glob("*/__init__.py")}
    # `init` and `generate` are reserved for functions that act on the process's manager.
    assert {"config", "engine", "llm"} <= modules
    assert modules & {*rollout._HOME_OF, "init", "generate"} == set()
