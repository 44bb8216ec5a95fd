"""Attention over a prefix tree, forward and backward: C++ on a CPU, FlexAttention on CUDA, plain torch otherwise.

The L tokens of a tree are in depth-first order, and ends[k] is the index after the last token of the subtree of token k.
Query q attends to key k if k <= q < ends[k] and, with a window, positions[q] - positions[k] < window. If images in the tree
attend in both directions, k <= lasts[q] replaces k <= q. Here lasts[q] is the last token of the image that contains q, or q
itself outside images. The C++ code does not support such images.

The queries may cover only the last S tokens. The first query is then token L - S, a multiple of `ALIGNMENT`.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from rollout.engine.kernels import cpu_library


@dataclass(frozen=True)
class Scores:
    """The rules that turn products of queries and keys into the scores of the softmax."""

    scaling: float
    window: int | None = None
    """The number of last positions that a query attends to, including its own; None means all positions."""
    softcap: float | None = None
    """The cap of scores, which become softcap * tanh(score / softcap); None means no cap."""
    causal: bool = False
    """Whether the layer is causal even within images."""

    def lasts(self, tree: Tensor) -> Tensor | None:
        """Return the last token (its index) that each token attends to, int32 [L]; None if it is always the token itself."""
        return None if self.causal or tree.shape[2] == 2 else tree[0, 0, 2]


def tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: Tensor, scores: Scores) -> Tensor:
    """Compute the attention of the last S tokens of a tree to their ancestors and themselves; differentiable.

    Args:
        query: [1, H, S, D] with H query heads of size D.
        key: [1, Hkv, L, D] for all L tokens; H is a multiple of the number Hkv of key-value heads.
        value: [1, Hkv, L, Dv].
        tree: int32 [1, 1, 2 or 3, L]. The rows have for each token the index after its subtree, its position and,
            if images attend in both directions, the last token of its image.
        scores: rules for the scores.

    Returns:
        [1, S, H, Dv].
    """
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.device.type == "cuda" and dtype != torch.float64:
        return flex_tree_attention(query, key, value, tree, scores)
    compiled = query.device.type == "cpu" and dtype in _COMPILED and scores.lasts(tree) is None
    library = cpu_library.load() if compiled else None
    if library is None:
        return torch_tree_attention(query, key, value, tree, scores)
    out: Tensor = _CpuTreeAttention.apply(query, key, value, tree[0, 0].contiguous(), scores)  # type: ignore[no-untyped-call]
    return out


# --- plain torch ------------------------------------------------------------------------------------------------------

QUERIES = 512
"""The number of queries that plain torch computes in one block."""


def torch_tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: Tensor, scores: Scores) -> Tensor:
    """Compute `tree_attention` on any device, by blocks of queries, with only the keys that a block attends to."""
    ends, positions = tree[0, 0, :2].to(torch.int64)
    index = torch.arange(key.shape[2], device=query.device)
    found = scores.lasts(tree)
    lasts = index if found is None else found.to(torch.int64)
    groups, out, first = query.shape[1] // key.shape[1], [], key.shape[2] - query.shape[2]
    for rows in torch.split(index[first:], QUERIES):
        keys = index[: int(lasts[rows].max()) + 1]
        keys = keys[ends[keys] > rows[0]]
        seen = (keys <= lasts[rows, None]) & (rows[:, None] < ends[keys])
        if scores.window is not None:
            seen &= positions[rows, None] - positions[keys] < scores.window
        some_keys, some_values = (part[:, :, keys].repeat_interleave(groups, 1) for part in (key, value))
        products = (query[:, :, rows - first] @ some_keys.transpose(2, 3)) * scores.scaling
        if scores.softcap is not None:
            products = (products / scores.softcap).tanh() * scores.softcap
        weights = products.masked_fill(~seen, float("-inf")).softmax(
            -1, dtype=torch.promote_types(query.dtype, torch.float32)
        )
        out.append(weights.to(query.dtype) @ some_values)
    return torch.cat(out, 2).transpose(1, 2).contiguous()


# --- CUDA -------------------------------------------------------------------------------------------------------------


FLEX_BLOCK = 128
ALIGNMENT = FLEX_BLOCK
"""The number that must divide the first query's index, so that the first query starts a block in every kernel."""


