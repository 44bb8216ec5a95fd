"""How a family of vision-language models takes images: cut into items, encoded, and placed among the tokens of a step.

An *item* is an image, or one tile of it. The tower encodes each alone, so that its embeddings depend on nothing else in the
batch and can be shared. The model's own functions (`get_image_features`, `get_rope_index`) compute everything.
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

from rollout.errors import InvalidRequestError, SerializationError
from rollout.requests import codec
from rollout.requests.codec import INT_ARRAY, TENSOR, TENSORS, refuse
from rollout.requests.images import PIXELS, ImageInputs, digest_of

VIDEO_PIXELS = "pixel_values_videos"
Cut = tuple[dict[str, Tensor], int]
"""The tower's arguments for an item, and the number of its embeddings."""
_SEEN = codec.optional(INT_ARRAY)
_FIELDS = 4


@dataclass(frozen=True, eq=False)
class ImageItem:
    """An image, a tile of one, or a video."""

    inputs: dict[str, Tensor]
    """The tower's arguments."""
    count: int
    """Number of embeddings, one per placeholder token."""
    digest: bytes
    """Digest of the inputs, and of what else its positions depend on."""
    video: bool = False
    """Whether its placeholders are a video's."""

    def serialize(self) -> list[Any]:
        """Plain values for msgpack."""
        return [TENSORS.encode(self.inputs), self.count, self.digest, self.video]

    @classmethod
    def deserialize(cls, plain: Any) -> ImageItem:
        """The inverse of `serialize`.

        Raises:
            SerializationError: not what `serialize` makes.
        """
        if not isinstance(plain, list) or [type(each) for each in plain[1:]] != [int, bytes, bool]:
            refuse("ImageItem", plain, "[tensors, count, digest, whether a video]")
        return cls(TENSORS.decode(plain[0]), *plain[1:])


@dataclass(frozen=True, eq=False)
class StepImages:
    """Changes that the images of a step's sequences make in its forward; P packed positions.

    Attributes:
        index: [I] packed positions that an image's embedding stands at.
        embeddings: [I, hidden]; then those added behind the first decoder layers, if any. Empty: no position has one.
        positions: [P], or [4, P] (place in the sequence, time, height, width) where the last three differ.
        seen: [P] last position that each attends to; None: its own.
    """

    index: NDArray[np.int64]
    embeddings: list[Tensor]
    positions: NDArray[np.int64]
    seen: NDArray[np.int64] | None

    @property
    def only_shifts(self) -> bool:
        """Whether the step differs from one of text by its positions alone, one per row."""
        return not len(self.index) and self.positions.ndim == 1 and self.seen is None

    def part(self, chosen: NDArray[np.int64]) -> StepImages:
        """The same for a forward of some of the step's positions.

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

    def serialize(self) -> list[Any]:
        """Plain values for msgpack."""
        embeddings = [TENSOR.encode(each) for each in self.embeddings]
        return [INT_ARRAY.encode(self.index), embeddings, INT_ARRAY.encode(self.positions), _SEEN.encode(self.seen)]

    @classmethod
    def deserialize(cls, plain: Any) -> StepImages:
        """The inverse of `serialize`; embeddings are on the CPU.

        Raises:
            SerializationError: not what `serialize` makes.
        """
        if not isinstance(plain, list) or len(plain) != _FIELDS or not isinstance(plain[1], list):
            refuse("StepImages", plain, "a list of four fields")
        index, positions, seen = INT_ARRAY.decode(plain[0]), INT_ARRAY.decode(plain[2]), _SEEN.decode(plain[3])
        embeddings = [TENSOR.decode(each) for each in plain[1]]
        if any(each.ndim != 2 or len(each) != len(index) for each in embeddings):
            raise SerializationError(f"StepImages: {len(index)} places and embeddings of another number")
        return cls(index, embeddings, positions, seen)


class Family(ABC):
    """How models of some types take images."""

    types: ClassVar[tuple[str, ...]] = ()
    """`model_type` of the configurations."""
    tensors: tuple[str, ...] = (PIXELS,)
    """Names of the images' tensors."""
    required: ClassVar[tuple[str, ...]] = (PIXELS,)
    """Tensors without which there is no image."""
    together: tuple[tuple[str, ...], ...] = ()
    """Names of tensors that come together or not at all."""
    token_types: ClassVar[str | None] = None
    """Argument of the trainer's forward that marks the placeholders; None: it needs none."""
    bidirectional: bool = False
    """Whether the positions of an image see each other in both directions."""
    bidirectional_in_windows: ClassVar[bool] = False
    """Whether they do so only in layers with a sliding window."""
    serves_video: ClassVar[bool] = False
    tiled: ClassVar[bool] = False
    """Whether tensors have a batch dimension before the dimension of the tiles."""

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
        return [
            ImageItem(inputs, count, digest_of(inputs), VIDEO_PIXELS in inputs)
            for inputs, count in self._cut(images.tensors)
        ]

    def encode(self, item: ImageItem, device: torch.device) -> list[Tensor]:
        """[count, hidden] embeddings of an item; then those added behind the first decoder layers (deepstack), if any.

        The caller has gradients and training behaviour off.
        """
        inputs = {name: value.to(device) for name, value in self._tower_inputs(item).items()}
        name = "get_video_features" if item.video else "get_image_features"
        # Gemma 4's outermost module has the one for images alone.
        tower = getattr(self.model if hasattr(self.model, name) else self.core, name)
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
        for names in self.together:
            given = [name for name in names if name in images.tensors]
            for name in names:
                if given and name not in given:
                    raise InvalidRequestError(f"the prompt brings {given[0]} and no {name}, which {kind} needs with it")

    @abstractmethod
    def _cut(self, tensors: Mapping[str, Tensor]) -> Iterator[Cut]:
        """Cut tensors whose names are right into items."""

    def _wrong_shapes(self, tensors: Mapping[str, Tensor], rule: str) -> InvalidRequestError:
        shown = [f"{name} of shape {list(tensors[name].shape)}" for name in self.tensors if name in tensors]
        return InvalidRequestError(f"{', '.join(shown)}: must be {rule}")

    def _tower_inputs(self, item: ImageItem) -> dict[str, Tensor]:
        return item.inputs


def module_with(model: nn.Module, name: str) -> Any:
    """The module of a model that has an attribute of this name."""
    return next(module for module in model.modules() if hasattr(module, name))


def _joined(parts: Any) -> Tensor:
    whole = torch.cat(list(parts), dim=0) if isinstance(parts, list | tuple) else parts
    flat: Tensor = whole.flatten(0, -2)
    return flat
