"""Prefix-tree packing: every common prefix of batch rows is packed, and so trained, once.

A hidden state depends only on the tokens up to its position and their recorded experts, so rows with a common prefix share
the hidden states of the prefix. Tokens are in depth-first order of the tree of all prefixes: a token is followed by its
subtree, which contains every token that continues it. Hence token q attends to token k iff k <= q < end[k], where end[k] is
the index after k's subtree (and, in a sliding window, iff position[q] - position[k] < window).
`rollout.engine.kernels.tree_attention` computes this attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.training.tree_forward import is_attached
from rollout.errors import EngineStateError
from rollout.manager.batch.forward import LogitScores, Part, read_scores


@dataclass(frozen=True, eq=False, repr=False)
class PackedTree:
    """A prefix tree of N rows, the longest of T tokens, as one sequence of the tree's L tokens. Built by `pack_tree`."""

    input_ids: Tensor
    """int64 [1, L]: token ids, in depth-first order."""

    position_ids: Tensor
    """int64 [1, L]: position of each token in its rows, which starts at 0 at every root."""

    attention_mask: Tensor
    """int32 [1, 1, 2, L]: the index after each token's subtree, and the token's position. If images attend in both
    directions, [1, 1, 3, L]: also the index of the last token of the token's image, or of the token itself. Only the tree
    attention reads this mask."""

    rows: Tensor
    """int64 [N]: each row's number in the batch. `advantages[packed.rows]` is aligned with the rows of `logprobs_of`."""

    nodes: Tensor
    """int64 [N, T]: for each token of each row, its index in the tree; -1 for padding."""

    wanted: Tensor
    """bool [N, T]: tokens whose log-probs are computed."""

    predictors: Tensor
    """int64 [N, T]: for tokens marked in `wanted`, the tree index of the token before, whose logits predict it; else 0."""

    routed_experts: Tensor | None = None
    """int16 [1, L, layers, k]: the k experts recorded for each token; -1 if it has no route. `rollout.replay` reads this
    field. None if no routes were recorded."""

    image_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    """The image arguments of the forward pass: image tensors (once per image of a prompt), token types, and `position_ids`
    [4, 1, L] (place in the row, time, height, width), as far as the model has them."""

    unrouted: Tensor | None = None
    """int64: numbers of the batch rows that have trained tokens and lack routes; None if this was not checked."""

    def __len__(self) -> int:
        return self.input_ids.shape[1]

    def __repr__(self) -> str:
        return f"PackedTree({len(self.rows)} rows of {int((self.nodes >= 0).sum())} tokens in {len(self)})"

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments of the forward pass, for a model with `trainer_hooks.tree` attached.

        Raises:
            EngineStateError: `trainer_hooks.tree` is not attached to any model of this process.
        """
        if not is_attached():
            raise EngineStateError(
                "the inputs of a tree need tree attention, which no model of this process has: call attach_tree(model) once "
                "before (from trainer_hooks.tree import attach as attach_tree)"
            )
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
            "use_cache": False,
            **self.image_inputs,
        }

    def logprobs_of(self, model: nn.Module, temperature: float = 1.0) -> Tensor:
        """Return the log-probs, float32 [N, T], of the tokens marked in `wanted`. See `scores_of` for the arguments."""
        return self.scores_of(model, temperature).logprobs

    def scores_of(
        self, model: nn.Module, temperature: float = 1.0, *, entropy: bool = False, top_k: int | Tensor = 0
    ) -> LogitScores:
        """Run the model over the tree; return the log-prob, over the whole vocabulary, of every token marked in `wanted`.

        Log-probs are differentiable. Logits are computed a tile at a time, in the forward pass and again in the backward
        pass.

        Args:
            model: a model with `trainer_hooks.tree` attached, or a wrapper of such a model.
            temperature: divisor of the logits.
            entropy: whether to return entropies too.
            top_k: number of most likely tokens whose log-probs are returned too; or other token ids, int64 [N, T, k].

        Raises:
            EngineStateError: see `inputs`.
            UnsupportedModelError: log-probs cannot be read from the model's head.
        """
        return read_scores(model, self.part(), {"temperature": temperature}, entropy=entropy, top_k=top_k)

    def part(self, input_ids: Tensor | None = None, mask: Tensor | None = None) -> Part:
        """Return the tree as input of a forward pass.

        Args:
            input_ids: token ids of the rows, int64 [N, T]; None means the token ids in the tree.
            mask: bool [N, T], the tokens whose scores are requested, out of those in `wanted`. None means all in `wanted`.
        """
        ids = self.input_ids[0][self.nodes.clamp(min=0)] if input_ids is None else input_ids
        return Part(self.inputs, ids, self.wanted if mask is None else mask & self.wanted, self.predictors)


def pack_tree(
    input_ids: Tensor,
    real: Tensor,
    wanted: Tensor,
    rows: Tensor | None = None,
    routed_experts: Tensor | None = None,
) -> PackedTree:
    """Pack N rows as the tree of their common prefixes, in O(N·T) array operations, without a Python loop over tokens.

    Args:
        input_ids: int64 [N, T], padded anywhere.
        real: bool [N, T], False on padding.
        wanted: bool [N, T], tokens whose log-probs will be requested. A row's first token has none and is left out.
        rows: int64 [N], the rows' numbers in a larger batch; None means 0, 1, 2, …
        routed_experts: int16 [N, W, layers, k], the k experts of each row's first W tokens, where W is at least the longest
            row's length. Rows then share a prefix as far as both tokens and experts are the same.

    Returns:
        The tree, on the device of `input_ids`.
    """
    device = input_ids.device
    ids, mask = input_ids.cpu().numpy(), real.cpu().numpy()
    # Move tokens to the left and sort the rows lexicographically, so that rows with a common prefix are adjacent.
    columns = np.argsort(~mask, axis=1, kind="stable")
    tokens, lengths = np.take_along_axis(ids, columns, 1), mask.sum(1)
    routes = None if routed_experts is None else _routes(routed_experts, lengths.max(initial=0))
    order = sorted(range(len(ids)), key=lambda row: _prefixes(row, tokens, lengths, routes))
    forest = _depth_first(tokens[order], lengths[order], None if routes is None else routes[order])

    nodes, asked = np.empty_like(columns), wanted.cpu().numpy() & mask
    np.put_along_axis(nodes, columns, forest.nodes[np.argsort(order)], 1)
    np.put_along_axis(asked, columns[:, :1], False, 1)

    def tensor(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedTree(
        input_ids=tensor(forest.tokens)[None],
        position_ids=tensor(forest.depths)[None],
        attention_mask=tensor(np.stack([forest.ends, forest.depths]).astype(np.int32))[None, None],
        rows=torch.arange(len(ids), device=device) if rows is None else rows.to(device),
        nodes=tensor(nodes),
        wanted=tensor(asked),
        predictors=tensor(np.where(asked, np.append(forest.parents, 0)[nodes], 0)),
        routed_experts=None if forest.routes is None else tensor(forest.routes)[None],
    )


def _routes(routed_experts: Tensor, width: int) -> NDArray[np.int16]:
    if routed_experts.ndim != 4 or routed_experts.shape[1] < width:
        raise ValueError(
            f"routed_experts of shape {tuple(routed_experts.shape)}: must be [N, at least {width}, layers, k] for rows of "
            f"up to {width} tokens"
        )
    routes: NDArray[np.int16] = routed_experts[:, :width].to("cpu", torch.int16).numpy()
    return routes


def _prefixes(
    row: int, tokens: NDArray[np.int64], lengths: NDArray[np.int64], routes: NDArray[np.int16] | None
) -> bytes:
    """Return a sort key that makes rows with a common prefix adjacent: the row's tokens, each followed by its experts."""
    ids = tokens[row, : lengths[row]]
    if routes is None:
        return ids.tobytes()
    experts = routes[row, : lengths[row]].reshape(len(ids), -1)
    return np.concatenate([ids[:, None].view(np.int16), experts], axis=1).tobytes()


