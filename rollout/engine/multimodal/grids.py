"""Families whose images and videos come as patches in rows, with a grid each: Muse Glimmer and Qwen-VL."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rollout.engine.multimodal.family import VIDEO_PIXELS, Family, ImageItem
from rollout.errors import InvalidRequestError
from rollout.requests.images import PIXELS, ImageInputs, digest_of

SECONDS = "second_per_grid_ts"
"""Seconds of a video that one step of its grid in time takes."""


class GridFamily(Family):
    """Muse Glimmer: patches of all images in one row, a grid per image; videos likewise."""

    types: ClassVar[tuple[str, ...]] = ("muse_glimmer",)
    tensors: tuple[str, ...] = (PIXELS, "image_grid_thw", VIDEO_PIXELS, "video_grid_thw")
    required = ()
    together: tuple[tuple[str, ...], ...] = ((PIXELS, "image_grid_thw"), (VIDEO_PIXELS, "video_grid_thw"))
    serves_video = True

    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        for pixels, grids in ((PIXELS, "image_grid_thw"), (VIDEO_PIXELS, "video_grid_thw")):
            if pixels in images.tensors:
                yield from self._cut_patches(pixels, images.tensors[pixels], grids, images.tensors[grids])

    def _cut_patches(
        self, name: str, pixels: Tensor, grids_name: str, grids: Tensor
    ) -> Iterator[tuple[dict[str, Tensor], int]]:
        vision = self.config.vision_config
        merge = _first(vision, "spatial_merge_size", "merge_size")
        frames = _first(vision, "temporal_patch_size", "patch_temporal")
        width = _first(vision, "in_channels", "in_chans", default=3) * frames * vision.patch_size**2
        if grids.ndim != 2 or grids.shape[1] != 3 or grids.is_floating_point() or not (grids > 0).all():
            raise InvalidRequestError(f"{grids_name} of shape {list(grids.shape)}: must be [n, 3] integers above 0")
        sizes: list[int] = grids.prod(-1).tolist()
        if list(pixels.shape) != [sum(sizes), width]:
            raise InvalidRequestError(
                f"{name} of shape {list(pixels.shape)}: {grids_name}={grids.tolist()} and the model's patches make it "
                f"[{sum(sizes)}, {width}]"
            )
        if (grids[:, 1:] % merge).any():
            raise InvalidRequestError(f"{grids_name}={grids.tolist()}: height and width must be multiples of {merge}")
        for grid, size, part in zip(grids, sizes, torch.split(pixels, sizes), strict=True):
            yield {name: part, grids_name: grid[None]}, size // merge**2


class RotaryGridFamily(GridFamily):
    """Qwen-VL: rotary positions in time, height and width."""

    types = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    token_types = "mm_token_type_ids"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.core = next(module for module in model.modules() if hasattr(module, "get_rope_index"))
        # Without them a model that knows them takes every frame for a second, in silence.
        if SECONDS in inspect.signature(self.core.get_rope_index).parameters:
            self.tensors = (*self.tensors, SECONDS)
            self.together = (*self.together, (VIDEO_PIXELS, SECONDS))

    def items(self, images: ImageInputs) -> list[ImageItem]:
        """As of any family. Equal videos at another speed are different items: their positions in time differ."""
        items, seconds = super().items(images), images.tensors.get(SECONDS)
        if seconds is None:
            return items
        videos = [item for item in items if item.video]
        if len(seconds) != len(videos):
            raise InvalidRequestError(f"{SECONDS} of {len(seconds)} for {len(videos)} videos: must be one each")
        return items[: len(items) - len(videos)] + [
            replace(item, digest=digest_of(item.inputs | {SECONDS: each}))
            for item, each in zip(videos, seconds, strict=True)
        ]

    def positions(self, tokens: Tensor, kinds: Tensor, images: ImageInputs) -> Tensor:
        """[3, P + 1] rotary positions, by the model's `get_rope_index`.

        A video may reach further in time than the text behind it, so that text does not go on from the largest position.
        """
        named = ("image_grid_thw", "video_grid_thw", SECONDS)
        given = {name: images.tensors[name].cpu() for name in named if name in images.tensors}
        tokens, kinds = pad(tokens[None], (0, 1)), pad(kinds[None].int(), (0, 1))
        try:
            found: Tensor = self.core.get_rope_index(tokens, mm_token_type_ids=kinds, **given)[0]
        except (RuntimeError, IndexError, TypeError, ValueError, StopIteration) as exc:
            raise InvalidRequestError(
                f"{type(self.model).__name__} finds no positions for these placeholders and grids ({type(exc).__name__}: "
                f"{exc}): text stands between images, and for Qwen3-VL and later between the frames of a video"
            ) from exc
        return found[:, 0]


def _first(config: Any, *names: str, default: int = 0) -> int:
    """The first of these attributes that a configuration has."""
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), default)
