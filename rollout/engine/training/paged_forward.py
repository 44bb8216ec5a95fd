"""The engine's steps in exact mode on a GPU: the trainer's layers, with attention over the blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.fused.fused_binding import Bound
from rollout.engine.fused.fused_forward import BoundForward
from rollout.engine.fused.fused_parts import rotary_tables
from rollout.engine.graphs.cuda_capture import CudaDevice
from rollout.engine.graphs.cuda_graphs import GraphedDecode
from rollout.engine.graphs.decode_kernels import TritonDecode
from rollout.engine.graphs.decode_state import DecodeInputs
from rollout.engine.kernels import triton_exact, triton_paged
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.triton_exact import AttendedRows, paged_attention
from rollout.engine.kernels.triton_paged import TritonPaged
from rollout.engine.memory.buffers import upload_together
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.training.decoder import hidden_of, norm
from rollout.engine.training.kernels import kernels_on
from rollout.engine.training.operations import linear
from rollout.errors import UnsupportedModelError


def run_exactly(runner: ModelRunner, length: int, graphed_rows: int, asked: bool | str) -> bool:
    """Have every step of a runner in exact mode run `PagedForward`, if its device has Triton's kernels.

    Args:
        length: most tokens of a sequence.
        graphed_rows: most rows of a decode step that is replayed as a CUDA graph; 0: no graphs.

    Returns:
        Whether it does; False on a CPU, whose fused forward is exact.

    Raises:
        UnsupportedModelError: the kernels do not run here, or do not serve the size of a block or of the vocabulary.
    """
    device, cache = runner.layout.device, runner.cache
    if kernels_on(device) is not triton_exact:
        return False
    if asked != "experimental":
        raise UnsupportedModelError(
            f"InferenceConfig.exact=True: the model is on {device}, where exact mode is an experiment: its bits were "
            "compared in Triton's interpreter, never on a device. Give InferenceConfig(exact='experimental'), and compare "
            "the first batch's log-probs with those in `with rollout.exact(model)`"
        )
    triton_exact.require(device, runner.layout.vocab_size)
    paged = triton_paged.load(device)
    if paged is None:
        raise UnsupportedModelError(
            f"InferenceConfig.exact=True: Triton's kernels do not work on {device}; see the log"
        )
    block_bytes = {part[0].numel() * part.element_size() for part in cache.layer(0)}
    if any(size % 16 for size in block_bytes):
        raise UnsupportedModelError(
            f"InferenceConfig.exact=True: a KV block of {max(block_bytes)} bytes is not a multiple of 16; make "
            f"block_size_tokens={cache.block_size} a multiple of 8"
        )
    forward = PagedForward(runner.model, runner.layout, cache, paged, length)
    runner.fused = forward
    if graphed_rows and device.type == "cuda":
        runner.graphs = GraphedDecode(
            runner.model,
            runner.layout,
            cache,
            graphed_rows,
            CudaDevice(device),
            TritonDecode(paged, cache),
            forward.decode,
        )
    return True


class PagedForward(BoundForward):
    """Forward of one model by the operations of exact mode on CUDA, over the blocks of the KV cache.

    Args:
        paged: writes K and V into their blocks.
        length: most tokens of a sequence. Cosines and sines of so many positions stay at one address, for CUDA graphs.
    """

    def __init__(self, model: nn.Module, layout: ModelLayout, cache: KVCache, paged: TritonPaged, length: int) -> None:
        super().__init__(model, layout, cache, exact=True)
        self._paged = paged
        self._length = length
        self._tables: tuple[Tensor, Tensor] | None = None

    def run(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        states: NDArray[np.int32] | None = None,
    ) -> Tensor:
        """Logits [len(keep), V]; see `BoundForward`."""
        device, size, groups = self._layout.device, self._cache.block_size, rows.groups()
        tokens, positions, kept, *slots = upload_together(
            (ids, rows.positions, keep, *(each.slots for each in groups)), device
        )
        arrays = (rows.offsets, rows.positions, *(each.tables for each in groups))
        begins, seen, *tables = upload_together([array.astype(np.int32) for array in arrays], device)
        longest = int(rows.positions.max()) + 1
        attended = [AttendedRows(table, begins, seen, longest, size, size) for table in tables]
        return self._logits(tokens, positions, list(zip(slots, attended, strict=True)), kept)

    def decode(self, inputs: DecodeInputs) -> Tensor:
        """Logits [B, V] of a decode step whose inputs stay at one address: nothing here waits for the host."""
        size = self._cache.block_size
        begins = torch.arange(len(inputs.seen) + 1, dtype=torch.int32, device=self._layout.device)
        groups = [
            (slots, AttendedRows(table, begins, inputs.seen, table.shape[1] * size, size, size))
            for slots, table in inputs.groups
        ]
        return self._logits(inputs.ids, inputs.positions, groups, None)

    def release(self) -> None:
        """There is nothing to release: the caching allocator keeps what a step needs."""

    def _bind(self) -> None:
        super()._bind()
        if self._bound is not None:
            self._fill_tables(self._bound)

    def _fill_tables(self, bound: Bound) -> None:
        found = [
            table[: self._length]
            for table in rotary_tables(bound.causal_lm.model.rotary_emb, bound.dtype, self._length)
        ]
        with torch.inference_mode(False):
            if self._tables is None:
                first, second = (table.to(self._layout.device, copy=True) for table in found)
                self._tables, self._filled = (first, second), found
            elif not all(map(torch.equal, found, self._filled)):
                for table, new in zip(self._tables, found, strict=True):
                    table.copy_(new)
                self._filled = found

    def _logits(
        self, ids: Tensor, positions: Tensor, groups: Sequence[tuple[Tensor, AttendedRows]], keep: Tensor | None
    ) -> Tensor:
        """`groups`: slot mapping [P] of each group of layers, and what its queries attend to."""
        assert self._bound is not None
        assert self._tables is not None
        layout, cache, model = self._layout, self._cache, self._bound.causal_lm

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            layer = layout.layer_of[module]
            slots, attended = groups[cache.group_of(layer)]
            keys, values = cache.layer(layer)
            self._paged.write(key, value, keys, values, slots)
            return paged_attention(query, keys, values, attended, module.scaling, layout.calls[layer].window)

        hidden = hidden_of(model.model, ids, positions, self._tables, attend)
        if keep is not None:
            hidden = hidden[keep]
        return linear(norm(hidden, model.model.norm), model.lm_head.weight)
