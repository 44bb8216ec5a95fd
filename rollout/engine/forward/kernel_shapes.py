"""Shapes of attention in a model, as the Triton kernels are tried out with them."""

from __future__ import annotations

from rollout.engine.forward.model_support import ModelLayout
from rollout.engine.kernels import triton_paged
from rollout.engine.kernels.triton_trial import Heads


def kernel_shapes(layout: ModelLayout) -> list[Heads]:
    """Head counts and sizes of the model's layers that the Triton kernels take, without duplicates."""
    found = (
        Heads(call.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim)
        for shape, call in zip(layout.layers, layout.calls, strict=True)
    )
    sizes = range(triton_paged.MIN_HEAD_DIM, triton_paged.MAX_HEAD_DIM + 1)
    served = layout.kv_dtype in triton_paged.DTYPES
    return [each for each in dict.fromkeys(found) if served and each.dim in sizes and each.value_dim in sizes]
