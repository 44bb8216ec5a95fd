"""A reader that verifies the parts of decoder layers for the fused forward pass, and reads their addresses and options.

Rotary tables must be bit-identical wherever they are used. A vectorised cosine may round an element of a short tensor
differently from the same element of a long tensor. Tables are therefore computed on the CPU in slices of a fixed size,
and cached for the lifetime of the module.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import activations, pytorch_utils
from transformers.integrations import moe

from rollout.engine.fused.families import Family
from rollout.engine.kernels.cpu_forward import MAX_TAPS, Activation, Adapter, DeltaNet, Experts, Linear, Norm, NormKind
from rollout.engine.memory.state_pool import StateKey, StatePool
from rollout.engine.models.originals import PEFT_LORA, Checks, address, is_of, require

_SPLIT, _INTERLEAVED = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")


class Parts:
    """The reader of one decoder's parts. Its methods raise `Unfusable` or `AttributeError` if C++ cannot compute a part.

    Args:
        dtype: dtype of all parameters except those of adapters.
        exact: whether to reject active adapters.

    Attributes:
        epsilons: the epsilons of all norms read so far.
        activations: the activation functions of all MLPs read so far.
        ranks: 0 (so that a maximum exists without adapters), followed by the ranks of all adapters read so far.
    """

    def __init__(self, checks: Checks, family: Family, dtype: torch.dtype, *, exact: bool) -> None:
        self._checks = checks
        self._family = family
        self.dtype = dtype
        self._exact = exact
        self.epsilons: set[float] = set()
        self.activations: set[Activation] = set()
        self.ranks = [0]

    def norm(self, module: Any) -> Norm:
        """Read a norm, and add its epsilon to `epsilons`."""
        kind = self._family.norm
        layer_norm = kind is NormKind.LAYER_NORM
        known = type(module) is nn.LayerNorm if layer_norm else is_of(module, f"{self._family.name}RMSNorm")
        require(known, "a norm is of another class")
        self._checks.plain(module)
        if kind is NormKind.RMS_OF_ONE_PLUS_WEIGHT:
            self._checks.methods(type(module), "_norm")
        older = kind in (NormKind.RMS, NormKind.RMS_ROUNDED_ONCE)
        self.epsilons.add(module.variance_epsilon if older else module.eps)
        weight = address(module, "weight", self.dtype)
        biased = layer_norm and module.bias is not None
        return Norm(weight, address(module, "bias", self.dtype) if biased else None)

    def activation(self, module: Any) -> None:
        """Read the activation function of an MLP, and add it to `activations`."""
        self._checks.plain(module)
        if type(module) in (nn.SiLU, activations.SiLUActivation):
            self.activations.add(Activation.SILU)
            return
        if type(module) is activations.GELUTanh:
            function = module.act
            plain = isinstance(function, partial) and function.func is nn.functional.gelu and not function.args
            require(plain and function.keywords == {"approximate": "tanh"}, "its GELU is not torch's")
        else:
            require(type(module) is activations.NewGELUActivation, f"its activation is {type(module).__name__}")
        self.activations.add(Activation.GELU_TANH)

    def dropouts(self, module: Any, names: tuple[str, ...]) -> None:
        """Check that the named children of a module are plain dropouts, which are inactive during sampling."""
        for name in names:
            dropout = getattr(module, name)
            require(type(dropout) is nn.Dropout, f"{name} is {type(dropout).__name__}")
            self._checks.plain(dropout)

    def linears(self, parent: Any, names: tuple[str, ...], sizes: list[int]) -> list[Linear]:
        """Read projections with `sizes` outputs, each from its own module, or all from one module that packs them."""
        if len(names) == 1:
            return self.linear(getattr(parent, names[0]), *sizes)
        return [self.linear(getattr(parent, name), size)[0] for name, size in zip(names, sizes, strict=True)]

    def linear(self, module: Any, *sizes: int, lora: bool = True) -> list[Linear]:
        """Read the projections packed in `module`, with `sizes` outputs each. Without `sizes`, it is a single projection.

        If `lora` is False, an active adapter raises `Unfusable`.
        """
        base = base_of(module)
        adapter = Adapter() if base is module else self._adapter(module, lora=lora)
        conv = is_conv(base)
        require(conv or type(base) is nn.Linear, f"a projection is {type(base).__name__}, not nn.Linear")
        self._checks.plain(base)
        weight, width = address(base, "weight", self.dtype), self.dtype.itemsize
        bias = None if base.bias is None else address(base, "bias", self.dtype)
        depth, columns = base.weight.shape if conv else base.weight.shape[::-1]
        require(sum(sizes or (columns,)) == columns, "a projection has another size than its layer")
        found, start = [], 0
        for size in sizes or (columns,):
            part = Linear(
                weight + start * width * (1 if conv else depth), None if bias is None else bias + start * width,
                columns if conv else 0, adapter,
            )  # fmt: skip
            if adapter.down is not None:
                part.adapter.up = adapter.up + start * adapter.rank * (4 if adapter.wide else width)
            found.append(part)
            start += size
        return found

    def _adapter(self, module: Any, *, lora: bool) -> Adapter:
        """Read the active adapter of a LoRA layer, or return an empty `Adapter` if no adapter is active."""
        self._checks.unhooked(module)
        require(not module.merged, "LoRA is merged into a projection")
        active = active_adapters(module)
        if not active:
            return Adapter()
        require(lora and not self._exact, "LoRA acts in a projection" if self._exact else "LoRA acts in its head")
        require(len(active) == 1, f"the adapters {', '.join(active)} act together")
        (name,) = active
        require(not module.lora_variant, "an adapter is a variant of LoRA")
        dropout, down, up = module.lora_dropout[name], module.lora_A[name], module.lora_B[name]
        require(type(dropout) in (nn.Identity, nn.Dropout), "an adapter's dropout is of another class")
        for each in (dropout, down, up):
            self._checks.plain(each)
        require(type(down) is type(up) is nn.Linear and down.bias is None is up.bias, "an adapter is not plain LoRA")
        dtype = down.weight.dtype
        require(dtype in (torch.float32, self.dtype), f"an adapter's dtype is {dtype}")
        self.ranks.append(down.weight.shape[0])
        return Adapter(
            address(down, "weight", dtype), address(up, "weight", dtype), down.weight.shape[0],
            module.scaling[name], bool(self.dtype == torch.bfloat16 and dtype == torch.float32),
        )  # fmt: skip

    def experts(self, block: Any) -> Experts:
        """Read the router and the experts of a mixture-of-experts block."""
        family = self._family
        beside = ("shared_expert", "shared_expert_gate") if family.shared_expert else ()
        self._checks.plain(block, "gate", "experts", *beside)
        router, experts = block.gate, block.experts
        require(
            is_of(router, f"{family.name}TopKRouter") and is_of(experts, f"{family.name}Experts"),
            "a mixture's parts are of other classes",
        )
        self._checks.plain(router)
        self._checks.plain(experts, "act_fn")
        self.activation(experts.act_fn)
        self._require_known_experts(experts)
        count = router.num_experts
        require(experts.num_experts == count == len(experts.down_proj), "a layer leaves out some of its experts")
        # Default to True, because routers without this option always normalise the chosen experts' weights.
        normalised = getattr(router, "norm_topk_prob", True)
        return Experts(
            address(router, "weight", self.dtype), address(experts, "gate_up_proj", self.dtype),
            address(experts, "down_proj", self.dtype), count, router.top_k, experts.down_proj.shape[2],
            bool(normalised), family.shares_wide,
        )  # fmt: skip

    def delta_net(self, layer: Any, index: int, states: StatePool) -> tuple[DeltaNet, Linear]:
        """Read a gated delta net layer of transformers (arXiv 2412.06464), and its output projection.

        Args:
            index: index of the layer in the model.
            states: pool that holds the layer's convolution inputs and recurrent state.
        """
        interleaved, dtype = self._family.delta == "interleaved", self.dtype
        names = _INTERLEAVED if interleaved else _SPLIT
        require(is_of(layer, f"{self._family.name}GatedDeltaNet"), "a layer of linear attention is of another class")
        self._checks.plain(layer, *names, "conv1d", "norm", "out_proj")
        key_heads, value_heads, key_dim, value_dim, kernel = (
            getattr(layer, name)
            for name in ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")
        )
        keys, values = key_heads * key_dim, value_heads * value_dim
        sizes = (layer.key_dim, layer.value_dim, layer.layer_idx)
        require(sizes == (keys, values, index), "the numbers of a layer of linear attention have changed")
        require(value_heads % key_heads == 0 and key_dim % 2 == 0, "its heads of linear attention have another shape")
        channels = 2 * keys + values
        norm, convolution = layer.norm, layer.conv1d
        require(is_of(norm, f"{self._family.name}RMSNormGated"), "a gated norm is of another class")
        self._checks.plain(norm)
        for module in (layer, norm):
            name = module.activation
            known = name in ("silu", "swish") and activations.ACT2FN.get(name) in (nn.SiLU, activations.SiLUActivation)
            require(known, f"its activation is {name}")
        self.epsilons.add(norm.variance_epsilon)
        require(type(convolution) is nn.Conv1d and convolution.bias is None, "a convolution is of another kind")
        self._checks.plain(convolution)
        fits = tuple(convolution.weight.shape) == (channels, 1, kernel) and 1 < kernel <= MAX_TAPS
        require(fits, "a convolution is too long")
        inputs, state = states.state(StateKey(index, "conv")), states.state(StateKey(index, "recurrent"))
        require(inputs.dtype == dtype and state.dtype == torch.float32, "its states have other dtypes")
        shapes = inputs.shape[1:] == (channels, kernel) and state.shape[1:] == (value_heads, key_dim, value_dim)
        require(shapes, "its states have another shape")
        require(inputs.stride(1) == 1 and state[0].is_contiguous(), "its states have another memory layout")
        wide = [channels + values, 2 * value_heads] if interleaved else [channels, values, value_heads, value_heads]
        projections = [self.linear(getattr(layer, name), size)[0] for name, size in zip(names, wide, strict=True)]
        qkv, z, b, a = (projections[0], Linear(), projections[1], Linear()) if interleaved else projections
        (output,) = self.linear(layer.out_proj)
        return DeltaNet(
            qkv, z, b, a,
            address(convolution, "weight", dtype), address(layer, "A_log", dtype), address(layer, "dt_bias", dtype),
            address(norm, "weight", dtype), inputs.data_ptr(), state.data_ptr(), inputs.stride(0), state.stride(0),
            key_heads, value_heads, key_dim, value_dim, kernel, interleaved,
        ), output  # fmt: skip

    def _require_known_experts(self, experts: Any) -> None:
        """Check that transformers' own code computes a layer's experts, and that C++ can read their memory layout."""
        checks = self._checks
        flags = ("is_transposed", "has_bias", "_is_expert_parallel")
        wrong = [name for name in flags if getattr(experts, name, False)]
        require(not wrong, f"the experts of a layer have {', '.join(wrong)}")
        require(
            experts.has_gate and experts.is_concatenated, "the experts of a layer have no gate, or an interleaved one"
        )
        checks.function(moe, "_default_apply_gate")
        require(type(experts)._apply_gate is moe._default_apply_gate, "the gate of experts was replaced")
        way = getattr(experts.config, "_experts_implementation", None)
        if way in ("grouped_mm", "batched_mm"):
            checks.function(moe, f"{way}_experts_forward")
            known = getattr(moe, f"{way}_experts_forward")
            require(moe.ALL_EXPERTS_FUNCTIONS.get(way) is known, f"the experts' {way} was replaced")
        else:
            require(way in (None, "eager"), f"its experts run by {way}")


def base_of(module: Any) -> Any:
    """Return the projection inside a LoRA layer, or the module itself."""
    return module.base_layer if is_of(module, "Linear", PEFT_LORA) else module


def active_adapters(module: Any) -> list[str]:
    """Return the names of the active adapters of a LoRA layer."""
    return [] if module.disable_adapters else [name for name in module.active_adapters if name in module.lora_A]


def is_conv(module: Any) -> bool:
    """Return whether a projection is GPT-2's Conv1D, whose weight is transposed."""
    return type(module) is pytorch_utils.Conv1D


