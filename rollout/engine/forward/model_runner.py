"""The model runner, which turns scheduled steps into tensors, runs the forward pass and samples tokens.

The positions of one step form one packed row [1, P]: decoding sequences first, then prefill chunks. A step uses the fastest
forward pass that supports it: a CUDA graph, the fused forward pass, or the module's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Rows
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.forward.module_forward import ModuleForward
from rollout.engine.forward.step_tensors import pack, prompt_spans, sample_step, take_prompt_logprobs
from rollout.engine.fused.fused_forward import FusedForward
from rollout.engine.graphs.cuda_graphs import GraphedDecode
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import upload
from rollout.engine.memory.streams import StreamOrder
from rollout.engine.models.adapters import LoraAdapters, Names
from rollout.engine.multimodal.family import StepImages
from rollout.engine.parallel.leading import ForwardWork, Together
from rollout.engine.sampling.constraints import Constraints
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.engine.scheduling.sequences import SequenceTable
from rollout.engine.scheduling.step import ScheduledStep, StepTokens
from rollout.errors import UnsupportedModelError


class ModelRunner:
    """The object that runs scheduled steps on one model.

    Args:
        module: the module's own forward pass, for every step that no faster forward pass supports.
        table: the table of active sequences, one per row.
        adapters: the LoRA adapters that requests may name.
        together: the object that runs each forward pass together with the other ranks, if there are any.
        constraints: the structured-output constraints of the sequences in the table.
        exact: whether to run only the fused forward pass, and to compute log-probs with torch's own log-softmax.

    Attributes:
        fused: the fused forward pass, which replaces the module's own if it supports the model in its current state. If
            None, `without_fused` gives the reason.
        graphs: the CUDA graphs of decode steps. If None, `without_graphs` gives the reason.
        runs: the object that runs several decode steps in one call. If None, every call runs one decode step.
    """

    def __init__(
        self,
        module: ModuleForward,
        table: SequenceTable,
        adapters: LoraAdapters,
        together: Together,
        constraints: Constraints,
        *,
        exact: bool = False,
    ) -> None:
        self.module = module
        self.model, self.layout, self.cache, self.states = module.model, module.layout, module.cache, module.states
        self.vision, self.installation = module.vision, module.installation
        self.table = table
        self.adapters = adapters
        self._together = together
        self.values = module.values
        self.exact = exact
        self.fused: FusedForward | None = None
        self.without_fused = "Advanced.fused_forward=False"
        self.graphs: GraphedDecode | None = None
        self.without_graphs = ""
        self.runs: DecodeRuns | None = None
        self.order = StreamOrder(self.layout.device)
        """The stream order, which makes the engine's device work wait for the work that callers have queued."""
        self.sampling = SamplingTable(self.layout.device)
        self.constraints = constraints

    def execute(self, step: ScheduledStep) -> StepTokens:
        """Run one forward pass and sample one token per sampled row, or run up to `step.ahead` decode steps in one call.

        Prompt log-probs are appended to the sequences that request them, for the prompt positions that this step computes.
        """
        # Wait for the callers' device work here: `compute` waits only after states have been moved and images encoded.
        self.order.follow()
        self.move_states(step.state_moves)
        if step.ahead and self.runs is not None:
            return self.runs.run(step)
        ids, packed = pack(step, self.table)
        entries, repeats = step.distinct_entries()
        keep = packed.offsets[entries + 1] - 1
        spans = prompt_spans(step, packed)
        packed, images = self.pictured(step, packed, self.table)
        keeps = np.concatenate([keep, *(span for _, span in spans)])
        compute = partial(self.compute, states=self.table.state[step.rows], named=self.adapters.of(step.rows))
        logits = self._together.run(ForwardWork(ids, packed, keeps, step.copies, images=images), compute)
        start = len(entries)
        for sequence, span in spans:
            rows, at = logits[start : start + len(span)], packed.positions[span]
            take_prompt_logprobs(sequence, rows, at, self.vision.text_ids, exact=self.exact)
            start += len(span)
        if not len(step.sampled_rows):
            return StepTokens(np.zeros(0, np.int64), np.zeros(0, np.float32))
        sampled_logits = logits[: len(entries)]
        values = None
        if self.values.width:
            with self.installation.inference():
                values = self.values.take(packed.slots[keep])[repeats]
        if len(entries) != len(repeats):
            sampled_logits = sampled_logits.index_select(0, upload(repeats, self.layout.device))
        return sample_step(
            step, sampled_logits, self.table, self.sampling, self.constraints, self.vision, values, exact=self.exact
        )

    def compute(self, work: ForwardWork, states: NDArray[np.int32] | None = None, named: Names | None = None) -> Tensor:
        """Zero and copy the KV blocks listed in `work`, then return the logits. All tensor-parallel ranks call this."""
        self.order.follow()
        if work.zeroed_blocks:
            self.cache.zero_blocks(work.zeroed_blocks)
        if work.copies:
            self.cache.copy_blocks(work.copies)
        with self.values.collecting():
            return self.forward(work.ids, work.rows, work.keep, states, work.images, named)

    def zero_blocks(self, blocks: Rows[int]) -> None:
        """Fill the given KV blocks with zeros, on all ranks of the tensor-parallel group."""
        self.cache.zero_blocks(blocks)
        self._together.zero_blocks(blocks)

    def move_states(self, moves: Rows[tuple[int, int]]) -> None:
        """Copy recurrent states for all pairs (source slot, destination slot) at once. A negative source means zeros."""
        if moves:
            self.states.move(moves)

    def why_not_fused(self) -> str | None:
        """Return why steps currently run the module's own forward pass, or None if they run the fused forward pass."""
        if self.fused is None:
            return self.without_fused
        with self.installation.inference():
            return None if self.fused.ready(self.installation.module_epoch) else self.fused.why_not

    def refuse_inexact(self) -> None:
        """Raise `UnsupportedModelError` if the fused forward pass, which exact mode requires, does not support the model."""
        if (why := self.why_not_fused()) is not None:
            raise UnsupportedModelError(
                f"InferenceConfig.exact=True: {type(self.model).__name__}: {why}; exact mode serves what the fused C++ "
                "forward serves"
            )

    @property
    def graph_bytes(self) -> int:
        """The device memory of the CUDA graphs, in bytes; 0 without graphs."""
        return 0 if self.graphs is None else self.graphs.graph_bytes

    def release_workspace(self, *, graphs: bool = False) -> None:
        """Release buffers, which the next step allocates again.

        Args:
            graphs: whether to release the CUDA graphs too; later steps capture them again.
        """
        self.module.release()
        self.vision.features.clear()
        if self.fused is not None:
            self.fused.release()
        if self.graphs is not None:
            self.graphs.release() if graphs else self.graphs.retry()

    def pictured(
        self, step: ScheduledStep, rows: PagedRows, table: SequenceTable
    ) -> tuple[PagedRows, StepImages | None]:
        """Return a step's packed rows, with image masks added, and its image inputs (None if no images affect the step)."""
        pictured = any(each.images.items for each in step.prefills)
        with self.installation.forward() if pictured else nullcontext():
            images = self.vision.of_step(step, table, rows.offsets, rows.positions)
        return rows if images is None else replace(rows, seen=images.seen), images

    def forward(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        states: NDArray[np.int32] | None = None,
        images: StepImages | None = None,
        named: Names | None = None,
    ) -> Tensor:
        """Compute logits [len(keep), V] at packed positions `keep`. They are valid until the next call.

        Args:
            ids: [P], the token ids of the P packed positions.
            rows: the R sequences, with their positions and block tables.
            keep: the packed positions whose logits are needed.
            states: [R], the slot of each sequence's recurrent state, if the model has any. None means the first R slots.
            images: the image inputs, or None if the step has no images.
            named: [R], the name of each sequence's adapter, or None if no sequence names an adapter.
        """
        self.order.follow()
        if states is None:
            states = np.arange(len(rows), dtype=np.int32)
        with self.installation.inference():
            epoch = self.installation.module_epoch
            if named is not None:
                return self.adapters.run(ids, rows, keep, named, self.forward, self.module.batch)
            fused = self.fused if images is None else None
            if fused is not None and not fused.ready(epoch):
                fused = None
            if self.exact and fused is None:
                self.refuse_inexact()
            if self.graphs is not None and (images is None or images.only_shifts):
                rotary = rows.positions if images is None else images.positions
                replayed = self.graphs.run(ids, rows, keep, epoch, rotary)
                if replayed is not None:
                    return replayed
            if fused is not None:
                return fused.run(ids, rows, keep, states)
            return self.module.run(ids, rows, keep, states, images)


