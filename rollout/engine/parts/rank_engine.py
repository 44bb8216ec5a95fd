"""The part of an engine that a session with a coordinator uses, for engines of other kinds to satisfy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rollout.engine.blocks.index import CacheChanges
from rollout.engine.parts.holds import HeldEngine, Holds
from rollout.requests.delta import SampleDelta
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams


class RankEngine(HeldEngine, Protocol):
    """Requests, progress and control of `DynamicInferenceEngine`, which documents these methods."""

    @property
    def holds(self) -> Holds:
        """Who asks the engine to stand still."""

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting) samples."""

    def new_request_id(self) -> int:
        """Reserve and return a request id."""

    def add_request(
        self,
        prompt: Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
        priority: int = 0,
        samples: Sequence[int] | None = None,
        arrival_time: float | None = None,
    ) -> int:
        """Queue samples of a prompt."""

    def add_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Queue a partially generated sample."""

    def abort_request(self, request_id: int, sample_index: int | None = None) -> int:
        """Abort a sample, or all of a request."""

    def progress(self, known: Mapping[tuple[int, int], tuple[int, int, int]]) -> list[SampleDelta]:
        """New tokens since `known`."""

    def take_ended(self, keys: Callable[[tuple[int, int]], bool]) -> list[DynamicInferenceRequestRecord]:
        """Ended records that no step has returned."""

    def track_prefix_cache(self, changes: CacheChanges | None) -> list[int]:
        """Record changes of the prefix cache; returns the hashes cached now."""

    def flush_prefix_cache(self) -> int:
        """Drop unreferenced cached blocks; returns their number."""

    def load_weights(self, folder: str) -> int:
        """Load the weights of a folder; returns the number of tensors."""

    def load_adapter(self, name: str, folder: str) -> int:
        """Load a LoRA adapter; returns the number of layers that it changes."""

    def unload_adapter(self, name: str) -> int:
        """Unload an adapter; returns the number of samples that have ended by it."""

    def weights_updated(self, version: int | None = None) -> int:
        """Announce changed weights."""

    def stop(self) -> list[DynamicInferenceRequestRecord]:
        """Stop the engine; returns all records not handed out yet."""