class _Forest(NamedTuple):
    """The prefix trees of rows in depth-first order."""

    nodes: NDArray[np.int64]
    """[N, T]: index in the forest of each token of each row; -1 after the end of a row."""
    tokens: NDArray[np.int64]
    """[L]: token ids of the forest's L tokens. The three fields below have the same shape."""
    depths: NDArray[np.int64]
    ends: NDArray[np.int64]
    """The index after the subtree of each token."""
    parents: NDArray[np.int64]
    """The index of each token's parent; -1 for a root."""
    routes: NDArray[np.int16] | None
    """[L, layers, k]: the experts recorded for each token; None if they were not recorded."""


def _depth_first(tokens: NDArray[np.int64], lengths: NDArray[np.int64], routes: NDArray[np.int16] | None) -> _Forest:
    """Build the prefix trees of sorted rows [N, T]. Each row adds the tokens that it does not share with the row above."""
    count, width = tokens.shape
    depth = np.arange(width)
    shared = np.zeros(count, dtype=np.int64)
    equal = (tokens[1:] == tokens[:-1]) & (depth < np.minimum(lengths[1:], lengths[:-1])[:, None])
    if routes is not None:
        longest = routes.shape[1]
        equal[:, :longest] &= (routes[1:] == routes[:-1]).all((2, 3))
    shared[1:] = np.logical_and.accumulate(equal, axis=1).sum(1)
    starts = np.concatenate([[0], np.cumsum(lengths - shared)])
    # Mark the tokens that each row adds: at depth d, row r adds its token if it shares at most d tokens with the row
    # above. Otherwise it uses the token that the nearest row above added at this depth.
    row = np.arange(count)[:, None]
    fresh = shared[:, None] <= depth
    owner = np.maximum.accumulate(np.where(fresh, row, 0), axis=0)
    nodes = np.where(depth < lengths[:, None], starts[owner] + depth - shared[owner], -1)
    # Find where each subtree ends: at the first token of the next row that adds another token at the same depth.
    below = np.minimum.accumulate(np.where(fresh, row, count)[::-1], axis=0)[::-1]
    below = np.concatenate([below[1:], np.full((1, width), count)]) if count else below
    new = fresh & (depth < lengths[:, None])
    parents = np.full(starts[-1], -1)
    parents[nodes[:, 1:][new[:, 1:]]] = nodes[:, :-1][new[:, 1:]]
    # Concatenate the added tokens row by row: the rows are sorted, so this is depth-first order.
    chosen = None if routes is None else routes[new[:, : routes.shape[1]]]
    return _Forest(nodes, tokens[new], np.broadcast_to(depth, new.shape)[new], starts[below][new], parents, chosen)
