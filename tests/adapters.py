"""LoRA adapters on disk, as PEFT saves them, and the model that a trainer would have with one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel


def saved_adapter(model: PreTrainedModel, folder: Path, **options: Any) -> str:
    """Save a random adapter that changes a lot, for a model that is used up by it; returns the folder."""
    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    config = LoraConfig(**(defaults | {"init_lora_weights": False} | options))
    get_peft_model(model, config).save_pretrained(str(folder))
    return str(folder)


def adapted(model: PreTrainedModel, folder: str) -> Any:
    """The model with the adapter of a folder, by PEFT."""
    return PeftModel.from_pretrained(model, folder)
