"""Parts of decoder layers for the fused forward: each is verified, and its addresses and numbers are read."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import activations, pytorch_utils
from transformers.integrations import moe

from rollout.engine.fused.families import Family
from rollout.engine.fused.fused_checks import PEFT_LORA, Checks, address, is_of, require
from rollout.engine.kernels.cpu_forward import Activation, Adapter, Experts, Linear, Norm, NormKind


class Parts:
    """Reads the parts of one model.

    Args:
        dtype: of all parameters but adapters.
        exact: refuse live adapters.

    Attributes:
        dtype: as given.
        epsilons, activations: of all norms and MLPs that were read.
        ranks: of all adapters, and 0.

    Every method raises `Unfusable`, `Replaced` or `AttributeError` for a part that the C++ forward does not compute.
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
        """A norm, whose epsilon is among `epsilons`."""
        kind = self._family.norm
        known = (
            type(module) is nn.LayerNorm
            if kind is NormKind.LAYER_NORM
            else is_of(module, f"{self._family.name}RMSNorm")
        )
        require(known, "a norm is of another class")
        self._checks.plain(module)
        if kind is NormKind.RMS_OF_ONE_PLUS_WEIGHT:
            self._checks.originals.methods(type(module), "_norm")
        older = kind in (NormKind.RMS, NormKind.RMS_ROUNDED_ONCE)
        self.epsilons.add(self._checks.originals.value(module, "variance_epsilon" if older else "eps"))
        weight = address(module, "weight", self.dtype)
        biased = kind is NormKind.LAYER_NORM and module.bias is not None
        return Norm(weight, address(module, "bias", self.dtype) if biased else None)

    def activation(self, module: Any) -> None:
        """Add an activation to `activations`."""
        self._checks.plain(module)
        if type(module) in (nn.SiLU, activations.SiLUActivation):
            self.activations.add(Activation.SILU)
            return
        if type(module) is activations.GELUTanh:
            function = self._checks.originals.value(module, "act")
            plain = isinstance(function, partial) and function.func is nn.functional.gelu and not function.args
            require(plain and function.keywords == {"approximate": "tanh"}, "its GELU is not torch's")
        else:
            require(type(module) is activations.NewGELUActivation, f"its activation is {type(module).__name__}")
        self.activations.add(Activation.GELU_TANH)

    def dropouts(self, module: Any, names: tuple[str, ...]) -> None:
        """Dropouts among the children of a module, which do nothing in a rollout."""
        for name in names:
            dropout = getattr(module, name)
            require(type(dropout) is nn.Dropout, f"{name} is {type(dropout).__name__}")
            self._checks.plain(dropout)

    def linears(self, parent: Any, names: tuple[str, ...], sizes: list[int]) -> list[Linear]:
        """Projections with `sizes` columns, from a module each or from one in which they are packed."""
        if len(names) == 1:
            return self.linear(getattr(parent, names[0]), *sizes)
        return [self.linear(getattr(parent, name), size)[0] for name, size in zip(names, sizes, strict=True)]

    def linear(self, module: Any, *sizes: int, lora: bool = True) -> list[Linear]:
        """The projections packed in a module, of `sizes` columns; without sizes one of all columns."""
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
        """The active adapter of a LoRA layer; all zeros: it has none."""
        originals = self._checks.originals
        self._checks.unhooked(module)
        for name in ("_disable_adapters", "_active_adapter"):
            originals.value(module, name)
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
        require(type(down) is type(up) is nn.Linear and down.bias is None is up.bias, "an adapter is no plain LoRA")
        dtype = down.weight.dtype
        require(dtype in (torch.float32, self.dtype), f"an adapter's dtype is {dtype}")
        self.ranks.append(down.weight.shape[0])
        return Adapter(
            address(down, "weight", dtype), address(up, "weight", dtype), down.weight.shape[0],
            originals.item(module.scaling, name), bool(self.dtype == torch.bfloat16 and dtype == torch.float32),
        )  # fmt: skip

    def experts(self, block: Any) -> Experts:
        """A mixture's router and experts."""
        family, read = self._family, self._checks.originals.value
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
        count, chosen = read(router, "num_experts"), read(router, "top_k")
        require(
            read(experts, "num_experts") == count == len(experts.down_proj), "a layer leaves out some of its experts"
        )
        # Routers without this option always normalise.
        normalised = not hasattr(router, "norm_topk_prob") or read(router, "norm_topk_prob")
        return Experts(
            address(router, "weight", self.dtype), address(experts, "gate_up_proj", self.dtype),
            address(experts, "down_proj", self.dtype), count, chosen, experts.down_proj.shape[2],
            bool(normalised), family.shares_wide,
        )  # fmt: skip

    def _require_known_experts(self, experts: Any) -> None:
        """Check that transformers' own functions compute a layer's experts, in the layout that the C++ forward reads."""
        originals = self._checks.originals
        layout = {name: originals.value(experts, name) for name in ("is_transposed", "has_bias", "_is_expert_parallel")}
        wrong = [name for name, value in layout.items() if value]
        require(not wrong, f"the experts of a layer have {', '.join(wrong)}")
        require(
            experts.has_gate and experts.is_concatenated, "the experts of a layer have no gate, or an interleaved one"
        )
        originals.function(moe, "_default_apply_gate")
        require(
            originals.value(type(experts), "_apply_gate") is moe._default_apply_gate, "the gate of experts was replaced"
        )
        way = originals.value(experts.config, "_experts_implementation")
        if way in ("grouped_mm", "batched_mm"):
            originals.function(moe, f"{way}_experts_forward")
            known = getattr(moe, f"{way}_experts_forward")
            require(originals.item(moe.ALL_EXPERTS_FUNCTIONS, way) is known, f"the experts' {way} was replaced")
        else:
            require(way in (None, "eager"), f"its experts run by {way}")


def base_of(module: Any) -> Any:
    """The projection inside a LoRA layer, or the module itself."""
    return module.base_layer if is_of(module, "Linear", PEFT_LORA) else module


def active_adapters(module: Any) -> list[str]:
    """Names of the adapters that act in a LoRA layer."""
    return [] if module.disable_adapters else [name for name in module.active_adapters if name in module.lora_A]


def is_conv(module: Any) -> bool:
    """Whether a projection is GPT-2's Conv1D, whose weight is transposed."""
    return type(module) is pytorch_utils.Conv1D
