"""Detection of weight changes that were not announced, by comparing a sample of every parameter.

Values are compared, because fused optimizers and PEFT's merges change neither a tensor's address nor its version counter. A
sample consists of `SAMPLES` evenly spaced elements of each tensor. After each announced update, different elements are
selected. Taking a sample does not synchronise with the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLES = 64
"""The number of elements compared per tensor. If one element in 64 has changed, the comparison most likely detects it."""

Named = tuple[str, Tensor]
_Kind = tuple[torch.dtype, torch.device]
_Part = tuple[list[tuple[str, torch.dtype, tuple[int, ...], int]], Tensor]
"""The samples of all tensors of one dtype and device: (name, dtype, shape, sample size) per tensor, and the bytes."""


def persistent_tensors(model: nn.Module) -> list[Named]:
    """Return the name and tensor of every parameter and persistent buffer, without batch normalisation's running statistics.

    A tied tensor is listed under each of its names, because each may be tied to another tensor later.
    """
    running = nn.modules.batchnorm._NormBase
    found: list[Named] = []
    for prefix, module in model.named_modules():
        own: list[tuple[str, Tensor | None]] = list(module._parameters.items())
        if not isinstance(module, running):
            own += [each for each in module._buffers.items() if each[0] not in module._non_persistent_buffers_set]
        found += [(f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in own if tensor is not None]
    return found


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself. The memory is shared, not copied."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def plain_parts(name: str, tensor: Tensor) -> Iterator[Named]:
    """Yield the readable parts of a tensor: a plain tensor itself, or the tensors inside a wrapper subclass.

    Quantised tensors, for example, are subclasses. For a subclass that cannot be read, its id() and version are yielded.
    """
    wrapper: Any = tensor
    if type(tensor) in (Tensor, nn.Parameter):
        yield name, tensor
    elif is_traceable_wrapper_subclass(wrapper):
        for part in wrapper.__tensor_flatten__()[0]:
            yield from plain_parts(f"{name}.{part}", getattr(wrapper, part))
    else:
        try:
            list(samples_of([(name, tensor)], 0))
        except (NotImplementedError, TypeError, RuntimeError):
            version = 0 if tensor.is_inference() else tensor._version
            tensor = torch.tensor([id(tensor), version])
        yield name, tensor


def samples_of(tensors: Iterable[Named], turn: int) -> Iterator[Named]:
    """Yield each tensor's name and at most `SAMPLES` elements (a view if possible), at positions that `turn` shifts."""
    for name, tensor in tensors:
        if tensor.is_meta or not tensor.numel():
            continue
        step = max(1, tensor.numel() // SAMPLES)
        start = turn % step
        length = min(SAMPLES, (tensor.numel() - start + step - 1) // step)
        flat = tensor.detach()
        if flat.is_contiguous():
            yield name, flat.as_strided((length,), (step,), flat.storage_offset() + start)
        else:
            yield name, flat.reshape(-1)[start::step][:length]


class Fingerprints:
    """Reference samples of a set of tensors, to compare with their current contents.

    Args:
        tensors: function that returns the current tensors. It is called for every comparison.
    """

    def __init__(self, tensors: Callable[[], list[Named]]) -> None:
        self._tensors = tensors
        self._turn = 0
        self._taken: dict[_Kind, _Part] = {}

    def take(self) -> None:
        """Replace the reference with a sample of the current tensors. Each call samples other elements of large tensors."""
        self._turn += 1
        self._taken = self._now()

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Return the names of tensors that differ from the reference or no longer exist.

        A new tensor, such as an adapter not yet in use, does not count as a change. It is added to the reference if no other
        tensor has changed.
        """
        now = self._now()
        then = self._taken
        if now.keys() == then.keys() and all(
            now[kind][0] == rows and torch.equal(now[kind][1], data) for kind, (rows, data) in then.items()
        ):
            return []
        new, old = _rows(now), _rows(then)
        changed = [name for name, row in old.items() if new.get(name) != row]
        if not changed:
            self._taken = now
        return changed

    @torch.no_grad()
    def _now(self) -> dict[_Kind, _Part]:
        tensors = [part for named in self._tensors() for part in plain_parts(*named)]
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        dtypes = {name: tensor.dtype for name, tensor in tensors}
        parts: dict[_Kind, list[Named]] = {}
        for name, values in samples_of(tensors, self._turn):
            parts.setdefault((values.dtype, values.device), []).append((name, values))
        return {
            kind: ([(name, dtypes[name], shapes[name], values.numel()) for name, values in rows], _joined(rows))
            for kind, rows in parts.items()
        }


def _joined(rows: list[Named]) -> Tensor:
    """Concatenate the values of all (name, values) pairs and return their bytes as uint8, with -0.0 replaced by 0.0.

    An update by zero can turn -0.0 into 0.0, and must not count as a change.
    """
    data = torch.cat([values for _, values in rows])
    if data.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        data += 0.0
    return data.view(torch.uint8)


def _rows(parts: dict[_Kind, _Part]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rows, values in parts.values():
        data, start = values.cpu().numpy().tobytes(), 0
        width = len(data) // max(1, sum(count for _, _, _, count in rows))
        for name, dtype, shape, count in rows:
            found[name] = dtype, shape, data[start : start + count * width]
            start += count * width
    return found
