"""Families of vision-language models: how images are cut into items, encoded, and placed among the tokens.

An *item* is what the tower encodes on its own: an image, or one tile of it. It is encoded alone, so that its embeddings
depend on nothing else in the batch and can be shared. Everything is computed by the model's own functions
(`get_image_features`, `get_rope_index`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rollout.errors import InvalidRequestError
from rollout.requests.images import PIXELS, ImageInputs, digest_of

VIDEO_PIXELS = "pixel_values_videos"


@dataclass(frozen=True, eq=False)
class ImageItem:
    """An image, a tile of one, or a video.

    Attributes:
        inputs: the tower's arguments.
        count: embeddings, one per placeholder token.
        digest: of the inputs, and of what else its positions depend on.
        video: whether its placeholders are those of videos.
    """

    inputs: dict[str, Tensor]
    count: int
    digest: bytes
    video: bool = False


class Family(ABC):
    """How models of some types take images."""

    types: ClassVar[tuple[str, ...]] = ()
    """`model_type` of the configurations."""
    tensors: tuple[str, ...] = (PIXELS,)
    """Names of the images' tensors."""
    required: ClassVar[tuple[str, ...]] = (PIXELS,)
    """Those without which there is no image."""
    token_types: ClassVar[str | None] = None
    """Argument of the trainer's forward that marks the placeholders; None: it needs none."""
    bidirectional: bool = False
    """Whether the positions of an image see each other in both directions."""
    bidirectional_in_windows: ClassVar[bool] = False
    """Whether they do so only in layers with a sliding window."""
    serves_video: ClassVar[bool] = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config
        self.core: Any = model
        """The module whose functions are used."""

    def items(self, images: ImageInputs) -> list[ImageItem]:
        """The items of a prompt's images, in the order of their placeholders; then those of its videos, in theirs.

        Raises:
            InvalidRequestError: a tensor is missing, unknown, or of the wrong shape.
        """
        self._check_names(images)
        for name in (PIXELS, VIDEO_PIXELS):
            if name in images.tensors and not images.tensors[name].is_floating_point():
                raise InvalidRequestError(f"{name} of {images.tensors[name].dtype}: must be floating-point numbers")
        return [ImageItem(inputs, count, digest_of(inputs)) for inputs, count in self._cut(images)]

    def encode(self, item: ImageItem, device: torch.device) -> list[Tensor]:
        """[count, hidden] embeddings of an item; then those added behind the first decoder layers (deepstack), if any.

        The caller has gradients and training behaviour off.
        """
        inputs = {name: value.to(device) for name, value in self._tower_inputs(item).items()}
        tower: Any = self.model.get_video_features if item.video else self.model.get_image_features
        output = tower(**inputs, return_dict=True)
        pooled = _joined(getattr(output, "pooler_output", output))
        return [pooled, *(_joined(each) for each in getattr(output, "deepstack_features", None) or ())]

    def positions(self, tokens: Tensor, kinds: Tensor, images: ImageInputs) -> Tensor | None:
        """[3, P + 1] rotary positions of a prompt and of the token after it; None: those of text.

        Args:
            tokens: int64 [P].
            kinds: int64 [P], 1 at placeholders of images, 2 at those of videos, 0 elsewhere.
        """
        return None

    def embed(self, tokens: Tensor) -> dict[str, Tensor]:
        """Arguments of the model's forward in place of `input_ids` [B, L], which are below 0 where an image is:
        `inputs_embeds` [B, L, hidden], any there, and what else follows from the token ids.
        """
        return {"inputs_embeds": self.model.get_input_embeddings()(tokens.clamp(min=0))}  # type: ignore[operator]

    def _check_names(self, images: ImageInputs) -> None:
        kind = type(self.model).__name__
        for name in images.tensors:
            if name not in self.tensors:
                what = (
                    "video is not served" if "video" in name else f"{kind} takes {', '.join(self.tensors)} for images"
                )
                raise InvalidRequestError(f"the prompt brings {name}: {what}")
        for name in self.required:
            if name not in images.tensors:
                raise InvalidRequestError(f"the prompt's images bring no {name}, which {kind} needs beside {PIXELS}")

    @abstractmethod
    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        """Inputs and count of each item, of tensors whose names are right."""

    def _tower_inputs(self, item: ImageItem) -> dict[str, Tensor]:
        return item.inputs


