"""Which tensors are on the pretended device: those whose storage was made there, or is of a result of others that were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)
_HOST = torch.device("cpu")
_ON, _PINNED = "_pretended_cuda", "_pretended_pinned"

_T: Any = Tensor
_DEVICE, _IS_CUDA = _T.device.__get__, _T.is_cuda.__get__
_ARRAYS = {_T.numpy, _T.__array__}
_WAITS = {_T.item, _T.tolist, _T.__bool__, _T.__int__, _T.__float__, _T.__index__, _T.nonzero, torch.nonzero, torch.equal,
          _T.equal, torch.masked_select, _T.masked_select, torch.unique, _T.unique, torch.allclose, _T.allclose}  # fmt: skip
_QUOTIENTS = {_T.div, _T.__truediv__, _T.true_divide, torch.div, torch.true_divide}
_COUNTS = {torch.histc, _T.histc}
_MIXED = {
    _T.copy_,
    _T.__getitem__,
    _T.__setitem__,
    _T.index_put_,
    torch.index_put_,
    torch._has_compatible_shallow_copy_type,
}
"""Functions that take tensors of two devices."""


def is_on(tensor: Tensor) -> bool:
    """Whether a tensor is on the pretended device."""
    return getattr(_storage(tensor), _ON, False)


def put(tensor: Tensor) -> Tensor:
    """Have this tensor's memory be the pretended device's."""
    setattr(_storage(tensor), _ON, True)
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Whether a host tensor's memory is pinned."""
    return getattr(_storage(tensor), _PINNED, False)


def _storage(tensor: Tensor) -> Any:
    try:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None  # Of no storage: sparse, or made of other tensors.


class PretendedCuda(TorchFunctionMode):
    """Redirects the device's tensors to host memory and keeps account of them.

    Args:
        capturing: whether a graph is being captured.
        refuse: invalidates that capture and raises.
    """

    def __init__(self, capturing: Callable[[], bool], refuse: Callable[[str], Any]) -> None:
        super().__init__()
        self._capturing = capturing
        self._refuse = refuse

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func in (_DEVICE, _IS_CUDA):
            on = first is not None and is_on(first)
            return func(*args) if not on else CUDA if func == _DEVICE else True
        if func is _T.backward:
            # What a backward of Python does, it does on this device too.
            gradient = kwargs.pop("gradient", None)
            with self:
                return torch.autograd.backward(first, *(args[1:] or (gradient,)), **kwargs)
        if func in (_T.to, _T.cpu, _T.cuda) and first is not None:
            return self._moved(func, first, args[1:], kwargs)
        if func in (_T.pin_memory, _T.is_pinned) and first is not None:
            if func is _T.is_pinned:
                return is_pinned(first)
            if is_on(first):
                raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
            return _pinned(first.clone())
        if func in _QUOTIENTS and first is not None and is_on(first) and isinstance(args[1], float):
            # A device multiplies by the reciprocal of a number.
            func, args = _T.mul, (first, float(np.float32(1) / np.float32(args[1])))
        if func in _COUNTS and first is not None and is_on(first) and not first.is_floating_point():
            # A device counts integers, and a CPU does not.
            return put(self._called(func, (first.float(), *args[1:]), kwargs).to(first.dtype))
        return self._called(func, args, kwargs)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked, pinned = _device_of(kwargs.get("device")), kwargs.pop("pin_memory", False)
        if asked == CUDA:
            kwargs["device"] = _HOST
        operands = [each for each in _tensors((args, kwargs)) if type(each).__name__ != "FakeTensor"]
        on = [each for each in operands if is_on(each)]
        if on:
            if func in _ARRAYS:
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
            if func in _WAITS or (func is _T.__getitem__ and _of_bools(args[1])):
                self._wait(func)
            self._check_operands(func, args, operands)
        result = func(*args, **kwargs)
        if asked == CUDA or (on and asked is None):
            for each in _tensors(result):
                if not any(each is operand for operand in operands) and not _shares(each, operands):
                    put(each)
        elif pinned:
            _pinned(result)
        return result

    def _check_operands(self, func: Any, args: tuple[Any, ...], operands: list[Tensor]) -> None:
        if func in _MIXED or getattr(func, "__name__", "") in ("__set__", "set_", "_make_subclass", "set_data"):
            if func is _T.copy_ and self._capturing():
                self._check_copy(*args[:2])
            return
        host = [each for each in operands if not is_on(each) and each.dim()]
        if host:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func}, "
                f"{[tuple(each.shape) for each in host]} on the host)"
            )

    def _check_copy(self, into: Tensor, source: Tensor) -> None:
        if is_on(into) and not is_on(source) and source.dim() and not is_pinned(source):
            self._refuse("a copy from memory that is not pinned")
        if is_on(source) and not is_on(into) and not is_pinned(into):
            self._refuse("a copy to memory that is not pinned")

    def _wait(self, func: Any) -> None:
        if self._capturing():
            self._refuse(f"{getattr(func, '__name__', func)} waits for the device")

    def _moved(self, func: Any, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        wanted = _HOST if func is _T.cpu else CUDA if func is _T.cuda else None
        if func is _T.to:
            given = [kwargs.get("device"), kwargs.get("other"), *args[:1]]
            devices = [_device_of(CUDA if isinstance(each, Tensor) and is_on(each) else each) for each in given]
            wanted = next((each for each in devices if each is not None), None)
            args = tuple(_HOST if _device_of(each) == CUDA else each for each in args)
            kwargs = kwargs | ({"device": _HOST} if _device_of(kwargs.get("device")) == CUDA else {})
            result = func(tensor, *args, **kwargs)
        else:
            result = tensor
        on = is_on(tensor)
        goes = wanted is not None and (wanted == CUDA) != on
        if goes:
            if self._capturing() and (on or (tensor.dim() and not is_pinned(tensor))):
                self._refuse("a copy between host and device")
            result = result.clone() if _shares(result, [tensor]) else result
        return put(result) if (wanted == CUDA if goes else on) else result


def _pinned(tensor: Tensor) -> Tensor:
    setattr(_storage(tensor), _PINNED, True)
    return tensor


def _device_of(given: Any) -> torch.device | None:
    """`CUDA`, another device, or None: `given` is no device."""
    if isinstance(given, int) and not isinstance(given, bool):
        return CUDA
    if isinstance(given, str):
        given = torch.device(given)
    if not isinstance(given, torch.device):
        return None
    return CUDA if given.type == "cuda" else given


def _of_bools(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, Tensor) and each.dtype == torch.bool and each.dim() > 0 for each in parts)


def _tensors(tree: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif depth and isinstance(tree, dict):
        for each in tree.values():
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each, depth - 1)


def _shares(tensor: Tensor, others: list[Tensor]) -> bool:
    own = _storage(tensor)
    return own is not None and any(own is _storage(each) for each in others)
