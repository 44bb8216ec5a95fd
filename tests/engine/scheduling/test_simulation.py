"""Random schedules of allocator, scheduler and context from one seed, without a model.

The fake cache remembers, for every token slot, which token at which position under which version was written there, and
whether everything it attended to was of that version. A step "reads" every position it attends to and finds out what a
real attention would have silently got wrong.

Replay one failing seed: ROLLOUT_SIM_SEED=1234 pytest tests/engine/scheduling/test_simulation.py
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from rollout.config import Advanced, InferenceConfig
from rollout.engine.blocks.index import CacheChanges
from rollout.engine.parts.context import DynamicInferenceContext
from rollout.engine.scheduling.sequences import Sequence
from rollout.engine.scheduling.step import ScheduledStep, StepTokens
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.requests.block_hash import chain_block_hashes, compute_block_hashes_batched
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, KVCacheManagementMode
from tests.invariants import check_scheduler

SCHEDULES = int(os.environ.get("ROLLOUT_SIM_SCHEDULES", "1200"))
TOKEN, POSITION, VERSION, PURE = range(4)
GARBAGE = -7
NOTHING = np.zeros((0, 4), int)


class FakeCache:
    """A `BlockPool` that holds what was written instead of keys and values."""

    block_bytes = 1

    def __init__(self, num_blocks: int, block_size: int, host_slots: int = 0) -> None:
        self.block_size = block_size
        self.host_slots = host_slots
        self.host: Any = np.full((host_slots, block_size, 4), GARBAGE)
        self.room = num_blocks
        self.materialize(num_blocks)

    def materialize(self, num_blocks: int) -> None:
        if num_blocks > self.room:
            raise torch.OutOfMemoryError("no room")
        self.num_blocks = num_blocks
        self.content: Any = np.full((num_blocks, self.block_size, 4), GARBAGE)

    def copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for source, target in pairs:
            (to, place) = (self.host, ~target) if target < 0 else (self.content, target)
            to[place] = self.host[~source] if source < 0 else self.content[source]

    def drop(self) -> int:
        self.content = None
        return 0

    def discard_saved(self) -> None:
        self.saved = {}

    def save(self, blocks: np.ndarray) -> int:
        self.saved = {int(block): self.content[block].copy() for block in blocks}
        self.drop()
        return len(blocks)

    def restore(self, blocks: np.ndarray | None, mapping: np.ndarray | None = None) -> int:
        wanted = set(self.saved) if blocks is None else set(blocks.tolist())
        for old, content in self.saved.items():
            new = old if mapping is None else int(mapping[old])
            if old in wanted and new >= 0:
                self.content[new] = content
        return len(wanted)


class FakeStates(FakeCache):
    """The memory of a state pool: which tokens, computed in which ways, a slot's state was made of."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots, 1)

    def materialize(self, num_blocks: int) -> None:
        super().materialize(num_blocks)
        self.content = dict.fromkeys(range(num_blocks), GARBAGE)

    def move(self, moves: tuple[tuple[int, int], ...]) -> None:
        read = [() if source < 0 else self.content[source] for source, _ in moves]
        self.content.update(zip([target for _, target in moves], read, strict=True))

    def save(self, blocks: np.ndarray) -> int:
        self.saved = {block: self.content[block] for block in blocks.tolist()}
        self.drop()
        return len(blocks)


