"""C++ forward of a Llama-like decoder on a CPU, over the module's own parameters.

Served models: those whose layers are exactly known classes of transformers (`_FAMILIES`), without hooks, replaced
forwards, active adapters or quantised layers, of one dtype, and with all functions as transformers defines them. Disabled
LoRA layers of PEFT are looked through, and so is FSDP2 while the weights are whole. Everything is checked again whenever
the trainer may have modified the module, and functions, hooks and numbers before every step; a model that fails a check
runs its own forward. Parameters are never copied or packed: a weight update is seen by the next step.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle
from transformers import activations

from rollout.engine.forward.model_support import ModelLayout, has_global_hooks
from rollout.engine.forward.originals import Originals, Replaced
from rollout.engine.forward.rotary_tables import rotary_tables
from rollout.engine.kernels.cpu_attention import MAX_GROUP
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.kv_cache import KVCache

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_log = logging.getLogger(__name__)


class _Layer(ctypes.Structure):
    """`Layer` in cpu_kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "input_norm", "post_norm", "query", "key", "value", "output", "gate", "up", "down",
            "query_bias", "key_bias", "value_bias", "output_bias", "query_norm", "key_norm", "keys", "values",
        )),
        *((name, ctypes.c_int64) for name in ("window", "group")),
    )  # fmt: skip


class _Model(ctypes.Structure):
    """`Model` in cpu_kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "norm", "head", "cosines", "sines")),
        *((name, ctypes.c_int64) for name in (
            "count", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocabulary",
        )),
        *((name, ctypes.c_float) for name in ("epsilon", "scaling")),
    )  # fmt: skip


class _Step(ctypes.Structure):
    """`Step` in cpu_kernels.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "ids", "positions", "slots", "offsets", "tables", "keep", "logits", "workspace",
        )),
        *((name, ctypes.c_int64) for name in ("count", "sequences", "width", "block_size", "kept", "threads")),
    )  # fmt: skip


class Unfusable(Exception):  # noqa: N818 - not an error: the module's own forward runs
    """The reason why a model runs its own forward."""


class BoundForward(ABC):
    """A forward over the module's own parameters that stands in for the module's while nothing differs from transformers'.

    Args:
        cache: holds K and V.
    """

    def __init__(self, model: nn.Module, layout: ModelLayout, cache: KVCache) -> None:
        self._model = model
        self._layout = layout
        self._cache = cache
        self._bound: Bound | None = None
        self._module_epoch = -1
        self._why = ""

    def ready(self, module_epoch: int) -> bool:
        """Whether the model, in its current state, can go through `run`.

        Args:
            module_epoch: changes whenever the trainer may have modified the module.
        """
        if module_epoch != self._module_epoch or (self._bound is not None and not self._bound.reads(self._cache)):
            self._module_epoch = module_epoch
            self._bind()
        return self._bound is not None and self._bypassed() is None

    @property
    def why_not(self) -> str:
        """Why the last `ready` was False."""
        return self._why or self._bypassed() or ""

    @abstractmethod
    def run(self, ids: NDArray[np.int64], rows: PagedRows, keep: NDArray[np.int64]) -> Tensor:
        """Logits [len(keep), V] at packed positions `keep`, valid until the next call; K and V go into the cache.

        Args:
            ids: [P] token ids.
            rows: the P positions.
        """

    @abstractmethod
    def release(self) -> None:
        """Release buffers that the next step allocates again."""

    def _bind(self) -> None:
        try:
            self._bound, why = Bound(self._model, self._layout, self._cache, self._kv_dtype()), ""
            self._take(self._bound)
        except (Unfusable, Replaced, AttributeError) as exc:
            self._bound, why = None, str(exc)
        if why and why != self._why:
            _log.info("%s runs its own forward: %s", type(self._model).__name__, why)
        self._why = why

    def _take(self, bound: Bound) -> None:  # noqa: B027 - most forwards read what is bound
        """Prepare for a module as it was found; raises `Unfusable` for what this forward does not compute."""

    def _bypassed(self) -> str | None:
        return bypassed(self._layout.device)

    def _kv_dtype(self) -> torch.dtype | None:
        """Dtype of keys and values; None: that of the parameters."""
        return None