class GridFamily(Family):
    """Qwen-VL: patches of all images in one row, a grid per image, three-dimensional rotary positions; videos likewise."""

    types = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    tensors: tuple[str, ...] = (PIXELS, "image_grid_thw", VIDEO_PIXELS, "video_grid_thw", "second_per_grid_ts")
    required = ()
    token_types = "mm_token_type_ids"
    serves_video = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.core = next(module for module in model.modules() if hasattr(module, "get_rope_index"))
        self._timed = "second_per_grid_ts" in inspect.signature(self.core.get_rope_index).parameters
        if not self._timed:
            self.tensors = tuple(name for name in self.tensors if name != "second_per_grid_ts")

    def items(self, images: ImageInputs) -> list[ImageItem]:
        """As of any family. Equal videos at another speed are different items: their positions in time differ."""
        seconds = images.tensors.get("second_per_grid_ts")
        items = super().items(images)
        videos = [item for item in items if VIDEO_PIXELS in item.inputs]
        if seconds is not None and len(seconds) != len(videos):
            raise InvalidRequestError(
                f"second_per_grid_ts of {len(seconds)} for {len(videos)} videos: must be one each"
            )
        for index, item in enumerate(videos):
            known = item.inputs if seconds is None else item.inputs | {"seconds": seconds[index]}
            items[len(items) - len(videos) + index] = replace(item, digest=digest_of(known), video=True)
        return items

    def positions(self, tokens: Tensor, kinds: Tensor, images: ImageInputs) -> Tensor:
        """[3, P + 1] rotary positions, by the model's `get_rope_index`.

        A video may reach further in time than the text behind it, so that text does not go on from the largest position.
        """
        named = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        given = {name: images.tensors[name].cpu() for name in named if name in images.tensors}
        tokens, kinds = pad(tokens[None], (0, 1)), pad(kinds[None].int(), (0, 1))
        found: Tensor = self.core.get_rope_index(tokens, mm_token_type_ids=kinds, **given)[0]
        return found[:, 0]

    def _check_names(self, images: ImageInputs) -> None:
        super()._check_names(images)
        pairs = [(PIXELS, "image_grid_thw"), (VIDEO_PIXELS, "video_grid_thw")]
        # Without them a model takes every frame for a second, in silence.
        pairs += [(VIDEO_PIXELS, "second_per_grid_ts")] * self._timed
        for one, other in (*pairs, *(pair[::-1] for pair in pairs)):
            if one in images.tensors and other not in images.tensors:
                raise InvalidRequestError(
                    f"the prompt brings {one} and no {other}, which {type(self.model).__name__} needs with it"
                )

    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        for pixels, grids in ((PIXELS, "image_grid_thw"), (VIDEO_PIXELS, "video_grid_thw")):
            if pixels in images.tensors:
                yield from self._cut_patches(pixels, images.tensors[pixels], grids, images.tensors[grids])

    def _cut_patches(
        self, name: str, pixels: Tensor, grids_name: str, grids: Tensor
    ) -> Iterator[tuple[dict[str, Tensor], int]]:
        vision = self.config.vision_config
        merge = vision.spatial_merge_size
        channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
        width = channels * vision.temporal_patch_size * vision.patch_size**2
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
        for crop in torch.split(pixels, 1):
            yield {PIXELS: crop}, self.config.mm_tokens_per_image


class TileFamily(Family):
    """Idefics 3 and SmolVLM: every image as several tiles, each a run of placeholders of the same length."""

    types = ("idefics3", "smolvlm")
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
    """Gemma 4: patches of an image at their places, pooled by squares; embeddings of tokens that enter every layer."""

    types = ("gemma4",)
    tensors = required = (PIXELS, "image_position_ids")
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
            inputs["per_layer_inputs"] = self.core.language_model.get_per_layer_inputs(plain)
        return inputs

    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        pixels, places = images.tensors[PIXELS], images.tensors["image_position_ids"]
        vision = self.config.vision_config
        width, square = 3 * vision.patch_size**2, vision.pooling_kernel_size**2
        if (
            pixels.ndim != 3 or pixels.shape[2] != width or places.is_floating_point()
            or places.shape != (*pixels.shape[:2], 2)
        ):  # fmt: skip
            raise InvalidRequestError(
                f"{PIXELS} of shape {list(pixels.shape)}, image_position_ids of shape {list(places.shape)}: must be "
                f"[images, patches, {width}] and integers [images, patches, 2]"
            )
        for patches, at in zip(pixels, places, strict=True):
            # Processors fill an image up to the most patches that one may have.
            real = (at >= 0).all(-1)
            count, rest = divmod(int(real.sum()), square)
            if rest or not count:
                raise InvalidRequestError(
                    f"image_position_ids with {int(real.sum())} patches of an image: must be a multiple of {square}, which "
                    "are pooled into one embedding"
                )
            yield {PIXELS: patches[real][None], "image_position_ids": at[real][None]}, count


FAMILIES: tuple[type[Family], ...] = (GridFamily, CropFamily, TileFamily, PooledFamily)


def family_of(model: nn.Module) -> Family | None:
    """The family of a model; None: the engine serves it no images."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not hasattr(model, "get_image_features"):
        return None
    return next((family(model) for family in FAMILIES if kind in family.types), None)


def _joined(parts: Any) -> Tensor:
    whole = torch.cat(list(parts), dim=0) if isinstance(parts, list | tuple) else parts
    flat: Tensor = whole.flatten(0, -2)
    return flat