PART = 64
"""The number of positions per call of the rotary embedding, small enough that torch computes them on one thread."""


class _Tables(NamedTuple):
    frequencies: Tensor
    """A copy of the frequencies from which the tables were computed."""
    key: tuple[float, torch.dtype]
    """The scaling factor and the requested dtype that the tables were computed with."""
    cosines: Tensor
    sines: Tensor


_kept: WeakKeyDictionary[nn.Module, dict[str | None, _Tables]] = WeakKeyDictionary()


def rotary_tables(rotary: Any, dtype: torch.dtype, length: int, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine tables of at least the first max(`length`, 1) positions, contiguous, on the CPU.

    A table has one row per position and one column per rotated element of a head.

    Args:
        rotary: the module that computes the rotary embedding.
        dtype: dtype of the hidden states, and of the tables unless the module keeps them in float32.
        layer_type: type of the layers that use the tables. If None, all layers use the same tables.
    """
    prefix = "" if layer_type is None else f"{layer_type}_"
    frequencies, scaling = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")
    of_types = _kept.setdefault(rotary, {})
    kept = of_types.get(layer_type)
    cosines, sines, start = [], [], 0
    if kept is not None and kept.key == (scaling, dtype) and torch.equal(kept.frequencies, frequencies):
        cosines, sines, start = [kept.cosines], [kept.sines], len(kept.cosines)
        if start >= length:
            return kept.cosines, kept.sines
    types = () if layer_type is None else (layer_type,)
    with torch.inference_mode(False), torch.no_grad():
        like = torch.empty(1, 1, 1, dtype=dtype, device="cpu")
        for first in range(start, max(length, 1), PART):
            part = rotary(like, torch.arange(first, first + PART, device="cpu")[None], *types)
            cosines.append(part[0][0])
            sines.append(part[1][0])
        whole = torch.cat(cosines), torch.cat(sines)
        of_types[layer_type] = _Tables(frequencies.clone(), (scaling, dtype), *whole)
    return whole
