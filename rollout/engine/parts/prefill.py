"""Forward passes over given sequences with the paged KV cache: logits at chosen positions, chunk by chunk, no sampling.

Always true:
- sequences are packed and chunked like prompts, and a shared prefix or a cached prefix is not computed again;
- requests in flight wait. The youngest of them lose their KV only if there is no room for the longest sequence;
- at most `LOGITS_BYTES` of logits exist at a time, or the logits of one position if these are larger;
- `Prefill.run` releases all its KV blocks, even if it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.config import InferenceConfig
from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.forward.step_tensors import pack
from rollout.engine.parts.context import DynamicInferenceContext
from rollout.engine.parts.intake import Intake
from rollout.engine.scheduling.planner import blocks_for
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.engine.scheduling.step import ScheduledStep, StepTokens
from rollout.errors import EngineStateError, InvalidRequestError
from rollout.requests.images import ImageInputs, ImagePrompt
from rollout.sampling_params import SamplingParams
from rollout.threads.interrupts import uninterrupted

LOGITS_BYTES = 1 << 29
"""The maximum size of the float32 logits of one forward pass, in bytes."""

_NOTHING_SAMPLED = StepTokens(np.zeros(0, np.int64), np.zeros(0, np.float32))
_PROMPT_ONLY = SamplingParams(max_tokens=0, seed=0)

Take = Callable[[NDArray[np.int64], NDArray[np.int64], Tensor], bool]
"""A callback that receives the logits of one chunk, and returns whether all of them are finite.

