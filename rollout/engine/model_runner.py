"""Scheduled work → tensors → the model's own forward → sampled tokens. Owns tensors, knows no queues.

The positions of one step travel as one packed row [1, P]: decoding sequences first, then prefill chunks.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.attention import BATCH_ARGUMENT, Installation, PagedBatch
from rollout.engine.kernels import cpu_decode
from rollout.engine.kernels.torch_paged import MAX_TILE_SCORES, Tile, Workspace
from rollout.engine.kv_cache import KVCache
from rollout.engine.model_support import ModelLayout
from rollout.engine.sampler import sample, token_logprobs
from rollout.engine.sampling_table import SamplingTable
from rollout.engine.sequences import Sequence, SequenceTable
from rollout.engine.step import ScheduledStep, StepTokens

PROMPT_LOGPROB_ROWS = 256
"""Prompt positions whose full-vocabulary log-softmax is made at once: bounds the memory."""


@dataclass(frozen=True, eq=False)
class _Packed:
    """The positions of one step, in order."""

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    write_index: NDArray[np.int64]
    offsets: NDArray[np.int64]
    """[R + 1], where each row's positions begin."""


class ModelRunner:
    """Runs steps on one model."""

    def __init__(self, model: nn.Module, layout: ModelLayout, cache: KVCache, table: SequenceTable) -> None:
        self.model = model
        self.layout = layout
        self.cache = cache
        self.table = table
        self._decode = cpu_decode.load() if layout.device.type == "cpu" else None
        self.installation = Installation(model)
        self.sampling = SamplingTable(layout.device)
        self.workspace = Workspace()

    def execute(self, step: ScheduledStep) -> StepTokens:
        """One forward and one token per sampled row.

        Prompt log-probs of the step's prefill chunks are appended to the sequences that asked for them.
        """
        if step.copies:
            self.cache.copy_blocks(step.copies)
        packed = self._pack(step)
        rows, repeats = np.unique(step.sample_rows, return_inverse=True)
        wanted = [s for s in step.prefills if s.wants_prompt_logprobs]
        keep = packed.offsets[rows + 1] - 1
        spans = self._prompt_spans(step, packed, wanted)
        logits = self._forward(packed, self._tiles(step, packed), np.concatenate([keep, *(span for _, span in spans)]))
        start = len(rows)
        for sequence, span in spans:
            self._take_prompt_logprobs(sequence, logits[start : start + len(span)], packed.positions[span])
            start += len(span)
        if not len(step.sample_slots):
            return StepTokens(np.zeros(0, np.int64), np.zeros(0, np.float32))
        sampled_logits = logits[: len(rows)]
        if len(rows) != len(repeats):
            sampled_logits = sampled_logits.index_select(0, self._to_device(repeats))
        return self._sample(step, sampled_logits)

    def paged_logits(self, tokens: list[int], cut: int) -> Tensor:
        """[V] logits after `tokens`, computed in the chunks [:cut] and [cut:] in the pool's first blocks (all free)."""
        size = self.table.block_size
        blocks = np.arange(-(-len(tokens) // size), dtype=np.int64)
        logits = torch.empty(0)
        for start, end in ((0, cut), (cut, len(tokens))):
            positions = np.arange(start, end)
            tile = Tile(None, None, self._to_device(positions[None]), self._to_device(blocks), fresh=False)
            packed = _Packed(np.asarray(tokens[start:end], np.int64), positions, positions, np.array([0, end - start]))
            logits = self._forward(packed, [tile], np.array([end - start - 1]))[0]
        self.cache.zero_blocks(blocks.tolist())
        return logits

    def release_workspace(self) -> None:
        """Give back buffers that the next step would allocate anyway."""
        self.workspace.clear()

    # --- tensors ------------------------------------------------------------------------------------------------

    def _pack(self, step: ScheduledStep) -> _Packed:
        table = self.table
        offsets = np.zeros(len(step.slots) + 1, np.int64)
        np.cumsum(step.counts, out=offsets[1:])
        rows = np.repeat(np.arange(len(step.slots)), step.counts)
        positions = np.arange(offsets[-1]) - offsets[rows] + step.starts[rows]
        slots = step.slots[rows]
        blocks = table.blocks[slots, positions // table.block_size]
        write = blocks.astype(np.int64) * table.block_size + positions % table.block_size
        return _Packed(table.tokens[slots, positions].astype(np.int64), positions, write, offsets)

    def _tiles(self, step: ScheduledStep, packed: _Packed) -> list[Tile]:
        decodes = step.num_decodes
        tiles = [self._tile(step, packed, np.arange(decodes))] if decodes else []
        chunks = np.arange(decodes, len(step.slots))
        ends = step.starts + step.counts
        # Like with like: padding is what a rectangle wastes.
        chunks = chunks[np.lexsort((ends[chunks], step.counts[chunks]))[::-1]]
        group: list[int] = []
        for row in chunks.tolist():
            if group and not _fits(step.counts, ends, group, row):
                tiles.append(self._tile(step, packed, np.asarray(group)))
                group = []
            group.append(row)
        if group:
            tiles.append(self._tile(step, packed, np.asarray(group)))
        return tiles

    def _tile(self, step: ScheduledStep, packed: _Packed, rows: NDArray[np.int64]) -> Tile:
        table = self.table
        counts, starts = step.counts[rows], step.starts[rows]
        batch, length = len(rows), int(counts.max())
        steps = np.arange(length)
        inside = steps < counts[:, None]
        positions = np.where(inside, starts[:, None] + steps, 0)
        index = np.where(inside, packed.offsets[rows][:, None] + steps, 0).reshape(-1)
        used = -(-int((starts + counts).max()) // table.block_size)
        slots = step.slots[rows]
        # Padding reads a block of the row's own: another's may hold NaN, and a masked NaN is NaN still.
        held = np.arange(used) < table.num_blocks[slots][:, None]
        blocks = np.where(held, table.blocks[slots, :used], table.blocks[slots, :1]).reshape(-1).astype(np.int64)
        leading = bool((rows == np.arange(batch)).all() and inside.all())
        return Tile(
            query_index=None if leading else self._to_device(index),
            valid=None if inside.all() else self._to_device(np.flatnonzero(inside.reshape(-1))),
            positions=self._to_device(positions),
            blocks=self._to_device(blocks),
            fresh=batch == 1 and int(starts[0]) == 0,
        )

    def _forward(self, packed: _Packed, tiles: list[Tile], keep: NDArray[np.int64]) -> Tensor:
        """Logits [len(keep), V] at packed positions `keep`."""
        batch = PagedBatch(
            self.cache, self.layout.layer_of, self._to_device(packed.write_index), tiles, self.workspace, self._decode
        )  # fmt: skip
        with self.installation:
            output = self.model(
                input_ids=self._to_device(packed.ids)[None],
                position_ids=self._to_device(packed.positions)[None],
                use_cache=False,
                logits_to_keep=self._to_device(keep if len(keep) else packed.offsets[-1:] - 1),
                **{BATCH_ARGUMENT: batch},
            )
        logits: Tensor = output.logits[0]
        return logits

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.layout.device.type == "cpu" else tensor.to(self.layout.device, non_blocking=True)

    # --- sampling -----------------------------------------------------------------------------------------------

    def _sample(self, step: ScheduledStep, logits: Tensor) -> StepTokens:
        table, slots = self.table, step.sample_slots
        rows = self.sampling.select(slots)
        length = table.length[slots]
        short = np.flatnonzero(length < table.min_length[slots])
        banned = [(row, ids[ids >= 0].tolist()) for row in short.tolist() if len(ids := table.stop_ids[slots[row]])]
        histories = None
        if rows.any_penalty:
            histories = [
                (table.tokens[slot, : table.origin[slot]], table.tokens[slot, table.origin[slot] : table.length[slot]])
                for slot in slots.tolist()
            ]
        positions = self._to_device((length - table.origin[slots]).astype(np.int64))
        sampled = sample(logits, rows, positions, histories=histories, banned=banned)
        top = None
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            top = [
                list(zip(ids, values, strict=True))
                for ids, values in zip(sampled.top_ids.tolist(), sampled.top_logprobs.tolist(), strict=True)
            ]
        return StepTokens(sampled.token_ids.cpu().numpy(), sampled.logprobs.cpu().numpy(), top)

    def _prompt_spans(
        self, step: ScheduledStep, packed: _Packed, wanted: Rows[Sequence]
    ) -> list[tuple[Sequence, NDArray[np.int64]]]:
        """Per sequence that wants prompt log-probs: the packed positions whose successor is a prompt token."""
        spans = []
        for row, sequence in enumerate(step.prefills, step.num_decodes):
            if sequence in wanted:
                span = np.arange(packed.offsets[row], packed.offsets[row + 1])
                last = len(sequence.tokens) - 1
                spans.append((sequence, span[packed.positions[span] < last]))
        return spans

    def _take_prompt_logprobs(self, sequence: Sequence, logits: Tensor, positions: NDArray[np.int64]) -> None:
        targets = self._to_device(sequence.tokens[positions + 1].astype(np.int64))
        top = sequence.params.prompt_logprobs or 0
        for start in range(0, len(positions), PROMPT_LOGPROB_ROWS):
            part = slice(start, start + PROMPT_LOGPROB_ROWS)
            values, top_ids, top_values = token_logprobs(logits[part], targets[part], top)
            sequence.prompt_logprobs += values.tolist()
            if top_ids is not None and top_values is not None:
                for ids, scores in zip(top_ids.tolist(), top_values.tolist(), strict=True):
                    sequence.prompt_top.append(list(zip(ids, scores, strict=True)))


def _fits(counts: NDArray[np.int32], ends: NDArray[np.int32], group: list[int], row: int) -> bool:
    """Whether `row` may share a rectangle: at most twice its size, and a bounded number of scores."""
    longest, span = int(counts[group[0]]), int(max(ends[each] for each in (*group, row)))
    return (
        2 * int(counts[row]) >= longest
        and 2 * int(ends[row]) >= span
        and (len(group) + 1) * longest * span <= MAX_TILE_SCORES
    )
