"""KV pool, state pool, block allocator and scheduler of one engine.

Always true: after a suspend or a resume, block tables, state slots and the memory of both pools agree.
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
from rollout.engine.memory.block_pool import BlockMemory
from rollout.engine.memory.host_pool import HostMemoryError
from rollout.engine.memory.kv_cache import LayerShape, RouteShape
from rollout.engine.memory.layer_groups import LayerGroups
from rollout.engine.memory.shortage import lacks_device_memory
from rollout.engine.memory.state_pool import StateShape
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.parts.state_memory import StateMemory
from rollout.engine.scheduling.block_allocator import BlockAllocator
from rollout.engine.scheduling.host_cache import HostCache
from rollout.engine.scheduling.layer_pages import LayerPages, PageShape
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.errors import ConfigError, EngineStateError
from rollout.metrics import binary_bytes
from rollout.state import KVCacheManagementMode

_log = logging.getLogger(__name__)
KEPT_NOTHING, KEPT_HELD, KEPT_ALL = range(3)
SHRINK_BY = 8
"""A step without memory takes one in so many blocks from the pool."""
PRECISION = 32
"""A pool that does not come back whole comes back within one in so many of the blocks that fit."""


@dataclass(frozen=True)
class MemoryMove:
    """Result of one suspend or resume."""

    bytes_copied: int = 0
    tokens_given_up: int = 0
    """KV positions of unfinished requests that will be recomputed."""
    requests_given_up: int = 0
    """Requests whose KV was dropped because it no longer fits."""
    shrunk_by_blocks: int = 0
    """Configured pool size minus current pool size, in blocks."""
    blocks_restored: int = 0
    """Blocks whose KV was copied back."""
    offload_failed: bool = False
    """The KV was to be offloaded, and is computed again: there was no memory for it."""


class DynamicInferenceContext:
    """Owns KV cache, state pool, block allocator and scheduler, and moves them together on suspend and resume.

    Args:
        spare: bytes of the device that a forward could take now.
        states: pool of the recurrent states; None: the model has none.
        groups: of the layers, whose pages are the blocks of `cache`; None: its blocks hold all layers.

    Attributes:
        states: pool and slots of the recurrent states.
        num_blocks: size of the pool as configured, in blocks or pages; `cache.num_blocks` is the present one.
        headroom: bytes of the device that the pool leaves free for a step.
        to_come: bytes that it leaves free beside, if it keeps half of its blocks: what graphs and copies of weights will
            take.
    """

    def __init__(
        self,
        config: InferenceConfig,
        cache: BlockMemory,
        clock: Callable[[], float],
        spare: Callable[[], float] = lambda: math.inf,
        states: BlockMemory | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        self.config = config
        self.headroom = 0
        self.to_come: Callable[[], int] = lambda: 0
        self._spare = spare
        self._warned = False
        self.cache = cache
        self.states = None if states is None else StateMemory(states)
        self.num_blocks = cache.num_blocks
        pages = None
        if groups is not None:
            pages = LayerPages(cache.num_blocks, PageShape(groups.whole, groups.limited, groups.reach))
        size, slots = config.advanced.block_size_tokens, cache.host_slots
        host = HostCache(slots, size, cache.block_bytes) if slots else None
        self.allocator = BlockAllocator(
            cache.num_blocks if pages is None else pages.num_blocks,
            config.advanced.block_size_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            eviction_policy=config.advanced.prefix_caching_eviction_policy,
            states=None if self.states is None else self.states.slots,
            pages=pages,
            host=host,
        )
        self.scheduler = Scheduler(config, self.allocator, clock)
        self._mode: KVCacheManagementMode | None = None
        self._followed: tuple[NDArray[np.int32], NDArray[np.int32]] | None = None
        """Blocks, or pages, in use on the first rank of a tensor-parallel group, with and without what is only cached."""
        self.may_shrink = True
        """Whether `resume` may make the pool smaller; in a tensor-parallel group all pools have the same blocks."""
        self.kept = KEPT_ALL
        """The least that a suspend has kept since this was set: `KEPT_ALL`, `KEPT_HELD` or `KEPT_NOTHING`."""

    def follow_blocks(self, live: NDArray[np.int32], held: NDArray[np.int32]) -> None:
        """Take the first rank's word for which memory is in use; between its calls it frees some, and adds none.

        Args:
            live: blocks, or pages, with content.
            held: those of them that some request holds.
        """
        self._followed = live, held

    def blocks_in_use(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Arguments of `follow_blocks` on the other members."""
        return self.allocator.live_memory(), self.allocator.held_memory()

    def _live_memory(self, keep_prefix_cache: bool = True) -> NDArray[np.int32]:
        if self._followed is None:
            return self.allocator.live_memory()
        live, held = self._followed
        return live if keep_prefix_cache else held

    def _num_live_blocks(self) -> int:
        if self._followed is None:
            return len(self.allocator.live_blocks())
        # Of pages a follower knows only how many complete blocks they amount to.
        return len(self._live_memory()) // self.allocator.pages_per_block

    def prepare_suspend(self) -> None:
        """Pin memory for an offload in the background, after the last of several steps: no optimizer hook may wait."""
        if self.config.kv_cache_management_mode is KVCacheManagementMode.OFFLOAD and self._mode is None:
            self.cache.prepare_save(len(self._live_memory(False)))

    def suspend(self, mode: KVCacheManagementMode, *, keep_prefix_cache: bool) -> MemoryMove:
        """Keep, offload or drop the KV cache according to `mode`. If it raises, nothing has changed.

        Without memory to offload to, or for the copies on their way, the KV is dropped and computed again.
        """
        given_up = copied = 0
        offload_failed = False
        if mode is not KVCacheManagementMode.RECOMPUTE and not keep_prefix_cache:
            self.allocator.drop_cached()
            if self.states is not None:
                self.states.slots.forget_all()
            self.kept = min(self.kept, KEPT_HELD)
        if mode is KVCacheManagementMode.OFFLOAD:
            try:
                copied = self.cache.save(self._live_memory(keep_prefix_cache))
                if self.states is not None:
                    copied += self.states.save()
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
        """Restore the KV cache and the states on the device, in smaller pools if memory is short.

        Requests whose blocks or states do not fit are recomputed, youngest first.

        Raises:
            EngineStateError: no room even for the largest unfinished request. Nothing has changed.
        """
        if self._mode is KVCacheManagementMode.PERSIST:
            self._mode = None
            return MemoryMove()
        self._materialize(self.num_blocks, self._least())
        if self.states is not None:
            self._materialize_states(self.states)
        before = len(self.scheduler.active())
        given_up = self.scheduler.preemption.checkpoint_until_fits(self.cache.num_blocks)
        if self.states is not None:
            given_up += self.scheduler.preemption.checkpoint_until_states_fit(self.states.pool.num_blocks)
        lost = before - len(self.scheduler.active())
        mapping = self._follow_pool()
        if self.states is not None:
            self.states.follow(self.scheduler)
        copied = blocks = 0
        if self._mode is KVCacheManagementMode.OFFLOAD:
            try:
                copied = self.cache.restore(self._live_memory() if mapping is None else None, mapping)
                if self.states is not None:
                    copied += self.states.restore()
                blocks = self._num_live_blocks()
            except RuntimeError as exc:
                if not lacks_device_memory(exc):
                    raise
                # A partly restored cache cannot be used.
                given_up += self.scheduler.preemption.checkpoint_all(exc)
                self.cache.discard_saved()
                if self.states is not None:
                    self.states.pool.discard_saved()
                self.allocator.drop_cached()
                lost = before
        self._mode = None
        missing = (self.num_blocks - self.cache.num_blocks) // self.allocator.pages_per_block
        return MemoryMove(copied, given_up, lost, missing, blocks)

    def drop(self) -> None:
        """Free the device memory of both pools, losing their content."""
        self.cache.drop()
        if self.states is not None:
            self.states.pool.drop()

    def shrink(self, why: BaseException | None = None) -> bool:
        """Take a share of the pool away, for a step that ran out of device memory; every request is computed again.

        Args:
            why: the error, for the requests' events; None: nothing has run yet.

        Returns:
            False if the pool is as small as the largest unfinished request allows; nothing has changed then.

        Raises:
            EngineStateError: the smaller pool did not fit either: the memory was taken meanwhile.
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

    def room(self) -> float:
        """Bytes of the device that are free beside what the forward needs; negative: so many are missing."""
        return self._spare() - self.headroom - self.to_come()

    def keep_free(self, headroom: int) -> None:
        """Leave `headroom` bytes of the device to the forward, now and at every resume, by a smaller pool if need be.

        Called before there are requests.
        """
        self.headroom = headroom
        if self.room() < 0:
            self.allocator.drop_cached()
            self.cache.drop()
            self._materialize(self.num_blocks, 1)
            self._follow_pool()
            _log.info(
                "the KV pool has %d of %d %s: the other memory is left to steps, CUDA graphs and copies of weights",
                self.cache.num_blocks, self.num_blocks, self.allocator.unit,
            )  # fmt: skip

    def _warn_of_failed_offload(self, exc: Exception) -> None:
        if not self._warned:
            self._warned = True
            reason = f"{exc}".partition("\n")[0]
            what = (
                reason if isinstance(exc, HostMemoryError) else f"device memory for the copies on their way ({reason})"
            )
            _log.warning(
                "the KV cache cannot be offloaded and is computed again after this suspend and others like it: no %s; set "
                "kv_cache_management_mode='recompute', or give the host more memory (ulimit -l, the container's limit)",
                what,
            )

    def _least(self) -> int:
        """Blocks that the largest unfinished request needs; the whole pool if it may not shrink."""
        if not self.may_shrink:
            return self.num_blocks
        needed = [
            self.scheduler.blocks_needed(len(sequence.tokens), sequence.max_length) for sequence in self.scheduler
        ]
        return max(needed, default=1)

    def _follow_pool(self) -> NDArray[np.int32] | None:
        """Make allocator and block tables agree with the pool's size; returns what `BlockAllocator.resize` does."""
        self.scheduler.blocks.poisoned.clear()
        if self.allocator.pages is not None:
            return self.allocator.pages.resize(self.cache.num_blocks)
        mapping = self.allocator.resize(self.cache.num_blocks)
        if mapping is not None:
            self.scheduler.remap_blocks(mapping)
        return mapping

    def _materialize(self, most: int, least: int) -> None:
        """Make a pool of at most `most` blocks: all of them, or by bisection nearly as many as fit."""
        size, fits, short = most, least - 1, most + 1
        while True:
            refused = self._take(size, least)
            if refused is None:
                fits = size
                if short - fits <= max(1, fits // PRECISION):
                    return
                self.cache.drop()
            elif size <= least:
                raise EngineStateError(
                    f"no device memory for {least} KV {self.allocator.unit} ({least * self.cache.block_bytes / 2**20:.1f} "
                    "MiB), which the largest unfinished request needs; free memory and call resume() again, or build "
                    "another engine"
                ) from refused
            else:
                # What has fitted may have been taken meanwhile.
                short, fits = size, fits if fits < size else least - 1
            near = short - fits <= max(1, fits // PRECISION)
            size = max(least, fits if near else (fits + short) // 2)

    def _take(self, size: int, least: int) -> torch.OutOfMemoryError | None:
        """Make a pool of `size` blocks; the error if it does not fit, or leaves the forward too little."""
        try:
            self.cache.materialize(size)
        except torch.OutOfMemoryError as exc:
            return exc
        # For graphs and copies, which are there for speed, at most half of the pool is given up.
        needed = self.headroom + (self.to_come() if 2 * size > self.num_blocks else 0)
        if size <= least or self._spare() >= needed:
            return None
        self.cache.drop()
        return torch.OutOfMemoryError(f"{size} blocks do not leave {needed} bytes to the forward")

    def _materialize_states(self, states: StateMemory) -> None:
        largest = max((1 + len(leader.siblings) for leader in self.scheduler.leaders()), default=1)
        try:
            states.materialize(largest)
        except EngineStateError:
            self.cache.drop()
            raise


def state_slots(config: InferenceConfig, shapes: Sequence[StateShape], device: torch.device) -> int:
    """Number of slots of the state pool: two per running sequence (its state and a snapshot), in half of the memory.

    Raises:
        ConfigError: the memory budget does not hold a single slot.
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
    routes: RouteShape | None = None,
    state_bytes: int = 0,
    groups: LayerGroups | None = None,
) -> int:
    """Number of blocks, or pages, of the KV pool, from the configuration and free memory.

    Args:
        routes: shape of the expert routes that every block holds beside K and V.
        state_bytes: part of the memory budget that the recurrent states take.
        groups: of the layers, one page of each of which is a block; None: it is counted in blocks.

    Raises:
        ConfigError: the memory budget does not hold a single block.
    """
    size, longest = config.advanced.block_size_tokens, -(-max_sequence_length // config.advanced.block_size_tokens)
    pages, useful, layers = 1, config.max_requests * longest, layout.layers
    if groups is not None:
        shape, layers = PageShape(groups.whole, groups.limited, groups.reach), layers[: groups.places]
        # All sequences decode, or some compute a step's positions of their prompts instead.
        step = groups.limited * -(-config.step_tokens // size)
        pages, useful = groups.count, config.max_requests * shape.needed(longest, 1, size) + step
    if config.kv_cache_blocks is not None:
        return config.kv_cache_blocks * pages
    block_bytes = _block_bytes(layers, size, layout.kv_dtype)
    if routes is not None:
        block_bytes += routes.block_bytes(size, layout.kv_dtype)
    budget = _budget(config, layout.device) - state_bytes
    # A model without attention layers has blocks without content: they hold the place of its tokens.
    blocks = min(int(budget // block_bytes), useful) if block_bytes else useful
    if blocks < pages:
        raise ConfigError(
            f"a KV pool of {binary_bytes(budget)} does not hold one block of {binary_bytes(pages * block_bytes)}; set "
            f"InferenceConfig(kv_cache_memory_gb=...) above {(pages * block_bytes + state_bytes) / 2**30:.2g}, or lower "
            "block_size_tokens"
        )
    return blocks


def _budget(config: InferenceConfig, device: torch.device) -> float:
    """Bytes for the KV blocks and the recurrent states together."""
    if config.kv_cache_memory_gb is not None:
        return config.kv_cache_memory_gb * 2**30
    return config.kv_cache_memory_fraction * _free_bytes(device)


def _block_bytes(layers: tuple[LayerShape, ...], block_size: int, dtype: torch.dtype) -> int:
    per_token = sum(s.num_kv_heads * (s.head_dim + s.value_dim) for s in layers)
    return per_token * block_size * dtype.itemsize


def spare_bytes(device: torch.device) -> float:
    """Bytes that tensors on a CUDA device can still take: of the driver, and cached by torch; elsewhere infinite."""
    if device.type != "cuda":
        return math.inf
    return _free_bytes(device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
