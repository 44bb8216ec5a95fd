"""Attention of a captured decode step: kernels that read nothing that changes but device memory at fixed addresses."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor, nn

from rollout.engine.graphs.cuda_capture import Uncapturable
from rollout.engine.graphs.decode_state import DecodeInputs
from rollout.engine.kernels import triton_paged
from rollout.engine.kernels.torch_paged import Rules
from rollout.engine.kernels.triton_paged import TritonPaged, serves
from rollout.engine.kernels.triton_trial import Heads
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.models.attention import SINKS
from rollout.engine.models.model_support import ModelLayout


class CapturedBatch:
    """`AttentionBatch` of a captured forward."""

    def __init__(self, kernels: TritonDecode, layout: ModelLayout, inputs: DecodeInputs) -> None:
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
    """Attention of a captured step by the Triton kernels.

    Args:
        paged: not shared with other users: graphs keep the addresses of its workspace.
    """

    def __init__(self, paged: TritonPaged, cache: KVCache) -> None:
        self._paged = paged
        self._cache = cache

    def __call__(
        self, layer: int, inputs: DecodeInputs, query: Tensor, key: Tensor, value: Tensor, **rules: Unpack[Rules]
    ) -> Tensor:
        """Write K and V of every row, then attend.

        Args:
            query, key, value: [B, H, D], [B, Hkv, D], [B, Hkv, Dv].

        Returns:
            [B, H, Dv].
        """
        keys, values = self._cache.layer(layer)
        slots, table = inputs.groups[self._cache.group_of(layer)]
        # Under an autocast that the engine was not built under, the cache has another dtype.
        dtype, query = query.dtype, query.to(keys.dtype)
        if not serves(query, keys, values):
            raise Uncapturable(f"the Triton kernels do not take its heads ({query.dtype}, {tuple(query.shape[1:])})")
        self._paged.write(key, value, keys, values, slots)
        out, _ = self._paged.decode_with_lse(
            query, keys, values, table, inputs.seen, rules.get("window"), rules["scaling"], softcap=rules.get("softcap"),
            chunk=rules.get("chunk"), sinks=rules.get("sinks"), parts=inputs.parts,
        )  # fmt: skip
        return out.to(dtype)

    @property
    def nbytes(self) -> int:
        """Size of the workspace, outgrown parts included."""
        return self._paged.nbytes

    def release(self) -> None:
        """Free the workspace."""
        self._paged.clear()


def kernel_shapes(layout: ModelLayout) -> list[Heads]:
    """Head counts and sizes of the model's layers that the Triton kernels take, without duplicates."""
    found = (
        Heads(call.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim)
        for shape, call in zip(layout.layers, layout.calls, strict=True)
    )
    sizes = range(triton_paged.MIN_HEAD_DIM, triton_paged.MAX_HEAD_DIM + 1)
    served = layout.kv_dtype in triton_paged.DTYPES
    return [each for each in dict.fromkeys(found) if served and each.dim in sizes and each.value_dim in sizes]
