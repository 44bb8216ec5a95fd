"""Images of a GRPOTrainer's prompts, as the rollout takes them.

TRL hands over token ids with every placeholder in place, and the images. The trainer's image processor makes the model's
tensors of them, once for adjacent rows that are equal.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

Prompt = list[int] | dict[str, Any]


def is_vision(trainer: Any) -> bool:
    """Whether the trainer's prompts may have images: its processing class is a processor, not a tokenizer."""
    return hasattr(trainer.processing_class, "image_processor")


def placeholders(trainer: Any) -> list[int]:
    """Token ids that stand for images and videos, which a completion must not have: the trainer's forward would look for
    what belongs to them.
    """
    if not is_vision(trainer):
        return []
    named = (getattr(trainer.model.config, name, None) for name in ("image_token_id", "video_token_id"))
    return [token for token in named if token is not None]


def prompt_groups(
    trainer: Any, prompts: Sequence[list[int]], images: Sequence[Sequence[Any] | None] | None
) -> list[tuple[Prompt, int]]:
    """Adjacent rows with equal tokens and equal images as one prompt each, and how many they are.

    Args:
        prompts: token ids.
        images: of each prompt (of Pillow, or arrays); None: no prompt has any.

    Returns:
        Token ids; with images the image processor's tensors beside, as for `RolloutManager.generate`.

    Raises:
        ValueError: there are images, and the trainer has a tokenizer alone.
    """
    shown: Sequence[Sequence[Any] | None] = [None] * len(prompts) if images is None else images
    rows = [
        (prompt, list(own or ()), [_identity(image) for image in own or ()])
        for prompt, own in zip(prompts, shown, strict=True)
    ]
    if any(own for _, own, _ in rows) and not is_vision(trainer):
        raise ValueError(
            f"these prompts have images, and the trainer's processing_class is a {type(trainer.processing_class).__name__}: "
            "give it the model's processor (AutoProcessor.from_pretrained(..., padding_side='left'))"
        )
    groups: list[tuple[Prompt, int]] = []
    for _, equal in groupby(rows, key=lambda row: (row[0], row[2])):
        (prompt, own, _), *others = equal
        groups.append((_processed(trainer, prompt, own) if own else prompt, 1 + len(others)))
    return groups


def _processed(trainer: Any, prompt: list[int], images: list[Any]) -> dict[str, Any]:
    made = trainer.processing_class.image_processor(images=images, return_tensors="pt")
    # Some of what a processor returns is for expanding placeholders, which has been done.
    taken = inspect.signature(type(trainer.accelerator.unwrap_model(trainer.model)).forward).parameters
    return {"input_ids": prompt} | {name: value for name, value in made.items() if name in taken}


def _identity(image: Any) -> object:
    """Equal for images of equal content."""
    if not hasattr(image, "tobytes"):
        return image
    form = [getattr(image, name, None) for name in ("mode", "size", "dtype", "shape")]
    return str(form), hashlib.blake2b(image.tobytes()).digest()
