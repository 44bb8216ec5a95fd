"""Prefill of whole prompts by FlashAttention (github.com/Dao-AILab/flash-attention) where it is installed; never required.

Used for chunks that start their sequences, whose keys are the step's own, so that no block is read. Other chunks and all
decodes use Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
_log = logging.getLogger(__name__)

VarlenAttention = Callable[..., Tensor]


@cache
def load() -> VarlenAttention | None:
    """`flash_attn_varlen_func`, or None where the package is missing or fails to import."""
    try:
        function: VarlenAttention = import_module("flash_attn").flash_attn_varlen_func
    except ModuleNotFoundError:
        return None
    except Exception as exc:  # noqa: BLE001 - a binary for another torch may fail in any way; Triton is used instead
        _log.warning("flash_attn is installed and does not load (%s: %s): Triton prefills", type(exc).__name__, exc)
        return None
    return function


def serves(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether FlashAttention supports query [P, H, D], key [P, Hkv, D], value [P, Hkv, D]: 16 bits, head size <= 256."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and query.shape[2] == key.shape[2] == value.shape[2] <= MAX_HEAD_DIM
        and query.shape[2] % 8 == 0
    )


def prefill(
    attend: VarlenAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    longest: int,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention of whole prompts, packed one after the other.

    Args:
        query, key, value: [P, H, D], [P, Hkv, D], [P, Hkv, D].
        begins: [R + 1] int32, offset of each prompt.
        longest: positions of the longest.

    Returns:
        [P, H, D].
    """
    return attend(
        query, key.contiguous(), value.contiguous(), begins, begins, longest, longest, softmax_scale=scaling, causal=True,
        # FlashAttention counts the positions before a query's own; -1: all.
        window_size=(-1 if window is None else window - 1, 0),
        softcap=softcap or 0.0,
    )  # fmt: skip
