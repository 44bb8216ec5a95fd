"""Read access to an engine's state: unfinished samples with their progress, counters, gauges and explanations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import SimpleNamespace

from rollout.config import InferenceConfig
from rollout.engine.forward.model_watch import ModelWatch
from rollout.engine.parts.context import DynamicInferenceContext
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.parts.explain import Explanation, explain
from rollout.engine.parts.ledger import Ledger
from rollout.engine.parts.lifecycle import Lifecycle
from rollout.engine.parts.stepper import Stepper
from rollout.engine.scheduling.adapters import described
from rollout.engine.scheduling.sequences import rank
from rollout.engine.weights.guard import WeightsGuard
from rollout.errors import EngineStateError
from rollout.observe.metric_table import ENGINE_STATS
from rollout.requests.delta import SampleDelta, growth
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.state import EngineState

_HOLD_LEVELS = dict.fromkeys(EngineState, 1) | {EngineState.RUNNING: 0, EngineState.SUSPENDED: 2}
_SHOWN = 4
"""The number of samples, oldest first, that `describe` lists."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """The part of one engine that reports the engine's state."""

    _config: InferenceConfig
    _max_sequence_length: int
    _lifecycle: Lifecycle
    _guard: WeightsGuard
    _controller: TextGenerationController
    _context: DynamicInferenceContext
    _ledger: Ledger
    _stepper: Stepper
    _watch: ModelWatch

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would have work to do or records to return, under the currently active adapters."""
        return bool(self._ledger.ended or self._context.scheduler.has_work(self._watch.variant()))

    @property
    def resized(self) -> bool:
        """Whether the vocabulary size has changed since the engine was built, so that `rebuild` must be called."""
        changed = self._guard.resized(self._controller.layout.vocab_size) is not None
        return changed and self._guard.source.sampled is self._guard.model

    def refuse_when_nothing_can_run(self) -> None:
        """Raise `EngineStateError` if there are unfinished samples, but all of them wait for inactive adapters."""
        if not self._ledger.live or self.has_unfinished:
            return
        waiting = {sample.variant for sample in self._context.scheduler}
        if not waiting:
            raise EngineStateError(
                f"requests {sorted(self._ledger.live)[:4]} are unfinished and in no queue, which must not happen; please "
                "report"
            )
        raise EngineStateError(
            f"{self._context.scheduler.num_waiting} samples in flight were accepted under other adapters (active then: "
            f"{'; '.join(map(described, waiting))}; active now: {described(self._watch.variant())}): leave the "
            "`with adapter(...)` block or switch back, and they continue; or abort them"
        )

    @property
    def acting_adapters(self) -> str:
        """The names of the model's active adapters, for use in messages."""
        with self._lifecycle.lock:
            return described(self._watch.variant())

    def explain(self) -> Explanation:
        """Wait for the current step, then return a printable report on how the engine runs the model on this machine."""
        with self._lifecycle.locked():
            return explain(
                self._controller.runner, self._context.scheduler, self._config, self._guard.source,
                self._max_sequence_length,
            )  # fmt: skip

    def describe(self) -> Iterator[str]:
        """Yield lines of text on sample counts, KV blocks, the last step and the oldest samples, without taking a lock."""
        scheduler, allocator, step = self._context.scheduler, self._context.allocator, self._stepper.last
        unfinished = self._ledger.unfinished()
        running = scheduler.num_active
        yield (
            f"  samples: {running} running, {len(unfinished) - running} waiting, {len(self._ledger.ended)} finished and not "
            f"returned; {self._ledger.counters['steps']} steps; model {'whole' if self._guard.source.ready else 'sharded'}"
        )
        yield (
            f"  KV blocks: {allocator.num_used} used, {allocator.num_cached} cached, {allocator.num_free} free, of "
            f"{allocator.num_blocks}; {'on' if self._controller.runner.cache.on_device else 'not on'} the device"
        )
        if step is not None:
            yield f"  last step: {step.num_decodes} decodes, {len(step.prefills)} prefills, {step.num_tokens} tokens"
        for sample in sorted(unfinished, key=rank)[:_SHOWN]:
            request, number = sample.request, sample.key
            yield (
                f"  request {number[0]} sample {number[1]}: {request.status.name.lower()}, {len(sample.tokens)} of at most "
                f"{sample.max_length} tokens"
            )

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        """Return copies of the records of all unfinished samples, in scheduling order.

        Raises:
            EngineStateError: some samples wait for inactive adapters, which a record does not store.
        """
        with self._lifecycle.lock:
            scheduler, variant = self._context.scheduler, self._watch.variant()
            foreign = [sample for sample in scheduler if sample.variant != variant]
            if foreign:
                raise EngineStateError(
                    f"snapshot() with {len(foreign)} samples accepted under other adapters (active then: "
                    f"{described(foreign[0].variant)}; active now: {described(variant)}): save when all samples in flight "
                    "belong to the active one, outside of `with adapter(...)`"
                )
            records = []
            for sample in scheduler:
                if sample.active:
                    scheduler.table.write_back(sample)
                records.append(DynamicInferenceRequestRecord.deserialize(sample.record.serialize()))
            return records

    def progress(self, known: Mapping[tuple[int, int], tuple[int, int, int]]) -> list[SampleDelta]:
        """Return the new tokens of unfinished samples since the state `known`. This takes a few microseconds per sample.

        Args:
            known: the state that the caller already has, by (request_id, sample_index). A state is the number of completion
                tokens, the policy version of the prompt, and the number of events.

        Returns:
            One delta for each sample of `known` that has new tokens, or that restarted from its prompt
            (`StalenessPolicy.REQUEUE`) and therefore counts its tokens from 0 again.
        """
        with self._lifecycle.lock:
            table, live = self._context.scheduler.table, self._ledger.live
            grown = []
            for (number, index), have in known.items():
                sample = live.get(number, {}).get(index)
                if sample is None:
                    continue
                each = table.growth(sample, *have) if sample.active else growth(sample.record, *have)
                if each.token_ids or each.start < have[0]:
                    grown.append(each)
            return grown

    def staleness(self) -> dict[int, int]:
        """Return the staleness of each unfinished request, by request id.

        Staleness is the number of weight updates since the oldest completion token of any of the request's samples. It is 0
        if no sample has tokens yet.
        """
        with self._lifecycle.lock:
            largest: dict[int, int] = {}
            for sample in self._context.scheduler:
                number = sample.key[0]
                largest[number] = max(largest.get(number, 0), self._ledger.staleness(sample))
            return largest

    @property
    def counters(self) -> dict[str, int]:
        """The numbers of steps, prompt tokens, pool shrinks, and failed, aborted, stale and requeued requests."""
        return self._ledger.counters

    def stats(self) -> dict[str, float]:
        """Return the counters since the engine was built and the current gauges, by their names in `ENGINE_STATS`."""
        scheduler, runner, allocator = self._context.scheduler, self._controller.runner, self._context.allocator
        sources = SimpleNamespace(
            scheduler=scheduler,
            queues=SimpleNamespace(**scheduler.counters),
            allocator=allocator,
            states=allocator.states,
            host=allocator.host,
            cache=runner.cache,
            runner=runner,
            state_pool=runner.states,
            images=runner.vision.features,
            ledger=SimpleNamespace(**self._ledger.counters),
            engine=SimpleNamespace(
                oldest_request_timestamp_s=self._ledger.oldest_arrival(), hold_level=_HOLD_LEVELS[self._lifecycle.state]
            ),
        )
        return {name: attrgetter(metric.read)(sources) for name, metric in ENGINE_STATS.items()}

    # --- read by a trace (`TracedEngine`) -------------------------------------------------------------------------

    def traced_state(self) -> str:
        """Return the name of the lifecycle state."""
        return self._lifecycle.state.value

    def traced_records(self) -> list[DynamicInferenceRequestRecord]:
        """Wait for the current step, then update and return the records of the unfinished samples."""
        with self._lifecycle.lock:
            unfinished = self._ledger.unfinished()
            for sample in unfinished:
                if sample.active:
                    self._context.scheduler.table.write_back(sample)
            return [sample.record for sample in unfinished]
