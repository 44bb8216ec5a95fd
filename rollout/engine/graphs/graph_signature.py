"""What a CUDA graph has fixed of a model, to be compared whenever the trainer may have modified it."""

from __future__ import annotations

from torch import nn

_SMALL = 64
_OF_NO_FORWARD = frozenset(
    {"gradient_checkpointing", "_gradient_checkpointing_func", "training", "_state_dict_hooks", "_state_dict_pre_hooks",
     "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
)  # fmt: skip
"""Attributes of modules that act only in training, and in saving and loading."""


def signature_of(model: nn.Module) -> list[object]:
    """Everything that a graph of `model` has fixed: a graph can be replayed while it compares equal.

    Of each module: its identity, its class's forward, addresses of its parameters and buffers, its hooks, replaced methods,
    and its bools, strings and floats (an adapter that is merged, disabled or scaled). Ints are counters and left out.
    """
    found: list[object] = []
    for module in model.modules():
        found.append((id(module), type(module).forward))
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                found += [
                    (key, each.data_ptr(), each.dtype, each.shape) for key, each in value.items() if each is not None
                ]
            elif name in _OF_NO_FORWARD:
                continue
            elif name == "_modules":
                found += [(key, id(each)) for key, each in value.items()]
            else:
                found.append((name, _plain(value)))
    return found


def _plain(value: object) -> object:
    if isinstance(value, bool | str | float):
        return value
    if isinstance(value, list | tuple | dict) and len(value) <= _SMALL:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((key, _plain(each)) for key, each in items)
    return id(value) if callable(value) else None