class DecodeRuns:
    """The object that runs several decode steps in one call, without calling the scheduler between them.

    Args:
        asked: a flag that stops the steps of a call early once it is not 0; see `FusedForward.decode`.
    """

    def __init__(self, forward: FusedForward, runner: ModelRunner, asked: ctypes.c_int32) -> None:
        self._forward = forward
        self._runner = runner
        self._asked = asked

    def serves(self, step: ScheduledStep) -> bool:
        """Return whether `run` can run several decode steps for the rows of `step`.

        All rows must be decoding, without named adapters and without images that shift later positions. Logits must not be
        edited, only divided by the temperature. No row may request results other than tokens and log-probs.
        """
        runner, rows = self._runner, step.rows
        table, installation = runner.table, runner.installation
        if step.prefills:
            return False
        if table.position_shift[rows].any() or runner.adapters.of(rows) is not None:
            return False
        if runner.layout.states and not table.plain[rows].all():
            # Do not run ahead if the model has recurrent states and Python checks the text of a row for stop strings: the
            # check follows all steps, so the state of a finished row would include tokens after the stop string.
            return False
        if runner.constraints.constrains(rows):
            return False
        short = table.length[rows] < table.min_length[rows]
        if short.any() and (table.stop_ids[rows[short]] >= 0).any():
            return False
        if not runner.sampling.select(rows).plain:
            return False
        with installation.inference():
            return self._forward.ready(installation.module_epoch)

    def run(self, step: ScheduledStep) -> StepTokens:
        """Run up to `step.ahead` decode steps and return their tokens. Call this only if `serves` returned True."""
        runner, table, rows = self._runner, self._runner.table, step.rows
        ids, packed = pack(step, table)
        if step.copies:
            runner.cache.copy_blocks(step.copies)
        counters = (table.length[rows] - table.origin[rows]).astype(np.int64)
        values = None
        with runner.installation.inference():
            with runner.values.collecting():
                tokens, logprobs = self._forward.decode(
                    ids, packed, table.state[rows], runner.sampling.select(rows), counters=counters,
                    stop_ids=table.stop_ids[rows], steps=step.ahead, asked=self._asked,
                )  # fmt: skip
            if runner.values.width:
                values = runner.values.take(np.arange(tokens.size))
        if np.isnan(logprobs).any():
            # Zero the KV slots of steps whose log-prob is NaN, because they may contain NaN. Kernels may multiply masked
            # slots by zero, and 0 * NaN is NaN.
            row, made = np.nonzero(np.isnan(logprobs))
            at, size = step.starts[row] + made, table.block_size
            runner.cache.zero_slots(packed.tables[row, at // size] * size + at % size)
        return StepTokens(tokens.ravel(), logprobs.ravel(), steps=tokens.shape[1], values=values)
