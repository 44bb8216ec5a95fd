"""The images of a GRPOTrainer's prompts, in the form that the rollout needs.

TRL passes each prompt's images, and token ids that already contain all image placeholders. The trainer's image processor
turns the images into the model's tensors, once for equal adjacent rows.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rollout.requests.images import ImageInputs

Prompt = list[int] | dict[str, Any]

_TENSORS = ("pixel_values", "image_grid_thw", "image_position_ids", "image_sizes", "pixel_attention_mask")
"""The image tensors that TRL passes to a forward pass. Their first dimension counts patches, images or rows."""


def is_vision(trainer: Any) -> bool:
    """Return whether the trainer's prompts may have images: its processing class is a processor, not a tokenizer."""
    return hasattr(trainer.processing_class, "image_processor")


def placeholders(trainer: Any) -> list[int]:
    """Return the ids of image and video placeholders. A completion must not contain them, because it has no images."""
    if not is_vision(trainer):
        return []
    named = (getattr(trainer.model.config, name, None) for name in ("image_token_id", "video_token_id"))
    return [token for token in named if token is not None]


def prompt_groups(
    trainer: Any, prompts: Sequence[list[int]], images: Sequence[Sequence[Any] | None] | None
) -> list[tuple[Prompt, int]]:
    """Merge adjacent rows with equal tokens and images into one prompt each.

    Args:
        prompts: the token ids of each row.
        images: the images of each row, as Pillow images or arrays. None if no row has images.

    Returns:
        (prompt, number of rows) for each group. A prompt is a list of token ids or, with images, a dict with the token ids
        and the image processor's tensors, as `RolloutManager.generate` accepts it.

    Raises:
        ValueError: there are images, but the trainer has only a tokenizer.
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


def images_of_rows(count: int, given: Mapping[str, Any]) -> list[ImageInputs | None]:
    """Return the images of each row, split from TRL's image arguments, or None for a row without images.

    Args:
        count: number of rows.
        given: the arguments of TRL's log-prob pass, except tokens and mask.

    Raises:
        ValueError: an argument is not supported; the message names it.
    """
    found = {
        name: value for name, value in given.items()
        if value is not None and value is not False and name not in ("token_type_ids", "mm_token_type_ids")
    }  # fmt: skip
    numbers = found.pop("num_images", None)
    if others := sorted(found.keys() - (set() if numbers is None else set(_TENSORS))):
        raise ValueError(f"{', '.join(others)}: not followed over prefix trees and kept tokens; attach with tree=False")
    if numbers is None or "pixel_values" not in found:
        return [None] * count
    rows: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in found.items():
        sizes = numbers
        if name == "pixel_values" and "image_grid_thw" in found:
            sizes = [int(grids.prod(-1).sum()) for grids in torch.split(found["image_grid_thw"], numbers)]
        elif len(tensor) != sum(numbers) or "pixel_attention_mask" in found:
            sizes = [1] * count
        for row, part in zip(rows, torch.split(tensor, sizes), strict=True):
            row[name] = part
    return [ImageInputs(row) if number else None for row, number in zip(rows, numbers, strict=True)]


def _processed(trainer: Any, prompt: list[int], images: list[Any]) -> dict[str, Any]:
    made = trainer.processing_class.image_processor(images=images, return_tensors="pt")
    # Keep only arguments of the model. The other results serve to expand placeholders, which has already been done.
    taken = inspect.signature(type(trainer.accelerator.unwrap_model(trainer.model)).forward).parameters
    return {"input_ids": prompt} | {name: value for name, value in made.items() if name in taken}


def _identity(image: Any) -> object:
    """Return a key that is equal for images with equal content."""
    if not hasattr(image, "tobytes"):
        return image
    form = [getattr(image, name, None) for name in ("mode", "size", "dtype", "shape")]
    return str(form), hashlib.blake2b(image.tobytes()).digest()
