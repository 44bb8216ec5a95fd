"""Copies of float32 weights in autocast's dtype, at fixed addresses, for steps that would cast the weights each time.

Under autocast a matrix product casts its weight in every forward, eight bytes of traffic per parameter instead of two.
Every float32 matrix except embeddings has a copy, and results are the same to the bit. Always true: after `refresh` of a
module epoch every copy is the cast of its parameter in that epoch, however the trainer has changed it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from rollout.config import InferenceConfig
from rollout.engine.memory.arena import PoolMemory, fixed_memory
from rollout.engine.weights.base import Weights
from rollout.errors import ConfigError

_ALIGNMENT = 512
"""Alignment of copies in bytes, the same as torch's allocator has: matrix products may choose a kernel by it."""
_PRODUCTS = frozenset(
    (linear, *(getattr(torch, name) for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm")),
     *(getattr(Tensor, name) for name in ("__matmul__", "__rmatmul__", "matmul", "mm", "bmm", "addmm", "baddbmm")))
)  # fmt: skip
"""Functions whose arguments autocast casts to its dtype."""
_log = logging.getLogger(__name__)


class AutocastCopies:
    """The copies of one module's parameters.

    Args:
        memory: memory of the copies; None: there never are any.
        room: bytes of the device that steps and `bytes_to_come` leave free, negative if they do not fit; None: the copies
            are made even then.

    Attributes:
        layout: equal as long as the copies have the same addresses; None: there are none.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, memory: PoolMemory | None, room: Callable[[], float] | None
    ) -> None:
        self._model = model
        self._device = device
        self._memory = memory
        self._room = room
        self._epoch = -1
        self._dtype: torch.dtype | None = None
        self._flat: Tensor | None = None
        self._copies: dict[nn.Parameter, Tensor] = {}
        self._refused = False
        self.layout: tuple[object, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Device memory of the copies."""
        return 0 if self._flat is None else self._flat.nbytes

    @property
    def bytes_to_come(self) -> int:
        """Device memory that the next refresh takes; 0 until a capture under autocast has asked for a copy."""
        return 0 if self._dtype is None else max(0, _place(self._matrices(), self._dtype)[1] - self.nbytes)

    def cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """The copy of a parameter in autocast's `dtype`, or the parameter itself.

        The first call for a dtype makes the copies, since the module's forward may enter an autocast of its own.
        """
        if self._memory is None or not self._fits(parameter):
            return parameter
        if dtype != self._dtype:
            # One dtype at a time.
            self._drop()
            self._dtype, self._refused, self._epoch = dtype, False, -1
            self._fill()
        return self._copies.get(parameter, parameter)

    def substituted(self) -> AbstractContextManager[object]:
        """A block in which matrix products under autocast read the copies. Slow, so it is for captures."""
        return nullcontext() if self._memory is None else _Substituted(self)

    def refresh(self, module_epoch: int) -> None:
        """Copy the parameters again before a step of another module epoch, on the current stream; may change `layout`."""
        if self._dtype is None or self._refused or (self._flat is not None and module_epoch == self._epoch):
            return
        self._fill()
        # Last, so that the next step repeats all of it after an exception.
        self._epoch = module_epoch

    def _fill(self) -> None:
        if self._flat is None or self._outline() != self.layout:
            self._lay_out()
        if self._copies:
            with torch.no_grad():
                torch._foreach_copy_(list(self._copies.values()), list(self._copies))

    def release(self) -> None:
        """Free the memory. Nothing may read the copies until the next `refresh`."""
        self._refused = False
        self._drop()

    def _fits(self, parameter: Tensor) -> bool:
        return parameter.dtype == torch.float32 and parameter.device == self._device and parameter.is_contiguous()

    def _outline(self) -> tuple[object, ...]:
        address = None if self._flat is None else self._flat.data_ptr()
        return address, self._dtype, tuple((id(each), each.shape) for each in self._matrices())

    def _matrices(self) -> dict[nn.Parameter, None]:
        """Parameters that have a copy, including a matrix that an embedding shares with a product."""
        modules = (module for module in self._model.modules() if not isinstance(module, nn.Embedding))
        own = (each for module in modules for each in module._parameters.values() if each is not None)
        return {each: None for each in own if each.ndim == 2 and self._fits(each)}

    def _lay_out(self) -> None:
        assert self._dtype is not None
        assert self._memory is not None
        self._drop()
        places, size = _place(self._matrices(), self._dtype)
        if not size:
            return
        try:
            if self._room is not None and (room := self._room()) < 0:
                raise torch.OutOfMemoryError(
                    f"{-room / 2**20:.0f} MiB are missing for them beside the KV pool and a step"
                )
            (self._flat,) = self._memory.allocate([size], torch.uint8, self._device)
        except torch.OutOfMemoryError as exc:
            self._refused = True
            _log.log(
                logging.WARNING if self._room is None else logging.INFO,
                "no copies of the weights in %s (%.0f MiB) until the next suspend, so that every step casts them: %s; see "
                "Advanced.autocast_weight_copies", self._dtype, size / 2**20, exc,
            )  # fmt: skip
            return
        for each, start in places.items():
            stop = start + each.numel() * self._dtype.itemsize
            self._copies[each] = self._flat[start:stop].view(self._dtype).view(each.shape)
        self.layout = self._outline()

    def _drop(self) -> None:
        held, self._flat, self.layout = self._flat is not None, None, None
        self._copies.clear()
        if held and self._memory is not None and self._memory.release is not None:
            self._memory.release()


NO_COPIES = AutocastCopies(nn.Module(), torch.device("cpu"), None, None)


def autocast_copies(
    config: InferenceConfig, weights: Weights, device: torch.device, room: Callable[[], float]
) -> AutocastCopies:
    """The copies of an engine.

    Args:
        room: see `AutocastCopies`; not asked if `autocast_weight_copies=True`.

    Raises:
        ConfigError: `autocast_weight_copies=True`, and there cannot be any.
    """
    wanted, why = config.advanced.autocast_weight_copies, None
    if device.type != "cuda":
        why = f"the model is on {device}"
    elif weights.tensor_parallel_mesh is not None or not weights.fixed_addresses:
        why = "its weights are sharded, and gathered to other addresses each time"
    if wanted and why is not None:
        raise ConfigError(
            f"Advanced.autocast_weight_copies=True: {type(weights.trained).__name__}: {why}, where no copies are "
            "made; set it to None"
        )
    if wanted is False or why is not None or config.exact:
        return NO_COPIES
    memory = fixed_memory(device) if config.advanced.virtual_memory else None
    memory = memory or PoolMemory(_empty, torch.cuda.empty_cache)
    return AutocastCopies(weights.sampled, device, memory, None if wanted else room)


def _empty(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.empty(size, dtype=dtype, device=device) for size in sizes]


class _Substituted(TorchFunctionMode):
    def __init__(self, copies: AutocastCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in _PRODUCTS:
            args, given = [self._cast(each) for each in args], {key: self._cast(each) for key, each in given.items()}
        return func(*args, **given)

    def _cast(self, argument: Any) -> Any:
        if not isinstance(argument, nn.Parameter) or not torch.is_autocast_enabled(argument.device.type):
            return argument
        return self._copies.cast(argument, torch.get_autocast_dtype(argument.device.type))


def _place(parameters: Mapping[nn.Parameter, None], dtype: torch.dtype) -> tuple[dict[nn.Parameter, int], int]:
    """First byte of the copy of each parameter, and the bytes of all."""
    places, end = {}, 0
    for each in parameters:
        places[each] = end
        end += -(-each.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, end
