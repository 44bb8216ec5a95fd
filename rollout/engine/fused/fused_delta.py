"""Layers of the gated delta rule for the fused forward: each is verified, and its addresses and numbers are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import activations

from rollout.engine.fused.families import Family
from rollout.engine.fused.fused_checks import Checks, address, is_of, require
from rollout.engine.fused.fused_parts import Parts
from rollout.engine.kernels.cpu_forward import MAX_TAPS, DeltaNet, Linear
from rollout.engine.memory.state_pool import StateKey, StatePool

_SPLIT, _INTERLEAVED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")


def delta_net(
    layer: Any, index: int, family: Family, parts: Parts, checks: Checks, states: StatePool
) -> tuple[DeltaNet, Linear]:
    """A GatedDeltaNet of transformers (arXiv 2412.06464), and the projection of its outputs.

    Args:
        index: of the layer in its model.
        states: holds the inputs of its convolution and the state of its recurrence.

    Raises:
        Unfusable, Replaced, AttributeError: the C++ forward does not compute what this layer does.
    """
    interleaved = family.delta == "interleaved"
    names, read = _INTERLEAVED if interleaved else _SPLIT, checks.originals.value
    require(is_of(layer, f"{family.name}GatedDeltaNet"), "a layer of linear attention is of another class")
    checks.plain(layer, *names, "conv1d", "norm", "out_proj")
    key_heads, value_heads, key_dim, value_dim, kernel = (
        read(layer, name) for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")
    )
    keys, values = key_heads * key_dim, value_heads * value_dim
    sizes = (read(layer, "key_dim"), read(layer, "value_dim"), read(layer, "layer_idx"))
    require(sizes == (keys, values, index), "the numbers of a layer of linear attention were changed")
    require(value_heads % key_heads == 0 and key_dim % 2 == 0, "its heads of linear attention have another shape")
    channels = 2 * keys + values
    _require_silu(layer, checks)
    norm, dtype = layer.norm, parts.dtype
    require(is_of(norm, f"{family.name}RMSNormGated"), "a gated norm is of another class")
    checks.plain(norm)
    _require_silu(norm, checks)
    parts.epsilons.add(read(norm, "variance_epsilon"))
    convolution = layer.conv1d
    require(type(convolution) is nn.Conv1d and convolution.bias is None, "a convolution is of another kind")
    checks.plain(convolution)
    require(
        tuple(convolution.weight.shape) == (channels, 1, kernel) and 1 < kernel <= MAX_TAPS, "a convolution is too long"
    )
    inputs, states_of = states.state(StateKey(index, "conv")), states.state(StateKey(index, "recurrent"))
    require(inputs.dtype == dtype and states_of.dtype == torch.float32, "the dtypes of its states are others")
    require(
        inputs.shape[1:] == (channels, kernel) and states_of.shape[1:] == (value_heads, key_dim, value_dim),
        "its states have another shape",
    )
    require(inputs.stride(1) == 1 and states_of[0].is_contiguous(), "its states lie otherwise")
    wide = [channels + values, 2 * value_heads] if interleaved else [channels, values, value_heads, value_heads]
    projections = [parts.linear(getattr(layer, name), size)[0] for name, size in zip(names, wide, strict=True)]
    qkv, z, b, a = (projections[0], Linear(), projections[1], Linear()) if interleaved else projections
    (output,) = parts.linear(layer.out_proj)
    return DeltaNet(
        qkv, z, b, a,
        address(convolution, "weight", dtype), address(layer, "A_log", dtype), address(layer, "dt_bias", dtype),
        address(norm, "weight", dtype), inputs.data_ptr(), states_of.data_ptr(), inputs.stride(0), states_of.stride(0),
        key_heads, value_heads, key_dim, value_dim, kernel, interleaved,
    ), output  # fmt: skip


def _require_silu(module: Any, checks: Checks) -> None:
    name = checks.originals.value(module, "activation")
    kind = checks.originals.item(activations.ACT2FN, name)
    require(name in ("silu", "swish") and kind in (nn.SiLU, activations.SiLUActivation), f"its activation is {name}")
