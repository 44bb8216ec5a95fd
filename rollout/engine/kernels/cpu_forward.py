"""The structures that the fused C++ forward pass reads: the parts of decoder layers, a model, a step, and several steps.

Each class mirrors the C++ struct that its docstring names; the header documents the fields.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum


class NormKind(IntEnum):
    """The mirror of the C++ enum `NormKind` in cpu_forward.h."""

    RMS = 0
    """weight * normalised input, rounded after the normalisation and after the product."""
    RMS_ROUNDED_ONCE = 1
    """weight * normalised input, rounded once."""
    RMS_OF_ONE_PLUS_WEIGHT = 2
    """(1 + weight) * normalised input, rounded once."""
    LAYER_NORM = 3


class RotaryKind(IntEnum):
    """The mirror of the C++ enum `RotaryKind` in cpu_forward.h: which dimensions are rotated together."""

    HALVES = 0
    PAIRS = 1


MAX_TAPS = 8
"""The maximum kernel size of a convolution (the C++ constant `MOST_TAPS` in cpu_delta.h)."""


class Activation(IntEnum):
    """The mirror of the C++ enum `Activation` in cpu_rows.h."""

    SILU = 0
    GELU_TANH = 1


class Adapter(ctypes.Structure):
    """The mirror of the C++ struct `Adapter` in cpu_linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("down", "up")),
        ("rank", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("wide", ctypes.c_int32),
    )


class Linear(ctypes.Structure):
    """The mirror of the C++ struct `Linear` in cpu_linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("stride", ctypes.c_int64),
        ("adapter", Adapter),
    )


class Norm(ctypes.Structure):
    """The mirror of the C++ struct `Norm` in cpu_forward.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weight", "bias"))


class Experts(ctypes.Structure):
    """The mirror of the C++ struct `Experts` in cpu_experts.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("router", "gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("count", "chosen", "inner")),
        *((name, ctypes.c_int32) for name in ("normalised", "wide")),
    )


class DeltaNet(ctypes.Structure):
    """The mirror of the C++ struct `DeltaNet` in cpu_delta.h."""

    _fields_ = (
        *((name, Linear) for name in ("qkv", "z", "b", "a")),
        *((name, ctypes.c_void_p) for name in ("convolution", "a_log", "bias", "norm", "inputs", "states")),
        *((name, ctypes.c_int64) for name in (
            "inputs_stride", "states_stride", "key_heads", "value_heads", "key_dim", "value_dim", "kernel", "interleaved",
        )),
    )  # fmt: skip


class Layer(ctypes.Structure):
    """The mirror of the C++ struct `Layer` in cpu_forward.h."""

    _fields_ = (
        *((name, Norm) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, Norm) for name in ("query_norm", "key_norm")),
        *((name, Linear) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        ("experts", Experts),
        ("shared_gate", Linear),
        ("delta", DeltaNet),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "cosines", "sines")),
        *((name, ctypes.c_int64) for name in ("window", "inner")),
    )


class Model(ctypes.Structure):
    """The mirror of the C++ struct `Model` in cpu_forward.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "head", "positions")),
        ("norm", Norm),
        *((name, ctypes.c_int64) for name in (
            "count", "hidden", "heads", "kv_heads", "head_dim", "vocabulary", "inner", "experts", "chosen", "rank",
            "norm_kind", "norm_whole", "gated", "delta_width", "delta_values", "shared", "rotary_kind",
            "rotary_dim", "rotary_wide", "activation",
        )),
        *((name, ctypes.c_float) for name in ("epsilon", "scaling", "embedding_scale", "softcap", "final_softcap")),
    )  # fmt: skip


class Step(ctypes.Structure):
    """The mirror of the C++ struct `Step` in cpu_forward.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "ids", "positions", "slots", "offsets", "tables", "keep", "states", "logits", "workspace", "routes",
            "hidden",
        )),
        *((name, ctypes.c_int64) for name in ("count", "sequences", "width", "block_size", "kept", "threads")),
    )  # fmt: skip


class Decode(ctypes.Structure):
    """The mirror of the C++ struct `Decode` in cpu_decode.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "ids", "positions", "slots", "counters", "stop_ids", "asked", "tokens", "logprobs",
        )),
        *((name, ctypes.c_int64) for name in ("stops", "steps")),
    )  # fmt: skip
