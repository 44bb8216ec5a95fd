"""Loads a causal or vision-language model and its tokenizer or processor from a folder."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from rollout.errors import ConfigError


def load(
    folder: str | PathLike[str], tokenizer: Any = None, *, dtype: str | torch.dtype = "auto", device: str = "auto"
) -> tuple[nn.Module, Any]:
    """The model of a folder, as `save_pretrained` leaves it, and its tokenizer; of a vision model its processor.

    Nothing is looked for elsewhere: a name that is not a folder is an error, not a download.

    Args:
        tokenizer: a tokenizer, or the folder of one; None: the model's folder, where it has one.
        dtype: of the parameters; `auto`: as they were saved.
        device: `auto`: CUDA, if there is some.

    Raises:
        ConfigError: there is no model, or torch has no such type or device.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        hub = f"a model of the Hub comes by `hf download {folder} --local-dir FOLDER`"
        what = "has no config.json" if path.is_dir() else f"is not a folder; {hub}"
        raise ConfigError(f"model={str(folder)!r}: {what}; pass the folder that save_pretrained() wrote")
    try:
        where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as exc:
        raise ConfigError(f"device={device!r}: must be one that torch knows ({exc})") from exc
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise ConfigError(f"dtype={dtype!r}: must be 'auto' or a type that torch knows, such as 'bfloat16'")
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
