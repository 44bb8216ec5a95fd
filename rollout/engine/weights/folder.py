"""Functions that load a folder of safetensors into an existing model, or as a new model with its tokenizer."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from rollout.errors import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_weights(model: nn.Module, folder: str | PathLike[str]) -> int:
    """Copy every tensor of a folder written by `save_pretrained` into the parameter or buffer of the same name.

    Returns:
        The number of tensors copied.

    Raises:
        ConfigError: the folder has no safetensors, a name or shape in it differs from the model's, or a parameter is
            missing. The model was not changed.
    """
    targets = model.state_dict(keep_vars=True)
    found: set[int] = set()
    names: dict[Path, list[str]] = {}
    try:
        for path in _files(Path(folder)):
            with safe_open(path, framework="pt") as opened:
                names[path] = list(opened.keys())
                for name in names[path]:
                    found.add(_check(folder, name, targets.get(name), opened.get_slice(name).get_shape()))
        missing = [name for name, each in model.named_parameters() if id(each) not in found]
        if missing:
            raise ConfigError(f"weights of {str(folder)!r}: {missing[0]!r} and {len(missing) - 1} others are missing")
        with torch.no_grad():
            for path, held in names.items():
                with safe_open(path, framework="pt") as opened:
                    for name in held:
                        targets[name].copy_(opened.get_tensor(name))
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"weights of {str(folder)!r}: cannot be read: {exc}") from exc
    return sum(map(len, names.values()))


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise ConfigError(f"weights of {str(folder)!r}: must be a folder with {SINGLE} or {INDEX}")
    try:
        listed = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        names = sorted({str(name) for name in listed})
    except (ValueError, KeyError, AttributeError) as exc:
        raise ConfigError(f"weights of {str(folder)!r}: {INDEX} is malformed: {exc!r}") from exc
    if any(Path(name).name != name for name in names):
        raise ConfigError(f"weights of {str(folder)!r}: {INDEX} names a file outside the folder")
    return [folder / name for name in names]


def _check(folder: Any, name: str, target: torch.Tensor | None, shape: list[int]) -> int:
    if target is None:
        raise ConfigError(f"weights of {str(folder)!r}: {name!r} is not a weight of this model")
    if list(target.shape) != list(shape):
        raise ConfigError(
            f"weights of {str(folder)!r}: {name!r} is {list(shape)}, and {list(target.shape)} in this model"
        )
    return id(target)


def load_model(
    folder: str | PathLike[str], tokenizer: Any = None, *, dtype: str | torch.dtype = "auto", device: str = "auto"
) -> tuple[nn.Module, Any]:
    """Load a model from a folder written by `save_pretrained`, with its tokenizer or, for a vision model, its processor.

    Nothing is ever downloaded: if the folder does not exist, `ConfigError` is raised.

    Args:
        folder: the model's folder.
        tokenizer: a tokenizer, or the folder to load it from. If None, it is loaded from the model's folder if possible.
        dtype: dtype of the parameters. `auto` selects the dtype in which they were saved.
        device: device of the model. `auto` selects CUDA if it is available, else the CPU.

    Returns:
        The model in eval mode, and its tokenizer or processor, or None if the model's folder contains neither.

    Raises:
        ConfigError: the folder has no model, the given folder has no tokenizer, or torch has no such dtype or device.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        hub = f"a model of the Hub comes by `hf download {folder} --local-dir FOLDER`"
        what = "has no config.json" if path.is_dir() else f"is not a folder; {hub}"
        raise ConfigError(f"model={str(folder)!r}: {what}; pass the folder that save_pretrained() wrote")
    try:
        where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as exc:
        raise ConfigError(f"device={device!r}: must be a device of torch ({exc})") from exc
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise ConfigError(f"dtype={dtype!r}: must be 'auto' or a dtype of torch, such as 'bfloat16'")
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    sees = type(config) in AutoModelForImageTextToText._model_mapping
    auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=kind, local_files_only=True, trust_remote_code=False)
    return model.to(where).eval(), _tokenizer(path, tokenizer, sees)


def _tokenizer(path: Path, given: Any, sees: bool) -> Any:
    if given is not None and not isinstance(given, str | PathLike):
        return given
    source = path if given is None else Path(given)
    if sees and any((source / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
        return AutoProcessor.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if any((source / name).is_file() for name in files):
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    if given is not None:
        raise ConfigError(f"tokenizer={str(given)!r}: there is none in that folder")
    return None
