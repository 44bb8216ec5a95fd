"""The KV pool, the pool of recurrent states, the block allocator and the scheduler of one engine.

Always true: after a suspend or a resume, block tables and state slots match the contents of the two pools.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.config import InferenceConfig
from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.blocks.host import HostCache
from rollout.engine.blocks.states import StateSlots
from rollout.engine.memory.block_pool import BlockPool
from rollout.engine.memory.buffers import lacks_device_memory
from rollout.engine.memory.host_blocks import HostMemoryError
from rollout.engine.memory.kv_cache import RouteShape
from rollout.engine.memory.state_pool import StateShape
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.errors import ConfigError, EngineStateError
from rollout.observe.metric_table import binary_bytes
from rollout.state import KVCacheManagementMode

_log = logging.getLogger(__name__)
KEPT_NOTHING, KEPT_HELD, KEPT_ALL = range(3)
SHRINK_BY = 8
"""The divisor for shrinking the KV pool: after a step ran out of memory, the pool loses 1/8 of its blocks."""
PRECISION = 32
"""The divisor for fitting the KV pool: if a pool does not fit, the next attempt is 1/32 smaller."""


@dataclass(frozen=True)
class MemoryMove:
    """The result of one suspend or resume: what was copied, dropped and restored."""

    bytes_copied: int = 0
    """The number of bytes copied between device and host."""
    tokens_given_up: int = 0
    """The number of KV positions of unfinished requests that will be recomputed."""
    requests_given_up: int = 0
    """The number of requests whose KV was dropped because it no longer fitted in device memory."""
    shrunk_by_blocks: int = 0
    """The configured size of the KV pool minus its current size, in blocks."""
    blocks_restored: int = 0
    """The number of blocks whose KV was copied back to the device."""
    offload_failed: bool = False
    """Whether there was too little memory to offload the KV, so that it must be recomputed."""


class DynamicInferenceContext:
    """The KV cache, state pool, block allocator and scheduler, which suspend and resume together.

    Args:
        spare: function that returns the number of device bytes that a forward pass could still allocate.

    Attributes:
        states: the pool of recurrent states; it has no slots if the model has no recurrent layers.
        num_blocks: the configured size of the KV pool, in blocks; `cache.num_blocks` is the current size.
        headroom: the number of device bytes that the pool leaves free for a step.
        to_come: function that returns the number of bytes that CUDA graphs will take. The pool leaves them free too,
            unless it would have to shrink to half of its configured size or less.
        may_shrink: whether `resume` may make the pool smaller. False in tensor-parallel groups, whose pools must be equal.
        kept: the smallest part of the KV cache that a suspend has kept since the caller last set this attribute: `KEPT_ALL`,
            `KEPT_HELD` (only blocks that requests hold) or `KEPT_NOTHING`.
    """

    def __init__(
        self,
        config: InferenceConfig,
        cache: BlockPool,
        states: BlockPool,
        clock: Callable[[], float],
        spare: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.config = config
        self.headroom = 0
        self.to_come: Callable[[], int] = lambda: 0
        self._spare = spare
        self._warned = False
        self.cache = cache
        self.states = states
        self.num_blocks = cache.num_blocks
        self.allocator = BlockAllocator(
            cache.num_blocks,
            config.advanced.block_size_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            eviction_policy=config.advanced.prefix_caching_eviction_policy,
            states=StateSlots(states.num_blocks),
            host=HostCache(cache.host_slots, cache.block_bytes),
        )
        self.scheduler = Scheduler(config, self.allocator, clock)
        self._mode: KVCacheManagementMode | None = None
        self._followed: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        """The pages to copy, from the last `follow_blocks` call. If None, they are read from this rank's allocator."""
        self.may_shrink = True
        self.kept = KEPT_ALL

    def follow_blocks(self, live: NDArray[np.int32], held: NDArray[np.int32]) -> None:
        """Set the pages that suspend and resume copy, as the first rank of a tensor-parallel group reports them.

        Args:
            live: ids of the pages in use, including pages that are only cached.
            held: ids of the pages that a request holds.
        """
        self._followed = live, held

    def blocks_in_use(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the arguments with which the other ranks of the tensor-parallel group must call `follow_blocks`."""
        return self.allocator.pages.live(), self.allocator.held_memory()

    def _live_memory(self, keep_prefix_cache: bool = True) -> NDArray[np.int32]:
        if self._followed is None:
            return self.allocator.pages.live()
        live, held = self._followed
        return live if keep_prefix_cache else held

    def _num_live_blocks(self) -> int:
        if self._followed is None:
            return self.allocator.num_used + self.allocator.num_cached
        return len(self._live_memory())

    def suspend(self, mode: KVCacheManagementMode, *, keep_prefix_cache: bool) -> MemoryMove:
        """Keep, offload or drop the KV cache according to `mode`.

        If there is too little memory to offload the KV, it is dropped and recomputed after `resume`.
        """
        given_up = copied = 0
        offload_failed = False
        if mode is not KVCacheManagementMode.RECOMPUTE and not keep_prefix_cache:
            self.allocator.drop_cached()
            self.allocator.states.forget_all()
            self.kept = min(self.kept, KEPT_HELD)
        if mode is KVCacheManagementMode.OFFLOAD:
            try:
                copied = self.cache.save(self._live_memory(keep_prefix_cache))
                copied += self.states.save(self.allocator.states.live_slots())
            except (HostMemoryError, RuntimeError) as exc:
                if not (isinstance(exc, HostMemoryError) or lacks_device_memory(exc)):
                    raise
                mode, offload_failed = KVCacheManagementMode.RECOMPUTE, True
                self.cache.discard_saved()
                self._warn_of_failed_offload(exc)
        if mode is KVCacheManagementMode.RECOMPUTE:
            given_up = self.scheduler.preemption.checkpoint_all()
            self.allocator.drop_cached()
            self.drop()
            self.kept = KEPT_NOTHING
        self._mode = mode
        return MemoryMove(bytes_copied=copied, tokens_given_up=given_up, offload_failed=offload_failed)

    def resume(self) -> MemoryMove:
        """Restore the KV cache and recurrent states. If memory is short, shrink the pool and requeue the youngest requests.

        Raises:
            EngineStateError: there is no room even for the largest unfinished request. The engine is still suspended.
        """
        if self._mode is KVCacheManagementMode.PERSIST:
            self._mode = None
            return MemoryMove()
        self._materialize(self.num_blocks, self._least())
        self._materialize_states()
        before = len(self.scheduler.active())
        given_up = self.scheduler.preemption.checkpoint_until_fits(self.cache.num_blocks)
        lost = before - len(self.scheduler.active())
        mapping = self._follow_pool()
        copied = blocks = 0
        if self._mode is KVCacheManagementMode.OFFLOAD:
            try:
                copied = self.cache.restore(self._live_memory() if mapping is None else None, mapping)
                copied += self.states.restore(self.allocator.states.live_slots())
                blocks = self._num_live_blocks()
            except RuntimeError as exc:
                if not lacks_device_memory(exc):
                    raise
                # Drop everything, because a partly restored cache cannot be used. The requests keep their tokens and are
                # prefilled again.
                given_up += self.scheduler.preemption.checkpoint_all(exc)
                self.cache.discard_saved()
                self.states.discard_saved()
                self.allocator.drop_cached()
                lost = before
        self._mode = None
        return MemoryMove(copied, given_up, lost, self.num_blocks - self.cache.num_blocks, blocks)

    def drop(self) -> None:
        """Free the device memory of both pools, whose content is lost."""
        self.cache.drop()
        self.states.drop()

    def shrink(self, why: BaseException | None = None) -> bool:
        """Make the pool smaller after a step ran out of device memory. The KV of every request is recomputed.

        Args:
            why: the out-of-memory error, which is recorded in the requests' events. If None, no event is recorded.

        Returns:
            Whether the pool is now smaller. If the largest unfinished request needs the whole pool, nothing changes.

        Raises:
            EngineStateError: the smaller pool did not fit either, because other code has taken the memory.
        """
        before, least = self.cache.num_blocks, self._least()
        size = max(least, before - max(1, before // SHRINK_BY))
        if size >= before:
            return False
        self.scheduler.preemption.checkpoint_all(why)
        self.allocator.drop_cached()
        self.cache.drop()
        self.headroom += (before - size) * self.cache.block_bytes
        self._materialize(size, least)
        self._follow_pool()
        return True

    def keep_free(self, headroom: int) -> None:
        """Leave `headroom` device bytes free for steps, now and at every resume. Call this before the first request."""
        self.headroom = headroom
        if self._spare() < headroom + self.to_come():
            self.allocator.drop_cached()
            self.cache.drop()
            self._materialize(self.num_blocks, 1)
            self._follow_pool()
            _log.info(
                "the KV pool has %d of %d blocks: the other memory is left to steps and CUDA graphs",
                self.cache.num_blocks,
                self.num_blocks,
            )

    def _warn_of_failed_offload(self, exc: Exception) -> None:
        if not self._warned:
            self._warned = True
            what = f"{exc}".partition("\n")[0]
            if not isinstance(exc, HostMemoryError):
                what = f"device memory for the copies on their way ({what})"
            _log.warning(
                "the KV cache cannot be offloaded and is computed again after this suspend and others like it: no %s; set "
                "kv_cache_management_mode='recompute', or give the host more memory (ulimit -l, the container's limit)",
                what,
            )

    def _least(self) -> int:
        """Return how many blocks the largest unfinished request needs, or `num_blocks` if the pool must not shrink."""
        if not self.may_shrink:
            return self.num_blocks
        needed = [
            self.scheduler.blocks_needed(len(sequence.tokens), sequence.max_length) for sequence in self.scheduler
        ]
        return max(needed, default=1)

    def _follow_pool(self) -> NDArray[np.int32] | None:
        """Resize the allocator to the pool's size. Return the new id of each old page (see `BlockPages.resize`)."""
        self.allocator.pages.poisoned.clear()
        return self.allocator.pages.resize(self.cache.num_blocks)

    def _materialize(self, most: int, least: int) -> None:
        size = most
        while (refused := self._take(size, least)) is not None:
            if size <= least:
                raise EngineStateError(
                    f"no device memory for {least} KV blocks "
                    f"({least * self.cache.block_bytes / 2**20:.1f} MiB), which the largest unfinished request needs; free "
                    "memory and call resume() again, or build another engine"
                ) from refused
            size = max(least, size - max(1, size // PRECISION))

    def _take(self, size: int, least: int) -> torch.OutOfMemoryError | None:
        """Allocate a pool of `size` blocks. Return an error if it does not fit or leaves too little for forward passes."""
        try:
            self.cache.materialize(size)
        except torch.OutOfMemoryError as exc:
            return exc
        # Leave room for graphs only if the pool keeps over half its blocks: a smaller one costs more than graphs gain.
        needed = self.headroom + (self.to_come() if 2 * size > self.num_blocks else 0)
        if size <= least or self._spare() >= needed:
            return None
        self.cache.drop()
        return torch.OutOfMemoryError(f"{size} blocks do not leave {needed} bytes to the forward")

    def _materialize_states(self) -> None:
        states, slots = self.states, self.allocator.states.num_slots
        try:
            states.materialize(slots)
        except torch.OutOfMemoryError as exc:
            self.cache.drop()
            raise EngineStateError(
                f"no device memory for {slots} recurrent states ({slots * states.block_bytes / 2**20:.1f} MiB); free memory "
                "and call resume() again, or build another engine"
            ) from exc


def state_slots(config: InferenceConfig, shapes: Sequence[StateShape], device: torch.device) -> int:
    """Return the number of slots in the pool of recurrent states: by default two per running sequence.

    One holds the sequence's state, one a snapshot in the prefix cache. All slots take at most half the KV memory budget.

    Raises:
        ConfigError: half of the memory budget is too small for a single slot.
    """
    if config.advanced.state_slots is not None:
        return config.advanced.state_slots
    useful = 2 * config.max_requests
    if config.kv_cache_blocks is not None:
        return useful
    size = sum(each.num_bytes for each in shapes)
    budget = _budget(config, device) / 2
    slots = min(int(budget // size), useful)
    if slots < 1:
        raise ConfigError(
            f"half a pool of {budget / 2**19:.1f} MiB does not hold one state of {size / 2**20:.1f} MiB; raise "
            "kv_cache_memory_gb"
        )
    return slots


def pool_size(
    config: InferenceConfig,
    layout: ModelLayout,
    max_sequence_length: int,
    routes: RouteShape | None,
    state_bytes: int,
) -> int:
    """Return the number of blocks in the KV pool, computed from the configuration and the free memory.

    Args:
        layout: the model's layers, which determine the bytes per block.
        max_sequence_length: maximum length of a sequence, in tokens.
        routes: shape of the expert routes that every block holds next to keys and values, or None if none are recorded.
        state_bytes: number of bytes of the memory budget that the recurrent states take.

    Raises:
        ConfigError: the memory budget is too small for a single block.
    """
    size = config.advanced.block_size_tokens
    if config.kv_cache_blocks is not None:
        return config.kv_cache_blocks
    useful = config.max_requests * -(-max_sequence_length // size)
    per_token = sum(each.num_kv_heads * (each.head_dim + each.value_dim) for each in layout.layers)
    block_bytes = per_token * size * layout.kv_dtype.itemsize
    if routes is not None:
        block_bytes += routes.block_bytes(size, layout.kv_dtype)
    budget = _budget(config, layout.device) - state_bytes
    # Without attention layers, allow the largest useful number of blocks: they take no memory and only count tokens.
    blocks = min(int(budget // block_bytes), useful) if block_bytes else useful
    if blocks < 1:
        raise ConfigError(
            f"a KV pool of {binary_bytes(budget)} does not hold one block of {binary_bytes(block_bytes)}; set "
            f"InferenceConfig(kv_cache_memory_gb=...) above {(block_bytes + state_bytes) / 2**30:.2g}, or lower "
            "block_size_tokens"
        )
    return blocks


def _budget(config: InferenceConfig, device: torch.device) -> float:
    if config.kv_cache_memory_gb is not None:
        return config.kv_cache_memory_gb * 2**30
    return config.kv_cache_memory_fraction * _free_bytes(device)


def spare_bytes(device: torch.device) -> float:
    """Return the free bytes of a CUDA device, including unused memory in torch's cache; infinity for other devices."""
    return _free_bytes(device) if device.type == "cuda" else math.inf


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
