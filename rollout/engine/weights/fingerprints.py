"""Detects weight changes that were not announced, by comparing a sample of every parameter.

Content decides. Neither a tensor's address nor its version counter tells a change: fused optimizers and PEFT's merges
move neither, a round trip between devices moves the address alone.

    sampled    SAMPLES elements of each tensor, spread evenly, other ones after every update
    full       sums over all of it, weighted by position, so that any one change is seen for certain

Always true: nothing of a tensor is kept but the copy of its samples, and taking them waits for no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 64
"""Elements of a tensor that are compared. What changes one element in so many shows with high probability."""

WORDS = 1 << 20
"""Words of eight bytes that the full fingerprint sums at once."""

Named = tuple[str, Tensor]
_Kind = tuple[torch.dtype, torch.device]


def persistent_tensors(model: nn.Module) -> list[Named]:
    """Every parameter and persistent buffer; not what a normalisation over batches counts by itself.

    A tied one comes under each of its names: any of them can be tied to another tensor.
    """
    running = nn.modules.batchnorm._NormBase
    found: list[Named] = []
    for prefix, module in model.named_modules():
        own: list[tuple[str, Tensor | None]] = list(module._parameters.items())
        if not isinstance(module, running):
            own += [each for each in module._buffers.items() if each[0] not in module._non_persistent_buffers_set]
        found += [(f"{prefix}.{name}" if prefix else name, tensor) for name, tensor in own if tensor is not None]
    return found


def samples_of(tensors: Iterable[Named], turn: int) -> Iterator[Named]:
    """(name, [<= SAMPLES] elements as views where that is possible) of each; another `turn` looks at other elements."""
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
    """(name, [1] int64) of each: the sum of its words, each times an odd number of its place, modulo 2**64."""
    factors: dict[torch.device, Tensor] = {}
    # Every tensor stays with its sum, so that no other one gets its id.
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
        # Eight bytes at once need an address that is a multiple of eight.
        words = (words if words.data_ptr() % 8 == 0 else words.clone()).view(torch.int64)
        total = torch.zeros(1, dtype=torch.int64, device=tensor.device)
        for number, part in enumerate(torch.split(words, WORDS)):
            total += (part * factors[tensor.device][: len(part)]).sum() * (2 * number + 1)
        rest = raw[whole:].long()
        total += (rest * factors[tensor.device][: len(rest)]).sum() * (2 * (whole // 8) + 3)
        summed[id(tensor)] = tensor, total
        yield name, total


class Fingerprints:
    """Of one set of tensors.

    Args:
        tensors: gives them, anew each time.
        full: see the module.
    """

    def __init__(self, tensors: Callable[[], list[Named]], *, full: bool = False) -> None:
        self._tensors = tensors
        self._read = sums_of if full else samples_of
        self._turn = 0
        self._taken: dict[_Kind, _Part] = {}

    def take(self) -> None:
        """The present content is meant."""
        self._turn += 1
        self._taken = self._now()

    @torch.no_grad()
    def changed(self) -> list[str]:
        """Names of tensors that are not as they were taken, or not there.

        New ones are no change (an adapter that nobody uses yet); from now on they are looked at too.
        """
        now = self._now()
        if now.keys() == self._taken.keys() and all(now[kind].equals(then) for kind, then in self._taken.items()):
            return []
        new, old = _rows(now), _rows(self._taken)
        changed = [name for name, row in old.items() if new.get(name) != row]
        if not changed:
            self._taken = now
        return changed

    @torch.no_grad()
    def _now(self) -> dict[_Kind, _Part]:
        tensors = self._tensors()
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        dtypes = {name: tensor.dtype for name, tensor in tensors}
        parts: dict[_Kind, list[Named]] = {}
        for name, values in self._read(tensors, self._turn):
            parts.setdefault((values.dtype, values.device), []).append((name, values))
        return {
            kind: _Part([(name, dtypes[name], shapes[name], values.numel()) for name, values in rows], _joined(rows))
            for kind, rows in parts.items()
        }


def _joined(rows: list[Named]) -> Tensor:
    """uint8: the bytes of all; a zero has no sign, for an update by nothing may take it away."""
    data = torch.cat([values for _, values in rows])
    if data.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        data += 0.0
    return data.view(torch.uint8)


class _Part:
    """What was read of the tensors of one dtype on one device."""

    def __init__(self, rows: list[tuple[str, torch.dtype, tuple[int, ...], int]], data: Tensor) -> None:
        self.rows = rows
        self.data = data

    def equals(self, other: _Part) -> bool:
        return self.rows == other.rows and torch.equal(self.data, other.data)


def _rows(parts: dict[_Kind, _Part]) -> dict[str, Any]:
    """name → dtype, shape and bytes, wherever the tensor is."""
    found: dict[str, Any] = {}
    for part in parts.values():
        data, start = part.data.cpu().numpy().tobytes(), 0
        width = len(data) // max(1, sum(count for _, _, _, count in part.rows))
        for name, dtype, shape, count in part.rows:
            found[name] = dtype, shape, data[start : start + count * width]
            start += count * width
    return found
