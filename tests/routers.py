"""Routers that choose otherwise while a rollout samples than in the trainer's forward, as rounding makes them do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rollout.engine.forward.routers import routers_of


class LowestExperts(TorchFunctionMode):
    """Makes the routers of a model choose the experts with the lowest scores, in the calling thread."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._shape = routers_of(model).shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self._shape.num_experts:
            return func(*args, **(kwargs or {}))
        return torch.topk(args[0], self._shape.top_k, dim=-1, largest=False)
