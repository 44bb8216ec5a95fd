"""Engine without a model: its tokens are a deterministic function, so that a test can compute the expected ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache

from rollout.distributed.worker.assignments import Key, Known
from rollout.engine.blocks.index import CacheChanges
from rollout.engine.parts.context import MemoryMove
from rollout.engine.parts.holds import Holds
from rollout.errors import RequestError
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.requests.delta import SampleDelta, growth
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import ENGINE_TRANSITIONS, ControlSignal, EngineState, FinishReason, Mode, Status

BLOCK = 4
CACHE_BLOCKS = 12


def token_at(seed: int, index: int, position: int) -> int:
    return (seed * 31 + index * 1009 + position * 7919) % 50_000


def length_of(seed: int, index: int) -> int:
    return 1 + (seed * 13 + index * 7) % (23 if (seed + index) % 5 == 0 else 6)


@cache
def hashes_of(prompt: tuple[int, ...]) -> list[int]:
    return compute_block_hashes_batched(prompt, BLOCK)


class FakeEngine:
    """An engine that samples `token_at`; a token's log-prob is the version that sampled it."""

    def __init__(self, slots: int, rng: random.Random, version: int) -> None:
        self.state = EngineState.RUNNING
        self.policy_version = version
        self.resting = False
        self.cache: dict[int, None] = {}
        self._slots = slots
        self._rng = rng
        self._number = 0
        self._samples: dict[Key, DynamicInferenceRequestRecord] = {}
        self._running: set[Key] = set()
        self._changes = CacheChanges()
        self.holds = Holds(self)

    @contextmanager
    def locked(self) -> Iterator[None]:
        yield

    def new_request_id(self) -> int:
        self._number += 1
        return self._number

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
        assert sampling_params is not None
        assert request_id is not None
        self._add(prompt, sampling_params, request_id, samples or ())
        return request_id

    def _add(self, prompt: Sequence[int], params: SamplingParams, request_id: int, samples: Sequence[int]) -> None:
        self._refuse_when_stopped()
        for index in samples:
            request = DynamicInferenceRequest(
                request_id=request_id,
                sample_index=index,
                prompt_tokens=list(prompt),
                sampling_params=params,
                seed=params.seed,
                policy_version=self.policy_version,
                arrival_time=0.0,
            )
            self._samples[request_id, index] = DynamicInferenceRequestRecord.from_request(request)

    def add_record(self, record: DynamicInferenceRequestRecord) -> None:
        self._refuse_when_stopped()
        live = record[-1]
        if live.policy_version > self.policy_version:
            raise RequestError(f"of version {live.policy_version}, the engine of {self.policy_version}")
        record.checkpoint()
        record.advance_version(self.policy_version, policy_only=True)
        self._samples[record.request_id, record.sample_index] = record

    def _refuse_when_stopped(self) -> None:
        if self.state is EngineState.STOPPED:
            raise RequestError("stopped")

    def abort_request(self, request_id: int, sample_index: int | None = None) -> int:
        aborted = [key for key in self._samples if key[0] == request_id and sample_index in (None, key[1])]
        for key in aborted:
            del self._samples[key]
            self._running.discard(key)
        return len(aborted)

    def progress(self, known: Mapping[Key, Known]) -> list[SampleDelta]:
        grown = [growth(self._samples[key], *what) for key, what in known.items() if key in self._samples]
        return [each for each in grown if each.count]

    def take_ended(self, keys: Callable[[Key], bool]) -> list[DynamicInferenceRequestRecord]:
        return []

    def _signal(self, signal: ControlSignal) -> bool:
        acts_in, _, to, harmless_in = ENGINE_TRANSITIONS[signal]
        if self.state not in acts_in | harmless_in:
            raise RuntimeError(f"{signal} while {self.state}")
        acts = self.state in acts_in
        self.state = to if acts else self.state
        return acts

    def pause(self) -> None:
        self._signal(ControlSignal.PAUSE)

    def unpause(self) -> None:
        self._signal(ControlSignal.UNPAUSE)

    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        self._signal(ControlSignal.SUSPEND)
        return MemoryMove()

    def resume(self) -> MemoryMove:
        self._signal(ControlSignal.RESUME)
        return MemoryMove()

    def stop(self) -> list[DynamicInferenceRequestRecord]:
        if not self._signal(ControlSignal.STOP):
            return []
        ended = list(self._samples.values())
        for record in ended:
            self._finish(record, FinishReason.ABORT, "RequestAbortedError: stopped")
        self._samples.clear()
        self._running.clear()
        return ended

    def weights_updated(self, version: int | None = None) -> int:
        """The weights have changed; now and then a sample starts afresh because it has become too old."""
        assert version is not None
        if version <= self.policy_version:
            return self.policy_version
        self.policy_version = version
        self.cache.clear()
        self._changes.flush()
        for key, record in list(self._samples.items()):
            record.advance_version(version, policy_only=key not in self._running)
            if record[-1].completion_tokens and self._rng.random() < 0.1:
                first = record[0]
                self.abort_request(*key)
                self._add(first.prompt_tokens, first.sampling_params, key[0], [key[1]])
        return version

    def flush_prefix_cache(self) -> int:
        forgotten = len(self.cache)
        self.cache.clear()
        self._changes.flush()
        return forgotten

    def track_prefix_cache(self, changes: CacheChanges) -> list[int]:
        self._changes = changes
        return list(self.cache)

    @property
    def load(self) -> tuple[int, int]:
        return len(self._running), len(self._samples) - len(self._running)

    @property
    def busy(self) -> bool:
        return self.state is EngineState.RUNNING and bool(self._samples) and not self.resting

    def step(self) -> list[DynamicInferenceRequestRecord]:
        for key, record in self._samples.items():
            if len(self._running) < self._slots and key not in self._running:
                self._running.add(key)
                self._remember(record[0].prompt_tokens)
        ended = []
        for key in list(self._running):
            record = self._samples[key]
            live = record[-1]
            position = live.total_length - live.original_prompt_length
            seed = live.seed or 0
            live.finished_chunk_token_count = len(live.prompt_tokens)
            live.generated_tokens.append(token_at(seed, key[1], position))
            live.generated_log_probs.append(float(self.policy_version))
            if position + 1 >= length_of(seed, key[1]):
                self._finish(record, FinishReason.LENGTH, None)
                self.abort_request(*key)
                ended.append(record)
        return ended

    def _finish(self, record: DynamicInferenceRequestRecord, reason: FinishReason, error: str | None) -> None:
        live = record[-1]
        live.finish_reason, live.error = reason, error
        live.status = Status.COMPLETED if error is None else Status.FAILED

    def _remember(self, prompt: list[int]) -> None:
        for each in hashes_of(tuple(prompt)):
            if each not in self.cache:
                self.cache[each] = None
                self._changes.add(each)
        while len(self.cache) > CACHE_BLOCKS:
            oldest = next(iter(self.cache))
            del self.cache[oldest]
            self._changes.remove(oldest)
