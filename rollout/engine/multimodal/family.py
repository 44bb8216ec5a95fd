"""Families of vision-language models: how images are cut into items, encoded, and placed among the tokens of a step.

An *item* is an image, or one tile of it. The tower encodes each item alone, so its embeddings do not depend on the batch and
can be shared. The model's own functions (`get_image_features`, `get_rope_index`) compute everything.
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
"""The tower's arguments for an item, and the number of embeddings of the item."""


@dataclass(frozen=True, eq=False)
class ImageItem:
    """An image, a tile of one, or a video."""

    inputs: dict[str, Tensor]
    """The tower's arguments."""
    count: int
    """The number of embeddings, one per placeholder token."""
    digest: bytes
    """The digest of the inputs, and of everything else that affects its positions."""
    video: bool = False
    """Whether the item's placeholders are a video's."""


@dataclass(frozen=True, eq=False)
class StepImages:
    """Changes that the images of a step's sequences make in its forward; P packed positions.

    Attributes:
        index: [I] packed positions of the image embeddings.
        embeddings: [I, hidden], then any embeddings added after the first decoder layers. Empty: there are none.
        positions: [P], or [4, P] (place in the sequence, time, height, width) where the last three differ.
        seen: [P] last position that each attends to; None: its own.
    """

    index: NDArray[np.int64]
    embeddings: list[Tensor]
    positions: NDArray[np.int64]
    seen: NDArray[np.int64] | None

    @property
    def only_shifts(self) -> bool:
        """Whether the step differs from a text step only in its positions, one per row."""
        return not len(self.index) and self.positions.ndim == 1 and self.seen is None

    def part(self, chosen: NDArray[np.int64]) -> StepImages:
        """Select the changes for a forward of some of the step's positions.

        Args:
            chosen: packed positions, in the order of that forward.
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
    """The way in which models of some types process images."""

    types: ClassVar[tuple[str, ...]] = ()
    """The `model_type` of the configurations in this family."""
    images: tuple[str, ...] = (PIXELS,)
    """Names of the tensors of images; all or none of them must be given."""
    videos: tuple[str, ...] = ()
    """Names of the tensors of videos; empty: video is not supported."""
    optional: ClassVar[tuple[str, ...]] = ()
    """Optional tensors of images."""
    token_types: ClassVar[str | None] = None
    """The argument of the trainer's forward that marks the placeholders; None: not needed."""
    bidirectional: bool = False
    """Whether the positions of an image attend to each other in both directions."""
    bidirectional_in_windows: ClassVar[bool] = False
    """Whether an image attends in both directions only in layers with a sliding window."""
    tiled: ClassVar[bool] = False
    """Whether tensors have a batch dimension before the dimension of the tiles."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.config: Any = model.config
        self.core: Any = model
        """The module whose functions are used."""

    def items(self, images: ImageInputs) -> list[ImageItem]:
        """Return the items of a prompt's images in the order of their placeholders, then the items of its videos.

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
        """Compute an item's embeddings [count, hidden], then any added after the first decoder layers (deepstack).

        The caller has gradients and training behaviour off.
        """
        inputs = {name: value.to(device) for name, value in item.inputs.items()}
        name = "get_video_features" if item.video else "get_image_features"
        output = getattr(self.model, name)(**inputs, return_dict=True)
        pooled = _joined(getattr(output, "pooler_output", output))
        return [pooled, *(_joined(each) for each in getattr(output, "deepstack_features", None) or ())]

    def positions(self, tokens: Tensor, kinds: Tensor, images: ImageInputs) -> Tensor | None:
        """Return rotary positions [3, P + 1] of a prompt and of the token after it; None: as in text.

        Args:
            tokens: int64 [P].
            kinds: int64 [P], 1 at placeholders of images, 2 at placeholders of videos, 0 elsewhere.
        """
        return None

    def embed(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the forward's arguments in place of `input_ids` [B, L], which are below 0 at images.

        They are `inputs_embeds` [B, L, hidden], with any values at images, and other inputs computed from the token ids.
        """
        return {"inputs_embeds": self.model.get_input_embeddings()(tokens.clamp(min=0))}  # type: ignore[operator]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors that a prompt may have."""
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
        """Cut tensors, whose names were checked, into items."""

    def _wrong_shapes(self, tensors: Mapping[str, Tensor], rule: str) -> InvalidRequestError:
        shown = [f"{name} of shape {list(tensors[name].shape)}" for name in self.tensors if name in tensors]
        return InvalidRequestError(f"{', '.join(shown)}: must be {rule}")


def module_with(model: nn.Module, name: str) -> Any:
    """Return the module of a model that has an attribute of this name."""
    return next(module for module in model.modules() if hasattr(module, name))


def _joined(parts: Any) -> Tensor:
    whole = torch.cat(list(parts), dim=0) if isinstance(parts, list | tuple) else parts
    flat: Tensor = whole.flatten(0, -2)
    return flat