class World:
    """One seed's life of a context."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        block_size = pick([1, 2, 3, 4, 8])
        blocks = self.random.randint(6, 24)
        requests = self.random.randint(2, 8)
        self.config = InferenceConfig(
            kv_cache_blocks=blocks,
            max_requests=requests,
            max_tokens_per_step=self.random.randint(requests, 24),
            enable_prefix_caching=self.random.random() < 0.85,
            advanced=Advanced(
                block_size_tokens=block_size, prefix_caching_eviction_policy=pick(["lru", "lru", "ref_zero"])
            ),
        )
        self.now = 0.0
        # Some models have recurrent states, sometimes with fewer slots than sequences may run.
        slots = random.Random(seed).choice([2, 3, requests, 2 * requests, 3 * requests])
        self.states = FakeStates(slots if seed % 4 == 3 else 0)
        # In many lives evicted blocks go to a host tier, which may be smaller or larger than the pool.
        tiered = seed % 7 < 3 and not self.states.num_blocks
        self.cache = FakeCache(blocks, block_size, random.Random(seed).randint(1, 48) if tiered else 0)
        self.context = DynamicInferenceContext(self.config, self.cache, self.states, lambda: self.now)
        self.scheduler = self.context.scheduler
        # The hashes that a remote reader has, which receives the changes now and then.
        self.mirror: set[int] = set()
        self.hears = random.Random(seed)
        self.changes = self.context.allocator.index.changes = CacheChanges()
        self.added: set[tuple[int, int]] = set()
        self.ended: dict[tuple[int, int], Sequence] = {}
        self.prompts: dict[int, list[int]] = {}
        self.first_admission: list[int] = []
        self.suspended = False
        self.updates = 0
        self.autocast = False
        # A few stems, so that prompts share prefixes of every length.
        self.stems = [[self.random.randrange(5) for _ in range(24)] for _ in range(3)]

    def admit(self) -> None:
        number = len(self.prompts)
        stem = self.random.choice(self.stems)
        prompt = stem[: self.random.randint(1, 16)] + [
            self.random.randrange(5) for _ in range(self.random.choice([0, 0, 1, 3]))
        ]
        if self.ended and self.random.random() < 0.4:
            prompt = self.next_turn()
        budget = self.random.randint(0, 10)
        params = SamplingParams(n=self.random.choice([1, 1, 2, 3]), max_tokens=budget)
        group = []
        for index in range(params.n):
            request = DynamicInferenceRequest(
                request_id=number, sample_index=index, prompt_tokens=prompt, sampling_params=params, arrival_time=self.now,
                policy_version=self.scheduler.version, block_size_tokens=self.config.advanced.block_size_tokens,
                enable_prefix_caching=True, seed=0,
            )  # fmt: skip
            group.append(
                Sequence(
                    record=DynamicInferenceRequestRecord.from_request(request),
                    order=number,
                    tokens=np.asarray(prompt, np.int32),
                    stop_ids=(4,) if self.random.random() < 0.3 else (),
                    max_length=len(prompt) + budget,
                    min_length=len(prompt),
                    hashes=compute_block_hashes_batched(prompt, self.config.advanced.block_size_tokens),
                )
            )
        group[0].siblings = group[1:]
        self.prompts[number] = prompt
        try:
            self.scheduler.add(group[0])
        except InvalidRequestError:
            assert params.n > self.scheduler.num_places or (
                self.scheduler.blocks_needed(len(prompt), len(prompt) + budget) > self.scheduler.allocator.num_blocks
            )
            return
        self.added |= {each.key for each in group}

    def next_turn(self) -> list[int]:
        """Return the tokens of a finished sample, sometimes without the last ones, and some more tokens."""
        merged = self.ended[self.random.choice(sorted(self.ended))].record.merge()
        said = [*merged.prompt_tokens, *merged.generated_tokens]
        said = said[: max(1, len(said) - self.random.choice([0, 0, 0, 1, 2]))]
        return said[:32] + [self.random.randrange(5) for _ in range(self.random.choice([0, 1, 3]))]

    def step(self) -> None:
        if self.suspended:
            return
        waiting = [(s.rank, s.key) for s in self.scheduler.waiting]
        step = self.scheduler.schedule()
        if step is None:
            assert not self.scheduler.num_active, "active sequences and nothing to run"
            assert not self.scheduler.waiting, "waiting sequences, an idle engine, and nothing admitted"
            return
        assert step.num_tokens <= self.config.max_tokens_per_step
        assert self.scheduler.num_active <= self.scheduler.num_places
        still = {s.key for s in self.scheduler.waiting}
        admitted = [rank for rank, key in waiting if key not in still]
        deferred = {s.key for s in self.scheduler.planner.deferred}
        kept = [rank for rank, key in waiting if key in still and key not in deferred]
        assert not admitted or not kept or max(admitted) < min(kept), "somebody overtook"
        if self.random.random() < 0.03:
            self.scheduler.preemption.requeue_step(step, KeyboardInterrupt())
            return
        if self.random.random() < 0.01 and self.context.shrink(torch.OutOfMemoryError("drawn")):
            return
        self.compute(step)
        tokens = np.array([self.random.randrange(5) for _ in step.sampled_rows], np.int64)
        logprobs = np.full(len(tokens), -1.0, np.float32)
        if len(tokens) and self.random.random() < 0.01:
            logprobs[self.random.randrange(len(tokens))] = np.nan
        self.now += 1
        for sequence in self.scheduler.update(step, StepTokens(tokens, logprobs)):
            self.end(sequence)
        self.states.move(self.scheduler.allocator.states.take_moves())

    def compute(self, step: ScheduledStep) -> None:
        """Copy, write, and read back everything that is attended to, as attention would."""
        table, size = self.scheduler.table, self.config.advanced.block_size_tokens
        # Free pages that must be zeroed get garbage here, so that a later read of them is detected.
        self.cache.content[self.scheduler.allocator.pages.poisoned] = GARBAGE
        self.scheduler.allocator.pages.poisoned.clear()
        self.cache.copy_blocks(step.copies)
        if self.context.allocator.states.num_slots:
            self.recur(self.states, step)
        for row, start, count in zip(step.rows, step.starts, step.counts, strict=True):
            seen = np.arange(start)
            memory = self.memory(table.blocks[row])
            before = self.cache.content[memory[seen // size], seen % size] if len(seen) else NOTHING
            assert (before[:, TOKEN] == table.tokens[row, :start]).all(), "another prompt's KV was read"
            assert (before[:, POSITION] == seen).all(), "KV of another position was read"
            pure = bool((before[:, VERSION] == self.way).all() and before[:, PURE].all())
            assert np.isin(table.blocks[row, : start // size], table.held(row)).all(), "the table names another's block"
            assert pure or not table.current[row], "KV of older weights passes for that of the present ones"
            where = np.arange(start, start + count)
            blocks = table.blocks[row, where // size]
            assert self.context.allocator.writable(np.unique(blocks)).all(), "a shared or cached block was written"
            memory = self.memory(blocks)
            assert (memory >= 0).all(), "what is written has no memory"
            self.cache.content[memory, where % size] = np.stack(
                [table.tokens[row, where], where, np.full(count, self.way), np.full(count, pure)], axis=1
            )

    def memory(self, blocks: np.ndarray) -> np.ndarray:
        """Return the places of these blocks in the pool."""
        return self.context.allocator.pages.of_blocks(blocks)

    def recur(self, states: FakeStates, step: ScheduledStep) -> None:
        """Copy states, and continue from the state after all earlier tokens and no other, as recurrent layers would."""
        table = self.scheduler.table
        states.move(step.state_moves)
        slots = table.state[step.rows]
        assert len(set(slots.tolist())) == len(slots), "two sequences share a state"
        for row, slot, start, count in zip(step.rows, slots.tolist(), step.starts, step.counts, strict=True):
            before, tokens = states.content[slot], table.tokens[row].tolist()
            assert [token for token, _ in before] == tokens[:start], "a state of other tokens was used"
            assert {way for _, way in before} <= {self.way} or not table.current[row], (
                "a state of older weights was used"
            )
            states.content[slot] = (*before, *((token, self.way) for token in tokens[start : start + count]))

    def end(self, sequence: Sequence) -> None:
        assert sequence.key not in self.ended, f"{sequence.key} ended twice"
        assert not sequence.active
        self.ended[sequence.key] = sequence
        merged = sequence.record.merge()
        prompt = self.prompts[sequence.record.request_id]
        assert merged.prompt_tokens == prompt
        assert len(merged.generated_log_probs) == len(merged.generated_tokens)
        assert len(merged.policy_spans) <= merged.total_length
        if merged.finish_reason is FinishReason.LENGTH:
            assert len(merged.generated_tokens) == merged.sampling_params.max_tokens

    def remove(self) -> None:
        alive = sorted(self.added - set(self.ended))
        if not alive:
            return
        number, index = self.random.choice(alive)
        whole = self.random.random() < 0.5
        used = self.context.allocator.num_used
        for sequence in self.scheduler.remove(lambda key: key[0] == number and (whole or key[1] == index)):
            self.scheduler.leave(sequence, FinishReason.ABORT, "aborted")
            self.end(sequence)
        assert self.context.allocator.num_used <= used

    def suspend(self) -> None:
        if self.suspended:
            return
        mode = self.random.choice(list(KVCacheManagementMode))
        self.context.suspend(mode, keep_prefix_cache=self.random.random() < 0.5)
        self.suspended = True
        if self.random.random() < 0.3:
            self.cache.room = self.random.randint(1, self.context.num_blocks)
            if self.context.allocator.states.num_slots:
                self.states.room = self.random.randint(1, self.context.allocator.states.num_slots)

    def resume(self) -> None:
        if not self.suspended:
            return
        try:
            self.context.resume()
        except EngineStateError:
            self.free_memory()
            self.context.resume()
        self.free_memory()
        self.suspended = False

    def free_memory(self) -> None:
        self.cache.room = self.context.num_blocks
        self.states.room = self.context.allocator.states.num_slots

    def update(self) -> None:
        self.updates += 1
        # A number may stay as it is, whatever has become of the weights.
        self.scheduler.advance_version(self.scheduler.version + self.random.choice([0, 1, 1]))

    def switch(self) -> None:
        """Autocast is on, or off again."""
        self.autocast = not self.autocast
        self.scheduler.switch(self.scheduler.variant, self.autocast)

    @property
    def way(self) -> int:
        """The number of the settings by which a step currently computes KV."""
        return 2 * self.updates + self.autocast

    def check(self) -> None:
        check_scheduler(self.scheduler)
        alive = {sequence.key for sequence in self.scheduler}
        assert alive == self.added - set(self.ended), "a request is lost or came from nowhere"
        if self.suspended:
            return
        # Whatever a lookup can find is what a fresh engine would compute now.
        allocator = self.context.allocator
        if self.hears.random() < 0.4:
            self.hear(set(allocator.index.current))
        for block in allocator.index.current.values():
            content = self.cache.content[self.memory(np.array([block]))[0]]
            assert (content[:, TOKEN] == allocator.index._tokens[block]).all()
            assert (content[:, VERSION] == self.way).all()
            assert content[:, PURE].all(), "a cached block was computed over KV of an older version"
            parent = allocator.index._parent.item(block)
            if parent >= 0:
                assert allocator.index.registered[parent], "a block is found behind one that is not registered"
                before = allocator.index._hash[[parent]]
                chained = chain_block_hashes(before, allocator.index._tokens[[block]].astype(np.int64))
                assert chained == allocator.index._hash[block], (
                    "a block is found behind tokens it was not computed behind"
                )
        for kept in allocator.host.blocks.values():
            content = self.cache.host[kept.slot]
            assert (content[:, TOKEN] == kept.tokens).all(), "the host has other tokens' KV"
            assert (content[:, VERSION] == self.way).all(), "KV of older weights is found on the host"
            assert content[:, PURE].all(), "the host has KV computed over that of an older version"
        for block, slot in allocator.states.snapshots.items():
            assert allocator.index.registered[block], "a snapshot of a block that nothing finds"
            state = self.states.content[slot]
            assert [token for token, _ in state][-allocator.block_size :] == allocator.index._tokens[block].tolist()
            assert {way for _, way in state} <= {self.way}, "a snapshot of a state of older weights"

    def hear(self, findable: set[int]) -> None:
        """Follow the blocks that have come and gone since the last time."""
        taken = self.changes.take()
        if taken.flushed:
            self.mirror.clear()
        assert taken.removed <= self.mirror, "something was removed that was not there"
        self.mirror -= taken.removed
        assert not taken.added & self.mirror, "something was added that was there"
        self.mirror |= taken.added
        assert self.mirror == findable, "the changes of the cache tell of other blocks than it has"


def live(seed: int, events: int = 30) -> World:
    world = World(seed)
    actions = [world.admit, world.step, world.step, world.step, world.step, world.remove, world.suspend, world.resume,
               world.resume, world.update, world.switch]  # fmt: skip
    weights = [6, 8, 8, 8, 8, 1, 1, 1, 1, 1, 1]
    for _ in range(events):
        world.random.choices(actions, weights)[0]()
        world.check()
    world.resume()
    for _ in range(4000):
        if not (world.added - set(world.ended)):
            break
        world.step()
    world.check()
    assert world.added == set(world.ended), "a request never ended"
    assert world.context.allocator.num_used == 0, "a block leaked"
    assert world.context.allocator.states.num_held == 0, "a state slot leaked"
    return world


@pytest.mark.slow
def test_thousands_of_random_schedules_keep_every_invariant() -> None:
    chosen = os.environ.get("ROLLOUT_SIM_SEED")
    seeds = range(SCHEDULES) if chosen is None else [int(chosen)]
    preemptions = refused = hits = loaded = 0
    for seed in seeds:
        try:
            world = live(seed)
        except Exception as exc:
            raise AssertionError(f"replay with ROLLOUT_SIM_SEED={seed}: {exc!r}") from exc
        preemptions += world.scheduler.counters["preemptions"]
        refused += world.context.allocator.index.refused
        hits += world.context.allocator.states.hits
        loaded += world.context.allocator.host.loaded
    if chosen is None and SCHEDULES >= 1000:
        assert preemptions > 100, "the schedules never ran out of blocks"
        assert refused > 100, "the schedules never met a block of an older version"
        assert loaded > 30, "the schedules never loaded a block from the host"
        assert hits > 100, "the schedules never went on from a snapshot of a state"