class FusedForward(BoundForward):
    """The C++ forward of one model.

    Args:
        library: see `cpu_library.load`.
        cache: holds K and V.
    """

    def __init__(self, model: nn.Module, layout: ModelLayout, cache: KVCache, library: ctypes.CDLL) -> None:
        super().__init__(model, layout, cache)
        self._library = library
        library.rollout_workspace_bytes.restype = ctypes.c_int64
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._logits = torch.empty(0, device="cpu")

    def run(self, ids: NDArray[np.int64], rows: PagedRows, keep: NDArray[np.int64]) -> Tensor:
        """Logits [len(keep), V]; see `BoundForward`."""
        bound = self._bound
        assert bound is not None
        bound.reach(int(rows.positions.max()) + 1)
        threads, kept = torch.get_num_threads(), len(keep)
        need = self._library.rollout_workspace_bytes(
            ctypes.byref(bound.model),
            ctypes.c_int64(len(ids)),
            ctypes.c_int64(kept),
            bound.narrow,
        )
        if self._workspace.numel() < need:
            self._workspace = torch.empty(need, dtype=torch.uint8, device="cpu")
        if self._logits.numel() < kept * bound.model.vocabulary or self._logits.dtype != bound.dtype:
            self._logits = torch.empty(kept * bound.model.vocabulary, dtype=bound.dtype, device="cpu")
        slots, tables = rows.slots, rows.tables
        if rows.others:
            groups = rows.groups()
            slots, tables = np.stack([each.slots for each in groups]), np.stack([each.tables for each in groups])
        step = _Step(
            ids.ctypes.data, rows.positions.ctypes.data, slots.ctypes.data, rows.offsets.ctypes.data,
            tables.ctypes.data, keep.ctypes.data, self._logits.data_ptr(), self._workspace.data_ptr(),
            len(ids), len(rows), rows.tables.shape[1], rows.block_size, kept, threads,
        )  # fmt: skip
        self._library.rollout_forward(ctypes.byref(bound.model), ctypes.byref(step), bound.narrow)
        return self._logits[: kept * bound.model.vocabulary].view(kept, bound.model.vocabulary)

    def release(self) -> None:
        """Release buffers that the next step allocates again."""
        self._workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._logits = torch.empty(0, device="cpu")


