"""Attention of a captured decode step: kernels that read nothing that changes but device memory at fixed addresses."""

from __future__ import annotations

from typing import Any, Protocol, Unpack

from torch import Tensor, nn

from rollout.engine.forward.attention import SINKS
from rollout.engine.forward.chunk_state import ChunkInputs
from rollout.engine.forward.cuda_capture import Uncapturable
from rollout.engine.forward.decode_state import DecodeInputs
from rollout.engine.forward.model_support import ModelLayout
from rollout.engine.kernels import triton_paged
from rollout.engine.kernels.torch_paged import Rules
from rollout.engine.kernels.triton_layers import Place
from rollout.engine.kernels.triton_paged import TritonPaged, serves
from rollout.engine.kernels.triton_trial import Heads
from rollout.engine.memory.kv_cache import KVCache


class DecodeKernels(Protocol):
    """Attention that can be captured in a graph."""

    @property
    def shares(self) -> bool:
        """Whether `DecodeInputs.shared` is obeyed."""

    def __call__(
        self,
        layer: int,
        inputs: DecodeInputs | ChunkInputs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **rules: Unpack[Rules],
    ) -> Tensor:
        """Write K and V of every row, then attend.

        Everything that changes between steps, the address of the KV pool included, is read from device memory.

        Args:
            query, key, value: [B, H, D], [B, Hkv, D], [B, Hkv, Dv].

        Returns:
            [B, H, Dv].
        """

    @property
    def nbytes(self) -> int:
        """Size of the workspace that captured calls use."""

    def release(self) -> None:
        """Free the workspace; no captured call is replayed any more."""


class DecodeForward(Protocol):
    """A forward that may be captured instead of the module's."""

    numbers: tuple[float, ...]
    """What a captured step has fixed beside the addresses of parameters."""
    by_kernels: bool
    """Whether its attention is that of the `DecodeKernels`; prefill chunks are captured only then."""

    def decode(self, inputs: Any) -> Tensor:
        """Logits of `DecodeInputs`, [B, V], or of `ChunkInputs` at their `keep`; reads nothing that changes between steps
        but the inputs and the cache."""


class CapturedBatch:
    """`AttentionBatch` of a captured forward."""

    def __init__(self, kernels: DecodeKernels, layout: ModelLayout, inputs: DecodeInputs | ChunkInputs) -> None:
        self._kernels = kernels
        self._layout = layout
        self._inputs = inputs

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        """Attention of one layer by the graph's kernels; see `AttentionBatch`."""
        out = self._kernels(
            self._layout.layer_of[module], self._inputs, *(part[0].transpose(0, 1) for part in (query, key, value)),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=self._layout.mask_windows.get(module, arguments.get("sliding_window")),
            softcap=arguments.get("softcap"), chunk=self._layout.chunks.get(module), sinks=arguments.get(SINKS),
        )  # fmt: skip
        return out[None]


class TritonDecode:
    """`DecodeKernels` by the Triton kernels.

    Args:
        paged: not shared with other users: graphs keep the addresses of its workspace.
    """

    def __init__(self, paged: TritonPaged, cache: KVCache) -> None:
        self._paged = paged
        self._cache = cache

    @property
    def shares(self) -> bool:
        """Whether the kernel that reads a prefix once works here."""
        return self._paged.shares

    def __call__(
        self,
        layer: int,
        inputs: DecodeInputs | ChunkInputs,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **rules: Unpack[Rules],
    ) -> Tensor:
        """Write K and V, then attend, by the Triton kernels; see `DecodeKernels`."""
        place = self.place(layer)
        # Under an autocast that the engine was not built under, the cache has another dtype.
        dtype, query = query.dtype, query.to(place.keys.dtype)
        _require_served(query, place)
        self._paged.write(key, value, place.keys, place.values, self.slots(layer, inputs), cells=place.cells)
        return self.attend(layer, inputs, query, **rules).to(dtype)

    def place(self, layer: int) -> Place:
        """Where K and V of a layer lie, also after the pool has moved."""
        keys, values = self._cache.layer(layer)
        if any(part[0].numel() * part.element_size() % 16 for part in (keys, values)):
            raise Uncapturable("16 does not divide the bytes of its KV blocks")
        return Place(keys, values, self._cache.addresses[2 * layer : 2 * layer + 2])

    def slots(self, layer: int, inputs: DecodeInputs | ChunkInputs) -> Tensor:
        """[P] int32 slot mapping of a layer."""
        return inputs.groups[self._cache.group_of(layer)][0]

    def attend(self, layer: int, inputs: DecodeInputs | ChunkInputs, query: Tensor, **rules: Unpack[Rules]) -> Tensor:
        """Attention of [B, H, D], in the dtype of the cache, over K and V that are written."""
        place, window, chunk = self.place(layer), rules.get("window"), rules.get("chunk")
        _require_served(query, place)
        table, softcap, sinks = inputs.groups[self._cache.group_of(layer)][1], rules.get("softcap"), rules.get("sinks")
        if isinstance(inputs, ChunkInputs):
            return self._paged.prefill(
                query, place.keys, place.values, table, inputs.begins, inputs.starts, window, rules["scaling"],
                softcap=softcap, chunk=chunk, sinks=sinks, cells=place.cells,
            )  # fmt: skip
        out, _ = self._paged.decode_with_lse(
            query, place.keys, place.values, table, inputs.seen, window, rules["scaling"], softcap=softcap, chunk=chunk,
            # With a window or a chunk, hardly any of the keys are in the prefix.
            sinks=sinks, shared=inputs.shared if window is None and chunk is None else None, cells=place.cells,
            parts=inputs.parts,
        )  # fmt: skip
        return out

    @property
    def nbytes(self) -> int:
        """Size of the workspace, outgrown parts included."""
        return self._paged.nbytes

    def release(self) -> None:
        """Free the workspace."""
        self._paged.clear()


def _require_served(query: Tensor, place: Place) -> None:
    if not serves(query, place.keys, place.values):
        raise Uncapturable(f"the Triton kernels do not take its heads ({query.dtype}, {tuple(query.shape[1:])})")


def kernel_shapes(layout: ModelLayout) -> list[Heads]:
    """Head counts and sizes of the model's layers that the Triton kernels take, without duplicates."""
    found = (
        Heads(call.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim)
        for shape, call in zip(layout.layers, layout.calls, strict=True)
    )
    sizes = range(triton_paged.MIN_HEAD_DIM, triton_paged.MAX_HEAD_DIM + 1)
    served = layout.kv_dtype in triton_paged.DTYPES
    return [each for each in dict.fromkeys(found) if served and each.dim in sizes and each.value_dim in sizes]
