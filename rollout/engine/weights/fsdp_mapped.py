"""FSDP2 weights gathered to the same addresses each time, so that CUDA graphs of the module's forward stay valid.

The parameters of a group are all-gathered together, from their shards to their places in memory of fixed addresses, which
is given back to the device by `release`. FSDP2's own state stays that of sharded weights. While they are gathered its
forward hooks do nothing but cast; a forward with gradients gives the gathered weights up and runs as FSDP2 runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import Shard
from torch.distributed.utils import _apply_to_tensors

from rollout.engine.memory.arena import PoolMemory
from rollout.engine.weights.fsdp import ShardedWeights, around_state_dicts, groups_of, reshard, show_shards, state_of

_ALIGNMENT = 256
"""Bytes between the starts of parameters, as of torch's allocator."""
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The name since torch 2.13, and the one before."""
TRIED = ("2.11", "2.12", "2.13")
"""Versions of torch whose private parts of FSDP2 were tried, on a CPU by gloo; with others FSDP2 gathers by `unshard`."""


class Unmappable(Exception):  # noqa: N818 - not an error: FSDP2 gathers the weights itself
    """Why parameters are not gathered by plain collectives."""


class MappedWeights(ShardedWeights):
    """FSDP2 (`fully_shard`) weights whose gathered parameters have fixed addresses.

    Memory while gathered: that of `ShardedWeights`.

    Args:
        memory: allocates at the same addresses each time.

    Raises:
        Unmappable: this torch is not in `TRIED`, or names what only FSDP2 itself can gather: parameters that are split by
            something else too or along another dimension than the first; tensors gathered in a format of their own (float8);
            units of several modules.
        UnsupportedModelError: see `ShardedWeights`.
    """

    fixed_addresses = True

    def __init__(self, model: nn.Module, memory: PoolMemory) -> None:
        if ".".join(torch.__version__.split(".")[:2]) not in TRIED:
            raise Unmappable(f"tried with torch {', '.join(TRIED)}, and this is {torch.__version__}")
        super().__init__(model)
        self._memory = memory
        self._address = 0
        self._whole: dict[Any, nn.Parameter] = {}
        """Gathered parameter of each of FSDP2's; its memory is there while the weights are gathered."""
        self._fsdp_groups = [group for unit in self._units for group in groups_of(state_of(unit)) if group.fsdp_params]
        for each in (each for group in self._fsdp_groups for each in group.fsdp_params):
            _refuse_unlike(each)
        self._hooks = [_UnitHooks(unit, self.release) for unit in self._units]

    @property
    def ready(self) -> bool:
        """Whether the modules have the gathered parameters; a forward with gradients and `reshard()` take them away."""
        return self._release is not None and all(self._is_shown(group.fsdp_params[0]) for group in self._fsdp_groups)

    def _is_shown(self, each: Any) -> bool:
        info = each._module_info
        return info.module._parameters.get(info.param_name) is self._whole[each]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _gather(self, undo: ExitStack) -> None:
        for unit in self._units:
            state_of(unit)._lazy_init()
        for unit in self._units:
            # A backward that kept it, an interrupted forward or `unshard()` may have left it whole.
            reshard(unit)
        places = dict(self._places())
        end = max((stop for _, stop in places.values()), default=0)
        (memory,) = self._memory.allocate([end], torch.uint8, self._fsdp_groups[0].device)
        if self._memory.release is not None:
            undo.callback(self._memory.release)
        if memory.data_ptr() != self._address:
            self._address = memory.data_ptr()
            self._whole.clear()
        for group in self._fsdp_groups:
            self._gather_group(group, memory, places)
            around_state_dicts(group, undo, partial(_show_sharded, group), partial(self._show, group))
            undo.callback(_show_sharded, group)
            self._show(group)
        for hooks in self._hooks:
            undo.callback(hooks.uninstall)
            hooks.install()

    def _places(self) -> Iterator[tuple[Any, tuple[int, int]]]:
        """First byte of each parameter in memory, and the one behind its last."""
        start = 0
        for group in self._fsdp_groups:
            ranks = group._all_gather_process_group.size()
            for each in group.fsdp_params:
                stop = start + each._sharded_param_data.numel() * ranks * _dtype(each).itemsize
                yield each, (start, stop)
                start = -(-stop // _ALIGNMENT) * _ALIGNMENT

    def _gather_group(self, group: Any, memory: Tensor, places: dict[Any, tuple[int, int]]) -> None:
        """Gather the parameters of a group, by one collective for all of them; shards are cut from the first dimension, so
        that they lie behind each other."""
        moves = []
        for each in group.fsdp_params:
            start, stop = places[each]
            gathered = memory[start:stop].view(_dtype(each))
            (shard,) = each.all_gather_inputs
            moves.append((gathered, shard))
            if each not in self._whole:
                # Behind the last row lies what the shards were padded with.
                whole = gathered[: each._orig_size.numel()].view(each._orig_size)
                self._whole[each] = nn.Parameter(whole, requires_grad=each.sharded_param.requires_grad)
        ranks = group._all_gather_process_group
        # Nothing in this block may raise before its end: calls that are not carried out would block the next ones.
        with _coalescing_manager(group=ranks, async_ops=True) as gathering:
            for gathered, shard in moves:
                _all_gather(gathered, shard, group=ranks, async_op=True)
        gathering.wait()

    def _show(self, group: Any) -> None:
        """Give the modules of a group its gathered parameters."""
        for each in group.fsdp_params:
            each._setattr_on_modules(self._whole[each])


class _UnitHooks:
    """Forward hooks of one unit in the place of FSDP2's.

    Attributes:
        fsdp_state: of the unit.
    """

    def __init__(self, unit: nn.Module, give_up: Callable[[], None]) -> None:
        self.fsdp_state = state_of(unit)
        if len(self.fsdp_state._modules) != 1:
            raise Unmappable(f"{len(self.fsdp_state._modules)} modules are one unit")
        self._give_up = give_up
        before, after = (
            getattr(self.fsdp_state, name).id for name in ("_pre_forward_hook_handle", "_post_forward_hook_handle")
        )
        # The same objects each time: graphs are captured again when hooks have changed.
        self._places: list[tuple[Any, int, Any]] = [
            (unit._forward_pre_hooks, before, self._before),
            (unit._forward_hooks, after, self._after),
        ]
        self._theirs = [hooks[key] for hooks, key, _ in self._places]

    def install(self) -> None:
        """Put these hooks in the place of FSDP2's."""
        for hooks, key, mine in self._places:
            hooks[key] = mine

    def uninstall(self) -> None:
        """Put FSDP2's back."""
        for (hooks, key, _), theirs in zip(self._places, self._theirs, strict=True):
            hooks[key] = theirs

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._give_up()
            return self._theirs[0](module, args, kwargs)
        policy = self.fsdp_state._mp_policy
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            return args, kwargs
        return _cast((args, kwargs), policy.param_dtype)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        policy = self.fsdp_state._mp_policy
        return output if policy.output_dtype is None else _cast(output, policy.output_dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """The floating-point tensors in `values` in another dtype, as FSDP2's mixed precision casts them."""
    return _apply_to_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, values)


def _dtype(each: Any) -> torch.dtype:
    dtype: torch.dtype = each.param_dtype or each.sharded_param.dtype
    return dtype


def _show_sharded(group: Any) -> None:
    # Whole only if `unshard()` was called meanwhile.
    if group.is_unsharded:
        type(group)._to_sharded(group)
    else:
        show_shards(group)


def _refuse_unlike(each: Any) -> None:
    """Refuse a parameter whose gathered shards, one behind the other, are not its values."""
    info = each._module_info
    if each.is_dtensor or not hasattr(each.mesh_info, "shard_process_group"):
        raise Unmappable(f"{info.param_name} is split by more than FSDP2")
    if each.fsdp_placement != Shard(0):
        raise Unmappable(f"{info.param_name} is cut as {each.fsdp_placement}")
    if hasattr(each.sharded_param.to_local(), "fsdp_pre_all_gather"):
        raise Unmappable(f"{info.param_name} is gathered in a format of its own")