def flex_tree_attention(query: Tensor, key: Tensor, value: Tensor, tree: Tensor, scores: Scores) -> Tensor:
    """Compute `tree_attention` with torch's FlexAttention, compiled on CUDA. Blocks that are fully masked are skipped."""

    def soften(score: Tensor, *_: Tensor) -> Tensor:
        assert scores.softcap is not None
        return torch.tanh(score / scores.softcap) * scores.softcap

    run: Any = _compiled_flex() if query.device.type == "cuda" else flex_attention
    out: Tensor = run(
        query,
        key,
        value,
        score_mod=None if scores.softcap is None else soften,
        block_mask=block_mask(tree, scores.window, scores.lasts(tree) is None, key.shape[2] - query.shape[2]),
        scale=scores.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()


_MASKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""A dict from (window, causal) to FlexAttention's mask for every tree in use. Masks are shared by layers and passes."""


def block_mask(tree: Tensor, window: int | None, causal: bool = True, start: int = 0) -> BlockMask:
    """Return FlexAttention's mask for the queries from token `start` on. If `causal`, images do not attend to later tokens.

    The mask is computed from each block's smallest and largest entries of `tree`, without an [L, L] array.
    """
    if tree not in _MASKS:
        _MASKS[tree] = {}
    known: dict[tuple[int | None, bool], BlockMask] = _MASKS[tree]
    if (window, causal) not in known:
        known[window, causal] = _block_mask(tree, window, causal, start)
    return known[window, causal]


def _block_mask(tree: Tensor, window: int | None, causal: bool, start: int) -> BlockMask:
    ends, positions = tree[0, 0, :2].to(torch.int64)
    lasts = torch.arange(len(ends), device=tree.device) if causal else tree[0, 0, 2].to(torch.int64)

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, k: Tensor) -> Tensor:
        q = row + start
        seen: Tensor = (k <= lasts[q]) & (q < ends[k])
        if window is not None:
            seen = seen & (positions[q] - positions[k] < window)
        return seen

    length = len(ends)
    count = -(-length // FLEX_BLOCK)
    surplus = (0, count * FLEX_BLOCK - length)
    # Pad by repeating the last token, which does not change the minimum and maximum of the last block.
    end, position, last = (
        pad(part[None].float(), surplus, "replicate")[0].view(count, -1) for part in (ends, positions, lasts)
    )
    first = torch.arange(count, device=tree.device) * FLEX_BLOCK
    q, k = first[:, None], first[None]
    some = (k <= last.amax(1)[:, None]) & (end.amax(1) > q)
    every = (k < q) & (end.amin(1) >= (q + FLEX_BLOCK).clamp(max=length)) & (q + FLEX_BLOCK <= length)
    if window is not None:
        some &= position.amin(1)[:, None] - position.amax(1) < window
        every &= position.amax(1)[:, None] - position.amin(1) < window

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        blocks = blocks[start // FLEX_BLOCK :]
        order = blocks.int().argsort(dim=1, descending=True, stable=True)
        return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(some & ~every),
        *listed(every),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=sees,
        seq_lengths=(length - start, length),
    )


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


# --- C++ --------------------------------------------------------------------------------------------------------------


_COMPILED = (torch.float32, torch.bfloat16)


class _Strided(ctypes.Structure):
    """The mirror of the C++ struct `Strided` in cpu_tree_attention.h."""

    _fields_ = (("at", ctypes.c_void_p), ("head", ctypes.c_int64), ("row", ctypes.c_int64))


class _Attention(ctypes.Structure):
    """The mirror of the C++ struct `tree::Attention` in cpu_tree_attention.h."""

    _fields_ = (
        *((name, _Strided) for name in (
            "query", "key", "value", "out", "out_gradient", "query_gradient", "key_gradient", "value_gradient",
        )),
        *((name, ctypes.c_void_p) for name in ("sums", "ends", "positions")),
        *((name, ctypes.c_int64) for name in ("length", "heads", "kv_heads", "head_dim", "value_dim", "window", "first")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )  # fmt: skip


def _strided(tensor: Tensor) -> _Strided:
    """Return the C++ view of a tensor [1, heads, L, width] whose rows are contiguous."""
    return _Strided(tensor.data_ptr(), tensor.stride(1), tensor.stride(2))


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy if its rows are not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _CpuTreeAttention(torch.autograd.Function):
    """The autograd function of the C++ code. It saves the inputs, the output, and a log-sum-exp per query and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: Tensor, scores: Scores) -> Tensor:
        query, key, value = _rows(query), _rows(key), _rows(value)
        heads, length = query.shape[1:3]
        out = query.new_empty(1, length, heads, value.shape[3])
        sums = query.new_empty(heads, key.shape[2], dtype=torch.float32)
        arguments = _arguments(query, key, value, out, sums, tree, scores)
        _call("rollout_tree_forward", arguments, query)
        ctx.save_for_backward(query, key, value, out, sums, tree)
        ctx.scores = scores
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums, tree = ctx.saved_tensors
        # Allocate gradients as [1, tokens, heads, size], the layout of the model's projections, so that nothing is copied.
        gradients = [torch.empty_like(part.transpose(1, 2), memory_format=torch.contiguous_format) for part in
                     (query, key, value)]  # fmt: skip
        of_query, of_key, of_value = (part.transpose(1, 2) for part in gradients)
        arguments = _arguments(query, key, value, out, sums, tree, ctx.scores)
        arguments.out_gradient = _strided(gradient := _rows(gradient.transpose(1, 2)))
        arguments.query_gradient = _strided(of_query)
        arguments.key_gradient, arguments.value_gradient = _strided(of_key), _strided(of_value)
        _call("rollout_tree_backward", arguments, query)
        return of_query, of_key, of_value, None, None


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, tree: Tensor, scores: Scores
) -> _Attention:
    return _Attention(
        query=_strided(query),
        key=_strided(key),
        value=_strided(value),
        out=_strided(out.transpose(1, 2)),
        sums=sums.data_ptr(),
        ends=tree[0].data_ptr(),
        positions=tree[1].data_ptr(),
        length=key.shape[2],
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        window=scores.window or 0,
        first=key.shape[2] - query.shape[2],
        scaling=scores.scaling,
        softcap=scores.softcap or 0.0,
    )


def _call(name: str, arguments: _Attention, query: Tensor) -> None:
    function = getattr(cpu_library.load(), name)
    function.argtypes, function.restype = (ctypes.POINTER(_Attention), ctypes.c_int64, ctypes.c_int), None
    function(arguments, torch.get_num_threads(), int(query.dtype == torch.bfloat16))
