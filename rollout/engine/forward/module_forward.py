"""The module's own forward pass over the KV cache, for every step that no faster forward pass supports."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.forward.recurrent_forward import length_groups
from rollout.engine.kernels import cpu_library, triton_paged
from rollout.engine.kernels.cpu_attention import CpuPagedAttention
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import PagedAttention, TorchPagedAttention, write_slots
from rollout.engine.kernels.triton_attention import TritonPagedAttention
from rollout.engine.kernels.triton_trial import Heads, tried_out
from rollout.engine.memory.buffers import upload, upload_together
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.models.attention import Installation, PagedBatch, forward_with, in_eval_mode
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.models.recurrent_states import StateRows
from rollout.engine.models.routers import Routers
from rollout.engine.multimodal.family import StepImages
from rollout.engine.multimodal.vision import Vision
from rollout.engine.sampling.token_values import TokenValues

VERIFY_TOKENS = 12
"""The number of tokens in the short sequence with which every model is verified."""


class ModuleForward:
    """The Hugging Face module's own forward pass, with paged attention instead of the module's attention.

    Args:
        vision: the model's image support, which prepares the inputs of steps with images.
        values: the collector of hidden states, from which the user's function computes values of sampled tokens.
        states: the pool that holds the recurrent states of all sequences.
        routers: the routers, whose chosen experts are recorded in the cache. If None, the choices are not recorded.

    Attributes:
        library: the C++ kernels, or None if the model is not on a CPU or the kernels cannot be compiled.
        paged: the Triton kernels, or None if the model is not on CUDA or the kernels do not work.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: ModelLayout,
        cache: KVCache,
        installation: Installation,
        vision: Vision,
        values: TokenValues,
        states: StatePool,
        *,
        routers: Routers | None = None,
    ) -> None:
        self.model = model
        self.layout = layout
        self.cache = cache
        self.installation = installation
        self.vision = vision
        self._routers = routers
        self.states = states
        self.values = values
        self.library = cpu_library.load() if layout.device.type == "cpu" else None
        self.paged = triton_paged.load(layout.device) if layout.device.type == "cuda" else None
        if self.paged is not None:
            self.paged = tried_out(self.paged, _kernel_shapes(layout), layout.kv_dtype, cache.block_size, layout.device)

    def run(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        states: NDArray[np.int32],
        images: StepImages | None = None,
    ) -> Tensor:
        """Compute logits [len(keep), V] at packed positions `keep`, and advance the recurrent states in slots `states` [R].

        `ModelRunner.forward` documents the arguments.
        """
        if not self.layout.states:
            return self.batch(ids[None], rows, keep, images=images)[0]
        parts, places = [], []
        for group in length_groups(rows, keep):
            cache = StateRows(self.states, states[group.members])
            pictured = None if images is None else images.part(group.positions.ravel())
            logits = self.batch(ids[group.positions], group.rows, group.columns, cache, pictured)
            cache.flush()
            row, column = upload_together((group.row, group.column), self.layout.device)
            parts.append(logits[row, column])
            places.append(group.places)
        order = np.argsort(np.concatenate(places), kind="stable")
        return torch.cat(parts).index_select(0, upload(order, self.layout.device))

    def batch(
        self,
        ids: NDArray[np.int64],
        rows: PagedRows,
        keep: NDArray[np.int64],
        states: StateRows | None = None,
        images: StepImages | None = None,
    ) -> Tensor:
        """Compute logits [B, len(keep), V] for B rows of L token ids each, at columns `keep` of every row.

        `rows` has the positions and block tables of these B * L tokens. `images` has their image inputs, and `states` has
        the recurrent states of the B rows. If `keep` is empty, the logits of the last column, [B, 1, V], are returned.
        """
        layout = self.layout
        keep = keep if len(keep) else rows.offsets[-1:] - 1
        rotary = rows.positions if images is None else images.positions
        tokens, positions, kept, slots = upload_together((ids, rotary, keep, rows.slots), layout.device)
        causal = None
        if rows.seen is not None and self.vision.causal_without_window:
            causal = self._attention(replace(rows, seen=None))
        batch = PagedBatch(
            self.cache, layout.layer_of, slots, self._attention(rows), layout.mask_windows,
            write_slots if self.paged is None else self.paged.write, causal,
        )  # fmt: skip
        inputs = dict[str, Any]() if states is None else {layout.cache_argument: states}
        with ExitStack() as around:
            around.enter_context(self.installation.forward())
            if self._routers is not None:
                around.enter_context(self._routers.recorded(partial(self.cache.write_routes, slots)))
            if self.values.wanted:
                around.enter_context(self.values.read_by_head(rows.slots.reshape(ids.shape)[:, keep]))
            inputs |= (
                {"input_ids": tokens} if images is None else around.enter_context(self.vision.inputs(tokens, images))
            )
            at = positions.view(*positions.shape[:-1], *tokens.shape)
            logits: Tensor = forward_with(batch, self.model, **inputs, position_ids=at, logits_to_keep=kept).logits
        return logits

    def own_logits(self, tokens: Sequence[int]) -> Tensor:
        """Compute the logits [V] after `tokens` with the model's own attention, without the KV cache, in eval mode."""
        ids = torch.tensor([list(tokens)], device=self.layout.device)
        with in_eval_mode(self.model.modules()), torch.no_grad():
            # Compute all positions of a short input, so that the comparison also verifies `logits_to_keep`.
            kept = {} if len(tokens) <= VERIFY_TOKENS else {"logits_to_keep": ids.new_tensor([len(tokens) - 1])}
            logits: Tensor = self.model(input_ids=ids, use_cache=False, **kept).logits[0, -1]
        return logits

    def release(self) -> None:
        """Free the buffers of the Triton kernels. The next step allocates them again."""
        if self.paged is not None:
            self.paged.clear()

    @property
    def without_library(self) -> str:
        """The reason why the C++ kernels are not used; if `library` is set, a description of the kernels."""
        on_cpu = self.layout.device.type == "cpu"
        return cpu_library.status().described if on_cpu else "the fused forward is for CPUs"

    def _attention(self, rows: PagedRows) -> PagedAttention:
        plain = TorchPagedAttention(rows, self.layout.device)
        if self.paged is not None:
            return TritonPagedAttention(self.paged, rows, self.layout.device, plain)
        return plain if self.library is None else CpuPagedAttention(self.library, rows, plain)


def _kernel_shapes(layout: ModelLayout) -> list[Heads]:
    """Return the distinct head counts and head sizes among the layers that the Triton kernels can run."""
    found = (
        Heads(call.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim)
        for shape, call in zip(layout.layers, layout.calls, strict=True)
    )
    sizes = range(triton_paged.MIN_HEAD_DIM, triton_paged.MAX_HEAD_DIM + 1)
    served = layout.kv_dtype in triton_paged.DTYPES
    return [each for each in dict.fromkeys(found) if served and each.dim in sizes and each.value_dim in sizes]
