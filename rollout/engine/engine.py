"""The engine of one rank: continuous batching in the training process, with the module that the optimizer steps.

Always true:
- every accepted request ends once, as a complete record: finished, stale, aborted or failed;
- an exception inside a step fails the requests of that step, cause attached, or the one request that was just being
  admitted, and the engine goes on; after `MAX_FAILED_STEPS` in a row it declares itself dead and ends every request;
- whenever none of its calls is running, the trainer's model is exactly as the trainer left it;
- weights that the ranks share are whole between `gather_weights` and `release_weights`, and steps run only there;
- a request that was accepted while some adapters acted runs while these act, and waits while others do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from rollout.config import InferenceConfig
from rollout.diagnosis import answer_signal, watch
from rollout.engine.admission import prompt_of, refuse_what_is_not_served
from rollout.engine.group_member import GroupMember
from rollout.engine.holds import Holds
from rollout.engine.ledger import Ledger
from rollout.engine.memory.block_pool import Allocate, zeros
from rollout.engine.plain_tensors import plain_tensors
from rollout.engine.prefill import Prefill, Take, Wanted
from rollout.engine.scheduling.adapters import described
from rollout.engine.scheduling.prefix_index import CacheChanges
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.errors import EngineStateError, InvalidRequestError, RequestError, UnsupportedModelError
from rollout.requests.images import ImagePrompt
from rollout.requests.prompt import Prompt
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, KVCacheManagementMode
from rollout.threads.interrupts import interrupt_deferred, interruptible, uninterrupted


class DynamicInferenceEngine(GroupMember):
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
        super().__init__(model, tokenizer, config or InferenceConfig(), clock, allocate)
        self.holds = Holds(self)
        """Named holds under which no step is made: of the coordinator, a weight update, the caller."""
        watch(self)
        answer_signal()

    def describe_state(self) -> Iterator[str]:
        """Lines for `rollout.diagnosis`: lifecycle, holds, lock, turn, scheduler, last step, oldest samples."""
        yield f"engine of {type(self.model).__name__}: {self.state.value}, policy version {self.policy_version}"
        yield f"  holds: {self.holds.describe()}; lock: {self._lock.describe()}; turn: {self.turns.describe()}"
        yield from self._scheduler_lines()

    def rebuild(self) -> None:
        """Build all parts but the weights again, of the model as it is now, whose device and dtype may have changed.

        Every rank calls it inside `whole_weights()`. Unfinished samples go on; their KV is computed again.

        Raises:
            UnsupportedModelError, InvalidRequestError: not with this model; everything is as it was before.
            ConfigError: not with this configuration, as above.
        """
        with interrupt_deferred(), self._lock:
            records, version, before = self.snapshot(), self.policy_version, dict(vars(self))
            context, changes = self.context, self.context.allocator.index.changes
            # Like the KV, graphs and copies of weights give way to the new parts, which measure what is free.
            self.controller.runner.order.settle()
            self.controller.runner.release_workspace(graphs=True)
            context.suspend(KVCacheManagementMode.RECOMPUTE, keep_prefix_cache=False)
            cache, host_slots = self.cache, self.cache.host_slots
            # The host may not have memory for a second tier beside it; it holds nothing any more.
            cache.release_host_blocks()
            try:
                with plain_tensors(), self._under_autocast():
                    self._build()
                for name in ("_order", "_next_request_id", "on_move"):
                    setattr(self, name, before[name])
                ledger: Ledger = before["_ledger"]
                self._ledger.ended, self._ledger.counters = ledger.ended, ledger.counters
                self.context.allocator.index.changes = changes
                self.context.scheduler.advance_version(version)
                for record in records:
                    self.add_record(record)
            except BaseException:
                vars(self).update(before)
                context.resume()
                if host_slots:
                    cache.keep_host_blocks(host_slots)
                raise
            self._guard.rebuild_due = False

    def changed_settings(self) -> str:
        """Names of settings that masks may be made of and that changed since the engine was built."""
        self.weights.follow()
        return self._watch.changed_settings()

    def follow_model(self) -> None:
        """Build the engine again if windows, chunks or masks of attention layers have changed since it was built.

        Every way to `step` calls it, with whole weights, wherever the caller had the module.

        Raises:
            UnsupportedModelError: the attention layers now do something that the engine does not support.
            EngineStateError: settings have changed, and ranks compute each forward together.
        """
        if self.installation.active or not self.weights.ready or not (names := self.changed_settings()):
            return
        if self.peers is not None:
            raise EngineStateError(
                f"{names} of {type(self.model).__name__} changed after the rollout was built, and the {self.peers.name} "
                "computes forwards together: undo it, or call manager.close() and build another on every rank"
            )
        with plain_tensors(), self._under_autocast():
            changed = self._watch.masks_changed(self.config.max_sequence_length)
        if changed:
            self.rebuild()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """A block of steps with our attention installed, after `follow_model`."""
        self.follow_model()
        with self.installation:
            yield

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
        client: Hashable = None,
    ) -> int:
        """Accept one prompt (and its n samples); it runs in the coming steps.

        Args:
            prompt: text, token ids, chat messages, or what a processor returned for one prompt with images.
            request_id: yours, or None for the engine's next.
            priority: higher runs first; equal ones in order of arrival.
            metadata: msgpack-able, returned untouched in the results.
            samples: those of the n samples to compute, others of the same request may be here; None: all.
            arrival_time: seconds by the engine's clock, from which times are counted; None: now.
            client: within a priority, clients with waiting requests get equal shares of the tokens, and the requests of
                one client run in order of arrival. All callers that leave it out are one client.

        Returns:
            The request id.

        Raises:
            InvalidRequestError: it can never be served as asked; nothing was queued.
            EngineStateError: the engine is stopping or stopped.
        """
        params = sampling_params or SamplingParams()
        with uninterrupted(), self._lock:
            self._lifecycle.refuse_when_stopped()
            number = self._next_request_id if request_id is None else request_id
            tokens = self.controller.tokenize(prompt)
            try:
                wanted = self._ledger.free_indices(number, params.n, samples)
                self.context.scheduler.check_samples(number, len(wanted))
                leader = self._admission.group(
                    number, tokens, params, order=(0, self._order), version=self.policy_version, priority=priority,
                    metadata=metadata, prompt=prompt if isinstance(prompt, str) else None, indices=wanted,
                    arrival_time=arrival_time,
                )  # fmt: skip
                self._line_up(leader, client)
            except InvalidRequestError as exc:
                exc.request_id = number
                raise
            self._next_request_id = max(self._next_request_id, number + 1)
            self._ledger.accept(leader, *leader.siblings)
            self._ledger.counters["prompt_tokens"] += len(wanted) * len(tokens)
            return number

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """Token ids of a prompt that `add_request` would accept; nothing is queued.

        Raises:
            InvalidRequestError, ConfigError, TypeError: it would refuse it.
        """
        params = sampling_params or SamplingParams()
        number = self._next_request_id
        tokens = self.controller.tokenize(prompt)
        pictured = self._admission.images(number, tokens)
        self._check(number, tokens, params)
        if pictured is not None and isinstance(tokens, ImagePrompt):
            tokens.keyed = pictured.keyed(tokens).tobytes()
        return tokens

    def _check(self, number: int, tokens: list[int], params: SamplingParams) -> None:
        clamped = self._admission.check(number, tokens, params)
        self.controller.completion_text(clamped)
        self.context.scheduler.check_samples(number, params.n)
        self.context.scheduler.check_room(number, len(tokens), len(tokens) + clamped.max_tokens)

    def check_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Refuse a record that `add_record` would refuse; nothing is queued.

        Raises:
            InvalidRequestError, ConfigError: no engine like this one could go on with it.
        """
        refuse_what_is_not_served(record, self.cache.routes)
        self._admission.images(record.request_id, prompt_of(record[0]))
        self._check(self._next_request_id, record[0].prompt_tokens, record[0].sampling_params)

    def add_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Continue an unfinished record (from `snapshot`, another engine or a checkpoint file) where it stands.

        Raises:
            InvalidRequestError: it can never be served here; nothing was queued.
        """
        with uninterrupted(), self._lock:
            self._lifecycle.refuse_when_stopped()
            number = record.request_id
            if record.sample_index in self._ledger.live.get(number, ()):
                raise InvalidRequestError(f"request {number} sample {record.sample_index} is here already", number)
            sample = self._admission.continued(record, (0, self._order), self.policy_version)
            self._line_up(sample, None)
            self._ledger.accept(sample)
            self._next_request_id = max(self._next_request_id, number + 1)

    def _line_up(self, leader: Sample, client: Hashable) -> None:
        """Queue a new group at the end of its client's queue."""
        scheduler = self.context.scheduler
        group = (leader, *leader.siblings)
        charge = sum(each.max_length for each in group) - sum(len(each.tokens) for each in leader.siblings)
        turn = scheduler.shares.turn(leader.request.priority, client, charge)
        for each in group:
            each.order, each.client = (turn, self._order), client
        scheduler.add(leader, self._watch.variant())
        self._order += 1

    def abort_request(self, request_id: int, sample_index: int | None = None) -> int:
        """End a request now, in any state; its blocks are free before this returns.

        Returns:
            How many samples were ended (0: it had finished, or never was).
        """
        with uninterrupted(), self._lock:
            removed = self.context.scheduler.remove(lambda key: key[0] == request_id and sample_index in (None, key[1]))
            for sample in removed:
                self._ledger.end(sample, FinishReason.ABORT, f"RequestAbortedError: request {request_id} was aborted")
            return len(removed)

    def has_request(self, request_id: int) -> bool:
        """Whether a request with this id is unfinished."""
        return request_id in self._ledger.live

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something left to do or to hand out, with the adapters that act now."""
        return bool(self._ledger.ended or self.context.scheduler.has_work(self._watch.adapters.variant))

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.context.scheduler.version

    # --- steps --------------------------------------------------------------------------------------------------

    def step(self, *, ahead: bool = False) -> list[DynamicInferenceRequestRecord]:
        """Schedule, execute, update. Returns the records that have ended since the last step, each exactly once.

        Args:
            ahead: make further decode steps in the same call, for about 30 ms, where the fused CPU forward or a CUDA graph
                can make all of them: until a sample ends, another thread waits for the engine, or `ask_for_boundary` is
                called. The tokens are the same.

        Requests that were accepted while other adapters acted than now wait until these act again; those that were
        running give up their KV then, what is left of it in the prefix cache excepted.

        Raises:
            EngineStateError: the engine is not RUNNING.
            EngineDeadError: too many steps in a row have failed.
        """
        ended: list[DynamicInferenceRequestRecord] = []
        try:
            with uninterrupted(), self._lock:
                self._step(ahead=ahead)
                ended = self.take_ended()
        except BaseException:
            if ended:
                with uninterrupted(), self._lock:
                    self._ledger.put_back(ended)
            raise
        return ended

    def ask_for_boundary(self) -> None:
        """Let a `step(ahead=True)` that is being made end as soon as it can; from any thread, without waiting."""
        self._lock.ask()

    def _step(self, *, ahead: bool) -> None:
        """Leaves the records that have ended in the ledger."""
        with uninterrupted(), self._lock:
            if self._lifecycle.cause_of_death is not None and self._ledger.ended:
                return
            self._lifecycle.refuse_unless_running()
            self._refuse_alone()
            if not self.weights.ready:
                self._guard.refuse_scattered()
                with interruptible():
                    self.weights.gather()
            self.follow_model()
            with plain_tensors():
                self._stepper.step(ahead=ahead)
                if self._lifecycle.cause_of_death is not None:
                    self._moved()

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[DynamicInferenceRequest]:
        """Run prompts to their end: one merged request per sample, in the order of the prompts, samples side by side.

        A second thread's call waits for the first one's end.

        Other requests that end meanwhile are returned by the next `step`; so are those of a call that raises.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing of this call was queued.
            EngineStateError: the engine is not RUNNING; nothing of this call was queued.
            WeightsChangedError: see `check_weights`; nothing of this call was queued.
            RequestError: a request failed; the others' results are lost (use `RolloutManager` to keep them).
        """
        with self.turns.taken(), plain_tensors():
            self._lifecycle.refuse_unless_running()
            self._refuse_alone()
            self.check_weights()
            with self.whole_weights(), self.stepping():
                numbers = self._add_all(prompts, sampling_params)
                mine = set(numbers)
                while not mine.isdisjoint(self._ledger.live):
                    self.refuse_when_nothing_can_run()
                    self._step(ahead=True)
            taken = self.take_ended(lambda key: key[0] in mine)
        ended = {(record.request_id, record.sample_index): record for record in taken}
        samples = range((sampling_params or SamplingParams()).n)
        results = [ended[number, index].merge() for number in numbers for index in samples]
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
            self.take_ended(lambda key: key[0] in numbers)
            raise
        return numbers

    def logits_at(self, wanted: Sequence[Wanted], take: Take) -> tuple[int, str]:
        """Compute logits of given sequences, without sampling; `RolloutManager.score` makes log-probs of them.

        Requests in flight stand still meanwhile.

        Args:
            take: gets the logits chunk by chunk.

        Returns:
            The policy version and the names of the model's own adapters that acted; those that sequences name are theirs.

        Raises:
            InvalidRequestError: a sequence cannot be computed by this engine; nothing was.
            UnsupportedModelError: the weights are split over a group of ranks.
            EngineStateError: the engine is not RUNNING.
            WeightsChangedError: see `check_weights`.
        """
        if self.peers is not None:
            raise UnsupportedModelError(
                f"score: the weights are split over the {self.peers.name}, whose members compute requests together and "
                "nothing else; score with the model's own forward, or with an engine of an unsplit copy"
            )
        with self.turns.taken(), plain_tensors():
            self._lifecycle.refuse_unless_running()
            self.check_weights()
            with self.whole_weights(), self._lock, self.stepping():
                self._lifecycle.refuse_unless_running()
                variant = self._stepper.follow_forward()
                Prefill(self.config, self.controller.runner, self.context, self._admission).run(wanted, take)
                return self.policy_version, described(variant)

    def flush_prefix_cache(self) -> int:
        """Drop every cached block that no request holds; returns their number."""
        with self._lock:
            return self.context.allocator.drop_cached()

    def track_prefix_cache(self, changes: CacheChanges | None) -> list[int]:
        """Record changes of the prefix cache in `changes` from now on (None: nowhere); returns the hashes cached now."""
        with self._lock:
            self.context.allocator.index.changes = changes
            return [] if changes is None else self.context.allocator.findable_hashes()

    @property
    def load(self) -> tuple[int, int]:
        """(running, waiting) samples."""
        return self.context.scheduler.num_active, self.context.scheduler.num_waiting

    def new_request_id(self) -> int:
        """Reserve and return a request id."""
        with self._lock:
            self._next_request_id += 1
            return self._next_request_id - 1

    def reserve_request_ids(self, start: int) -> None:
        """Mark ids below `start` as taken; the next id is at least `start`."""
        with self._lock:
            self._next_request_id = max(self._next_request_id, start)
