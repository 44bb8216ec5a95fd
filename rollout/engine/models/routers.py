"""Finds the routers of a mixture-of-experts model, records the experts that they choose, and replays the choices.

Transformers declares the class of a model's routers in `_can_record_outputs["router_logits"]`. A router finds the k experts
with the highest scores by one call of `topk`. For P positions it returns (logits, weights, indices [P, k]). A forward hook
records the indices. In a replay, `topk` returns the given indices with the router's current scores, and the router's own
code does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollout.engine.memory.kv_cache import RouteShape
from rollout.errors import UnsupportedModelError

Record = Callable[[int, Tensor], None]
"""A function that receives a router's index and the k experts that it chose for each of P positions, [P, k]."""

_TOPK = frozenset({torch.topk, Tensor.topk})


class Routers:
    """The routers of one model, in layer order. `shape` is (routers, chosen experts per position, all experts)."""

    def __init__(self, modules: list[nn.Module], shape: RouteShape) -> None:
        self.modules = modules
        self.shape = shape

    @contextmanager
    def recorded(self, record: Record) -> Iterator[None]:
        """Call `record` with the experts that each router chooses inside the `with` block."""
        with ExitStack() as stack:
            for index, module in enumerate(self.modules):
                stack.callback(module.register_forward_hook(partial(self._chosen, index, record)).remove)
            yield

    def _chosen(self, index: int, record: Record, module: nn.Module, inputs: Any, output: Any) -> None:
        record(index, chosen_experts(module, output, self.shape.top_k))


def chosen_experts(router: nn.Module, output: Any, top_k: int) -> Tensor:
    """Return the k experts chosen for each of P positions, [P, k], from a router's output.

    Raises:
        UnsupportedModelError: the output is not (logits, weights, indices).
    """
    experts = output[2] if isinstance(output, tuple) and len(output) == 3 else None
    if not isinstance(experts, Tensor) or experts.is_floating_point() or experts.shape[1:] != (top_k,):
        raise UnsupportedModelError(
            f"router {type(router).__name__} does not return (logits, weights, indices [tokens, {top_k}]): its routes can "
            "be neither recorded nor replayed; set record_routes=False"
        )
    return experts


def routers_of(model: nn.Module) -> Routers:
    """Return the routers of `model`, which may be wrapped.

    Raises:
        UnsupportedModelError: the model has no routers, or the routers' numbers of experts are unknown or differ.
    """
    name, kinds = type(model).__name__, tuple(_router_classes(model.modules()))
    found = [module for module in model.modules() if kinds and isinstance(module, kinds)]
    if not found:
        raise UnsupportedModelError(
            f"expert routes: {name} declares no routers (transformers' _can_record_outputs['router_logits']): it is not a "
            "mixture of experts, or one whose routes cannot be recorded; set record_routes=False"
        )
    sizes: set[tuple[Any, Any]] = {
        (getattr(module, "top_k", None), getattr(module, "num_experts", None)) for module in found
    }
    if len(sizes) > 1 or not all(isinstance(size, int) for each in sizes for size in each):
        raise UnsupportedModelError(
            f"expert routes: routers {type(found[0]).__name__} of {name} have (top_k, num_experts) "
            f"{sorted(sizes, key=str)}: must be the same two integers in all of them; set record_routes=False"
        )
    ((top_k, num_experts),) = sizes
    return Routers(found, RouteShape(len(found), top_k, num_experts))


def _router_classes(modules: Iterable[nn.Module]) -> Iterator[type]:
    for module in modules:
        declared = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        for each in declared if isinstance(declared, list | tuple) else (declared,):
            kind = getattr(each, "target_class", each)
            # Take only classes that return their logits at output index 0, as routers do. A block that passes on a
            # router's logits returns them at a later index.
            if isinstance(kind, type) and getattr(each, "index", 0) == 0:
                yield kind


class Topk(TorchFunctionMode):
    """A context manager that makes `topk` return other indices, together with the router's own scores at these indices.

    Args:
        choose: function of the scores and the indices that `topk` found. It returns the indices to use, or None to keep
            the indices that `topk` found.
    """

    def __init__(self, choose: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self._choose = choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        live = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return live
        scores: Tensor = args[0] if args else kwargs["input"]
        chosen = self._choose(scores, live[1])
        return live if chosen is None else torch.return_types.topk((scores.gather(-1, chosen), chosen))


class ChosenExperts(Topk):
    """A context manager that makes a router choose the given experts. An instance can be entered only once.

    Args:
        experts: the experts to use, int64 [P, k]. If a position's entries are negative, the router's own choice applies.
        num_experts: total number of experts.

    Attributes:
        answered: number of `topk` calls whose result was replaced so far.
    """

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__(self._given)
        self._experts = experts
        self._num_experts = num_experts
        self.answered = 0

    def _given(self, scores: Tensor, live: Tensor) -> Tensor | None:
        # Ignore a `topk` of another shape: some routers first choose among groups of experts.
        if scores.shape != (len(self._experts), self._num_experts) or live.shape != self._experts.shape:
            return None
        self.answered += 1
        return torch.where(self._experts >= 0, self._experts, live)
