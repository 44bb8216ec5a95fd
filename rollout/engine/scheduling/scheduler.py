"""Continuous batching: admission, chunked prefill and preemption, within the token budget and the free blocks.

The scheduler owns the queues, the sequence table and the block tables. It handles no tensors; the clock is passed in.

Always true between calls:
- sequences are admitted in order of (priority, arrival); an evicted sequence returns to its place in this order. A sequence
  is skipped while another sequence computes its prefix, but enough rows and blocks are kept free for the skipped sequence;
- the oldest active sequence can always run: it may evict every younger sequence, and it fits alone (checked by `add`);
- a block is registered as a shareable prefix only if a new request would now compute the same KV for it;
- a sequence runs only under the variant (active adapters) it was accepted under; otherwise it is parked;
- a sequence finishes exactly once, as a `Sequence` whose record is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from rollout.config import InferenceConfig
from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.scheduling.adapters import Variant
from rollout.engine.scheduling.planner import StepPlanner, blocks_for
from rollout.engine.scheduling.preemption import Preemption
from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.results import StepResults
from rollout.engine.scheduling.run_ahead import StepCost, run_ahead
from rollout.engine.scheduling.sequences import Sequence, discard, insert
from rollout.engine.scheduling.step import ScheduledStep, StepTokens
from rollout.errors import InvalidRequestError
from rollout.state import FinishReason, Status


class Scheduler(Queues):
    """The scheduler of one engine, which plans each step and applies its results.

    Attributes:
        preemption: preempts active sequences.
        planner: chooses the work of each step.
        cost: the expected duration of a step without prefill.
        forward: a key of all settings of the forward pass except the variant. KV is shared only under equal keys, but a new
            key does not evict running sequences.
        version: the current policy version.
    """

    def __init__(self, config: InferenceConfig, allocator: BlockAllocator, clock: Callable[[], float]) -> None:
        super().__init__(allocator, clock, config.max_requests)
        self.config = config
        self.preemption = Preemption(self)
        self.cost = StepCost()
        self.planner = StepPlanner(config, self, self.preemption)
        self._results = StepResults(self, track_events=config.advanced.track_generated_token_events)
        self._scheduled_at = 0.0
        self.forward: Hashable = None
        self.version = 0

    # --- one step -----------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Choose the work of the next forward pass and reserve its blocks. Return None if nothing can run."""
        self._scheduled_at = self.clock()
        return self.planner.plan(self.version)

    def run_ahead(self, step: ScheduledStep) -> ScheduledStep:
        """Turn a decode step into a run of as many decode steps as may run in one call (see `run_ahead.run_ahead`)."""
        return run_ahead(self, step, self.cost)

    def update(self, step: ScheduledStep, sampled: StepTokens) -> list[Sequence]:
        """Apply a step's sampled tokens. Return the sequences that finished in it, each with a complete `record`."""
        if not step.prefills:
            self.cost.observe(step.num_tokens, max(0.0, self.clock() - self._scheduled_at) / sampled.steps)
        return self._results.apply(step, sampled, self._scheduled_at)

    # --- adding and removing sequences --------------------------------------------------------------------------

    def add(self, sequence: Sequence, variant: Variant | None = None) -> None:
        """Queue a sequence and its unforked `siblings`, in the order of rank (see `Queues`).

        Args:
            sequence: the leader of a group.
            variant: the variant under which the group is accepted; None for the current variant.

        Raises:
            InvalidRequestError: the sequence could never run, even alone.
        """
        request_id = sequence.record.request_id
        self.check_fits(request_id, 1 + len(sequence.siblings), len(sequence.tokens), sequence.max_length)
        for each in (sequence, *sequence.siblings):
            each.request.status = Status.WAITING_IN_QUEUE
            each.variant = self.variant if variant is None else variant
        insert(self.queue_of(sequence), sequence)

    def check_fits(self, request_id: int, samples: int, prompt: int = 0, length: int = 0) -> None:
        """Check that a group would fit if it ran alone.

        Args:
            request_id: id of the request, for error messages.
            samples: number of samples in the group.
            prompt: number of tokens in the prompt.
            length: maximum number of tokens of a sample, including the prompt.

        Raises:
            InvalidRequestError: the group has more samples than `max_requests` or the number of state slots, or the pool has
                too few blocks for one sample.
        """
        if samples > self.num_places:
            limit = "max_requests" if self.num_places == self.config.max_requests else "state_slots"
            raise InvalidRequestError(
                f"request {request_id}: n={samples} samples exceed {limit}={self.num_places}; raise {limit} or split the "
                "group",
                request_id,
            )
        need, most = self.blocks_needed(prompt, length), self.allocator.num_blocks
        if need > most:
            raise InvalidRequestError(
                f"request {request_id}: {length} tokens need {need} KV blocks and the pool has {most}; "
                "raise kv_cache_blocks (or kv_cache_memory_gb) or lower max_tokens",
                request_id,
            )

    def blocks_needed(self, prompt: int, length: int) -> int:
        """Return how many blocks hold the KV of a sequence of `length` tokens, including `prompt` prompt tokens."""
        return blocks_for(prompt, length, self.allocator.block_size)

    def remove(self, keys: Callable[[tuple[int, int]], bool]) -> list[Sequence]:
        """Remove and return every sequence whose (request_id, sample_index) `keys` accepts, and release its blocks.

        If a leader is removed, the first of its remaining unforked siblings becomes the leader.
        """
        removed: list[Sequence] = []
        for leader in [*self.waiting, *self.parked, *self.active()]:
            group = [leader, *leader.siblings]
            gone, stay = [each for each in group if keys(each.key)], [each for each in group if not keys(each.key)]
            removed += gone
            if not gone:
                continue
            if not leader.active:
                discard(self.queue_of(leader), leader)
                self.put_back(stay)
                continue
            memory = self.blocks.memory(leader.row)
            if leader in gone and stay:
                self.preemption.give_up_kv(group)
                self.put_back(stay)
                self.preemption.mark_evicted(stay)
            else:
                leader.siblings = [each for each in leader.siblings if each in stay]
                for each in gone:
                    self.table.write_back(each)
                    self.deactivate(each)
            # Have this memory zeroed before reuse: the KV of an unfinished prefill or failed step was not checked for NaN.
            self.allocator.pages.poison(memory)
        return removed

    def leave(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Finish a sequence that is active or in no queue: complete its record, and release its blocks and row."""
        self._results.leave(sequence, reason, error)

    # --- changes to the model -----------------------------------------------------------------------------------

    def has_work(self, variant: Variant) -> bool:
        """Return whether any sequence could run if the adapters of `variant` were active."""
        if variant == self.variant:
            return bool(self.waiting or self.by_row)
        return any(sequence.variant == variant for sequence in self.parked)

    def switch(self, variant: Variant, forward: Hashable) -> None:
        """Change the variant (the active adapters) and the forward key (see `forward`), and empty the prefix cache.

        If the variant changes, all active sequences are evicted, because their KV belongs to the old variant.
        """
        self.allocator.outdate()
        self.table.current[:] = False
        self.forward = forward
        if variant == self.variant:
            return
        for sequence in reversed(self.active()):
            self.preemption.evict(sequence)
        self.variant, leaders, self.waiting, self.parked = variant, [*self.waiting, *self.parked], [], []
        for leader in leaders:
            insert(self.queue_of(leader), leader)

    def advance_version(self, version: int) -> None:
        """Make `version` the current policy version, under which all later tokens are recorded."""
        table = self.table
        for sequence in self:
            request = sequence.request
            if sequence.active and table.computed[sequence.row]:
                request.policy_spans.extend_to(int(table.length[sequence.row]), request.policy_version)
                request.kv_spans.extend_to(int(table.computed[sequence.row]), request.policy_version)
                request.policy_version = version
            else:
                sequence.record.advance_version(version, policy_only=True)
        self.version = version
        table.current[:] = False
        self.allocator.outdate()
