"""One engine per rank, in the training process, running the very module the optimizer steps.

Promises:
- every accepted request ends once, as a complete record: finished, stale, aborted or failed;
- an exception inside a step fails the requests of that step, cause attached, and the engine goes on; after
  `MAX_FAILED_STEPS` in a row it declares itself dead and ends every request;
- whenever none of its calls is running, the trainer's model is exactly as the trainer left it.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.attention import Installation
from rollout.engine.context import DynamicInferenceContext, MemoryMove, pool_size
from rollout.engine.controller import Prompt, TextGenerationController
from rollout.engine.kv_cache import Allocate, KVCache, zeros
from rollout.engine.model_runner import ModelRunner
from rollout.engine.model_support import inspect_model, refuse_growing_rope
from rollout.engine.sampler import stream_key
from rollout.engine.scheduler import ScheduledStep
from rollout.engine.sequences import Sequence as Sample
from rollout.errors import (
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    RequestError,
    UnsupportedModelError,
)
from rollout.record import DynamicInferenceRequestRecord
from rollout.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import (
    ENGINE_TRANSITIONS,
    STABLE_ENGINE_STATES,
    ControlSignal,
    EngineState,
    FinishReason,
    KVCacheManagementMode,
    StalenessPolicy,
    Status,
)

_COUNTED: dict[FinishReason | None, str] = {
    FinishReason.ERROR: "requests_failed",
    FinishReason.ABORT: "requests_aborted",
    FinishReason.STALE: "requests_stale",
}
MAX_FAILED_STEPS = 3
VERIFY_TOKENS = 12


class DynamicInferenceEngine:
    """Continuous batching over a paged KV cache, by the training module itself.

    Args:
        model: the `PreTrainedModel` the optimizer steps. It is called, never copied or changed.
        tokenizer: its tokenizer, or None where prompts are token ids and no text is asked for.
        config: see `InferenceConfig`.
        clock: seconds; a seam for tests.
        allocate: makes the KV pool's tensor; a seam for tests.

    Raises:
        UnsupportedModelError: the model does something the engine cannot honour; the message names it.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: InferenceConfig | None = None,
        *,
        clock: Callable[[], float] = time.time,
        allocate: Allocate = zeros,
    ) -> None:
        self.model = model
        self.config = config or InferenceConfig()
        self.state = EngineState.RUNNING
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        layout = inspect_model(model)
        self.max_sequence_length = self.config.max_sequence_length or layout.max_position_embeddings or 2048
        refuse_growing_rope(model, self.max_sequence_length)
        blocks = pool_size(self.config, layout, self.max_sequence_length)
        self.cache = KVCache(
            layout.layers, blocks, self.config.block_size_tokens, layout.kv_dtype, layout.device, allocate
        )
        self.context = DynamicInferenceContext(self.config, self.cache, clock)
        self.controller = TextGenerationController(
            model, tokenizer, layout, ModelRunner(model, layout, self.cache, self.context.scheduler.table)
        )
        self._order = 0
        self._next_request_id = 0
        self._live: dict[int, int] = {}
        self._ended: list[DynamicInferenceRequestRecord] = []
        self._failed_steps = 0
        self._dead: BaseException | None = None
        self.last_step: ScheduledStep | None = None
        self.counters = dict.fromkeys(("steps", "requests_requeued", "prompt_tokens", *_COUNTED.values()), 0)
        if self.config.verify_model:
            self._verify_model()

    # --- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
        priority: int = 0,
        metadata: Any = None,
    ) -> int:
        """Accept one prompt (and its n samples); it runs in the coming steps.

        Args:
            prompt: text, token ids, or chat messages.
            request_id: yours, or None for the engine's next.
            priority: higher runs first; equal ones in order of arrival.
            metadata: msgpack-able, returned untouched in the results.

        Returns:
            The request id.

        Raises:
            InvalidRequestError: it can never be served as asked; nothing was queued.
            EngineStateError: the engine is stopping or stopped.
        """
        params = sampling_params or SamplingParams()
        with self._lock:
            self._refuse_when_stopped()
            number = self._next_request_id if request_id is None else request_id
            tokens = self.controller.tokenize(prompt)
            try:
                leader = self._family(number, tokens, params, priority, metadata, prompt)
                self.context.scheduler.add(leader)
            except InvalidRequestError as exc:
                exc.request_id = number
                raise
            self._next_request_id = max(self._next_request_id, number + 1)
            self._order += 1
            self._live[number] = params.n
            self.counters["prompt_tokens"] += params.n * len(tokens)
            return number

    def add_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Continue an unfinished record (from `snapshot`, another engine or a checkpoint file) where it stands.

        Raises:
            InvalidRequestError: it can never be served here; nothing was queued.
        """
        with self._lock:
            self._refuse_when_stopped()
            if record[-1].generated_tokens:
                record.checkpoint()
            request = record[-1]
            request.kv_spans.clear()
            self.controller.check_tokens(request.prompt_tokens)
            if request.policy_version != self.policy_version:
                record.advance_version(self.policy_version, policy_only=True)
            scheduler = self.context.scheduler
            scheduler.add(self._sample(record, self._order))
            self._order += 1
            self._live[record.request_id] = self._live.get(record.request_id, 0) + 1
            self._next_request_id = max(self._next_request_id, record.request_id + 1)

    def abort_request(self, request_id: int, sample_index: int | None = None) -> int:
        """End a request now, in any state; its blocks are free before this returns.

        Returns:
            How many samples were ended (0: it had finished, or never was).
        """
        with self._lock:
            removed = self.context.scheduler.remove(
                lambda key: key[0] == request_id and sample_index in (None, key[1])
            )
            for sample in removed:
                self._end(sample, FinishReason.ABORT, f"RequestAbortedError: request {request_id} was aborted")
            return len(removed)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something left to do or to hand out."""
        scheduler = self.context.scheduler
        return bool(self._ended or scheduler.waiting or scheduler.num_active)

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.context.scheduler.version

    # --- the loop's only verb -----------------------------------------------------------------------------------

    def step(self) -> list[DynamicInferenceRequestRecord]:
        """Schedule, execute, update. Returns the records that have ended since the last step, each exactly once.

        Raises:
            EngineStateError: the engine is not RUNNING.
            EngineDeadError: too many steps in a row have failed.
        """
        with self._lock:
            self._refuse_unless_running()
            step = self.last_step = self.context.scheduler.schedule()
            if step is not None:
                self._run(step)
            elif not self._ended and self.has_unfinished:
                raise EngineStateError(f"no request can run, which must not happen; please report: {self.stats()}")
            return self.take_ended()

    def take_ended(self) -> list[DynamicInferenceRequestRecord]:
        """Records that have ended and that no step has returned yet: aborted or too stale between two steps."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def _run(self, step: ScheduledStep) -> None:
        scheduler = self.context.scheduler
        try:
            self._admit(step)
            sampled = self.controller.execute(step)
        except Exception as exc:  # noqa: BLE001 - whatever a model raises belongs to the requests of this step
            self._fail_step(step, exc)
            return
        except BaseException:
            scheduler.requeue_step(step)
            raise
        self._failed_steps = 0
        self.counters["steps"] += 1
        for sample in scheduler.update(step, sampled):
            self._collect(sample)

    def _admit(self, step: ScheduledStep) -> None:
        if scheduler_poisoned := self.context.scheduler.poisoned:
            self.cache.zero_blocks(scheduler_poisoned)
            scheduler_poisoned.clear()
        for leader in step.prefills:
            for sample in (leader, *leader.siblings):
                self.controller.admit(sample)

    def _fail_step(self, step: ScheduledStep, exc: Exception) -> None:
        self._failed_steps += 1
        scheduler = self.context.scheduler
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._dead = exc
            self._move(EngineState.STOPPED)
            victims = scheduler.remove(lambda key: True)
        else:
            keys = {sample.key for sample in scheduler.sequences_of(step)}
            victims = scheduler.remove(lambda key: key in keys)
        now = self._clock()
        for sample in victims:
            sample.request.add_event_error_nontransient(exc, timestamp=now)
            self._end(sample, FinishReason.ERROR, f"{type(exc).__name__}: {exc}")

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[DynamicInferenceRequest]:
        """Run prompts to their end: one merged request per sample, in the order of the prompts, samples side by side.

        Raises:
            RequestError: a request failed; the others' results are lost (use `RolloutManager` to keep them).
        """
        numbers = [self.add_request(prompt, sampling_params) for prompt in prompts]
        mine, done, others = set(numbers), {}, []
        with self.installation:
            while not mine.isdisjoint(self._live) or self._ended:
                for record in self.step():
                    if record.request_id in mine:
                        done[record.request_id, record.sample_index] = record.merge()
                    else:
                        others.append(record)
        self._ended = others
        samples = range((sampling_params or SamplingParams()).n)
        results = [done[number, index] for number in numbers for index in samples]
        for result in results:
            if result.error is not None:
                raise RequestError(f"request {result.request_id}: {result.error}", result.request_id)
        return results

    # --- lifecycle ----------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop at the step boundary; requests keep their KV and wait."""
        self._signal(ControlSignal.PAUSE, lambda: self._mark_active(Status.ACTIVE_BUT_NOT_GENERATING_TOKENS))

    def unpause(self) -> None:
        """Go on."""
        self._signal(ControlSignal.UNPAUSE, lambda: self._mark_active(Status.ACTIVE_AND_GENERATING_TOKENS))

    def suspend(self, mode: KVCacheManagementMode | None = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Give the KV cache's device memory back, as `mode` (default: the configuration's) says.

        Args:
            keep_prefix_cache: also keep cached blocks that no request holds. Pass False before the weights change:
                they could not be used afterwards.
        """
        chosen = self.config.kv_cache_management_mode if mode is None else KVCacheManagementMode(mode)
        moves: list[MemoryMove] = []

        def act() -> None:
            moves.append(self.context.suspend(chosen, keep_prefix_cache=keep_prefix_cache))
            if chosen is not KVCacheManagementMode.PERSIST:
                self.controller.runner.release_workspace()

        self._signal(ControlSignal.SUSPEND, act)
        return moves[0] if moves else MemoryMove()

    def resume(self) -> MemoryMove:
        """Have the KV cache back; leads to PAUSED."""
        moves: list[MemoryMove] = []
        self._signal(ControlSignal.RESUME, lambda: moves.append(self.context.resume()))
        return moves[0] if moves else MemoryMove()

    def stop(self) -> list[DynamicInferenceRequestRecord]:
        """End for good. Every unfinished request ends with an error; returns all records not handed out yet."""

        def act() -> None:
            for sample in self.context.scheduler.remove(lambda key: True):
                self._end(sample, FinishReason.ABORT, "RequestAbortedError: the engine was stopped")
            self.cache.drop()

        self._signal(ControlSignal.STOP, act)
        return self.take_ended()

    def wait_until(self, state: EngineState, timeout_s: float | None = None) -> None:
        """Block until the engine is in a stable state.

        Raises:
            ValueError: `state` is a transient one.
            DeadlineError: not reached within `timeout_s` (default: `control_timeout_s`).
        """
        if state not in STABLE_ENGINE_STATES:
            stable = ", ".join(sorted(each.value for each in STABLE_ENGINE_STATES))
            raise ValueError(f"wait_until({state.value}): a transient state; wait for one of {stable}")
        limit = self.config.control_timeout_s if timeout_s is None else timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: self.state is state, limit):
                raise DeadlineError(f"the engine is {self.state.value}, not {state.value}, after {limit} s")

    def weights_updated(self, version: int | None = None) -> int:
        """The weights have changed: the policy version moves (by 1, or to `version`), in any state.

        Requests that would exceed `max_staleness` are dealt with as `staleness_policy` says.

        Returns:
            The new policy version.
        """
        with self._lock:
            self._refuse_when_stopped()
            scheduler = self.context.scheduler
            scheduler.advance_version(scheduler.version + 1 if version is None else version)
            if self.config.max_staleness is not None:
                self._enforce_staleness(self.config.max_staleness)
            return scheduler.version

    def flush_prefix_cache(self) -> int:
        """Forget every cached block that no request holds; returns how many."""
        with self._lock:
            return self.context.allocator.drop_cached()

    @property
    def installation(self) -> Installation:
        """A context manager that keeps our attention in the model over many steps; each step enters it anyway."""
        return self.controller.runner.installation

    @property
    def next_request_id(self) -> int:
        """The id the next request gets that brings none."""
        return self._next_request_id

    def reserve_request_ids(self, start: int) -> None:
        """Ids below `start` are taken: the next ones given out begin there."""
        with self._lock:
            self._next_request_id = max(self._next_request_id, start)

    # --- looking at it ------------------------------------------------------------------------------------------

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        """Records of all unfinished samples, in order, independent of the running ones."""
        with self._lock:
            records = []
            for sample in self.context.scheduler:
                if sample.active:
                    self.context.scheduler.write_back(sample)
                records.append(DynamicInferenceRequestRecord.deserialize(sample.record.serialize()))
            return records

    def staleness(self) -> dict[int, int]:
        """Per unfinished request id: updates since the oldest token of its unfinished samples (0: they have none)."""
        with self._lock:
            oldest: dict[int, int] = {}
            for sample in self.context.scheduler:
                number = sample.record.request_id
                oldest[number] = max(oldest.get(number, 0), self._staleness(sample))
            return oldest

    def stats(self) -> dict[str, float]:
        """Counters since construction and present gauges, by plain names."""
        scheduler, allocator, cache = self.context.scheduler, self.context.allocator, self.cache
        return {
            "policy_version": self.policy_version,
            "requests_running": scheduler.num_active,
            "requests_waiting": scheduler.num_waiting,
            "preemptions": scheduler.preemptions,
            "preemption_tokens_recomputed": scheduler.preempted_tokens,
            "generated_tokens": scheduler.generated_tokens,
            "kv_blocks_copied": scheduler.blocks_copied,
            "kv_blocks_evicted": allocator.evictions,
            "prefill_tokens_computed": scheduler.prefill_tokens_computed,
            "prefill_tokens_saved": scheduler.prefill_tokens_saved,
            "prefix_hits_refused_version": allocator.refused_for_version,
            "kv_blocks_total": allocator.num_blocks,
            "kv_blocks_used": allocator.num_used,
            "kv_blocks_cached": allocator.num_cached,
            "kv_blocks_free": allocator.num_free,
            "kv_device_bytes": cache.device_bytes,
            "kv_host_bytes": cache.host_bytes,
            **self.counters,
        }

    # --- inside -------------------------------------------------------------------------------------------------

    def _family(
        self, number: int, tokens: list[int], params: SamplingParams, priority: int, metadata: Any, prompt: Prompt
    ) -> Sample:
        """The request's samples: the first, with the others as its unforked siblings."""
        if number in self._live:
            raise InvalidRequestError(f"request_id={number} is in use by an unfinished request; choose another")
        self.controller.check_tokens(tokens)
        params = self._clamped(number, len(tokens), params)
        # Every request has a seed, so that its random stream survives checkpoints; one it brought or the engine's next.
        seed = stream_key(self.config.seed, number) if params.seed is None else params.seed
        samples = []
        for index in range(params.n):
            request = DynamicInferenceRequest(
                request_id=number,
                sample_index=index,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_tokens=tokens,
                sampling_params=params,
                arrival_time=self._clock(),
                priority=priority,
                metadata=metadata,
                seed=seed,
                policy_version=self.policy_version,
                block_size_tokens=self.config.block_size_tokens,
                enable_prefix_caching=self.config.enable_prefix_caching,
                precomputed_block_hashes=samples[0].hashes if samples else [],
            )
            request.add_event_add_engine(timestamp=request.arrival_time)
            samples.append(self._sample(DynamicInferenceRequestRecord.from_request(request), self._order))
        samples[0].siblings = samples[1:]
        return samples[0]

    def _sample(self, record: DynamicInferenceRequestRecord, order: int) -> Sample:
        request = record[-1]
        params = request.sampling_params
        length = len(request.prompt_tokens)
        text = self.controller.completion_text(params)
        completed = request.prompt_tokens[request.original_prompt_length :]
        first = record[0].sampling_params
        for position, token in enumerate(completed, 1):
            if text is not None:
                text.push(token, may_stop=position > first.min_tokens)
        return Sample(
            record=record,
            order=order,
            tokens=np.asarray(request.prompt_tokens, np.int32),
            stop_ids=self.controller.stop_ids(params),
            max_length=length + params.max_tokens,
            min_length=length + params.min_tokens,
            hashes=request.precomputed_block_hashes,
            text=text,
            wants_prompt_logprobs=params.prompt_logprobs is not None and record[0].prompt_log_probs is None,
        )

    def _clamped(self, number: int, length: int, params: SamplingParams) -> SamplingParams:
        room = self.max_sequence_length - length
        if room < 0 or (room == 0 and params.max_tokens > 0):
            raise InvalidRequestError(
                f"request {number}: a prompt of {length} tokens leaves no room within max_sequence_length="
                f"{self.max_sequence_length}; shorten it or raise max_sequence_length"
            )
        if params.max_tokens <= room:
            return params
        warnings.warn(
            f"request {number}: max_tokens={params.max_tokens} is clamped to {room}, what max_sequence_length="
            f"{self.max_sequence_length} leaves after a prompt of {length} tokens",
            stacklevel=4,
        )
        return params.replace(max_tokens=room, min_tokens=min(params.min_tokens, room))

    def _end(self, sample: Sample, reason: FinishReason, error: str | None = None) -> None:
        self.context.scheduler.leave(sample, reason, error)
        self._collect(sample)

    def _collect(self, sample: Sample) -> None:
        record, request = sample.record, sample.request
        if (counter := _COUNTED.get(request.finish_reason)) is not None:
            self.counters[counter] += 1
        if sample.text is not None:
            record.completion_text = sample.text.text()
        else:
            record.completion_text = self.controller.detokenize(request.completion_tokens)
        record.latency = self._clock() - record[0].arrival_time
        self._ended.append(record)
        self._live[record.request_id] -= 1
        if not self._live[record.request_id]:
            del self._live[record.request_id]

    def _staleness(self, sample: Sample) -> int:
        request = sample.request
        oldest = request.policy_spans.oldest(start=request.original_prompt_length)
        return 0 if oldest is None else self.policy_version - oldest

    def _enforce_staleness(self, limit: int) -> None:
        policy = self.config.staleness_policy
        stale = [sample for sample in self.context.scheduler if self._staleness(sample) > limit]
        if not stale or policy is StalenessPolicy.MASK:
            return
        keys = {sample.key for sample in stale}
        for sample in self.context.scheduler.remove(lambda key: key in keys):
            if policy is StalenessPolicy.PARTIAL:
                self._end(sample, FinishReason.STALE)
                continue
            self.counters["requests_requeued"] += 1
            self.context.scheduler.add(self._sample(_from_prompt(sample.record, self.policy_version), sample.order))

    def _mark_active(self, status: Status) -> None:
        for leader in self.context.scheduler.active():
            for sample in (leader, *leader.siblings):
                sample.request.status = status

    def _signal(self, signal: ControlSignal, act: Callable[[], None]) -> None:
        acts_in, through, to, harmless_in = ENGINE_TRANSITIONS[signal]
        with self._lock:
            if self.state in harmless_in:
                return
            if self.state not in acts_in:
                allowed = " or ".join(sorted(state.value for state in acts_in))
                raise EngineStateError(f"{signal.value}() while {self.state.value}: allowed when {allowed}")
            before = self.state
            self._move(through)
            try:
                act()
            except BaseException:
                self._move(before)
                raise
            self._move(to)

    def _move(self, state: EngineState) -> None:
        self.state = state
        self._changed.notify_all()

    def _refuse_when_stopped(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(
                f"the engine is dead after {MAX_FAILED_STEPS} failed steps in a row, the last with "
                f"{type(self._dead).__name__}: {self._dead}; build another"
            ) from self._dead
        if self.state in (EngineState.STOPPING, EngineState.STOPPED):
            raise EngineStateError(f"the engine is {self.state.value}: it takes no more work; build another")

    def _refuse_unless_running(self) -> None:
        if self._dead is not None and self._ended:
            return
        self._refuse_when_stopped()
        if self.state is not EngineState.RUNNING:
            cure = "resume() and unpause()" if self.state is EngineState.SUSPENDED else "unpause()"
            raise EngineStateError(f"step() while {self.state.value}: call {cure} first")

    def _verify_model(self) -> None:
        """A prompt in two chunks through the paged path must give what the model's own forward gives.

        This catches state that travels between positions by another way than attention.
        """
        vocab = self.controller.layout.vocab_size
        tokens = [(7 * position + 3) % vocab for position in range(VERIFY_TOKENS)]
        size = min(VERIFY_TOKENS, self.max_sequence_length - 1)
        if size < 2 or self.context.num_blocks * self.config.block_size_tokens < size:
            return
        tokens = tokens[:size]
        paged = self.controller.runner.paged_logits(tokens, size - size // 2).float()
        expected = self.controller.forward_logits(tokens).float()
        scale = max(1.0, float(expected.abs().max()))
        tolerance = 2e-3 if self.controller.layout.kv_dtype == torch.float32 else 1e-1
        worst = float((paged - expected).abs().max()) / scale
        if not worst <= tolerance:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: {size} tokens in two chunks through the paged path differ from the model's "
                f"own forward by {worst:.3g} of the largest logit (allowed: {tolerance:g}); some layer keeps state that the "
                "engine does not see. If you know better, set InferenceConfig.verify_model=False"
            )


def _from_prompt(record: DynamicInferenceRequestRecord, version: int) -> DynamicInferenceRequestRecord:
    """The same request as if it had just arrived: its tokens are given up."""
    first = record[0]
    fresh = DynamicInferenceRequest(
        request_id=first.request_id,
        sample_index=first.sample_index,
        prompt=first.prompt,
        prompt_tokens=first.prompt_tokens,
        sampling_params=first.sampling_params,
        arrival_time=first.arrival_time,
        priority=first.priority,
        metadata=first.metadata,
        seed=first.seed,
        policy_version=version,
        block_size_tokens=first.block_size_tokens,
        enable_prefix_caching=first.enable_prefix_caching,
        precomputed_block_hashes=first.precomputed_block_hashes,
    )
    fresh.add_event_add_engine(timestamp=first.arrival_time)
    return DynamicInferenceRequestRecord.from_request(fresh)
