"""Training on a tree that is too large for one forward pass, in the memory of one path from root to leaf.

The tree is computed in segments, in depth-first order. A segment is a range of the tree's tokens: a chain that later
segments continue, or small whole subtrees. A segment's forward pass attends to the keys and values of the segments on the
path to the root. Its backward pass runs once no later segment continues it, with the gradients that all branches have added
to the segment's keys, values and log-probs. Every token is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.kernels.tree_attention import ALIGNMENT
from rollout.engine.training.tree_forward import paths_of
from rollout.manager.batch.forward import LogitScores, Part
from rollout.manager.batch.tree import PackedTree


class PathRows(NamedTuple):
    """A set of n batch rows whose forward pass is complete."""

    rows: Tensor
    """int64 [n]: row numbers in the batch."""
    scores: LogitScores
    """The scores [n, T] of the rows; call backward on their loss before the next rows are computed."""


class _Span(NamedTuple):
    """A range [start, stop) of a tree's tokens, which one forward pass computes."""

    start: int
    stop: int
    place: int
    """The index of the span's first key among the keys of all spans on the path from the root."""
    last: int
    """The index after the subtrees of the span's tokens; tokens from `stop` to this index continue the span."""


@dataclass(eq=False)
class _Segment:
    """A span whose forward pass has run, on the path from the root to the next span."""

    span: _Span
    places: Tensor
    """int64 [m]: flat indices into [N, T] of the segment's m tokens whose log-probs are requested."""
    values: tuple[Tensor, ...]
    """The log-probs [m] of these m tokens and, if requested, their entropies [m]."""
    leaves: tuple[Tensor, ...]
    """Copies of `values`, detached from the graph, for the caller; they collect the gradients of the caller's loss."""

    def backward(self) -> None:
        """Run the segment's backward pass. Even if no log-prob has a gradient, the segment's keys may have one."""
        if self.values[0].requires_grad:
            torch.autograd.backward(
                self.values,
                [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves],
            )


def along_paths(
    model: nn.Module, tree: PackedTree, part: Part, max_tokens: int, read: Callable[[Part, Tensor], LogitScores]
) -> Iterator[PathRows]:
    """Run a tree segment by segment; yield rows once their log-probs are complete. Backward passes run in between.

    Args:
        part: the tree as input of a single forward pass.
        max_tokens: maximum number of tokens in a segment.
        read: function (part, the tree rows in it) that runs the part's forward pass and returns its scores.

    Raises:
        ValueError: `max_tokens` is below 1; or the tree has images or expert routes.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens!r}: must be at least 1, which makes a segment of every token")
    if tree.image_inputs or tree.routed_experts is not None:
        raise ValueError("paths are of text without recorded routes: train on batch.trees(max_tokens)")
    ends, depths = tree.attention_mask[0, 0].cpu().numpy().astype(np.int64)
    device, mask = tree.nodes.device, part.mask
    if not mask.numel():
        return
    first = torch.where(mask, part.predictors, len(ends)).amin(1)
    final = torch.where(mask, part.predictors, -1).amax(1)
    spans = _placed(ends, depths, max_tokens)
    stack: list[_Segment] = []
    with paths_of(model, max(span.place + span.stop - span.start for span in spans)):
        for span in spans:
            start, stop = span.start, span.stop
            while stack and stack[-1].span.last <= start:
                stack.pop().backward()
            near = ((first < stop) & (final >= start)).nonzero()[:, 0]
            before = part.predictors[near] - start
            inside = mask[near] & (before >= 0) & (before < stop - start)
            keys = torch.from_numpy(_keys([*(each.span for each in stack), span], ends, depths)).to(device)
            inputs = {
                "input_ids": tree.input_ids[:, start:stop],
                "position_ids": tree.position_ids[:, start:stop],
                "attention_mask": keys,
                "use_cache": False,
            }
            found = read(Part(inputs, part.input_ids[near], inside, before), near)
            values = tuple(each[inside] for each in (found.logprobs, found.entropies) if each is not None)
            leaves = tuple(each.detach().requires_grad_(each.requires_grad) for each in values)
            row, column = inside.nonzero().T
            places = near[row] * mask.shape[1] + column
            del found, inside, before
            stack.append(_Segment(span, places, values, leaves))
            done = ((final >= start) & (final < stop)).nonzero()[:, 0]
            if len(done):
                yield PathRows(tree.rows[done], _of_rows(stack, done, mask.shape))
        while stack:
            stack.pop().backward()


def _segments(ends: NDArray[np.int64], depths: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Yield the segments [start, stop) of a tree, at most `limit` tokens each.

    `ends` has the index after each token's subtree, `depths` each token's position. Small subtrees share a segment. A chain
    stops at a branch or at the limit.
    """
    start, token, chain = 0, 0, False
    while token < len(ends):
        small = ends[token] - token <= limit
        following = int(ends[token]) if small else token + 1
        continued = chain and token > 0 and depths[token] == depths[token - 1] + 1
        if token > start and (small == chain or (not small and not continued) or following - start > limit):
            yield start, token
            start = token
        token, chain = following, not small
    if token > start:
        yield start, token


def _placed(ends: NDArray[np.int64], depths: NDArray[np.int64], limit: int) -> list[_Span]:
    """Return a tree's spans, in order. A span's keys start at the first kernel block boundary after its path's keys."""
    spans: list[_Span] = []
    path: list[_Span] = []
    for start, stop in _segments(ends, depths, limit):
        while path and path[-1].last <= start:
            path.pop()
        end = path[-1].place + path[-1].stop - path[-1].start if path else 0
        path.append(_Span(start, stop, -(-end // ALIGNMENT) * ALIGNMENT, int(ends[start:stop].max())))
        spans.append(path[-1])
    return spans


def _keys(path: list[_Span], ends: NDArray[np.int64], depths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the attention mask for a path's last span, [1, 1, 2, keys]: the subtree end and the position of every key."""
    own = path[-1]
    keys = np.zeros((2, own.place + own.stop - own.start), np.int32)
    for start, stop, at, _ in path:
        # Shift subtree ends so that the last span starts at `own.place`. Clamp negative ends to 0: the last span does
        # not attend to subtrees that finish before it.
        keys[0, at : at + stop - start] = np.maximum(ends[start:stop] - own.start + own.place, 0)
        keys[1, at : at + stop - start] = depths[start:stop]
    return keys[None, None]


def _of_rows(stack: list[_Segment], rows: Tensor, shape: torch.Size) -> LogitScores:
    columns = shape[1]
    number = torch.full((shape[0],), -1, device=rows.device)
    number[rows] = torch.arange(len(rows), device=rows.device)
    found = []
    for kind in range(len(stack[0].leaves)):
        out = stack[0].leaves[kind].new_zeros(len(rows) * columns)
        for each in stack:
            row = number[each.places // columns]
            own = (row >= 0).nonzero()[:, 0]
            out = out.index_put((row[own] * columns + each.places[own] % columns,), each.leaves[kind][own])
        found.append(out.view(len(rows), columns))
    return LogitScores(*found)
