"""Separate copy of the weights in another dtype or on another device, refreshed once per update.

Always true: only `gather` copies. It casts one tensor at a time and transfers buckets of at most `BUCKET_BYTES`, so there is
never a third full set of weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engine.weights.base import Weights
from rollout.engine.weights.fingerprints import samples_of
from rollout.errors import UnsupportedModelError

BUCKET_BYTES = 256 << 20
"""Size limit of a bucket of the copy: one transfer between devices."""

_ALIGNMENT = 64
"""Bytes; kernels read whole cache lines."""


class CopiedWeights(Weights):
    """A second module of the same architecture with its own parameters.

    Args:
        source: the trainer's weights, plain or FSDP2.
        dtype: dtype of the copy's floating-point parameters; None: the trainer's.
        device: None: the trainer's.

    Raises:
        UnsupportedModelError: this module cannot be duplicated.
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
        self._buckets = list(_buckets(_parameters(model), dtype, place))
        fresh = {name: parameter for bucket in self._buckets for name, parameter in bucket.parameters.items()}
        self.sampled = _sharded_skeleton(model, fresh, place) if source.collective else _skeleton(model, fresh, place)

    def gather(self) -> None:
        if self.ready:
            return
        theirs = _parameters(self.trained)
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.fill(theirs)
            buffers = dict(self.sampled.named_buffers())
            for name, buffer in self.trained.named_buffers():
                if name in buffers:
                    buffers[name].copy_(buffer)
        self._current = True

    def follow(self) -> None:
        # Flags, numbers and strings of the modules and of their configurations.
        mine = dict(self.sampled.named_modules())
        for name, module in self.trained.named_modules():
            if name in mine:
                pairs: list[tuple[Any, Any]] = [(module, mine[name])]
                if hasattr(module, "config") and hasattr(mine[name], "config"):
                    pairs.append((module.config, mine[name].config))
                for theirs, own in pairs:
                    plain = {key: value for key, value in vars(theirs).items() if _is_plain(value)}
                    own.__dict__.update(plain | {"training": False} if own is mine[name] else plain)

    @property
    def ready(self) -> bool:
        return self._current

    def changed(self) -> None:
        self._current = False

    def tensors(self) -> list[tuple[str, Tensor]]:
        return self._source.tensors()

    @torch.no_grad()
    def stale(self) -> list[str]:
        # Comparing sharded weights would need a collective call.
        if not self.ready or self.collective:
            return []
        mine = {name: each for bucket in self._buckets for name, each in bucket.parameters.items()}
        theirs = _parameters(self.trained)
        together = [(name, theirs[name]) for name in mine if name in theirs and theirs[name].shape == mine[name].shape]
        found = [name for name in mine if name not in dict(together)]
        for (name, one), (_, other) in zip(
            samples_of(together, 0), samples_of([(name, mine[name]) for name, _ in together], 0), strict=True
        ):
            if not torch.equal(_bytes(one.to(other.dtype)), _bytes(other).to(one.device)):
                found.append(name)
        return found


class _Bucket:
    """Parameters of the copy that are views of one flat tensor."""

    def __init__(self, flat: Tensor, parameters: dict[str, nn.Parameter], offsets: dict[str, int]) -> None:
        self.parameters = parameters
        self._flat = flat
        self._offsets = offsets

    def fill(self, theirs: dict[str, Tensor]) -> None:
        """Copy the values of the trainer's parameters with these names."""
        device = next(iter(theirs.values())).device
        flat = self._flat if self._flat.device == device else torch.empty_like(self._flat, device=device)
        for name, parameter in self.parameters.items():
            start = self._offsets[name]
            flat[start : start + parameter.numel()].view(parameter.shape).copy_(_whole(theirs[name]))
        if flat is not self._flat:
            self._flat.copy_(flat)


def _whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def _buckets(parameters: dict[str, Tensor], dtype: torch.dtype | None, device: torch.device) -> Iterator[_Bucket]:
    """Split the parameters into buckets, in order; a parameter above `BUCKET_BYTES` has its own bucket."""
    kind: torch.dtype | None = None
    names: dict[str, int] = {}
    used = 0
    for name, tensor in parameters.items():
        its = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        size = -(-tensor.numel() * its.itemsize // _ALIGNMENT) * _ALIGNMENT // its.itemsize
        if kind is not None and names and (its != kind or (used + size) * its.itemsize > BUCKET_BYTES):
            yield _bucket(names, used, kind, device, parameters)
            names, used = {}, 0
        kind = its
        names[name] = used
        used += size
    if kind is not None and names:
        yield _bucket(names, used, kind, device, parameters)


def _bucket(
    offsets: dict[str, int], size: int, dtype: torch.dtype, device: torch.device, theirs: dict[str, Tensor]
) -> _Bucket:
    flat = torch.zeros(size, dtype=dtype, device=device)
    parameters = {
        name: nn.Parameter(flat[start : start + theirs[name].numel()].view(theirs[name].shape), requires_grad=False)
        for name, start in offsets.items()
    }
    return _Bucket(flat, parameters, dict(offsets))


def _skeleton(model: nn.Module, fresh: dict[str, nn.Parameter], device: torch.device) -> nn.Module:
    """Deep copy of the module with the parameters of `fresh` and without instance-bound forwards."""
    memo: dict[int, Any] = {id(parameter): fresh[name] for name, parameter in model.named_parameters()}
    memo |= {id(buffer): buffer.detach().to(device, copy=True) for buffer in model.buffers()}
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        # A patched forward (accelerate's autocast) would call the trainer's module.
        module.__dict__.pop("forward", None)
    return made.eval()


def _sharded_skeleton(model: nn.Module, fresh: dict[str, nn.Parameter], device: torch.device) -> nn.Module:
    """New instance of the class that `fully_shard` wrapped, with the parameters of `fresh`."""
    plain = next((each for each in type(model).__mro__ if not each.__name__.startswith("FSDP")), nn.Module)
    config = getattr(model, "config", None)
    if config is None or not hasattr(plain, "_from_config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is sharded and no model of transformers, so that no copy in another dtype or on "
            "another device can be made; leave InferenceConfig.inference_dtype and inference_device out"
        )
    with torch.device("meta"):
        made: nn.Module = plain(copy.deepcopy(config))
    shapes = {name: parameter.shape for name, parameter in made.named_parameters()}
    if shapes != {name: parameter.shape for name, parameter in fresh.items()}:
        different = sorted(set(shapes.items()) ^ {(name, each.shape) for name, each in fresh.items()})[0][0]
        raise UnsupportedModelError(
            f"{type(model).__name__} is not what its config describes ({different} differs), so that no copy of it can be "
            "made; leave InferenceConfig.inference_dtype and inference_device out"
        )
    buffers = {name: buffer.detach().to(device, copy=True) for name, buffer in model.named_buffers()}
    by_old: dict[int, Any] = {id(parameter): fresh[name] for name, parameter in made.named_parameters()}
    by_old |= {id(buffer): buffers[name] for name, buffer in made.named_buffers()}
    for module in made.modules():
        for own in (module._parameters, module._buffers):
            own.update({name: by_old[id(tensor)] for name, tensor in own.items() if tensor is not None})
    return made.eval()
