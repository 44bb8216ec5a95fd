"""Model runner: scheduled work to tensors, forward, sampled tokens. Owns tensors, knows no queues.

The positions of one step travel as one packed row [1, P]: decoding sequences first, then prefill chunks. A model with
recurrent states runs one forward [B, L] per length L instead (`recurrent_forward`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Rows
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.forward.decode_runs import DecodeRuns, RunForward
from rollout.engine.forward.prompt_logprobs import prompt_spans, take_prompt_logprobs
from rollout.engine.forward.recurrent_forward import forward_by_length
from rollout.engine.forward.step_rows import pack
from rollout.engine.forward.step_sampling import sample_step
from rollout.engine.fused.fused_forward import BoundForward, FusedForward
from rollout.engine.graphs.cuda_capture import CudaDevice
from rollout.engine.graphs.cuda_graphs import GraphedDecode
from rollout.engine.graphs.decode_kernels import TritonDecode, kernel_shapes
from rollout.engine.graphs.graphed_runs import GraphedRuns
from rollout.engine.kernels import cpu_library, triton_paged
from rollout.engine.kernels.cpu_attention import CpuPagedAttention
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import PagedAttention, TorchPagedAttention, Workspace, write_slots
from rollout.engine.kernels.triton_attention import TritonPagedAttention
from rollout.engine.kernels.triton_trial import tried_out
from rollout.engine.memory.buffers import upload, upload_together
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.memory.stream_order import StreamOrder
from rollout.engine.models.adapters import LoraAdapters, Names
from rollout.engine.models.attention import Installation, PagedBatch, forward_with
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.models.recurrent_states import States
from rollout.engine.models.routers import Routers
from rollout.engine.multimodal.family import ImageItem
from rollout.engine.multimodal.step_images import StepImages
from rollout.engine.multimodal.vision import Vision
from rollout.engine.parallel.leader import Leader
from rollout.engine.parallel.lockstep import Lockstep
from rollout.engine.parallel.work import ForwardWork
from rollout.engine.sampling.constraints import Constraints
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.engine.scheduling.sequences import SequenceTable
from rollout.engine.scheduling.step import ScheduledStep, StepTokens
from rollout.engine.weights.autocast_copies import NO_COPIES, AutocastCopies
from rollout.errors import UnsupportedModelError


class ModelRunner:
    """Runs scheduled steps on one model.

    Args:
        fused: try the fused forward.
        exact: run nothing but `fused`, which on a GPU is set after construction (`exact.paged_forward`), and report
            log-probs by torch's own log-softmax.
        graphed_rows: on CUDA, most rows of a decode step that is replayed as a graph; 0: no graphs but those of exact mode.
        autocast: the dtype of an autocast that all forwards run under; None: the caller's, if any.
        routers: record what these routers choose in the cache, which has room for it; None: nothing is recorded.
        vision: the images of the sequences.
        adapters: those that requests may name.
        split: whether the weights are split over ranks, which the fused forward does not serve.
        leader: has the other members of a tensor-parallel group compute every step too; None: there are none, or this rank
            is one of them.
        lockstep: has the ranks that exchange tokens with this one compute a forward whenever it does; None: there are none.
        states: holds the recurrent states; None: the model has none.
        asked: ends a run of decode steps; None: no runs are made.
        copies: of weights that autocast casts, for steps on CUDA.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        cache: KVCache,
        table: SequenceTable,
        vision: Vision,
        *,
        fused: bool = True,
        exact: bool = False,
        graphed_rows: int = 0,
        autocast: torch.dtype | None = None,
        routers: Routers | None = None,
        adapters: LoraAdapters,
        split: bool = False,
        leader: Leader | None = None,
        lockstep: Lockstep | None = None,
        states: StatePool | None = None,
        asked: ctypes.c_int32 | None = None,
        copies: AutocastCopies = NO_COPIES,
    ) -> None:
        self.model = model
        self.layout = layout
        self.cache = cache
        self.table = table
        self.vision = vision
        self._library = cpu_library.load() if layout.device.type == "cpu" else None
        self.paged = triton_paged.load(layout.device) if layout.device.type == "cuda" else None
        if self.paged is not None and not exact:
            self.paged = tried_out(self.paged, kernel_shapes(layout), layout.kv_dtype, cache.block_size, layout.device)
        self._split = split
        self.copies = copies
        self.fused: BoundForward | None = None
        """Runs the steps of a model that it serves, in place of the module's forward."""
        self.graphs: GraphedDecode | None = None
        fused = fused and not split and routers is None
        if fused and self._library is not None:
            self.fused = FusedForward(model, layout, cache, self._library, exact=exact, states=states)
        # Graphs need a separate workspace, which `release_workspace` must not free.
        if graphed_rows and self.paged is not None and not exact:
            decode = TritonDecode(self.paged.with_own_workspace(), cache)
            device = CudaDevice(layout.device)
            self.graphs = GraphedDecode(model, layout, cache, graphed_rows, device, decode, copies=copies)
        self.exact = exact
        self.installation = Installation(model, autocast)
        self.order = StreamOrder(layout.device)
        """Of what this runner does behind what callers have queued on the device."""
        self._dropped = ""
        self.sampling = SamplingTable(layout.device)
        self.constraints: Constraints | None = None
        self.workspace = Workspace()
        self._routers = routers
        self.adapters = adapters
        self._leader = leader
        self._lockstep = lockstep
        self.states = states
        self.runs: DecodeRuns | None = None
        """Makes several decode steps in one call."""
        maker: RunForward | None = self.fused if isinstance(self.fused, FusedForward) else None
        if self.graphs is not None:
            maker = GraphedRuns(self.forward, self.graphs, layout.device)
        if asked is not None and maker is not None and not exact and leader is None and lockstep is None:
            self.runs = DecodeRuns(maker, table, cache, self.sampling, adapters, self.installation, asked)

    def execute(self, step: ScheduledStep) -> StepTokens:
        """Run one forward and sample one token per sampled row, or up to `step.ahead` of them.

        Prompt log-probs of the step's prefill chunks are appended to the sequences that want them.
        """
        # Blocks, states and images are touched before the forward.
        self.order.follow()
        self.move_states(step.state_moves)
        if step.ahead and self.runs is not None:
            return self.runs.run(step)
        ids, packed = pack(step, self.table)
        entries, repeats = step.distinct_entries()
        wanted = [s for s in step.prefills if s.wants_prompt_logprobs]
        keep = packed.offsets[entries + 1] - 1 if step.depths is None else packed.offsets[entries] + step.depths
        spans = prompt_spans(step, packed, wanted)
        packed, images = self.pictured(step, packed, self.table)
        keeps = np.concatenate([keep, *(span for _, span in spans)])
        work = ForwardWork(ids, packed, keeps, step.copies, images=images)
        if self._leader is None:
            with nullcontext() if self._lockstep is None else self._lockstep.ended_by_failures():
                logits = self.compute(work, self.table.state[step.rows], self.adapters.of(step.rows))
        else:
            logits = self._leader.run(work, self.compute)
        start = len(entries)
        for sequence, span in spans:
            rows, at = logits[start : start + len(span)], packed.positions[span]
            take_prompt_logprobs(sequence, rows, at, self.vision.text_ids, exact=self.exact)
            start += len(span)
        if not len(step.sampled_rows):
            return StepTokens(np.zeros(0, np.int64), np.zeros(0, np.float32))
        sampled_logits = logits[: len(entries)]
        if len(entries) != len(repeats):
            sampled_logits = sampled_logits.index_select(0, upload(repeats, self.layout.device))
        sampled = self._sample(step, sampled_logits)
        if step.depths is not None and (broken := np.isnan(sampled.logprobs) & (step.depths > 0)).any():
            # A kernel may multiply what lies behind a sequence's end by zero, which leaves a NaN of a rejected draft.
            self.zero_slots(np.concatenate([each.slots[keep[broken]] for each in packed.groups()]))
        return sampled

    def compute(
        self,
        work: ForwardWork,
        states: NDArray[np.int32] | None = None,
        named: Names | None = None,
    ) -> Tensor:
        """Logits [len(work.keep), V], valid until the next call; every member of a tensor-parallel group calls it.

        Args:
            states: state slot of each sequence; not read without a state pool.
            named: adapter of each sequence; None: none has one.
        """
        self.order.follow()
        if work.zeroed_blocks:
            self.cache.zero_blocks(work.zeroed_blocks)
        if len(work.zeroed_slots):
            self.cache.zero_slots(work.zeroed_slots)
        if work.copies:
            self.cache.copy_blocks(work.copies)
        return self.forward(work.ids, work.rows, work.keep, states, work.images, named)

    def encode(self, item: ImageItem) -> None:
        """Run this member's part of the vision tower on an item that the first rank of a tensor-parallel group encodes."""
        self.order.follow()
        with self.installation.forward():
            self.vision.encode(item)

    def zero_blocks(self, blocks: Rows[int]) -> None:
        """Fill KV blocks with zeros."""
        self.cache.zero_blocks(blocks)
        if self._leader is not None:
            self._leader.zero_blocks(blocks)

    def zero_slots(self, slots: NDArray[np.int64]) -> None:
        """Fill token slots of the KV cache with zeros."""
        self.cache.zero_slots(slots)
        if self._leader is not None:
            self._leader.zero_slots(slots)

    def move_states(self, moves: Rows[tuple[int, int]]) -> None:
        """Copy (source, destination) state slots, all read before any is written; a negative source: zeros."""
        if self.states is not None and moves:
            self.states.move(moves)

    def why_not_fused(self) -> str | None:
        """Why a step runs the module's own forward in the model's present state; None: it runs the fused one."""
        if self.fused is None:
            if self.layout.device.type != "cpu":
                return "the fused forward is for CPUs"
            if self._library is None:
                return cpu_library.status().described
            if self._split:
                return "its weights are split over ranks, and the fused forward reads whole matrices"
            if self._routers is not None:
                return "it records the experts that its routers choose (InferenceConfig.record_routes)"
            return self._dropped or "Advanced.fused_forward=False"
        with self.installation.inference():
            return None if self.fused.ready(self.installation.module_epoch) else self.fused.why_not

    def drop_fused(self, why: str) -> None:
        """Run the module's own forward from here on."""
        self.fused, self._dropped = None, why
        if self.graphs is None:
            self.runs = None

    def refuse_inexact(self) -> None:
        """Refuse a model, or a state of it, that the fused forward does not serve.

        Raises:
            UnsupportedModelError: names what it is.
        """
        why = self.why_not_fused()
        if why is None:
            return
        raise UnsupportedModelError(
            f"InferenceConfig.exact=True: {type(self.model).__name__}: {why}; exact mode serves what the fused C++ forward "
            "serves"
        )

    @property
    def graph_bytes(self) -> int:
        """Device memory of the CUDA graphs; 0: there are none."""
        return 0 if self.graphs is None else self.graphs.graph_bytes

    def release_workspace(self, *, graphs: bool = False) -> None:
        """Release buffers that the next step allocates again.

        Args:
            graphs: also the CUDA graphs, which are captured again when they are needed.
        """
        self.workspace.clear()
        self.vision.features.clear()
        if self.paged is not None:
            self.paged.clear()
        if self.fused is not None:
            self.fused.release()
        if self.graphs is not None:
            self.graphs.release() if graphs else self.graphs.retry()
        self.copies.release()

    # --- tensors ------------------------------------------------------------------------------------------------

    def pictured(
        self, step: ScheduledStep, rows: PagedRows, table: SequenceTable
    ) -> tuple[PagedRows, StepImages | None]:
        """The rows of a step with what its images let them see, and what images change in its forward; None: nothing."""
        pictured = any(each.images is not None for each in step.prefills)
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
        """Logits [len(keep), V] at packed positions `keep`, valid until the next call.

        Args:
            states: [R] state slot of each sequence, not read without a state pool; None: the first R.
            images: those of the step; None: it has none.
            named: [R] adapter of each sequence; None: none has one.
        """
        self.order.follow()
        rotary = rows.positions if images is None else images.positions
        with self.installation.inference():
            self.copies.refresh(self.installation.module_epoch)
            if named is not None:
                return self.adapters.run(ids, rows, keep, named, self.forward, self._module_forward)
            fused = self.fused if images is None else None
            if fused is not None and not fused.ready(self.installation.module_epoch):
                fused = None
            if self.states is not None:
                slots = np.arange(len(rows), dtype=np.int32) if states is None else states
                if fused is not None:
                    return fused.run(ids, rows, keep, slots)
                return forward_by_length(self._module_forward, self.layout, self.states, ids, rows, keep, slots, images)
            if self.exact and fused is None:
                self.refuse_inexact()
            if self.graphs is not None and (images is None or images.only_shifts):
                epoch = self.installation.module_epoch
                replayed = self.graphs.run(ids, rows, keep, epoch, rotary)
                if replayed is not None:
                    return replayed
            if fused is not None:
                return fused.run(ids, rows, keep)
            return self._module_forward(ids[None], rows, keep, images=images)[0]

    def _module_forward(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        states: States | None = None,
        images: StepImages | None = None,
    ) -> Tensor:
        """Logits [B, len(keep), V] of the module's own forward of `ids` [B, L] at positions `keep` (none: the last) of
        every row."""
        layout = self.layout
        keep = keep if len(keep) else rows.offsets[-1:] - 1
        rotary = rows.positions if images is None else images.positions
        groups = rows.groups()
        tokens, positions, kept, *slots = upload_together(
            (ids, rotary, keep, *(each.slots for each in groups)), layout.device
        )
        write = write_slots if self.paged is None else self.paged.write
        causal = None
        if rows.seen is not None and self.vision.causal_without_window:
            causal = [self._attention(replace(each, seen=None)) for each in groups]
        attention = [self._attention(each) for each in groups]
        batch = PagedBatch(
            self.cache, layout.layer_of, slots, attention, layout.mask_windows, layout.chunks, write, causal
        )
        cache = {} if states is None else {layout.cache_argument: states, **states.arguments}
        with ExitStack() as around:
            around.enter_context(self.installation.forward())
            around.enter_context(self._recording(slots[0]))
            inputs = {"input_ids": tokens}
            if images is not None:
                inputs = around.enter_context(self.vision.inputs(tokens, images))
            at = positions.view(*positions.shape[:-1], *tokens.shape)
            output = forward_with(batch, self.model, **inputs, position_ids=at, logits_to_keep=kept, **cache)
        logits: Tensor = output.logits
        return logits

    def _recording(self, slots: Tensor) -> AbstractContextManager[object]:
        write = partial(self.cache.write_routes, slots)
        return nullcontext() if self._routers is None else self._routers.recorded(write)

    def _attention(self, rows: PagedRows) -> PagedAttention:
        plain = TorchPagedAttention(rows, self.layout.device, self.workspace)
        if self.paged is not None:
            return TritonPagedAttention(self.paged, rows, self.layout.device, plain)
        return plain if self._library is None else CpuPagedAttention(self._library, rows, plain)

    def _sample(self, step: ScheduledStep, logits: Tensor) -> StepTokens:
        return sample_step(step, logits, self.table, self.sampling, self.constraints, self.vision, exact=self.exact)
