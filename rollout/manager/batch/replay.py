"""The context manager `replay`, in which a model's routers choose the experts that were chosen during sampling.

Rows of the trainer's forward pass are found in the batch by their tokens. They may be any rows in any order, padded on the
left or the right, or packed with `position_ids` that start at 0 in every sequence. To replay the forward pass of a prefix
tree, pass the tree instead. Only the choice is replayed: the router still computes scores, softmax and normalisation, with
gradient. In the engine's own forward passes inside the `with` block (`generate`, `score`), routers choose by themselves. The
model is restored after the block, even after an exception.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from rollout.engine.memory.kv_cache import RouteShape
from rollout.engine.models.attention import is_rollout_forward
from rollout.engine.models.routers import ChosenExperts, chosen_experts, routers_of
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.tree import PackedTree


@dataclass(frozen=True, eq=False)
class RoutedRows:
    """The fields of a `RolloutBatch` that `replay` reads, for rows that are not from a `RolloutBatch`."""

    input_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor
    routed_experts: Tensor | None


Routed = RolloutBatch | RoutedRows | PackedTree


@contextmanager
def replay(batch: Routed, model: nn.Module) -> Iterator[None]:
    """Let the routers of `model` choose, inside the `with` block, the experts recorded in `batch.routed_experts`.

    Gradient checkpointing computes the routers again in the backward pass. If you use it, run the backward pass inside the
    block too, before the next forward pass. Routers choose by themselves for padding and for the last token of a row, which
    have no routes.

    Args:
        batch: a `RolloutBatch` from an engine with `InferenceConfig(record_routes=True)`; for the forward pass of a tree,
            the result of `batch.tree()`.
        model: the model that runs in the block, or a wrapper of it (DDP, PEFT).

    Raises:
        ValueError: the batch or one of its rows has no routes, or the routes belong to another model; or a forward pass in
            the block has sequences that are not in the batch.
        UnsupportedModelError: the model has routers of an unknown form; the message names them.
        RuntimeError: with gradient checkpointing, a backward pass ran outside of the block.
    """
    routers = routers_of(model)
    owner = next(module for module in model.modules() if getattr(module, "_can_record_outputs", None))
    _check_routes(batch, routers.shape)
    alignment = _Alignment(_routes_of(batch), routers.shape)
    with ExitStack() as stack:
        hook = owner.register_forward_pre_hook(alignment.begin, with_kwargs=True, prepend=True)
        stack.callback(hook.remove)
        for index, router in enumerate(routers.modules):
            stack.callback(_restore, router, vars(router).get("forward"))
            router.forward = partial(_replayed, router.forward, router, index, alignment)
        yield
        alignment.end(owner)


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        vars(module).pop("forward", None)
    else:
        module.forward = forward


def _replayed(
    forward: Callable[..., Any], router: nn.Module, index: int, alignment: _Alignment, *args: Any, **kwargs: Any
) -> Any:
    """Run `forward`, the original method of the router in layer `index`, with the experts recorded for that layer."""
    if is_rollout_forward():
        return forward(*args, **kwargs)
    shape = alignment.shape
    experts = alignment.routes()[:, index]
    with ChosenExperts(experts, shape.num_experts) as choice:
        output = forward(*args, **kwargs)
    chosen = chosen_experts(router, output, shape.top_k)
    if choice.answered != 1 or len(chosen) != len(experts):
        raise ValueError(
            f"replay: router {type(router).__name__} made {choice.answered} choices of {shape.top_k} among "
            f"{shape.num_experts} experts for {len(experts)} tokens and chose for {len(chosen)}: it cannot be replayed"
        )
    return output


def _check_routes(batch: Routed, shape: RouteShape) -> None:
    if batch.routed_experts is None:
        raise ValueError(
            "replay: the batch has no routed_experts; build the engine with InferenceConfig(record_routes=True)"
        )
    want, have = (shape.num_layers, shape.top_k), tuple(batch.routed_experts.shape[2:])
    if want != have:
        raise ValueError(f"replay: routed_experts [N, T, layers, k] of {have}, and the model has (layers, k) = {want}")


def _routes_of(batch: Routed) -> Callable[[Tensor, Any, Any], Tensor]:
    """Return a function (input_ids [B, T], mask, positions) → expert routes [B, T, layers, k] of a forward pass."""
    if not isinstance(batch, PackedTree):
        return _Rows(batch).of_forward
    if batch.unrouted is not None and len(batch.unrouted):
        _refuse_row(int(batch.unrouted[0]))
    return partial(_of_tree, batch)


def _of_tree(tree: PackedTree, ids: Tensor, mask: Any, positions: Any) -> Tensor:
    """Return the expert routes of a prefix tree, int16 [1, L, layers, k]; `ids` must be the tree's token ids."""
    if not torch.equal(ids, tree.input_ids):
        raise ValueError(
            f"replay: a forward of {list(ids.shape)} tokens that are not the {tree.input_ids.shape[1]} of the tree: pass "
            "all of packed.inputs; replay the rows of a batch by replay(batch, model)"
        )
    assert tree.routed_experts is not None
    return tree.routed_experts