class Bound:
    """A module as a fused forward knows it, with the addresses of everything that the C++ one reads.

    Attributes:
        causal_lm: the …ForCausalLM, out of PEFT's wrappers.
        dtype: of its parameters.

    Args:
        kv_dtype: of keys and values; None: that of the parameters.

    Raises:
        Unfusable, Replaced, AttributeError: why the C++ forward does not compute what this model does.
    """

    def __init__(self, model: Any, layout: ModelLayout, cache: KVCache, kv_dtype: torch.dtype | None = None) -> None:
        self._epsilons: set[float] = set()
        self._originals = Originals()
        self._dicts: list[dict[str, Any]] = []
        self._hooks_ever = RemovableHandle.next_id
        for name in ("linear", "silu", "embedding"):
            self._originals.function(nn.functional, name)
        self.causal_lm: Any = self._without_lora(model)
        model = self.causal_lm
        family = next((name for name in _FAMILIES if _is(model, f"{name}ForCausalLM")), None)
        if family is None:
            raise Unfusable(
                f"{type(model).__name__} is none of {', '.join(f'{each}ForCausalLM' for each in _FAMILIES)}"
            )
        self._plain(model, "lm_head", "model")
        decoder = model.model
        _require(_is(decoder, f"{family}Model"), "its decoder is of another class")
        self._plain(decoder, "embed_tokens", "layers", "norm", "rotary_emb")
        _require(type(decoder.layers) is nn.ModuleList, "its layers are no plain list")
        _require(type(decoder.embed_tokens) is nn.Embedding, "its embedding is no nn.Embedding")
        self._plain(decoder.embed_tokens)
        _require(decoder.embed_tokens.max_norm is None, "its embedding has a max_norm")
        self._plain(decoder.rotary_emb)
        self._rotary = decoder.rotary_emb
        self._rotation = self._rotation_now()
        self.dtype = decoder.embed_tokens.weight.dtype
        _require(self.dtype in (torch.float32, torch.bfloat16), f"its dtype is {self.dtype}")
        _require(layout.kv_dtype == cache.dtype == (kv_dtype or self.dtype), "its KV cache has another dtype")
        self.narrow = int(self.dtype == torch.bfloat16)
        _require_known_attention(model.config, layout)
        _require(
            self._originals.value(model.config, "num_hidden_layers") == len(decoder.layers),
            "its configuration leaves out some of its layers",
        )
        self._scaling = self._originals.value(decoder.layers[0].self_attn, "scaling")
        embedding = self._address(decoder.embed_tokens)
        self._pool = cache.layer(0)[0].data_ptr()
        self._layers = (_Layer * len(decoder.layers))()
        widths = {
            self._fill(out, layer, family, layout, cache)
            for out, layer in zip(self._layers, decoder.layers, strict=True)
        }
        _require(len(widths) == 1, "its layers differ in shape")
        self._tables = torch.empty(0, 0, device="cpu"), torch.empty(0, 0, device="cpu")
        norm, (head, _) = self._norm(decoder.norm, family), self._linear(model.lm_head, bias=False)
        self._attributes = sum(map(len, self._dicts))
        self.model = _Model(
            ctypes.addressof(self._layers), embedding, norm, head,
            None, None, len(decoder.layers), model.config.hidden_size, widths.pop(),
            layout.calls[0].num_heads, layout.layers[0].num_kv_heads, layout.layers[0].head_dim,
            model.lm_head.weight.shape[0], self._epsilons.pop(), self._scaling,
        )  # fmt: skip

    def reads(self, cache: KVCache) -> bool:
        """Whether the KV pool is unmoved and a quick check finds no change of the model."""
        return (
            cache.layer(0)[0].data_ptr() == self._pool
            and RemovableHandle.next_id == self._hooks_ever
            and self._originals.intact()
            and sum(map(len, self._dicts)) == self._attributes
            and self._rotation_now() == self._rotation
        )

    def _rotation_now(self) -> tuple[int, int, float]:
        frequencies = self._rotary.inv_freq
        return frequencies.data_ptr(), frequencies._version, self._rotary.attention_scaling

    def reach(self, length: int) -> None:
        """Extend the cosine and sine tables to `length` positions, by the module's own rotary embedding."""
        if self._tables[0].shape[0] < length:
            self._tables = rotary_tables(self._rotary, self.dtype, max(length, min(4096, 2 * length)))
            self.model.cosines, self.model.sines = (table.data_ptr() for table in self._tables)

    def _fill(self, out: _Layer, layer: Any, family: str, layout: ModelLayout, cache: KVCache) -> int:
        """Write the addresses of one decoder layer into `out`; returns the width of its MLP."""
        _require(_is(layer, f"{family}DecoderLayer"), "a layer is of another class")
        self._plain(layer, "self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
        attention, mlp = layer.self_attn, layer.mlp
        _require(
            _is(attention, f"{family}Attention") and _is(mlp, f"{family}MLP"), "a layer's parts are of other classes"
        )
        norms = ("q_norm", "k_norm") if family == "Qwen3" else ()
        self._plain(attention, "q_proj", "k_proj", "v_proj", "o_proj", *norms)
        self._plain(mlp, "gate_proj", "up_proj", "down_proj", "act_fn")
        _require(
            type(mlp.act_fn) in (nn.SiLU, activations.SiLUActivation), f"its activation is {type(mlp.act_fn).__name__}"
        )
        self._plain(mlp.act_fn)
        out.input_norm = self._norm(layer.input_layernorm, family)
        out.post_norm = self._norm(layer.post_attention_layernorm, family)
        for name, short in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            weight, bias = self._linear(getattr(attention, f"{short}_proj"))
            setattr(out, name, weight)
            setattr(out, f"{name}_bias", bias)
        for name in ("gate", "up", "down"):
            setattr(out, name, self._linear(getattr(mlp, f"{name}_proj"), bias=False)[0])
        if norms:
            out.query_norm, out.key_norm = self._norm(attention.q_norm, family), self._norm(attention.k_norm, family)
        index = layout.layer_of.get(attention)
        if index is None:
            raise Unfusable("an attention layer was replaced after the engine was built")
        self._require_numbers(attention, family, layout, index)
        keys, values = cache.layer(index)
        out.keys, out.values = keys.data_ptr(), values.data_ptr()
        out.window, out.group = layout.calls[index].window or 0, cache.group_of(index)
        return int(mlp.gate_proj.weight.shape[0])

    def _require_numbers(self, attention: Any, family: str, layout: ModelLayout, index: int) -> None:
        """Check that a layer's scaling, head size and window equal those of the layout."""
        read = self._originals.value
        _require(read(attention, "scaling") == self._scaling, "its attention layers scale their scores differently")
        _require(read(attention, "head_dim") == layout.layers[index].head_dim, "the head size of a layer was changed")
        # The object from which a layer of this family reads its window.
        place = {"Llama": None, "Mistral": attention.config}.get(family, attention)
        window = None if place is None else read(place, "sliding_window")
        _require(window == layout.calls[index].window, "the window of a layer was changed")

    def _norm(self, module: Any, family: str) -> int:
        _require(_is(module, f"{family}RMSNorm"), "a norm is of another class")
        self._plain(module)
        self._epsilons.add(self._originals.value(module, "variance_epsilon"))
        _require(len(self._epsilons) == 1, "its norms have several epsilons")
        return self._address(module)

    def _linear(self, module: Any, *, bias: bool = True) -> tuple[int, int | None]:
        if _is(module, "Linear", "peft.tuners.lora."):
            _require(module.disable_adapters and not module.merged, "LoRA acts in a projection")
            self._unhooked(module)
            module = module.base_layer
        _require(type(module) is nn.Linear, f"a projection is {type(module).__name__}, not nn.Linear")
        self._plain(module)
        _require(bias or module.bias is None, "a projection has a bias where none is known")
        return self._address(module), None if module.bias is None else self._address(module, "bias")

    def _address(self, module: nn.Module, name: str = "weight") -> int:
        parameter = module._parameters.get(name)
        if type(parameter) is not nn.Parameter or parameter.dtype != self.dtype or not parameter.is_contiguous():
            raise Unfusable(f"a parameter is not a contiguous {self.dtype} nn.Parameter")
        return parameter.data_ptr()

    def _without_lora(self, model: Any) -> Any:
        """The model inside PEFT's LoRA wrappers, which only forward calls."""
        if not (_is(model, "PeftModel", "peft.") or _is(model, "PeftModelForCausalLM", "peft.")):
            return model
        self._plain(model, "base_model")
        _require(_is(model.base_model, "LoraModel", "peft.tuners.lora."), "its adapters are not LoRA")
        self._plain(model.base_model, "model")
        return model.base_model.model

    def _plain(self, module: nn.Module, *children: str) -> None:
        """Refuse a module with hooks, a replaced forward or unexpected children."""
        self._unhooked(module)
        name = type(module).__name__
        _require(set(module._modules) == set(children), f"{name} has other parts than {', '.join(children) or 'none'}")

    def _unhooked(self, module: nn.Module) -> None:
        name = type(module).__name__
        _require(
            "forward" not in module.__dict__ and "__call__" not in module.__dict__,
            f"the forward of {name} was replaced",
        )
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            _require(_only_gathers(hook) or _only_marks(hook), f"{name} has forward hooks")
        _require(not is_parametrized(module), f"{name} is parametrised")
        self._originals.methods(_kind(module), "forward", "__call__")
        self._dicts.append(module.__dict__)


def _require_known_attention(config: Any, layout: ModelLayout) -> None:
    """Refuse attention variants that the C++ forward does not compute."""
    rope = getattr(config, "rope_parameters", None) or {}
    _require(
        rope.get("rope_type", "default") not in ("dynamic", "longrope"), "its rotary embedding changes with the length"
    )
    shape, call = layout.layers[0], layout.calls[0]
    _require(all(each == shape for each in layout.layers), "its layers differ in shape")
    _require(shape.value_dim == shape.head_dim and shape.head_dim % 2 == 0, f"its head size is {shape.head_dim}")
    _require(
        all(
            (c.num_heads, c.scaling, c.softcap, c.chunk, c.sinks) == (call.num_heads, call.scaling, None, None, False)
            for c in layout.calls
        ),
        "its attention layers differ, cap their scores, or have chunks or sinks",
    )
    _require(call.num_heads <= MAX_GROUP * shape.num_kv_heads, f"more than {MAX_GROUP} query heads share a KV head")


def _kind(module: Any) -> type:
    # FSDP2 derives its own class from the wrapped one.
    kind = type(module)
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)]


