"""The vision-language model families with image support, each of which splits a prompt's tensors into items."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rollout.engine.multimodal.family import VIDEO_PIXELS, Cut, Family, ImageItem, module_with
from rollout.errors import InvalidRequestError
from rollout.requests.images import PIXELS, ImageInputs, digest_of

SECONDS = "second_per_grid_ts"
"""The name of the tensor that holds the number of seconds per time step of each video's grid."""


class GridFamily(Family):
    """The Muse Glimmer family, with one tensor for the patches of all images (or videos) and one for grid sizes."""

    types: ClassVar[tuple[str, ...]] = ("muse_glimmer",)
    images: tuple[str, ...] = (PIXELS, "image_grid_thw")
    videos: tuple[str, ...] = (VIDEO_PIXELS, "video_grid_thw")

    def _cut(self, tensors: Mapping[str, Tensor]) -> Iterator[Cut]:
        for name, grids_name, *_ in (self.images, self.videos):
            if name in tensors:
                yield from self._cut_patches(name, tensors[name], grids_name, tensors[grids_name])

    def _cut_patches(self, name: str, pixels: Tensor, grids_name: str, grids: Tensor) -> Iterator[Cut]:
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
    """The Qwen-VL family: it has the tensors of the Muse Glimmer family, and rotary positions in time, height and width."""

    types = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    token_types = "mm_token_type_ids"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.core = module_with(model, "get_rope_index")
        # Require the seconds per time step if the model has an argument for them: without it, the model assumes 1 second.
        if SECONDS in inspect.signature(self.core.get_rope_index).parameters:
            self.videos = (*self.videos, SECONDS)

    def items(self, images: ImageInputs) -> list[ImageItem]:
        items, seconds = super().items(images), images.tensors.get(SECONDS)
        if seconds is None:
            return items
        videos = [item for item in items if item.video]
        if len(seconds) != len(videos):
            raise InvalidRequestError(f"{SECONDS} of {len(seconds)} for {len(videos)} videos: must be one each")
        # Include the seconds in the digest: equal videos at different speeds have different positions in time.
        return items[: len(items) - len(videos)] + [
            replace(item, digest=digest_of(item.inputs | {SECONDS: each}))
            for item, each in zip(videos, seconds, strict=True)
        ]

    def positions(self, tokens: Tensor, kinds: Tensor, images: ImageInputs) -> Tensor:
        named = ("image_grid_thw", "video_grid_thw", SECONDS)
        given = {name: images.tensors[name].cpu() for name in named if name in images.tensors}
        # Append a token to get the position that follows the prompt. The last position plus one may be wrong, because a
        # video may extend further in time than the text after it.
        tokens, kinds = pad(tokens[None], (0, 1)), pad(kinds[None].int(), (0, 1))
        try:
            found: Tensor = self.core.get_rope_index(tokens, mm_token_type_ids=kinds, **given)[0]
        except (RuntimeError, IndexError, TypeError, ValueError, StopIteration) as exc:
            raise InvalidRequestError(
                f"{type(self.model).__name__} finds no positions for these placeholders and grids ({type(exc).__name__}: "
                f"{exc}): text stands between images, and for Qwen3-VL and later between the frames of a video"
            ) from exc
        return found[:, 0]


class CropFamily(Family):
    """The Gemma 3 family: images are square crops. The placeholders of a crop attend to each other in both directions."""

    types = ("gemma3",)
    token_types = "token_type_ids"
    bidirectional = True

    def _cut(self, tensors: Mapping[str, Tensor]) -> Iterator[Cut]:
        pixels, side = tensors[PIXELS], self.config.vision_config.image_size
        channels = self.config.vision_config.num_channels
        if pixels.ndim != 4 or pixels.shape[1:] != (channels, side, side):
            raise self._wrong_shapes(tensors, f"[images, {channels}, {side}, {side}]")
        for crop in pixels:
            yield {PIXELS: crop[None]}, self.config.mm_tokens_per_image


class TileFamily(Family):
    """The Idefics 3 and SmolVLM family: an image is split into tiles, each with the same number of placeholders."""

    types = ("idefics3", "smolvlm")
    tiled = True
    optional = ("pixel_attention_mask",)

    def _cut(self, tensors: Mapping[str, Tensor]) -> Iterator[Cut]:
        pixels = tensors[PIXELS]
        mask = tensors.get("pixel_attention_mask")
        if pixels.ndim == 5 and pixels.shape[0] == 1:
            pixels, mask = pixels[0], None if mask is None else mask[0]
        if pixels.ndim != 4 or (mask is not None and mask.shape != (len(pixels), *pixels.shape[2:])):
            raise self._wrong_shapes(tensors, "[1, tiles, channels, height, width] and [1, tiles, height, width]")
        vision = self.config.vision_config
        count = int((vision.image_size // vision.patch_size) ** 2 / self.config.scale_factor**2)
        for index, tile in enumerate(pixels):
            # Skip tiles of zeros, with which processors pad a batch: the model ignores them.
            if tile.any():
                masked = {} if mask is None else {"pixel_attention_mask": mask[index][None, None]}
                yield {PIXELS: tile[None, None]} | masked, count


class PooledFamily(Family):
    """The Gemma 4 family: squares of an image's patches are pooled, and every decoder layer has its own token embeddings."""

    types = ("gemma4",)
    images = (PIXELS, "image_position_ids")
    token_types = "mm_token_type_ids"
    bidirectional_in_windows = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.text: Any = self.config.get_text_config()
        self.bidirectional = self.text.use_bidirectional_attention == "vision"
        self.core = module_with(model, "get_placeholder_mask")

    def embed(self, tokens: Tensor) -> dict[str, Tensor]:
        marks = (tokens < 0) | torch.stack(self.core.get_placeholder_mask(tokens)).any(0)
        plain = tokens.masked_fill(marks, self.text.pad_token_id)
        inputs = super().embed(plain)
        if self.text.hidden_size_per_layer_input:
            # Give image placeholders the padding token's per-layer embeddings, as the model does: [B, L, layers, ...].
            inputs["per_layer_inputs"] = self.core.language_model.get_per_layer_inputs(plain, None)
        return inputs

    def _cut(self, tensors: Mapping[str, Tensor]) -> Iterator[Cut]:
        pixels, places = (tensors[name] for name in self.images)
        vision = self.config.vision_config
        width, square = 3 * vision.patch_size**2, vision.pooling_kernel_size**2
        whole = pixels.ndim == 3 and pixels.shape[2] == width and places.shape == (*pixels.shape[:2], 2)
        if not whole or places.is_floating_point():
            raise self._wrong_shapes(tensors, f"[images, patches, {width}] and integers [images, patches, 2]")
        for patches, at in zip(pixels, places, strict=True):
            # Drop padding patches, whose positions are negative. Processors pad each image to the maximum number of patches.
            real = (at >= 0).all(-1)
            count, rest = divmod(int(real.sum()), square)
            if rest or not count:
                raise InvalidRequestError(
                    f"image_position_ids with {int(real.sum())} patches of an image: must be a multiple of {square}, which "
                    "are pooled into one embedding"
                )
            yield {PIXELS: patches[real][None], "image_position_ids": at[real][None]}, count


def _first(config: Any, *names: str, default: int = 0) -> int:
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), default)


FAMILIES: tuple[type[Family], ...] = (RotaryGridFamily, GridFamily, CropFamily, PooledFamily, TileFamily)


def family_of(model: nn.Module) -> Family | None:
    """Return the family of a model, or None if the engine does not support images for this model."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not hasattr(model, "get_image_features"):
        return None
    return next((family(model) for family in FAMILIES if kind in family.types), None)