class _Rows:
    """A lookup that finds the recorded expert routes of a batch's row by the row's tokens."""

    def __init__(self, batch: RolloutBatch | RoutedRows) -> None:
        assert batch.routed_experts is not None
        self._experts = batch.routed_experts.detach().cpu().numpy()
        self._of_sequence = self._sequences(batch)

    def _sequences(self, batch: RolloutBatch | RoutedRows) -> dict[bytes, list[int]]:
        ids, mask = batch.input_ids.cpu().numpy(), batch.attention_mask.cpu().numpy().astype(bool)
        usable = batch.response_mask.any(1).tolist()
        rows: dict[bytes, list[int]] = defaultdict(list)
        for row, (tokens, real) in enumerate(zip(ids, mask, strict=True)):
            count = int(real.sum())
            if usable[row] and (self._experts[row, : count - 1] < 0).any():
                _refuse_row(row)
            rows[_key(tokens[real])].append(row)
        return rows

    def of_forward(self, ids: Tensor, mask: Any, positions: Any) -> Tensor:
        """Return the expert routes, int16 [B, T, layers, k], of the tokens in a forward pass with these arguments."""
        real, starts = np.ones(ids.shape, bool), None
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            real = mask.cpu().numpy().astype(bool)
        elif positions is not None:
            starts = positions.expand(ids.shape).cpu().numpy() == 0
        routes = np.full((*ids.shape, *self._experts.shape[2:]), -1, np.int16)
        left = {key: list(rows) for key, rows in self._of_sequence.items()}
        for row, tokens in enumerate(ids.cpu().numpy()):
            columns = np.flatnonzero(real[row])
            cuts = [] if starts is None else np.flatnonzero(starts[row])[1:].tolist()
            for sequence in np.split(columns, cuts):
                # Match equal sequences with equal rows of the batch in order. Extra sequences use the last equal row.
                found = left.get(_key(tokens[sequence]))
                if found is None:
                    if self._is_surplus(tokens[sequence]):
                        continue
                    raise ValueError(
                        f"replay: row {row} of the forward has a sequence of {len(sequence)} tokens that is not in the "
                        "batch. Pass whole rows (prompt and completion) with their attention_mask, or packed with "
                        "position_ids that start at 0; replay the forward of a tree by replay(packed, model)"
                    )
                source = found.pop(0) if len(found) > 1 else found[0]
                routes[row, sequence] = self._experts[source, : len(sequence)]
        return torch.from_numpy(routes)

    def _is_surplus(self, tokens: np.ndarray[Any, Any]) -> bool:
        """Return whether a sequence is empty or one repeated token, and so may be padding that rounds up a packed row."""
        return len(tokens) == 0 or bool((tokens == tokens[0]).all())


def _refuse_row(row: int) -> NoReturn:
    raise ValueError(
        f"replay: row {row} of the batch has tokens without routes; it was sampled by an engine without "
        "record_routes=True: leave it out"
    )


class _Alignment:
    """A matcher that finds the recorded expert routes of the tokens in each forward pass of the trainer."""

    def __init__(self, routes_of: Callable[[Tensor, Any, Any], Tensor], shape: RouteShape) -> None:
        self.shape = shape
        self._routes_of = routes_of
        self._current: Tensor | None = None
        self._forwards = 0
        """The number of forward passes with gradient since the last backward pass that recomputed a router."""
        self._recomputed = False

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look up the expert routes for a forward pass, unless an engine runs it. Used as the model's forward pre-hook."""
        if is_rollout_forward():
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor) or ids.ndim != 2:
            raise ValueError("replay: the forward needs input_ids [B, T], by which its rows are found in the batch")
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        positions = kwargs.get("position_ids", args[2] if len(args) > 2 else None)
        routes = self._routes_of(ids, mask, positions)
        self._current = routes.flatten(0, 1).to(ids.device, torch.int64)
        if torch.is_grad_enabled():
            self._forwards = 1 if self._recomputed else self._forwards + 1
            self._recomputed = False

    def routes(self) -> Tensor:
        """Return the expert routes, int64 [B * T, layers, k], for the forward pass that is running or being recomputed."""
        if self._current is None:
            raise RuntimeError("replay: a router ran outside of a forward of the model; call the model itself")
        if torch._C._current_graph_task_id() != -1:
            self._recomputed = True
            if self._forwards > 1:
                raise RuntimeError(
                    f"replay: a backward computes routers again after {self._forwards} forwards, whose routes differ; call "
                    "backward after each forward, inside of the block"
                )
        return self._current

    def end(self, model: nn.Module) -> None:
        """Raise an error if the `with` block of `replay` ends before the backward pass of a checkpointed forward pass.

        Raises:
            RuntimeError: the block ended too early, so the backward pass would compute routers again without replay.
        """
        checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        if checkpointed and model.training and self._forwards and not self._recomputed:
            raise RuntimeError(
                "replay: a forward with gradient checkpointing ran in the block and its backward did not, which would "
                "compute the routers again without replay; call backward inside of the block"
            )


def _key(tokens: np.ndarray[Any, Any]) -> bytes:
    return tokens.astype(np.int64).tobytes()
