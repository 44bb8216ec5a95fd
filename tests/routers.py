"""Routes that the routers of a trainer's forward would not choose: of a rollout, and of requests from elsewhere."""

from __future__ import annotations

from typing import Any
from unittest import SkipTest

import numpy as np
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rollout.engine.models.routers import routers_of
from rollout.errors import UnsupportedModelError
from rollout.manager.batch.batch import RolloutBatch
from rollout.requests.request import DynamicInferenceRequest
from rollout.state import FinishReason, Status


def batch_of(*requests: DynamicInferenceRequest, version: int = 0) -> RolloutBatch:
    return RolloutBatch.from_requests(requests, policy_version=version, pad_token_id=0)


def elsewhere(model: PreTrainedModel, prompt: list[int], completion: list[int], number: int) -> DynamicInferenceRequest:
    """An ended request with routes that no router of `model` would choose.

    Raises:
        SkipTest: this version of transformers does not declare the routers of `model`.
    """
    try:
        shape = routers_of(model).shape
    except UnsupportedModelError as exc:
        if Version(transformers.__version__) < Version("5.20"):
            raise SkipTest(f"transformers {transformers.__version__}: {exc}") from exc
        raise
    draw = np.random.default_rng(number)
    rows = len(prompt) + len(completion) - 1
    routes = draw.permuted(np.tile(np.arange(shape.num_experts), (rows, shape.num_layers, 1)), axis=-1)
    return DynamicInferenceRequest(
        request_id=number, prompt_tokens=prompt, generated_tokens=completion,
        generated_log_probs=[-1.0] * len(completion), routing_indices=routes[..., : shape.top_k].astype(np.uint8),
        status=Status.COMPLETED, finish_reason=FinishReason.LENGTH,
    )  # fmt: skip


class LowestExperts(TorchFunctionMode):
    """Makes the routers of a model choose the experts with the lowest scores, in the calling thread."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._shape = routers_of(model).shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk) or args[0].shape[-1] != self._shape.num_experts:
            return func(*args, **(kwargs or {}))
        return torch.topk(args[0], self._shape.top_k, dim=-1, largest=False)
