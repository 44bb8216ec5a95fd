"""How a family of vision-language models takes images: cut into items, encoded, and placed among the tokens.

An *item* is what the tower encodes on its own: an image, or one tile of it. It is encoded alone, so that its embeddings
depend on nothing else in the batch and can be shared. Everything is computed by the model's own functions
(`get_image_features`, `get_rope_index`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rollout.errors import InvalidRequestError
from rollout.requests.codec import TENSORS, refuse
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


class Family(ABC):
    """How models of some types take images."""

    types: ClassVar[tuple[str, ...]] = ()
    """`model_type` of the configurations."""
    tensors: tuple[str, ...] = (PIXELS,)
    """Names of the images' tensors."""
    required: ClassVar[tuple[str, ...]] = (PIXELS,)
    """Those without which there is no image."""
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
    """Whether tensors of a prompt have a dimension of the batch before that of the tiles of all its images."""

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
            ImageItem(inputs, count, digest_of(inputs), VIDEO_PIXELS in inputs) for inputs, count in self._cut(images)
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
    def _cut(self, images: ImageInputs) -> Iterator[tuple[dict[str, Tensor], int]]:
        """Inputs and count of each item, of tensors whose names are right."""

    def _tower_inputs(self, item: ImageItem) -> dict[str, Tensor]:
        return item.inputs


def _joined(parts: Any) -> Tensor:
    whole = torch.cat(list(parts), dim=0) if isinstance(parts, list | tuple) else parts
    flat: Tensor = whole.flatten(0, -2)
    return flat
