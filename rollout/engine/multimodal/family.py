"""The base class of vision-language model families: splits images into items, encodes them and computes their positions.

An *item* is an image, one tile of an image, or a video. The vision tower encodes each item separately, so the embeddings do
not depend on the batch and can be shared. The model's own functions compute embeddings and positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.errors import InvalidRequestError
from rollout.requests.images import PIXELS, ImageInputs, digest_of

VIDEO_PIXELS = "pixel_values_videos"
Cut = tuple[dict[str, Tensor], int]
"""The vision tower's arguments for one item (an image, a tile or a video), and the item's number of embeddings."""


@dataclass(frozen=True, eq=False)
class ImageItem:
    """An image, a tile of an image, or a video."""

    inputs: dict[str, Tensor]
    """The vision tower's arguments for this image or video, by name."""
    count: int
    """The number of embeddings of this image or video, one per placeholder token."""
    digest: bytes
    """The digest of `inputs` and of everything else that affects the positions of this image or video."""
    video: bool = False
    """Whether the item is a video."""


@dataclass(frozen=True, eq=False)
class StepImages:
    """The changes that images make to the forward pass of a step with P packed positions.

    Attributes:
        index: packed positions of the I image embeddings, [I].
        embeddings: the image embeddings, [I, hidden size], then (with deepstack) one tensor for each of the first decoder
            layers, to add after the layer. The list is empty if the step has no image embeddings.
        positions: rotary positions, [P]. If time, height and width may differ, [4, P]: the position in the sequence, time,
            height and width.
        seen: last position that each position attends to, [P]; None means its own position.
    """

    index: NDArray[np.int64]
    embeddings: list[Tensor]
    positions: NDArray[np.int64]
    seen: NDArray[np.int64] | None

    @property
    def only_shifts(self) -> bool:
        """Whether the images only shift the step's rotary positions, by one number per packed position."""
        return not len(self.index) and self.positions.ndim == 1 and self.seen is None

    def part(self, chosen: NDArray[np.int64]) -> StepImages:
        """Return the changes that images make to a forward pass over only some of the step's positions.

        Args:
            chosen: packed positions that this forward pass computes, in the order of its inputs.
        """
        place = np.full(self.positions.shape[-1], -1, np.int64)
        place[chosen] = np.arange(len(chosen))
        index = place[self.index]
        kept = torch.from_numpy(np.flatnonzero(index >= 0))
        return StepImages(
            index[index >= 0],
            [layer.index_select(0, kept.to(layer.device)) for layer in self.embeddings],
            self.positions[..., chosen],
            None if self.seen is None else self.seen[chosen],
        )


class Family(ABC):
    """A family of models that process images in the same way."""

    types: ClassVar[tuple[str, ...]] = ()
    """The values of `model_type` in the configurations of this family."""
    images: tuple[str, ...] = (PIXELS,)
    """The names of the image tensors. A prompt must have all of them or none."""
    videos: tuple[str, ...] = ()
    """The names of the video tensors; empty if video is not supported."""
    optional: ClassVar[tuple[str, ...]] = ()
    """The names of further image tensors that a prompt may omit."""
    token_types: ClassVar[str | None] = None
    """The argument that marks the placeholders in the trainer's forward pass; None if the model needs no such argument."""
    bidirectional: bool = False
    """Whether the positions of an image attend to each other in both directions."""
    bidirectional_in_windows: ClassVar[bool] = False
    """Whether an image attends in both directions only in layers with a sliding window."""
    tiled: ClassVar[bool] = False
    """Whether image tensors have a batch dimension before the dimension of the tiles."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config
        self.core: Any = model
        """The part of the model whose functions compute positions and embeddings."""

    def items(self, images: ImageInputs) -> list[ImageItem]:
        """Return a prompt's items (images or tiles of images, then videos), each kind in the order of its placeholders.

        Raises:
            InvalidRequestError: a tensor is missing, unknown, or of the wrong shape.
        """
        self._check_names(images.tensors)
        for name in (PIXELS, VIDEO_PIXELS):
            if name in images.tensors and not images.tensors[name].is_floating_point():
                raise InvalidRequestError(f"{name} of {images.tensors[name].dtype}: must be floating-point numbers")
        return [
            ImageItem(inputs, count, digest_of(inputs), VIDEO_PIXELS in inputs)
            for inputs, count in self._cut(images.tensors)
        ]

    def encode(self, item: ImageItem, device: torch.device) -> list[Tensor]:
        """Compute an item's embeddings [count, hidden size]. The caller must disable gradients and use eval mode.

        Returns:
            The embeddings, then (with deepstack) one tensor for each of the first decoder layers, to add after the layer.
        """
        inputs = {name: value.to(device) for name, value in item.inputs.items()}
        name = "get_video_features" if item.video else "get_image_features"
        output = getattr(self.model, name)(**inputs, return_dict=True)
        pooled = _joined(getattr(output, "pooler_output", output))
        return [pooled, *(_joined(each) for each in getattr(output, "deepstack_features", None) or ())]

    def positions(self, tokens: Tensor, kinds: Tensor, images: ImageInputs) -> Tensor | None:
        """Return rotary positions [3, P + 1] of P prompt tokens and the next token, or None if text positions apply.

        Args:
            tokens: token ids, int64 [P].
            kinds: 1 at image placeholders, 2 at video placeholders, 0 elsewhere, int64 [P].
            images: the prompt's images.
        """
        return None

    def embed(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the arguments that replace `input_ids` in the model's forward pass.

        They are `inputs_embeds` [B, L, hidden size], with arbitrary values at image positions, and any other inputs that
        the model computes from token ids.

        Args:
            tokens: token ids, [B, L], negative at the positions of images.
        """
        return {"inputs_embeds": self.model.get_input_embeddings()(tokens.clamp(min=0))}  # type: ignore[operator]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all image and video tensors that a prompt may contain."""
        return (*self.images, *self.optional, *self.videos)

    def _check_names(self, given: Mapping[str, Tensor]) -> None:
        kind = type(self.model).__name__
        if unknown := next((name for name in given if name not in self.tensors), None):
            takes = f"{kind} takes {', '.join(self.tensors)} for images"
            raise InvalidRequestError(
                f"the prompt has {unknown}: {'video is not served' if 'video' in unknown else takes}"
            )
        for names, more in ((self.images, self.optional), (self.videos, ())):
            there = [name for name in (*names, *more) if name in given]
            missing = [name for name in names if name not in given]
            if there and missing:
                raise InvalidRequestError(f"the prompt has {there[0]} and no {missing[0]}, which {kind} needs with it")

    @abstractmethod
    def _cut(self, tensors: Mapping[str, Tensor]) -> Iterator[Cut]:
        """Yield a `Cut` for each item (image, tile or video) in a prompt's tensors, whose names have been checked."""

    def _wrong_shapes(self, tensors: Mapping[str, Tensor], rule: str) -> InvalidRequestError:
        shown = [f"{name} of shape {list(tensors[name].shape)}" for name in self.tensors if name in tensors]
        return InvalidRequestError(f"{', '.join(shown)}: must be {rule}")


def module_with(model: nn.Module, name: str) -> Any:
    """Return the first module in a model that has an attribute of this name."""
    return next(module for module in model.modules() if hasattr(module, name))


def _joined(parts: Any) -> Tensor:
    whole = torch.cat(list(parts), dim=0) if isinstance(parts, list | tuple) else parts
    flat: Tensor = whole.flatten(0, -2)
    return flat
