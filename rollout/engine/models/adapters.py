"""Reads LoRA adapters from folders, and applies them to the sequences whose requests select them by name.

    y = W x + s · B (A x),   s = alpha / r, or alpha / √r with rsLoRA        (Hu et al. 2021, arXiv:2106.09685)

A step runs up to two forward passes. The first computes the sequences without an adapter, exactly as if no adapter were
loaded; the second computes all others. The `forward` of the adapted layers is replaced only during the second pass.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import upload
from rollout.errors import ConfigError, InvalidRequestError, UnsupportedModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

MAX_RANK = 512
"""The maximum rank of an adapter."""

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""The values of `init_lora_weights` that leave the base weights unchanged."""
_OTHER_KINDS = (
    "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "modules_to_save", "target_parameters",
    "trainable_token_indices", "layer_replication", "alora_invocation_tokens", "arrow_config", "use_bdlora", "kasa_config",
    "monteclora_config",
)  # fmt: skip
"""The options of PEFT's `LoraConfig` that change the computation and are not supported."""


@dataclass(frozen=True, eq=False)
class LoraLayer:
    """The low-rank update of one linear layer: `scaling` · `up` (`down` x)."""

    down: Tensor
    """The factor A of the update, [r, in]."""
    up: Tensor
    """The factor B of the update, [out, r]."""
    scaling: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return the update [..., out] for inputs x [..., in], computed in the dtype of the factors, as in PEFT."""
        down, up = self.down.to(x.device), self.up.to(x.device)
        return linear(linear(x.to(down.dtype), down), up) * self.scaling


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """A LoRA adapter: its folder, and its updates indexed by the name of the linear layer that they change."""

    folder: str
    layers: dict[str, LoraLayer]


def read_adapter(model: nn.Module, folder: str | PathLike[str]) -> LoraAdapter:
    """Read an adapter that PEFT's `save_pretrained` has written, and check that it fits a model.

    Tensors keep their dtype, in which PEFT also computes, and are copied to the device of the layer that they change.

    Raises:
        ConfigError: a file is missing or malformed, the adapter is not plain LoRA, or an update does not match the name and
            shape of a linear layer in the model.
    """
    try:
        config = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(Path(folder) / WEIGHTS)
        _check_kind(config)
        modules: dict[str, Any] = dict(model.named_modules())
        embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)
        head = embeddings()
        pairs: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            found = _TENSOR.fullmatch(name)
            if found is None:
                raise ConfigError(f"{name!r} is not a lora_A or lora_B of a linear layer; train such layers alone")
            pairs.setdefault(found["module"], {})[found["part"]] = tensor
        if not pairs:
            raise ConfigError(f"{WEIGHTS} is empty")
        for name, pair in pairs.items():
            _check_layer(name, modules.get(name), head, pair)
    except OSError as exc:
        raise ConfigError(f"adapter {str(folder)!r}: must be a folder with {CONFIG} and {WEIGHTS}: {exc}") from exc
    except ConfigError as exc:
        raise ConfigError(f"adapter {str(folder)!r}: {exc}") from exc
    except (SafetensorError, ValueError) as exc:
        raise ConfigError(f"adapter {str(folder)!r}: {CONFIG} or {WEIGHTS} is malformed: {exc}") from exc
    return LoraAdapter(
        str(folder), {name: _layer(config, name, pair, modules[name].weight) for name, pair in pairs.items()}
    )


def _check_kind(config: Any) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ConfigError(f"{CONFIG}: must be an object with peft_type='LORA'")
    named = {name: config[name] for name in _OTHER_KINDS if config.get(name)}
    if config.get("bias", "none") != "none":
        named["bias"] = config["bias"]
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        # Reject this initialisation, which has changed the base weights. PEFT's `save_pretrained` can convert the adapter,
        # with the argument `path_initial_model_for_weight_conversion`.
        named["init_lora_weights"] = config["init_lora_weights"]
    if named:
        shown = ", ".join(f"{name}={value!r}" for name, value in named.items())
        raise ConfigError(f"{shown}: only plain LoRA is served; merge the adapter and load the weights instead")
    for name in ("lora_alpha", "r"):
        if not isinstance(config.get(name), int | float) or config[name] <= 0:
            raise ConfigError(f"{name}={config.get(name)!r}: must be a number above 0")


def _check_layer(name: str, module: nn.Module | None, head: nn.Module | None, pair: dict[str, Tensor]) -> None:
    if not isinstance(module, nn.Linear) or module is head:
        kind = "there is no such module" if module is None else f"it is {type(module).__name__}"
        kind = "it is the output layer" if module is not None and module is head else kind
        raise ConfigError(f"{name!r}: must be a linear layer inside this model's decoder: {kind}")
    if set(pair) != {"A", "B"}:
        raise ConfigError(f"{name!r}: lora_{'B' if 'A' in pair else 'A'} is missing")
    down, up = pair["A"], pair["B"]
    rank = down.shape[0] if down.ndim == 2 else 0
    if list(down.shape) != [rank, module.in_features] or list(up.shape) != [module.out_features, rank]:
        raise ConfigError(
            f"{name!r}: lora_A {list(down.shape)} and lora_B {list(up.shape)} do not fit a layer of "
            f"{module.in_features} inputs and {module.out_features} outputs"
        )
    if not 1 <= rank <= MAX_RANK or not (down.is_floating_point() and up.is_floating_point()):
        raise ConfigError(f"{name!r}: rank {rank} of {down.dtype}: must be of floats, of rank 1 to {MAX_RANK}")


def _layer(config: dict[str, Any], name: str, pair: dict[str, Tensor], weight: Tensor) -> LoraLayer:
    rank = pair["A"].shape[0]
    alpha = next(
        (value for key, value in (config.get("alpha_pattern") or {}).items() if re.match(rf"(.*\.)?({key})$", name)),
        config["lora_alpha"],
    )
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraLayer(pair["A"].to(weight.device), pair["B"].to(weight.device), scaling)


MAX_ADAPTERS = 64
"""The maximum number of loaded adapters."""

IntArray = NDArray[np.int64]
Names = Sequence[str | None]
"""The adapter name of each sequence of a step, or None for a sequence without an adapter."""
Forward = Callable[[IntArray, PagedRows, IntArray], Tensor]
"""A function of (ids, rows, keep), as in `ModelRunner.forward`, that returns logits [len(keep), vocabulary size]."""
_Part = tuple[LoraLayer, Tensor | None]
"""A low-rank update, and the indices of the positions that it applies to (None for all positions)."""


class LoraAdapters:
    """The adapters loaded for one model, and the adapter of each row of the sequence table."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._loaded: dict[str, LoraAdapter] = {}
        self._of_row: dict[int, str] = {}

    @property
    def folders(self) -> dict[str, str]:
        """The folder of each loaded adapter, by name."""
        return {name: adapter.folder for name, adapter in self._loaded.items()}

    def load(self, name: str, folder: str | PathLike[str]) -> None:
        """Load an adapter, replacing any adapter of the same name.

        Raises:
            ConfigError: the adapter does not fit the model, or `MAX_ADAPTERS` are loaded; nothing was changed.
        """
        if name not in self._loaded and len(self._loaded) >= MAX_ADAPTERS:
            raise ConfigError(f"adapter {name!r}: {MAX_ADAPTERS} adapters are loaded, the maximum; unload one")
        self._loaded[name] = read_adapter(self._model, folder)

    def unload(self, name: str) -> None:
        """Remove the adapter `name`, which no sequence may use any more. Do nothing if it is not loaded."""
        self._loaded.pop(name, None)

    def num_layers(self, name: str) -> int:
        """Return the number of linear layers that a loaded adapter changes."""
        return len(self._loaded[name].layers)

    def check(self, name: str | None) -> None:
        """Raise `InvalidRequestError` if no adapter of this name is loaded. A `name` of None is always valid."""
        if name is not None and name not in self._loaded:
            there = ", ".join(map(repr, self._loaded)) or "none"
            raise InvalidRequestError(
                f"adapter {name!r} is not loaded (loaded: {there}); load it by load_lora_adapter()"
            )

    def set(self, row: int, name: str | None) -> None:
        """Set the adapter of a row of the sequence table. A `name` of None removes the row's adapter."""
        if name is not None:
            self._of_row[row] = name
        elif self._of_row:
            self._of_row.pop(row, None)

    def of(self, rows: NDArray[np.int32]) -> Names | None:
        """Return the adapter name of each of the given rows, or None if none of the rows has an adapter."""
        if not self._of_row:
            return None
        named = [self._of_row.get(row) for row in rows.tolist()]
        return named if any(named) else None

    def run(
        self, ids: IntArray, rows: PagedRows, keep: IntArray, named: Names, plain: Forward, adapted: Forward
    ) -> Tensor:
        """Compute the logits of sequences with and without adapters.

        Args:
            ids: packed token ids of the sequences in `rows`, [P].
            keep: indices of the packed positions to compute logits for, ascending.
            named: adapter name of each sequence.
            plain: forward pass for the sequences without an adapter.
            adapted: the model's own forward pass for the other sequences, from ids [1, P] to logits [1, len(keep), V].

        Returns:
            The logits [len(keep), V], where V is the vocabulary size.
        """
        parts: list[Tensor] = []
        places: list[IntArray] = []
        for acts in (False, True):
            entries = np.flatnonzero([(name is not None) is acts for name in named])
            if not len(entries):
                continue
            chosen, positions = rows.select(entries)
            place = np.flatnonzero(np.isin(keep, positions))
            at = np.searchsorted(positions, keep[place])
            if acts:
                with self._acting(np.repeat([str(named[entry]) for entry in entries.tolist()], chosen.counts)):
                    logits = adapted(ids[None, positions], chosen, at)[0]
            else:
                logits = plain(ids[positions], chosen, at)
            parts.append(logits[: len(at)])
            places.append(place)
        order = np.argsort(np.concatenate(places), kind="stable")
        return torch.cat(parts).index_select(0, upload(order, parts[0].device))

    @contextmanager
    def _acting(self, named: NDArray[np.str_]) -> Iterator[None]:
        """Apply each packed position's adapter in forward passes inside the `with` block.

        Args:
            named: name of each position's adapter, [P].
        """
        parts: dict[str, list[_Part]] = {}
        device = next(self._model.parameters()).device
        names = np.unique(named).tolist()
        for name in names:
            index = None if len(names) == 1 else upload(np.flatnonzero(named == name), device)
            for path, layer in self._loaded[name].layers.items():
                parts.setdefault(path, []).append((layer, index))
        with ExitStack() as stack:
            for path, updates in parts.items():
                module = self._model.get_submodule(path)
                own: dict[str, Any] = vars(module)
                # Save the module's current forward: PEFT or accelerate may have replaced it.
                before = {name: own[name] for name in ("forward",) if name in own}
                own["forward"] = partial(_updated, module.forward, path, updates, len(named))
                stack.callback(own.update, before)
                stack.callback(own.pop, "forward")
            yield


def _updated(forward: Callable[[Tensor], Tensor], path: str, updates: list[_Part], positions: int, x: Tensor) -> Tensor:
    """Return a linear layer's output for `x`, with each low-rank update added at the positions that it applies to."""
    base = forward(x)
    inputs, outputs = x.flatten(0, -2), base.flatten(0, -2)
    for layer, index in updates:
        if index is None:
            return (base + layer(x)).to(base.dtype)
        if len(inputs) != positions:
            raise UnsupportedModelError(
                f"{path} computes {len(inputs)} of {positions} positions, so it cannot apply several adapters at once: "
                "use one adapter at a time, or train it without this layer"
            )
        mixed = outputs.index_select(0, index) + layer(inputs.index_select(0, index))
        outputs = outputs.index_copy(0, index, mixed.to(base.dtype))
    return outputs.view_as(base)
