"""Rollouts for a training loop, sampled with the same module that the optimizer steps.

Names are imported when they are first used. The modules for requests, records, sampling parameters, states and errors do
not need torch, so a process that only sends requests never loads it.
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names that a training loop uses
    from rollout.config import InferenceConfig as InferenceConfig
    from rollout.current import close as close
    from rollout.current import generate as generate
    from rollout.current import init as init
    from rollout.current import metrics as metrics
    from rollout.current import resume as resume
    from rollout.current import score as score
    from rollout.current import submit as submit
    from rollout.current import suspend as suspend
    from rollout.current import suspended as suspended
    from rollout.current import weights_updated as weights_updated
    from rollout.engine.engine import inspect as inspect
    from rollout.llm.llm import LLM as LLM
    from rollout.manager.batch.batch import RolloutBatch as RolloutBatch
    from rollout.manager.manager import RolloutManager as RolloutManager
    from rollout.sampling_params import SamplingParams as SamplingParams

if TYPE_CHECKING:  # other public names
    from rollout.config import Advanced as Advanced
    from rollout.config import CoordinatorConfig as CoordinatorConfig
    from rollout.config import ServerConfig as ServerConfig
    from rollout.config import __version__ as __version__
    from rollout.distributed.client.client import InferenceClient as InferenceClient
    from rollout.engine.training.exact import exact as exact
    from rollout.errors import ConfigError as ConfigError
    from rollout.errors import ConnectionLostError as ConnectionLostError
    from rollout.errors import DeadlineError as DeadlineError
    from rollout.errors import EngineDeadError as EngineDeadError
    from rollout.errors import EngineStateError as EngineStateError
    from rollout.errors import InvalidRequestError as InvalidRequestError
    from rollout.errors import JournalError as JournalError
    from rollout.errors import QueueFullError as QueueFullError
    from rollout.errors import RankLostError as RankLostError
    from rollout.errors import RequestAbortedError as RequestAbortedError
    from rollout.errors import RequestError as RequestError
    from rollout.errors import RequestFailedError as RequestFailedError
    from rollout.errors import RequestTimeoutError as RequestTimeoutError
    from rollout.errors import RolloutError as RolloutError
    from rollout.errors import RolloutFailedError as RolloutFailedError
    from rollout.errors import StaleRequestError as StaleRequestError
    from rollout.errors import UnsupportedModelError as UnsupportedModelError
    from rollout.errors import WeightsChangedError as WeightsChangedError
    from rollout.journal import Journal as Journal
    from rollout.llm.llm import AsyncLLM as AsyncLLM
    from rollout.manager.batch.replay import replay as replay
    from rollout.manager.batch.tree import pack_tree as pack_tree
    from rollout.manager.episodes.batch import EpisodeBatch as EpisodeBatch
    from rollout.manager.episodes.environment import Environment as Environment
    from rollout.manager.episodes.environment import EnvironmentTask as EnvironmentTask
    from rollout.manager.episodes.environment import StepResult as StepResult
    from rollout.manager.episodes.episode import Episode as Episode
    from rollout.manager.scoring import PromptTask as PromptTask
    from rollout.manager.scoring import rewards_differ as rewards_differ
    from rollout.observe.page import report as report
    from rollout.observe.recorder import span as span
    from rollout.observe.run_log import RunLog as RunLog
    from rollout.observe.traces import trace as trace
    from rollout.requests.request import DynamicInferenceRequest as DynamicInferenceRequest
    from rollout.sampling_params import StructuredOutput as StructuredOutput
    from rollout.state import EngineState as EngineState
    from rollout.state import FinishReason as FinishReason
    from rollout.state import KVCacheManagementMode as KVCacheManagementMode
    from rollout.state import StalenessPolicy as StalenessPolicy

if TYPE_CHECKING:  # results, engine parts and job parts, for tests and ports of other engines
    from rollout.config import CoordinatorAdvanced as CoordinatorAdvanced
    from rollout.distributed.client.futures import Delta as Delta
    from rollout.distributed.client.futures import RequestFuture as RequestFuture
    from rollout.distributed.client.futures import RequestStream as RequestStream
    from rollout.distributed.client.text_stream import TextDelta as TextDelta
    from rollout.distributed.coordinator.launch import CoordinatorHandle as CoordinatorHandle
    from rollout.distributed.coordinator.launch import launch_coordinator as launch_coordinator
    from rollout.distributed.coordinator.process import (
        DataParallelInferenceCoordinator as DataParallelInferenceCoordinator,
    )
    from rollout.distributed.transport.keys import JobKeys as JobKeys
    from rollout.distributed.worker.worker import EngineWorker as EngineWorker
    from rollout.engine.blocks.allocator import BlockAllocator as BlockAllocator
    from rollout.engine.engine import DynamicInferenceEngine as DynamicInferenceEngine
    from rollout.engine.parts.context import DynamicInferenceContext as DynamicInferenceContext
    from rollout.engine.parts.controller import TextGenerationController as TextGenerationController
    from rollout.errors import ControlError as ControlError
    from rollout.errors import SerializationError as SerializationError
    from rollout.llm.job_llm import JobLLM as JobLLM
    from rollout.manager.batch.batch import PackedRollouts as PackedRollouts
    from rollout.manager.batch.scores import TokenScores as TokenScores
    from rollout.manager.batch.tree import PackedTree as PackedTree
    from rollout.manager.scoring import ScoredBatch as ScoredBatch
    from rollout.manager.scoring import ScoredSample as ScoredSample
    from rollout.requests.block_hash import HASH_BASE as HASH_BASE
    from rollout.requests.block_hash import HASH_PRIME as HASH_PRIME
    from rollout.requests.block_hash import chain_block_hashes as chain_block_hashes
    from rollout.requests.block_hash import compute_block_hashes_batched as compute_block_hashes_batched
    from rollout.requests.events import DynamicInferenceEvent as DynamicInferenceEvent
    from rollout.requests.events import DynamicInferenceEventType as DynamicInferenceEventType
    from rollout.requests.record import DynamicInferenceRequestRecord as DynamicInferenceRequestRecord
    from rollout.requests.request import InferenceRequest as InferenceRequest
    from rollout.requests.request import VLMInferenceRequest as VLMInferenceRequest
    from rollout.requests.request import deserialize_tensor as deserialize_tensor
    from rollout.requests.request import serialize_tensor as serialize_tensor
    from rollout.requests.spans import VersionSpans as VersionSpans
    from rollout.state import ControlSignal as ControlSignal
    from rollout.state import CoordinatorState as CoordinatorState
    from rollout.state import PrefixCachingCoordinatorPolicy as PrefixCachingCoordinatorPolicy
    from rollout.state import PrefixCachingEvictionPolicy as PrefixCachingEvictionPolicy
    from rollout.state import Status as Status


def _homes() -> list[dict[str, str]]:
    """Return a dict from name to module for each of this file's three import blocks, so each name is written only once."""
    blocks = [
        each.body for each in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(each, ast.If)
    ]
    return [
        {name.name: each.module or "" for each in block if isinstance(each, ast.ImportFrom) for name in each.names}
        for block in blocks
    ]


_FIRST, _FURTHER, _PARTS = _homes()
_HOME_OF = _FIRST | _FURTHER | _PARTS

__all__ = [*_FIRST, *sorted(_FURTHER)]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        if find_spec(f"{__name__}.{name}") is not None:
            # Raise a plain AttributeError, after which `from rollout import MODULE` imports the submodule itself.
            raise AttributeError(name)
        from rollout.errors import did_you_mean

        cure = did_you_mean(name, _HOME_OF, "rollout.__all__ lists the public names")
        message = f"module 'rollout' has no attribute {name!r}; {cure}"
        # Raise ImportError for `from rollout import NAME`: Python would replace the message of an AttributeError.
        if sys._getframe(1).f_code.co_name == "_handle_fromlist":
            raise ImportError(message, name=__name__)
        raise AttributeError(message)
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__} - _PARTS.keys())
