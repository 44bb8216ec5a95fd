"""Reads a LoRA adapter from a folder, as PEFT's `save_pretrained` leaves it, for the linear layers of a model.

y = W x + s · B (A x),   s = alpha / r, or alpha / √r with rsLoRA        (Hu et al. 2021, arXiv:2106.09685)
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rollout.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

MAX_RANK = 512
"""Largest rank of an adapter."""

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are."""
_REFUSED = {
    "use_dora": "DoRA changes the norm of every weight",
    "use_qalora": "QALoRA pools the inputs",
    "lora_bias": "it has biases",
    "fan_in_fan_out": "its matrices are transposed",
    "modules_to_save": "whole modules were trained beside it",
    "target_parameters": "it acts on parameters that are no linear layers",
    "trainable_token_indices": "embeddings were trained beside it",
    "layer_replication": "it repeats layers",
    "alora_invocation_tokens": "it acts from certain tokens on only",
    "arrow_config": "it routes among adapters",
    "use_bdlora": "its matrices are block diagonal",
    "kasa_config": "it changes the base weights",
    "monteclora_config": "its weights are drawn",
}
"""Options of PEFT's `LoraConfig` that mean another computation, and why."""


@dataclass(frozen=True, eq=False)
class LoraLayer:
    """The low-rank update of one linear layer."""

    down: Tensor
    """A, [r, in]."""
    up: Tensor
    """B, [out, r]."""
    scaling: float


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """A LoRA adapter: updates by the names of the modules they belong to."""

    folder: str
    layers: dict[str, LoraLayer]


def read_adapter(model: nn.Module, folder: str | PathLike[str]) -> LoraAdapter:
    """Read an adapter and check it against a model, which stays as it is.

    Tensors keep their dtype, in which PEFT computes too, and go to the device of their layer.

    Raises:
        ConfigError: a file is missing or malformed; the adapter is no plain LoRA; or a layer is not there, not linear or of
            another shape.
    """
    where = f"adapter {str(folder)!r}"
    config = _config(Path(folder), where)
    _refuse_other_kinds(config, where)
    modules: dict[str, Any] = dict(model.named_modules())
    embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = embeddings()
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _tensors(Path(folder), where).items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise ConfigError(f"{where}: {name!r} is no lora_A or lora_B of a linear layer; train such layers alone")
        pairs.setdefault(found["module"], {})[found["part"]] = tensor
    if not pairs:
        raise ConfigError(f"{where}: {WEIGHTS} is empty")
    for name, pair in pairs.items():
        _check_layer(modules.get(name), head, pair, f"{where}: {name!r}")
    return LoraAdapter(
        str(folder), {name: _layer(config, name, pair, modules[name].weight) for name, pair in pairs.items()}
    )


def _config(folder: Path, where: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        (folder / WEIGHTS).stat()
    except OSError as exc:
        raise ConfigError(f"{where}: must be a folder with {CONFIG} and {WEIGHTS}: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{where}: {CONFIG} is malformed: {exc}") from exc
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: {CONFIG} is malformed: it holds no object")
    return config


def _refuse_other_kinds(config: dict[str, Any], where: str) -> None:
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{where}: peft_type={config.get('peft_type')!r}: must be 'LORA'")
    for name, why in _REFUSED.items():
        if config.get(name):
            raise ConfigError(f"{where}: {name}={config[name]!r}: {why}; merge it and load the weights instead")
    if config.get("bias", "none") != "none":
        raise ConfigError(f"{where}: bias={config['bias']!r}: must be 'none'; merge it and load the weights instead")
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        raise ConfigError(
            f"{where}: init_lora_weights={config['init_lora_weights']!r} has changed the base weights: save it with "
            "path_initial_model_for_weight_conversion, or merge it and load the weights instead"
        )
    for name in ("lora_alpha", "r"):
        if not isinstance(config.get(name), int | float) or config[name] <= 0:
            raise ConfigError(f"{where}: {name}={config.get(name)!r}: must be a number above 0")


def _tensors(folder: Path, where: str) -> dict[str, Tensor]:
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"{where}: {WEIGHTS} cannot be read: {exc}") from exc


def _check_layer(module: nn.Module | None, head: nn.Module | None, pair: dict[str, Tensor], where: str) -> None:
    if not isinstance(module, nn.Linear) or module is head:
        kind = "there is no such module" if module is None else f"it is {type(module).__name__}"
        kind = "it is the output layer" if module is not None and module is head else kind
        raise ConfigError(f"{where}: must be a linear layer inside this model's decoder: {kind}")
    if set(pair) != {"A", "B"}:
        raise ConfigError(f"{where}: lora_{'B' if 'A' in pair else 'A'} is not there")
    down, up = pair["A"], pair["B"]
    rank = down.shape[0] if down.ndim == 2 else 0
    if list(down.shape) != [rank, module.in_features] or list(up.shape) != [module.out_features, rank]:
        raise ConfigError(
            f"{where}: lora_A {list(down.shape)} and lora_B {list(up.shape)} do not fit a layer of "
            f"{module.in_features} inputs and {module.out_features} outputs"
        )
    if not 1 <= rank <= MAX_RANK or not (down.is_floating_point() and up.is_floating_point()):
        raise ConfigError(f"{where}: rank {rank} of {down.dtype}: must be of floats, of rank 1 to {MAX_RANK}")


def _layer(config: dict[str, Any], name: str, pair: dict[str, Tensor], weight: Tensor) -> LoraLayer:
    rank = pair["A"].shape[0]
    alpha = next(
        (value for key, value in (config.get("alpha_pattern") or {}).items() if re.match(rf"(.*\.)?({key})$", name)),
        config["lora_alpha"],
    )
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraLayer(pair["A"].to(weight.device), pair["B"].to(weight.device), scaling)
