"""Detects weight changes that were not announced, by comparing a sample of every parameter.

Contents are compared: fused optimizers and PEFT's merges change neither a tensor's address nor its version counter. Only
samples or sums are kept, and taking them does not synchronise with the device.

    sampled SAMPLES elements of each tensor, spread evenly, different ones after every update full       position-weighted
    sums over all elements, which detect any single change for certain
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLES = 64
"""Elements compared per tensor. A change of one element in SAMPLES is detected with high probability."""

WORDS = 1 << 20
"""Number of 8-byte words that the full fingerprint sums per operation."""

Named = tuple[str, Tensor]
_Kind = tuple[torch.dtype, torch.device]
_Part = tuple[list[tuple[str, torch.dtype, tuple[int, ...], int]], Tensor]
"""Name, dtype, shape and number of samples of each tensor of one kind, and the bytes of all samples."""


def persistent_tensors(model: nn.Module) -> list[Named]:
    """Every parameter and persistent buffer, without the running statistics of batch normalisation.

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
    """This rank's shard of a DTensor, or the tensor itself; memory is shared."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def plain_parts(name: str, tensor: Tensor) -> Iterator[Named]:
    """Readable parts of a tensor: itself, or the tensors that a wrapper subclass (such as a quantised one) consists of.

    A subclass that cannot be read is replaced by its identity and version.
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
    """Yield (name, [<= SAMPLES] elements, as views where possible) of each tensor; `turn` selects which elements."""
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


def sums_of(tensors: Iterable[Named], turn: int) -> Iterator[Named]:
    """Yield (name, [1] int64) of each tensor: the sum of its words, weighted by odd position factors, modulo 2**64."""
    factors: dict[torch.device, Tensor] = {}
    # The tensor is kept next to its sum so that its id is not reused.
    summed: dict[int, tuple[Tensor, Tensor]] = {}
    for name, tensor in tensors:
        if tensor.is_meta or not tensor.numel():
            continue
        if id(tensor) in summed:
            yield name, summed[id(tensor)][1]
            continue
        if tensor.device not in factors:
            drawn = torch.randint(-(1 << 62), 1 << 62, (WORDS,), generator=torch.Generator().manual_seed(0))
            factors[tensor.device] = (2 * drawn + 1).to(tensor.device)
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = raw.numel() // 8 * 8
        words = raw[:whole]
        # A view as int64 needs an 8-byte aligned address.
        words = (words if words.data_ptr() % 8 == 0 else words.clone()).view(torch.int64)
        total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        for number, part in enumerate(torch.split(words, WORDS)):
            total += (part * factors[tensor.device][: len(part)]).sum() * (2 * number + 1)
        rest = raw[whole:].long()
        total += (rest * factors[tensor.device][: len(rest)]).sum() * (2 * (whole // 8) + 3)
        summed[id(tensor)] = tensor, total
        yield name, total


class Fingerprints:
    """Reference samples of a set of tensors, to compare with their current contents.

    Args:
        tensors: returns the current tensors; called at every comparison.
        full: sums over all elements instead of samples.
    """

    def __init__(self, tensors: Callable[[], list[Named]], *, full: bool = False) -> None:
        self._tensors = tensors
        self._read = sums_of if full else samples_of
        self._turn = 0
        self._taken: dict[_Kind, _Part] = {}

    def take(self) -> None:
        """Record the current values as the reference."""
        self._turn += 1
        self._taken = self._now()

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Names of tensors that differ from the reference or no longer exist.

        New tensors are not a change (an adapter not yet in use); they are included from then on.
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
        for name, values in self._read(tensors, self._turn):
            parts.setdefault((values.dtype, values.device), []).append((name, values))
        return {
            kind: ([(name, dtypes[name], shapes[name], values.numel()) for name, values in rows], _joined(rows))
            for kind, rows in parts.items()
        }


def _joined(rows: list[Named]) -> Tensor:
    """Concatenated bytes as uint8; -0.0 becomes 0.0, because an update by zero may drop the sign."""
    data = torch.cat([values for _, values in rows])
    if data.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        data += 0.0
    return data.view(torch.uint8)


def _rows(parts: dict[_Kind, _Part]) -> dict[str, Any]:
    """Map name to (dtype, shape, bytes), independent of the device."""
    found: dict[str, Any] = {}
    for rows, values in parts.values():
        data, start = values.cpu().numpy().tobytes(), 0
        width = len(data) // max(1, sum(count for _, _, _, count in rows))
        for name, dtype, shape, count in rows:
            found[name] = dtype, shape, data[start : start + count * width]
            start += count * width
    return found