For K positions and a vocabulary of V tokens, its arguments are the sequence indices [K], the positions in these sequences
[K], and the logits [K, V]. The logits are valid only until the next call.
"""


class Wanted(NamedTuple):
    """One sequence, and the positions whose logits are needed."""

    tokens: Sequence[int]
    """The token ids of the sequence (at least one)."""
    positions: NDArray[np.int64]
    """The ascending positions (at least one) whose logits are needed. Without images, later tokens are not computed."""
    images: ImageInputs | None = None
    """The images for the sequence's placeholder tokens, or None if there are no images."""
    adapter: str | None = None
    """The name of a loaded LoRA adapter. If None, the model runs with its own active adapters."""

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of a request that computes the sequence without sampling a token."""
        return _PROMPT_ONLY if self.adapter is None else _PROMPT_ONLY.replace(adapter=self.adapter)


@dataclass(eq=False)
class Prefill:
    """Computes logits with one engine's runner, KV pool and intake. The caller of `run` must hold the engine's lock."""

    _config: InferenceConfig
    _runner: ModelRunner
    _context: DynamicInferenceContext
    _intake: Intake

    def run(self, wanted: Sequence[Wanted], take: Take) -> None:
        """Pass the logits of every position in `wanted` to `take`. After a preemption, positions may be passed again.

        Raises:
            InvalidRequestError: a sequence cannot be computed (see `Intake.clamped` and `Intake.images`). The message
                contains the sequence's index, and no sequence was computed.
        """
        longest_whole = max((self._check(index, each) for index, each in enumerate(wanted)), default=0)
        scheduler = self._scheduler(longest_whole)
        index_of = {self._queue(scheduler, index, each): index for index, each in enumerate(wanted)}
        self._make_room(max((len(sample.tokens) for sample in index_of), default=0))
        try:
            while scheduler.waiting or scheduler.by_row:
                with uninterrupted():
                    self._step(scheduler, index_of, wanted, take)
        finally:
            with uninterrupted():
                scheduler.remove(lambda key: True)

    def _check(self, index: int, wanted: Wanted) -> int:
        """Check a sequence, and return the length of its longest run of image tokens that a single step must compute."""
        tokens = _tokens(wanted, len(wanted.tokens))
        try:
            self._intake.clamped(index, tokens, wanted.params)
            # Match images with placeholders, because a placeholder without an image would be computed as if it were text.
            return self._intake.images(index, tokens).longest_whole
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"sequence {index}: {exc}") from exc

    def _scheduler(self, longest_whole: int) -> Scheduler:
        vocabulary = self._runner.layout.vocab_size
        # Allow a step as long as the longest image, even if `LOGITS_BYTES` allows less: image tokens need no logits.
        most = max(1, longest_whole, min(self._config.step_tokens, LOGITS_BYTES // (4 * vocabulary)))
        config = replace(self._config, max_tokens_per_step=most, max_requests=min(self._config.max_requests, most))
        context = self._context
        scheduler = Scheduler(config, context.allocator, context.scheduler.clock)
        scheduler.variant, scheduler.version = context.scheduler.variant, context.scheduler.version
        return scheduler

    def _queue(self, scheduler: Scheduler, index: int, wanted: Wanted) -> Sample:
        first, last = int(wanted.positions[0]), int(wanted.positions[-1])
        tokens = _tokens(wanted, last + 1)
        sample = self._intake.group(index, tokens, wanted.params, order=index, version=scheduler.version)
        # Look up only the blocks before the first wanted position: no logits are computed for cached positions.
        sample.hashes = sample.hashes[: first // self._config.advanced.block_size_tokens]
        scheduler.add(sample)
        return sample

    def _make_room(self, longest: int) -> None:
        main, allocator = self._context.scheduler, self._context.allocator
        need = blocks_for(longest, longest, self._config.advanced.block_size_tokens)
        states = allocator.states
        while (active := main.active()) and not (
            allocator.can_allocate(need) and (states.num_held < states.num_slots or not states.num_slots)
        ):
            main.preemption.evict(active[-1])

    def _step(self, scheduler: Scheduler, index_of: dict[Sample, int], wanted: Sequence[Wanted], take: Take) -> None:
        step = scheduler.schedule()
        if step is None:
            raise EngineStateError(
                f"no sequence can be scored, which must not happen; please report: {scheduler.allocator.counts()}"
            )
        if poisoned := scheduler.allocator.pages.poisoned:
            self._runner.cache.zero_blocks(poisoned)
            poisoned.clear()
        if step.copies:
            self._runner.cache.copy_blocks(step.copies)
        self._runner.move_states(step.state_moves)
        indices, positions, keep = _wanted_of(step, index_of, wanted)
        ids, rows = pack(step, scheduler.table)
        rows, images = self._runner.pictured(step, rows, scheduler.table)
        adapters = [wanted[index_of[sample]].adapter for sample in step.prefills]
        named = adapters if any(adapters) else None
        logits = self._runner.forward(ids, rows, keep, scheduler.table.state[step.rows], images, named)
        finite = take(indices, positions, logits[: len(keep)])
        memory = np.zeros(0, np.int32)
        if not finite:
            # Keep this KV out of the prefix cache and have it zeroed, because it may hold NaN, and 0 * NaN is NaN.
            scheduler.table.current[step.rows] = False
            memory = np.concatenate([scheduler.blocks.memory(row) for row in step.rows.tolist()])
        scheduler.update(step, _NOTHING_SAMPLED)
        self._runner.move_states(scheduler.allocator.states.take_moves())
        scheduler.allocator.pages.poison(memory)


def _tokens(wanted: Wanted, count: int) -> list[int]:
    """Return the first `count` tokens, or all tokens if there are images, because every image needs its placeholders."""
    return list(wanted.tokens[:count]) if wanted.images is None else ImagePrompt(wanted.tokens, wanted.images)


def _wanted_of(
    step: ScheduledStep, index_of: dict[Sample, int], wanted: Sequence[Wanted]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return three arrays [K] for the K positions of a step that are listed in `wanted`.

    The arrays hold the sequence index, the position in the sequence, and the index among the step's packed positions.
    """
    indices, positions, packed = [], [], []
    offset = 0
    for sample, start, count in zip(step.prefills, step.starts.tolist(), step.counts.tolist(), strict=True):
        index = index_of[sample]
        low, high = np.searchsorted(wanted[index].positions, (start, start + count))
        some = wanted[index].positions[low:high]
        indices.append(np.full(len(some), index))
        positions.append(some)
        packed.append(some - start + offset)
        offset += count
    return np.concatenate(indices), np.concatenate(positions), np.concatenate(packed)
