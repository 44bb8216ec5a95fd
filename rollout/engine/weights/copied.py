"""A separate copy of the weights in another dtype or on another device, refreshed once per update.

`gather` copies one tensor at a time, so there is never a third full set of weights.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engine.weights.base import Weights
from rollout.errors import UnsupportedModelError


class CopiedWeights(Weights):
    """A weight source whose `sampled` is a second module of the same architecture, with its own parameters.

    Args:
        source: the source of the trainer's weights, which may be sharded by FSDP2.
        dtype: dtype of the copy's floating-point parameters. If None, they have the trainer's dtypes.
        device: device of the copy. If None, the copy is on the trainer's device.

    Raises:
        UnsupportedModelError: the module cannot be copied.
    """

    def __init__(self, source: Weights, dtype: torch.dtype | None, device: torch.device | None) -> None:
        self._source = source
        super().__init__(source.trained)
        self.collective = source.collective
        self._current = False
        model = self.trained
        if any(isinstance(getattr(type(module), "active_adapters", None), property) for module in model.modules()):
            raise UnsupportedModelError(
                f"{type(model).__name__} has adapters, whose switches a copy would not follow: leave "
                "InferenceConfig.inference_dtype and inference_device out"
            )
        place = device or next(model.parameters()).device
        fresh = {}
        for name, each in model.named_parameters():
            kind = dtype if dtype is not None and each.is_floating_point() else each.dtype
            fresh[name] = nn.Parameter(torch.zeros(each.shape, dtype=kind, device=place), requires_grad=False)
        self._copied: dict[str, Tensor] = dict(fresh)
        self.sampled = _sharded_skeleton(model, fresh, place) if source.collective else _skeleton(model, fresh, place)

    def gather(self) -> None:
        if self.ready:
            return
        with torch.no_grad():
            for name, parameter in self.trained.named_parameters():
                self._copied[name].copy_(parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter)
            buffers = dict(self.sampled.named_buffers())
            for name, buffer in self.trained.named_buffers():
                if name in buffers:
                    buffers[name].copy_(buffer)
        self._current = True

    @property
    def ready(self) -> bool:
        return self._current

    def changed(self) -> None:
        self._current = False

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self._source.tensors()


def _skeleton(model: nn.Module, fresh: dict[str, nn.Parameter], device: torch.device) -> nn.Module:
    """Return a deep copy of `model` with `fresh` as its parameters (by name), and without patched `forward` methods."""
    memo: dict[int, Any] = {id(parameter): fresh[name] for name, parameter in model.named_parameters()}
    memo |= {id(buffer): buffer.detach().to(device, copy=True) for buffer in model.buffers()}
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        # Remove patched `forward` methods (such as accelerate's autocast wrapper), which would call the trainer's module.
        module.__dict__.pop("forward", None)
    return made.eval()


def _sharded_skeleton(model: nn.Module, fresh: dict[str, nn.Parameter], device: torch.device) -> nn.Module:
    """Return a new instance of the model's class without FSDP2, with `fresh` as its parameters (by name)."""
    plain = next((each for each in type(model).__mro__ if not each.__name__.startswith("FSDP")), nn.Module)
    config = getattr(model, "config", None)
    made: nn.Module = nn.Module()
    if config is not None and hasattr(plain, "_from_config"):
        with torch.device("meta"):
            made = plain(copy.deepcopy(config))
    shapes = [{name: each.shape for name, each in named} for named in (made.named_parameters(), fresh.items())]
    if shapes[0] != shapes[1]:
        raise UnsupportedModelError(
            f"{type(model).__name__} is sharded and not the model of transformers that its config describes, so that no "
            "copy in another dtype or on another device can be made; leave InferenceConfig.inference_dtype and "
            "inference_device out"
        )
    buffers = {name: buffer.detach().to(device, copy=True) for name, buffer in model.named_buffers()}
    by_old: dict[int, Any] = {id(parameter): fresh[name] for name, parameter in made.named_parameters()}
    by_old |= {id(buffer): buffers[name] for name, buffer in made.named_buffers()}
    for module in made.modules():
        for own in (module._parameters, module._buffers):
            own.update({name: by_old[id(tensor)] for name, tensor in own.items() if tensor is not None})
    return made.eval()