def _is(module: Any, name: str, package: str = "transformers.models.") -> bool:
    kind = _kind(module)
    return kind.__name__ == name and kind.__module__.startswith(package)


def _only_gathers(hook: Any) -> bool:
    """Whether a hook is FSDP2's, which has nothing to do while the weights are whole."""
    owner = getattr(hook, "__self__", None)
    ours = type(owner).__module__.startswith("torch.distributed.fsdp.") and type(owner).__name__ == "FSDPState"
    return ours and owner._mp_policy.output_dtype is None  # type: ignore[union-attr]


def _only_marks(hook: Any) -> bool:
    """Whether a hook is the one of `gradient_checkpointing_enable`, which sets `requires_grad` of the embedding's output."""
    home, name = str(getattr(hook, "__module__", "")), getattr(hook, "__name__", "")
    return home.startswith(("transformers.", "peft.")) and name in (
        "make_inputs_require_grads",
        "make_inputs_require_grad",
    )


def _require(ok: bool, why: str) -> None:
    if not ok:
        raise Unfusable(why)


def bypassed(device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """What acts on every module on `device` now and a fused forward would bypass; None: nothing.

    Args:
        dtype: of an autocast that the forward follows; None: it follows none.
    """
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != dtype:
        return "autocast is on"
    if has_global_hooks():
        return "torch has hooks on every module"
    return "a torch dispatch or function mode is active" if _torch_mode_active() else None


def _torch_mode_active() -> bool:
    """Whether a torch dispatch or function mode is active (device contexts excepted), which the C++ forward would bypass."""
    return bool(torch._C._len_torch_dispatch_stack()) or any(
        type(torch._C._get_function_stack_at(index)) is not DeviceContext
        for index in range(torch._C._len_torch_function_stack())
    )
