"""Families whose images come as crops, as tiles, or as patches with their places."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rollout.engine.multimodal.family import VIDEO_PIXELS, Family, ImageItem
from rollout.errors import InvalidRequestError
from rollout.requests.images import PIXELS, ImageInputs

FRAMES = "num_frames_per_video"


class CropFamily(Family):
    """Gemma 3: one square crop per run of placeholders, whose positions see each other in both directions."""

    types = ("gemma3",)
    token_types = "token_type_ids"
    bidirectional = True

    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        pixels, side = images.tensors[PIXELS], self.config.vision_config.image_size
        channels = self.config.vision_config.num_channels
        if pixels.ndim != 4 or pixels.shape[1:] != (channels, side, side):
            raise InvalidRequestError(
                f"{PIXELS} of shape {list(pixels.shape)}: must be [images, {channels}, {side}, {side}]"
            )
        for crop in pixels:
            yield {PIXELS: crop[None]}, self.config.mm_tokens_per_image


class TileFamily(Family):
    """Idefics 3 and SmolVLM: every image as several tiles, each a run of placeholders of the same length."""

    types = ("idefics3", "smolvlm")
    tiled = True
    tensors = (PIXELS, "pixel_attention_mask")

    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        pixels = images.tensors[PIXELS]
        mask = images.tensors.get("pixel_attention_mask")
        if pixels.ndim == 5 and pixels.shape[0] == 1:
            pixels, mask = pixels[0], None if mask is None else mask[0]
        if pixels.ndim != 4 or (mask is not None and mask.shape != (len(pixels), *pixels.shape[2:])):
            shown = "none" if mask is None else list(mask.shape)
            raise InvalidRequestError(
                f"{PIXELS} of shape {list(images.tensors[PIXELS].shape)}, pixel_attention_mask of shape {shown}: must be "
                "[1, tiles, channels, height, width] and [1, tiles, height, width]"
            )
        vision = self.config.vision_config
        count = int((vision.image_size // vision.patch_size) ** 2 / self.config.scale_factor**2)
        for index, tile in enumerate(pixels):
            # Processors fill a batch up with tiles of zeros, which the model leaves out.
            if tile.any():
                inputs = {PIXELS: tile}
                if mask is not None:
                    inputs["pixel_attention_mask"] = mask[index]
                yield inputs, count

    def _tower_inputs(self, item: ImageItem) -> dict[str, Tensor]:
        return {name: value[None, None] for name, value in item.inputs.items()}


class PooledFamily(Family):
    """Gemma 4: patches of an image or a frame at their places, pooled by squares; embeddings of tokens that enter every
    layer."""

    types = ("gemma4",)
    tensors = (PIXELS, "image_position_ids", VIDEO_PIXELS, "video_position_ids", FRAMES)
    required = ()
    together = ((PIXELS, "image_position_ids"), (VIDEO_PIXELS, "video_position_ids", FRAMES))
    serves_video = True
    token_types = "mm_token_type_ids"
    bidirectional_in_windows = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.text: Any = self.config.get_text_config()
        self.bidirectional = self.text.use_bidirectional_attention == "vision"
        self.core = next(module for module in model.modules() if hasattr(module, "get_placeholder_mask"))

    def embed(self, tokens: Tensor) -> dict[str, Tensor]:
        """`inputs_embeds`, and `per_layer_inputs` [B, L, layers, …] where layers have inputs of their own: as the model
        computes them, of padding where a placeholder is.
        """
        marks = (tokens < 0) | torch.stack(self.core.get_placeholder_mask(tokens)).any(0)
        plain = tokens.masked_fill(marks, self.text.pad_token_id)
        inputs = super().embed(plain)
        if self.text.hidden_size_per_layer_input:
            inputs["per_layer_inputs"] = self.core.language_model.get_per_layer_inputs(plain, None)
        return inputs

    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        if PIXELS in images.tensors:
            for patches, at, count in self._pictures(images, PIXELS, "image_position_ids"):
                yield {PIXELS: patches[None], "image_position_ids": at[None]}, count
        if VIDEO_PIXELS not in images.tensors:
            return
        if FRAMES not in inspect.signature(self.core.get_video_features).parameters:
            raise InvalidRequestError(
                f"{VIDEO_PIXELS}: video of {type(self.core).__name__} is served with transformers 5.21 or later, and this "
                f"is {transformers.__version__}: install a later one, or leave the video out"
            )
        pictures = list(self._pictures(images, VIDEO_PIXELS, "video_position_ids"))
        lengths = images.tensors[FRAMES].reshape(-1).tolist()
        if sum(lengths) != len(pictures) or min(lengths, default=0) < 1:
            raise InvalidRequestError(
                f"{FRAMES}={lengths}: must be above 0, and together the {len(pictures)} frames of {VIDEO_PIXELS}"
            )
        for length in lengths:
            frames, pictures = pictures[:length], pictures[length:]
            yield (
                {
                    VIDEO_PIXELS: pad_sequence([patches for patches, _, _ in frames], batch_first=True),
                    "video_position_ids": pad_sequence([at for _, at, _ in frames], True, -1),
                    FRAMES: torch.tensor([length]),
                },
                sum(count for _, _, count in frames),
            )

    def _pictures(self, images: ImageInputs, name: str, places_name: str) -> Iterator[tuple[Tensor, Tensor, int]]:
        """(patches, their places, number of embeddings) of each image or frame, without what it was filled up with."""
        pixels, places = images.tensors[name], images.tensors[places_name]
        vision = self.config.vision_config
        width, square = 3 * vision.patch_size**2, vision.pooling_kernel_size**2
        if (
            pixels.ndim != 3 or pixels.shape[2] != width or places.is_floating_point()
            or places.shape != (*pixels.shape[:2], 2)
        ):  # fmt: skip
            raise InvalidRequestError(
                f"{name} of shape {list(pixels.shape)}, {places_name} of shape {list(places.shape)}: must be "
                f"[images, patches, {width}] and integers [images, patches, 2]"
            )
        for patches, at in zip(pixels, places, strict=True):
            # Processors fill an image up to the most patches that one may have.
            real = (at >= 0).all(-1)
            count, rest = divmod(int(real.sum()), square)
            if rest or not count:
                raise InvalidRequestError(
                    f"{places_name} with {int(real.sum())} patches of an image: must be a multiple of {square}, which "
                    "are pooled into one embedding"
                )
            yield patches[real], at[real], count


class ShapedFamily(Family):
    """LFM2-VL: tiles of patches, each with its height and width in patches, filled up to the most patches."""

    types = ("lfm2_vl",)
    tensors = required = (PIXELS, "spatial_shapes", "pixel_attention_mask")

    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        pixels, shapes, mask = (images.tensors[name] for name in self.tensors)
        factor = self.config.downsample_factor
        if pixels.ndim != 3 or shapes.shape != (len(pixels), 2) or mask.shape != pixels.shape[:2]:
            raise InvalidRequestError(
                f"{PIXELS} of shape {list(pixels.shape)}, spatial_shapes of shape {list(shapes.shape)}, "
                f"pixel_attention_mask of shape {list(mask.shape)}: must be [tiles, patches, width], [tiles, 2] and [tiles, "
                "patches]"
            )
        for patches, shape, real in zip(pixels, shapes, mask.bool(), strict=True):
            height, width = shape.tolist()
            if height * width != int(real.sum()) or height % factor or width % factor or not height * width:
                raise InvalidRequestError(
                    f"spatial_shapes of {height} x {width} for a tile of {int(real.sum())} patches: must be their "
                    f"number, and multiples of {factor}"
                )
            inputs = {
                PIXELS: patches[real],
                "spatial_shapes": shape,
                "pixel_attention_mask": mask.new_ones(height * width),
            }
            yield {name: value[None] for name, value in inputs.items()}, height * width // factor**2


class AnyResolutionFamily(Family):
    """LLaVA-NeXT: an image as a whole and cut into squares, whose embeddings are packed in rows with line ends."""

    types = ("llava_next",)
    tensors = required = (PIXELS, "image_sizes")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.core = next(module for module in model.modules() if hasattr(module, "multi_modal_projector"))

    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        pixels, sizes = images.tensors[PIXELS], images.tensors["image_sizes"]
        side = self.config.vision_config.image_size
        if pixels.ndim != 5 or pixels.shape[2:] != (3, side, side) or sizes.shape != (len(pixels), 2):
            raise InvalidRequestError(
                f"{PIXELS} of shape {list(pixels.shape)}, image_sizes of shape {list(sizes.shape)}: must be [images, "
                f"squares, 3, {side}, {side}] and [images, 2]"
            )
        functions: Any = inspect.getmodule(type(self.core))
        length = (side // self.config.vision_config.patch_size) ** 2
        for squares, size in zip(pixels, sizes, strict=True):
            needed = functions.image_size_to_num_patches(size, self.config.image_grid_pinpoints, side)
            if len(squares) < needed:
                raise InvalidRequestError(
                    f"{PIXELS} of {len(squares)} squares for an image of {size.tolist()}: must be at least {needed}"
                )
            packed, _ = self.core.pack_image_features(
                [torch.zeros(needed, length, 1)], size[None], self.config.vision_feature_select_strategy, torch.zeros(1)
            )
            yield {PIXELS: squares[None, :needed], "image_sizes": size[None]}, len(packed[0])
