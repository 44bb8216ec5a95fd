"""The images of a prompt: the tensors from an image processor, and token ids to which they are attached.

Always true: equal digests mean equal images, whatever device the tensors are on. Nothing in this module depends on a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgpack

from rollout.errors import InvalidRequestError
from rollout.requests.block_hash import integer_array
from rollout.requests.codec import TENSORS, unpack_msgpack

if TYPE_CHECKING:
    import torch

NO_TENSORS = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""The outputs of tokenizers and processors that are not image tensors. Token types are not kept, because the token ids
determine them."""
PIXELS = "pixel_values"
TILED_DIMENSIONS = 5
"""The number of dimensions of `pixel_values` if images have tiles: [1, tiles, channels, height, width]."""


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """The tensors of all images of one prompt, in the layout of the model's image processor."""

    tensors: Mapping[str, torch.Tensor]
    """The tensor `pixel_values` and the model's other image inputs (such as `image_grid_thw`), by name."""

    @cached_property
    def digest(self) -> bytes:
        """The BLAKE2b digest (32 bytes) of the tensors' names, dtypes, shapes and contents."""
        return digest_of(self.tensors)

    def pack(self) -> bytes:
        """Pack the tensors as msgpack, without loss."""
        packed: bytes = msgpack.packb(TENSORS.encode(dict(self.tensors)))
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> ImageInputs:
        """Decode the result of `pack`; raise `SerializationError` if it is malformed."""
        return cls(TENSORS.decode(unpack_msgpack("images", packed)))

    def begins_with(self, earlier: ImageInputs) -> bool:
        """Return whether the images in `earlier` are the first of these images, in the same order."""
        # If images have tiles, compare along the second dimension, the tiles, because the first is the batch dimension.
        tiled = PIXELS in self.tensors and self.tensors[PIXELS].ndim == TILED_DIMENSIONS
        dim = 1 if tiled else 0
        return self.tensors.keys() >= earlier.tensors.keys() and all(
            len(part.shape) == len(self.tensors[name].shape)
            and digest_of(
                {name: self.tensors[name].narrow(dim, 0, min(part.shape[dim], self.tensors[name].shape[dim]))}
            )
            == digest_of({name: part})
            for name, part in earlier.tensors.items()
        )


class ImagePrompt(list[int]):
    """The token ids of a prompt, including image placeholders, together with the images.

    Args:
        token_ids: token ids with an image's placeholder repeated once per embedding, as processors return them.
        images: the tensors of all images, in the order of their placeholders.
        keyed: the token ids for block hashes (little-endian int32), in which every placeholder is replaced by a key of the
            image's content. Empty until they are computed.
    """

    def __init__(self, token_ids: Iterable[int], images: ImageInputs, keyed: bytes = b"") -> None:
        super().__init__(token_ids)
        self.images = images
        self.keyed = keyed


def images_of(tokens: object) -> ImageInputs | None:
    """Return the images attached to token ids, or None if there are no images."""
    return tokens.images if isinstance(tokens, ImagePrompt) else None


def processed_prompt(inputs: Mapping[str, Any]) -> list[int]:
    """Convert a processor's result for one prompt to token ids, or to an `ImagePrompt` if there are images.

    Args:
        inputs: `input_ids` [P] or [1, P] for a prompt of P tokens, and the image tensors (`pixel_values`, …). Positions that
            an `attention_mask` masks are removed.

    Raises:
        TypeError: there are no `input_ids`.
        InvalidRequestError: there are several prompts, or a value cannot be converted to a tensor.
    """
    if "input_ids" not in inputs:
        raise TypeError(
            f"prompt of type {type(inputs).__name__} with the keys {sorted(map(str, inputs))}: must be text, token ids, "
            "chat messages (a list), or what a processor returned (with input_ids)"
        )
    ids = _row("input_ids", inputs["input_ids"])
    mask = inputs.get("attention_mask")
    if mask is not None:
        kept = _row("attention_mask", mask)
        if len(kept) != len(ids):
            raise InvalidRequestError(f"attention_mask of {len(kept)} positions for {len(ids)} input_ids")
        ids = [token for token, keep in zip(ids, kept, strict=True) if keep]
    tensors = {str(name): value for name, value in inputs.items() if name not in NO_TENSORS and value is not None}
    return ImagePrompt(ids, ImageInputs(as_tensors(tensors))) if tensors else ids


def as_tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Convert named values to tensors without an autograd graph; raise `InvalidRequestError` if this is not possible."""
    import torch

    tensors = {}
    for name, value in values.items():
        try:
            tensors[name] = torch.as_tensor(value).detach()
        except (TypeError, ValueError, RuntimeError) as exc:
            raise InvalidRequestError(
                f"{name} of type {type(value).__name__}: must be a tensor, as processors return with "
                f"return_tensors='pt' ({exc})"
            ) from exc
    return tensors


def digest_of(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the BLAKE2b digest (32 bytes) of names, dtypes, shapes and contents of tensors."""
    import torch

    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}:{flat.dtype}:{tuple(flat.shape)};".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def _row(name: str, values: Any) -> list[int]:
    shape = tuple(getattr(values, "shape", ()))
    nested = not shape and len(values) == 1 and isinstance(values[0], list | tuple)
    if nested or (len(shape) == 2 and shape[0] == 1):
        values = values[0]
    try:
        row: list[int] = integer_array(name, values).tolist()
        return row
    except ValueError as exc:
        raise InvalidRequestError(f"{exc}; give one prompt at a time, [P] or [1, P]") from exc
