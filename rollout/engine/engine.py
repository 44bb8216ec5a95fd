"""One engine per rank, in the training process, running the very module the optimizer steps.

Promises:
- every accepted request ends once, as a complete record: finished, stale, aborted or failed;
- an exception inside a step fails the requests of that step, cause attached, or the one request that was just being
  admitted, and the engine goes on; after `MAX_FAILED_STEPS` in a row it declares itself dead and ends every request;
- whenever none of its calls is running, the trainer's model is exactly as the trainer left it;
- weights that the ranks share are whole between `gather_weights` and `release_weights`, and steps run only there;
- a request that was accepted while some adapters acted runs while these act, and waits while others do.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from rollout.config import InferenceConfig
from rollout.engine.admission import Admission, refuse_what_is_not_served
from rollout.engine.context import DynamicInferenceContext, MemoryMove, pool_size
from rollout.engine.controller import Prompt, TextGenerationController
from rollout.engine.forward.attention import Installation
from rollout.engine.forward.forward_key import ForwardKey
from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.forward.model_support import DEFAULT_LENGTH, inspect_model, refuse_growing_rope
from rollout.engine.lifecycle import Lifecycle
from rollout.engine.memory.kv_cache import Allocate, KVCache, zeros
from rollout.engine.plain_tensors import plain_tensors
from rollout.engine.scheduling.adapters import AdapterSwitches, Variant, described
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.engine.scheduling.step import ScheduledStep
from rollout.engine.weights.fingerprints import Fingerprints
from rollout.engine.weights.source import fully_sharded_since, refuse_sharded_since, weights_of
from rollout.errors import (
    ConfigError,
    EngineStateError,
    InvalidRequestError,
    RequestError,
    WeightsChangedError,
)
from rollout.requests.growth import Growth
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import MAX_VERSION
from rollout.sampling_params import SamplingParams
from rollout.state import (
    ControlSignal,
    EngineState,
    FinishReason,
    KVCacheManagementMode,
    Mode,
    StalenessPolicy,
    Status,
)
from rollout.threads.fair_lock import FairLock
from rollout.threads.interrupts import interrupt_deferred
from rollout.threads.turns import Turns

_COUNTED: dict[FinishReason | None, str] = {
    FinishReason.ERROR: "requests_failed",
    FinishReason.ABORT: "requests_aborted",
    FinishReason.STALE: "requests_stale",
}
MAX_FAILED_STEPS = 3
VERIFY_TOKENS = 12

T = TypeVar("T")


class DynamicInferenceEngine:
    """Continuous batching over a paged KV cache, by the training module itself.

    Args:
        model: the `PreTrainedModel` the optimizer steps, also wrapped in DDP, FSDP1 or torch.compile, or sharded by FSDP2
            (then every rank builds its engine at the same time). It is called, never changed, and copied only where
            `inference_dtype` or `inference_device` ask for it.
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
        self.config = config or InferenceConfig()
        with plain_tensors():
            self._begin(model, tokenizer, clock, allocate)

    def _begin(self, model: nn.Module, tokenizer: Any, clock: Callable[[], float], allocate: Allocate) -> None:
        self._given = model
        self._autocast = _dtype(self.config.autocast_dtype)
        self._clock = clock
        self._lock = FairLock()
        self._lifecycle = Lifecycle(self._lock)
        self.turns = Turns()
        """Whoever steps until requests have ended takes one."""
        self._made_with = tokenizer, allocate
        self._rebuild_due = False
        self._find_weights()
        with self.whole_weights(), self._under_autocast():
            self._build()

    def _find_weights(self) -> None:
        self.weights = weights_of(
            self._given,
            dtype=_dtype(self.config.inference_dtype),
            device=None if self.config.inference_device is None else torch.device(self.config.inference_device),
        )
        self.model = self.weights.trained
        self.training_device = next(self.model.parameters()).device
        """Where the trainer wants its batches."""
        self._dtype = next(self.model.parameters()).dtype
        fingerprints = self.config.weight_fingerprints
        self._fingerprints = (
            None if fingerprints == "off" else Fingerprints(self.weights.tensors, full=fingerprints == "full")
        )
        self._weights_are_known = False

    def _build(self) -> None:
        model, clock = self.weights.sampled, self._clock
        tokenizer, allocate = self._made_with
        layout = inspect_model(model, self.config.max_sequence_length)
        self.max_sequence_length = self.config.max_sequence_length or layout.max_position_embeddings or DEFAULT_LENGTH
        refuse_growing_rope(model, self.max_sequence_length)
        blocks = pool_size(self.config, layout, self.max_sequence_length)
        self.cache = KVCache(
            layout.layers, blocks, self.config.block_size_tokens, layout.kv_dtype, layout.device, allocate
        )
        self.context = DynamicInferenceContext(self.config, self.cache, clock)
        self.controller = TextGenerationController(
            model,
            tokenizer,
            layout,
            ModelRunner(
                model,
                layout,
                self.cache,
                self.context.scheduler.table,
                fused=self.config.fused_forward,
                # A graph holds the addresses of weights, and those that are gathered lie elsewhere each time.
                graphed_rows=self.config.max_requests * (self.config.cuda_graphs and not self.weights.collective),
                autocast=self._autocast,
            ),
        )
        self._adapters = AdapterSwitches(model)
        self._forward = ForwardKey(model, layout.device, self._autocast)
        self._order = 0
        self._next_request_id = 0
        self._live: dict[int, dict[int, Sample]] = {}
        """Unfinished samples, by request and index."""
        self._ended: list[DynamicInferenceRequestRecord] = []
        self._failed_steps = 0
        self.last_step: ScheduledStep | None = None
        self.on_move: Callable[[], None] | None = None
        """Called after every control call and weight update, and when the engine dies, by the thread that did it; also
        when nothing has changed. That thread may hold the engine's lock (`step`, `locked`), so this must not wait for
        another thread, only wake it."""
        self.counters = dict.fromkeys(("steps", "requests_requeued", "prompt_tokens", *_COUNTED.values()), 0)
        self._admission = Admission(self.config, self.controller, self.max_sequence_length, clock)
        if self.config.verify_model:
            room = min(self.max_sequence_length, blocks * self.config.block_size_tokens)
            self.controller.verify_model(min(VERIFY_TOKENS, room))

    def is_of(self, model: nn.Module) -> bool:
        """Whether it was built of this model, or of its wrapper."""
        return model is self.model or model is self._given

    def sharded_since(self) -> bool:
        """Whether the trainer has sharded the weights by FSDP2 since the engine was built; then `rebuild` is due.

        They are gathered as those of FSDP2 from here on; nothing here speaks to another rank.
        """
        if fully_sharded_since(self.weights):
            with self._lock:
                self._find_weights()
                self._rebuild_due = True
        return self._rebuild_due

    def rebuild(self) -> None:
        """Build all but the weights anew, of the model as it is now: its device, and the dtype it computes in, may be
        others. Every rank calls it inside `whole_weights()`. Unfinished samples go on, their KV is computed again.

        Raises:
            UnsupportedModelError, InvalidRequestError: not with this model; everything is as it was before.
        """
        with self._lock, interrupt_deferred():
            records, version, before = self.snapshot(), self.policy_version, dict(vars(self))
            context, changes = self.context, self.context.allocator.changes
            context.suspend(KVCacheManagementMode.RECOMPUTE, keep_prefix_cache=False)
            try:
                with plain_tensors(), self._under_autocast():
                    self._build()
                for name in ("_order", "_next_request_id", "_ended", "counters", "on_move"):
                    setattr(self, name, before[name])
                self.context.allocator.changes = changes
                self.context.scheduler.advance_version(version)
                for record in records:
                    self.add_record(record)
            except BaseException:
                vars(self).update(before)
                context.resume()
                raise
            self._rebuild_due = False

    def _under_autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._autocast is None else torch.autocast(self.training_device.type, self._autocast)

    # --- weights ------------------------------------------------------------------------------------------------

    def gather_weights(self) -> None:
        """Have whole, current weights. Where they are spread over the ranks, every rank calls it."""
        with self.locked():
            self.weights.gather()

    def release_weights(self) -> None:
        """Leave the weights as the trainer had them. Speaks to nobody; harmless when repeated."""
        with self.locked():
            self.weights.release()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """A block in which steps can run; where the weights are spread over the ranks, every rank enters it."""
        if self.weights.collective and self.weights.ready:
            yield
            return
        self.gather_weights()
        try:
            yield
        finally:
            self.release_weights()

    def check_weights(self) -> None:
        """Refuse weights that nobody has said to have changed. The first ones are as they are when it is first called: a
        checkpoint may be loaded after the engine was built.

        Raises:
            WeightsChangedError: some are not what they were at the last update; names them.
            EngineStateError: they were sharded, or moved to another device or dtype, after the engine was built.
        """
        refuse_sharded_since(self.weights)
        self._refuse_moved()
        if self._fingerprints is None:
            return
        with self._lock:
            if not self._weights_are_known:
                self._note_weights()
            changed, stale = self._fingerprints.changed(), self.weights.stale()
        if changed:
            raise WeightsChangedError(
                f"{_some(changed)} changed since policy version {self.policy_version} without a step of an attached "
                "optimizer: call rollout.weights_updated() where that was meant, or undo it; "
                "InferenceConfig.weight_fingerprints='off' looks no more",
                tuple(changed),
            )
        if stale:
            raise WeightsChangedError(
                f"the copy that samples is not what the trainer has, at policy version {self.policy_version}: "
                f"{_some(stale)}; call rollout.weights_updated(), which copies anew",
                tuple(stale),
            )

    def _refuse_moved(self) -> None:
        if self.weights.sampled is not self.model or self.weights.collective:
            return
        first = next(self.model.parameters())
        if first.dtype != self._dtype:
            raise EngineStateError(
                f"{type(self.model).__name__} was {self._dtype} when the rollout was built, and so is its KV cache, and is "
                f"{first.dtype}: build it after model.to(), or undo that (InferenceConfig.inference_dtype samples with a "
                "copy of another dtype)"
            )
        if (device := first.device) != self.training_device:
            raise EngineStateError(
                f"{type(self.model).__name__} was on {self.training_device} when the rollout was built, and is on {device}: "
                "build it after model.to(), accelerator.prepare or Trainer(...), which move the model, or move it back"
            )

    def _note_weights(self) -> None:
        if self._fingerprints is not None:
            self._fingerprints.take()
            self._weights_are_known = True

    # --- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
        priority: int = 0,
        metadata: Any = None,
        samples: Sequence[int] | None = None,
        arrival_time: float | None = None,
    ) -> int:
        """Accept one prompt (and its n samples); it runs in the coming steps.

        Args:
            prompt: text, token ids, or chat messages.
            request_id: yours, or None for the engine's next.
            priority: higher runs first; equal ones in order of arrival.
            metadata: msgpack-able, returned untouched in the results.
            samples: those of the n samples to compute, others of the same request may be here; None: all.
            arrival_time: seconds by the engine's clock, from which times are counted; None: now.

        Returns:
            The request id.

        Raises:
            InvalidRequestError: it can never be served as asked; nothing was queued.
            EngineStateError: the engine is stopping or stopped.
        """
        params = sampling_params or SamplingParams()
        with self._lock, interrupt_deferred():
            self._lifecycle.refuse_when_stopped()
            number = self._next_request_id if request_id is None else request_id
            tokens = self.controller.tokenize(prompt)
            try:
                wanted = self._wanted(number, params.n, samples)
                self.context.scheduler.check_samples(number, len(wanted))
                leader = self._admission.family(
                    number, tokens, params, order=self._order, version=self.policy_version, priority=priority,
                    metadata=metadata, prompt=prompt if isinstance(prompt, str) else None, indices=wanted,
                    arrival_time=arrival_time,
                )  # fmt: skip
                self.context.scheduler.add(leader, self._variant())
            except InvalidRequestError as exc:
                exc.request_id = number
                raise
            self._next_request_id = max(self._next_request_id, number + 1)
            self._order += 1
            self._accepted(leader, *leader.siblings)
            self.counters["prompt_tokens"] += len(wanted) * len(tokens)
            return number

    def _accepted(self, *samples: Sample) -> None:
        for sample in samples:
            number, index = sample.key
            self._live.setdefault(number, {})[index] = sample

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The tokens of a prompt that `add_request` would accept; nothing is queued.

        Raises:
            InvalidRequestError, ConfigError, TypeError: it would refuse it.
        """
        params = sampling_params or SamplingParams()
        number = self._next_request_id
        tokens = self.controller.tokenize(prompt)
        clamped = self._admission.check(number, tokens, params)
        self.controller.completion_text(clamped)
        self.context.scheduler.check_samples(number, params.n)
        self.context.scheduler.check_room(number, len(tokens), len(tokens) + clamped.max_tokens)
        return tokens

    def check_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Nothing is queued.

        Raises:
            InvalidRequestError, ConfigError: no engine like this one could go on with it.
        """
        refuse_what_is_not_served(record)
        self.check_request(record[0].prompt_tokens, record[0].sampling_params)

    def _wanted(self, number: int, n: int, samples: Sequence[int] | None) -> Sequence[int]:
        live = self._live.get(number, {}).keys()
        if samples is None:
            if live:
                raise InvalidRequestError(f"request_id={number} is in use by an unfinished request; choose another")
            return range(n)
        if not samples or len(set(samples)) < len(samples) or not 0 <= min(samples) <= max(samples) < n:
            raise InvalidRequestError(f"samples={list(samples)!r}: must be different ones of the n={n}, at least one")
        if not live.isdisjoint(samples):
            raise InvalidRequestError(
                f"request {number} samples {sorted(live & set(samples))} are here already; abort them first"
            )
        return samples

    def add_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Continue an unfinished record (from `snapshot`, another engine or a checkpoint file) where it stands.

        Raises:
            InvalidRequestError: it can never be served here; nothing was queued.
        """
        with self._lock, interrupt_deferred():
            self._lifecycle.refuse_when_stopped()
            number = record.request_id
            if record.sample_index in self._live.get(number, ()):
                raise InvalidRequestError(f"request {number} sample {record.sample_index} is here already", number)
            sample = self._admission.continued(record, self._order, self.policy_version)
            self.context.scheduler.add(sample, self._variant())
            self._order += 1
            self._accepted(sample)
            self._next_request_id = max(self._next_request_id, number + 1)

    def abort_request(self, request_id: int, sample_index: int | None = None) -> int:
        """End a request now, in any state; its blocks are free before this returns.

        Returns:
            How many samples were ended (0: it had finished, or never was).
        """
        with self._lock, interrupt_deferred():
            removed = self.context.scheduler.remove(lambda key: key[0] == request_id and sample_index in (None, key[1]))
            for sample in removed:
                self._end(sample, FinishReason.ABORT, f"RequestAbortedError: request {request_id} was aborted")
            return len(removed)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something left to do or to hand out, with the adapters that act now."""
        return bool(self._ended or self.context.scheduler.has_work(self._adapters.variant))

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.context.scheduler.version

    # --- the loop's only verb -----------------------------------------------------------------------------------

    def step(self) -> list[DynamicInferenceRequestRecord]:
        """Schedule, execute, update. Returns the records that have ended since the last step, each exactly once.

        Requests that were accepted while other adapters acted than now wait until these act again; those that were
        running give up their KV then, what is left of it in the prefix cache excepted.

        Raises:
            EngineStateError: the engine is not RUNNING.
            EngineDeadError: too many steps in a row have failed.
        """
        with self._lock:
            if self._lifecycle.cause_of_death is not None and self._ended:
                return self.take_ended()
            self._lifecycle.refuse_unless_running()
            if not self.weights.ready:
                self._refuse_scattered_weights()
                self.weights.gather()
            with interrupt_deferred(), plain_tensors():
                self._step()
            return self.take_ended()

    def _step(self) -> None:
        try:
            self._follow_forward()
            step = self.last_step = self.context.scheduler.schedule()
            if step is None and not self._ended and self.has_unfinished:
                raise EngineStateError(f"no request can run, which must not happen; please report: {self.stats()}")
        except BaseException as exc:
            self._start_over(exc, half_taken=False)
            if not isinstance(exc, Exception):
                raise
        else:
            if step is not None:
                self._run(step)

    def _refuse_scattered_weights(self) -> None:
        if self.weights.collective:
            raise EngineStateError(
                f"{type(self.model).__name__} has its weights spread over the ranks, where no step can run: generate by "
                "RolloutManager, which gathers them, or step inside `with engine.whole_weights():` on every rank"
            )

    def _variant(self) -> Variant:
        return self._adapters.look(self.installation.handovers)

    def _follow_forward(self) -> None:
        scheduler, variant = self.context.scheduler, self._variant()
        forward = self._forward.look(self.installation.handovers)
        if variant != scheduler.variant:
            # What a forward has bound of the model may be of the other adapters.
            self.installation.handovers += 1
        if (variant, forward) != (scheduler.variant, scheduler.forward):
            scheduler.switch(variant, forward)

    def take_ended(
        self, keys: Callable[[tuple[int, int]], bool] = lambda key: True
    ) -> list[DynamicInferenceRequestRecord]:
        """Records that have ended and that no step has returned yet: aborted or too stale between two steps.

        Args:
            keys: which (request_id, sample_index) to take; the others stay for the next step.
        """
        with self._lock:
            ended: list[DynamicInferenceRequestRecord] = []
            stay: list[DynamicInferenceRequestRecord] = []
            for record in self._ended:
                (ended if keys((record.request_id, record.sample_index)) else stay).append(record)
            self._ended = stay
            return ended

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Several calls at one step boundary: no step of another thread comes between them."""
        with self._lock, interrupt_deferred(), plain_tensors():
            yield

    @property
    def wanted(self) -> bool:
        """Inside `locked()`: whether another thread waits for a step boundary."""
        return self._lock.wanted

    def _run(self, step: ScheduledStep) -> None:
        scheduler = self.context.scheduler
        try:
            self._admit(step)
            sampled = self.controller.runner.execute(step)
        except Exception as exc:  # noqa: BLE001 - whatever a model raises belongs to the requests of this step
            self._fail_step(step, exc)
            return
        except BaseException as exc:
            scheduler.requeue_step(step, exc)
            raise
        try:
            ended = scheduler.update(step, sampled)
        except BaseException as exc:
            self._start_over(exc, half_taken=True)
            if not isinstance(exc, Exception):
                raise
            return
        self._failed_steps = 0
        self.counters["steps"] += 1
        for sample in ended:
            self._collect(sample)

    def _admit(self, step: ScheduledStep) -> None:
        if scheduler_poisoned := self.context.scheduler.blocks.poisoned:
            self.cache.zero_blocks(scheduler_poisoned)
            scheduler_poisoned.clear()
        for leader in step.prefills:
            for sample in (leader, *leader.siblings):
                self.controller.admit(sample)

    def _fail_step(self, step: ScheduledStep, exc: Exception) -> None:
        keys = {sample.key for sample in self.context.scheduler.sequences_of(step)}
        self._fail(self.context.scheduler.remove(lambda key: key in keys), exc)
        self._count_failed_step(exc)

    def _start_over(self, exc: BaseException, *, half_taken: bool) -> None:
        """An exception in `schedule` or `update` has left queues, slots and blocks in disagreement: make them anew.

        Whoever was just being admitted fails alone, and the others compute their KV again; otherwise all that held a slot
        fail. Nobody fails where it was no error (Ctrl-C).
        """
        scheduler = self.context.scheduler
        family = [] if scheduler.admitting is None else [scheduler.admitting, *scheduler.admitting.siblings]
        everybody = [sample for samples in self._live.values() for sample in samples.values()]
        guilty = 0
        for sample in scheduler.start_over(everybody, half_taken=half_taken):
            if sample.request.finish_reason is not None:
                self._collect(sample)
            elif isinstance(exc, Exception) and (not family or sample in family):
                self._fail([sample], exc)
                guilty += 1
            else:
                self._compute_again(sample, exc)
        # Where one request is to blame, the next step has one less, and so there is an end of it.
        if isinstance(exc, Exception) and not (family and guilty):
            self._count_failed_step(exc)

    def _compute_again(self, sample: Sample, why: BaseException) -> None:
        now = self._clock()
        sample.request.add_event_error_transient(why, timestamp=now)
        sample.request.add_event_evict(timestamp=now)
        continued = partial(self._admission.continued, sample.record, sample.order, self.policy_version)
        self._replace(sample, "cannot go on", continued)

    def _replace(self, sample: Sample, what: str, build: Callable[[], Sample]) -> bool:
        """Queue another sample in place of one that is in no queue; where that raises, this one fails with it."""
        try:
            fresh = build()
            self.context.scheduler.add(fresh, sample.variant)
        except Exception as exc:  # noqa: BLE001 - whatever it raises harms this request alone
            number, index = sample.key
            error = f"RequestFailedError: request {number} sample {index} {what}: {type(exc).__name__}: {exc}"
            self._end(sample, FinishReason.ERROR, error)
            return False
        self._accepted(fresh)
        return True

    def _count_failed_step(self, exc: Exception) -> None:
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._lifecycle.die(exc)
            self._fail(self.context.scheduler.remove(lambda key: True), exc)
            self.cache.drop()
            self._moved()

    def _fail(self, samples: Sequence[Sample], exc: Exception) -> None:
        now = self._clock()
        for sample in samples:
            sample.request.add_event_error_nontransient(exc, timestamp=now)
            self._end(sample, FinishReason.ERROR, f"{type(exc).__name__}: {exc}")

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[DynamicInferenceRequest]:
        """Run prompts to their end: one merged request per sample, in the order of the prompts, samples side by side.

        A second thread's call waits for the first one's end.

        What other requests end meanwhile, the next `step` hands out; whatever interrupts this call, everything it has.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing of this call was queued.
            EngineStateError: the engine is not RUNNING; nothing of this call was queued.
            WeightsChangedError: see `check_weights`; nothing of this call was queued.
            RequestError: a request failed; the others' results are lost (use `RolloutManager` to keep them).
        """
        with self.turns.taken(), plain_tensors():
            return self._generate(prompts, sampling_params)

    def _generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None
    ) -> list[DynamicInferenceRequest]:
        self._lifecycle.refuse_unless_running()
        self.check_weights()
        numbers = self._add_all(prompts, sampling_params)
        mine = set(numbers)
        done: dict[tuple[int, int], DynamicInferenceRequestRecord] = {}
        others: list[DynamicInferenceRequestRecord] = []
        try:
            with self.whole_weights(), self.installation:
                while not mine.isdisjoint(self._live) or self._ended:
                    self.refuse_when_nothing_can_run()
                    with interrupt_deferred():
                        for record in self.step():
                            if record.request_id in mine:
                                done[record.request_id, record.sample_index] = record
                            else:
                                others.append(record)
        except BaseException:
            others += done.values()
            raise
        finally:
            self._ended = others + self._ended
        samples = range((sampling_params or SamplingParams()).n)
        results = [done[number, index].merge() for number in numbers for index in samples]
        for result in results:
            if result.error is not None:
                raise RequestError(f"request {result.request_id}: {result.error}", result.request_id)
        return results

    def _add_all(self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None) -> list[int]:
        numbers: list[int] = []
        try:
            for prompt in prompts:
                numbers.append(self.add_request(prompt, sampling_params))
        except BaseException:
            for number in numbers:
                self.abort_request(number)
            self._ended = [record for record in self._ended if record.request_id not in numbers]
            raise
        return numbers

    # --- lifecycle ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Where the engine stands."""
        return self._lifecycle.state

    def refuse_when_stopped(self) -> None:
        """Raises: EngineDeadError, EngineStateError: the engine is dead, or stopping or stopped."""
        self._lifecycle.refuse_when_stopped()

    def refuse_when_nothing_can_run(self) -> None:
        """Raises: EngineStateError: all that is unfinished waits for adapters that do not act now, or for nothing."""
        if self._live and not self.has_unfinished:
            waiting = {sample.variant for sample in self.context.scheduler}
            if not waiting:
                raise EngineStateError(
                    f"requests {sorted(self._live)[:4]} are unfinished and in no queue, which must not happen; please report"
                )
            raise EngineStateError(
                f"{self.context.scheduler.num_waiting} samples in flight were accepted with other adapters (acting then: "
                f"{'; '.join(map(described, waiting))}) than act now ({described(self._adapters.variant)}): leave the "
                "`with adapter(...)` block or switch back, and they go on; or abort them"
            )

    @contextmanager
    def adapter_switch(self, what: str | None = None) -> Iterator[None]:
        """A block that changes which adapters of the model act: at a step boundary, with no step meanwhile.

        Args:
            what: for the signature's sake; there is nobody to tell (see `RolloutManager.adapter_switch`).
        """
        with self.locked():
            try:
                yield
            finally:
                self.installation.handovers += 1
        self._moved()

    def pause(self) -> None:
        """Stop at the step boundary; requests keep their KV and wait."""
        self._signal(ControlSignal.PAUSE, self._pause_active)

    def unpause(self) -> None:
        """Go on."""
        self._signal(ControlSignal.UNPAUSE, lambda: self._mark_active(Status.ACTIVE_AND_GENERATING_TOKENS))

    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Give the KV cache's device memory back, as `mode` (default: the configuration's) says.

        Args:
            keep_prefix_cache: also keep cached blocks that no request holds. Pass False before the weights change:
                they could not be used afterwards.

        Raises:
            ConfigError: there is no such mode.
            EngineStateError: the engine is not PAUSED.
        """
        chosen = KVCacheManagementMode.parse(mode) or self.config.kv_cache_management_mode

        def act() -> MemoryMove:
            move = self.context.suspend(chosen, keep_prefix_cache=keep_prefix_cache)
            if chosen is not KVCacheManagementMode.PERSIST:
                self.controller.runner.release_workspace()
            return move

        return self._signal(ControlSignal.SUSPEND, act) or MemoryMove()

    def resume(self) -> MemoryMove:
        """Have the KV cache back; leads to PAUSED."""
        return self._signal(ControlSignal.RESUME, self.context.resume) or MemoryMove()

    def stop(self) -> list[DynamicInferenceRequestRecord]:
        """End for good. Every unfinished request ends with an error; returns all records not handed out yet."""

        def act() -> None:
            for sample in self.context.scheduler.remove(lambda key: True):
                self._end(sample, FinishReason.ABORT, "RequestAbortedError: the engine was stopped")
            self.cache.drop()

        self._signal(ControlSignal.STOP, act)
        return self.take_ended()

    def _signal(self, signal: ControlSignal, act: Callable[[], T]) -> T | None:
        try:
            with plain_tensors():
                return self._lifecycle.signal(signal, act)
        finally:
            self._moved()

    def _moved(self) -> None:
        if self.on_move is not None:
            self.on_move()

    def wait_until(self, state: EngineState, timeout_s: float | None = None) -> None:
        """Block until the engine is in a stable state.

        Raises:
            ValueError: `state` is a transient one.
            DeadlineError: not reached within `timeout_s` (default: `control_timeout_s`).
        """
        self._lifecycle.wait_until(state, self.config.control_timeout_s if timeout_s is None else timeout_s)

    def weights_updated(self, version: int | None = None) -> int:
        """The weights have changed: the policy version moves (by 1, or to `version`), in any state.

        KV of the weights before is not shared any more, also where `version` is the present one. Requests that would
        exceed `max_staleness` are dealt with as `staleness_policy` says; none of them makes this raise.

        Returns:
            The new policy version.

        Raises:
            ConfigError: `version` is below the present one, or no version.
        """
        with self.locked():
            self._lifecycle.refuse_when_stopped()
            scheduler = self.context.scheduler
            if version is not None and (type(version) is not int or version > MAX_VERSION):
                raise ConfigError(f"weights_updated({version!r}): must be an integer of at most {MAX_VERSION}")
            if version is not None and version < scheduler.version:
                raise ConfigError(
                    f"weights_updated({version}): the policy version is {scheduler.version} and only rises; build "
                    "another engine to go back"
                )
            self.weights.changed()
            self._note_weights()
            self.installation.handovers += 1
            torch.clear_autocast_cache()
            scheduler.advance_version(scheduler.version + 1 if version is None else version)
            if self.config.max_staleness is not None:
                self._enforce_staleness(self.config.max_staleness)
            updated = scheduler.version
        self._moved()
        return updated

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
        """Records of all unfinished samples, in order, independent of the running ones.

        Raises:
            EngineStateError: some wait for other adapters than act now, which no record says.
        """
        with self._lock:
            variant = self._variant()
            foreign = [sample for sample in self.context.scheduler if sample.variant != variant]
            if foreign:
                raise EngineStateError(
                    f"snapshot() with {len(foreign)} samples accepted with other adapters (acting then: "
                    f"{described(foreign[0].variant)}) than act now ({described(variant)}): save when all in flight are of "
                    "one, outside of `with adapter(...)`"
                )
            records = []
            for sample in self.context.scheduler:
                if sample.active:
                    self.context.scheduler.table.write_back(sample)
                records.append(DynamicInferenceRequestRecord.deserialize(sample.record.serialize()))
            return records

    def progress(self, known: Mapping[tuple[int, int], tuple[int, int, int]]) -> list[Growth]:
        """Tokens that unfinished samples have gained. Costs a few microseconds per sample and copies only new tokens.

        Args:
            known: (request_id, sample_index) → (completion tokens known, the prompt's policy version they came with,
                events known).

        Returns:
            One row per sample of `known` that has more, or that has started afresh (`StalenessPolicy.REQUEUE`): that
            one counts from 0 again, and may have no token yet.
        """
        with self._lock:
            return self.context.scheduler.growths(known)

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

    def _end(self, sample: Sample, reason: FinishReason, error: str | None = None) -> None:
        self.context.scheduler.leave(sample, reason, error)
        self._collect(sample)

    def _collect(self, sample: Sample) -> None:
        record, request = sample.record, sample.request
        if (counter := _COUNTED.get(request.finish_reason)) is not None:
            self.counters[counter] += 1
        record.completion_text = self._text(sample)
        record.latency = self._clock() - record[0].arrival_time
        self._ended.append(record)
        self._live[record.request_id].pop(record.sample_index, None)
        if not self._live[record.request_id]:
            del self._live[record.request_id]

    def _text(self, sample: Sample) -> str | None:
        if sample.text is not None:
            return str(sample.text.text())
        request = sample.request
        try:
            return self.controller.detokenize(request.completion_tokens)
        except Exception as exc:  # noqa: BLE001 - a tokenizer that cannot read a token harms this request's text alone
            warnings.warn(
                f"request {request.request_id} sample {sample.record.sample_index} has tokens and no text: the tokenizer "
                f"raised {type(exc).__name__}: {exc}",
                stacklevel=2,
            )
            return None

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
            fresh = partial(self._admission.from_prompt, sample.record, sample.order, self.policy_version)
            self.counters["requests_requeued"] += self._replace(
                sample, "is too stale and cannot start again from its prompt", fresh
            )

    def _pause_active(self) -> None:
        self._mark_active(Status.ACTIVE_BUT_NOT_GENERATING_TOKENS)
        now = self._clock()
        for leader in self.context.scheduler.active():
            for sample in (leader, *leader.siblings):
                sample.request.add_event_pause(timestamp=now)

    def _mark_active(self, status: Status) -> None:
        for leader in self.context.scheduler.active():
            for sample in (leader, *leader.siblings):
                sample.request.status = status


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
