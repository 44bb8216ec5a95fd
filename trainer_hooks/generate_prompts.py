"""The rows of a transformers `generate` call as prompts for the rollout: without padding, each with its own images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rollout import SamplingParams
from rollout.requests.images import ImageInputs
from trainer_hooks.generate_options import CACHES, NotServed
from trainer_hooks.trl_images import images_of_rows


class Pixels(dict[str, Any]):
    """The encoded images of a `generate` call, and the tensors that they were encoded from.

    `generate` encodes images before it expands rows, and then drops the original tensors, which the engine needs.

    Attributes:
        taken: the arguments that the image encoder has consumed, by name.
        given: all model arguments, as they were before the image encoder ran.
        sizes: dict from each key of the encoder's outputs, such as "image", to the number of embeddings of each image.
    """

    def __init__(self, encoded: Mapping[str, Any], taken: Iterable[str], given: dict[str, Any]) -> None:
        super().__init__(encoded)
        self.given = given
        self.taken = {name: given[name] for name in taken if given[name] is not None}
        # Store the sizes now, because `generate` changes these lists when it expands rows.
        self.sizes = {name: [len(each) for each in output.pooler_output] for name, output in encoded.items()}


@dataclass(frozen=True)
class Row:
    """One row of a `generate` call.

    Attributes:
        tokens: token ids of the prompt, without padding.
        images: images of the prompt, or None without images.
        tail: token ids that were already generated after the prompt.
    """

    tokens: list[int]
    images: ImageInputs | None = None
    tail: list[int] = field(default_factory=list)

    def continued(self, tail: list[int]) -> Row:
        """Return a copy of the row with `tail` as the tokens generated so far."""
        return replace(self, tail=list(tail))

    @property
    def prompt(self) -> Any:
        """The prompt followed by `tail`, with any images, in the form that `RolloutManager.generate` accepts."""
        tokens = [*self.tokens, *self.tail]
        return tokens if self.images is None else {"input_ids": tokens, **self.images.tensors}


def grouped(rows: Sequence[Row], params: Sequence[SamplingParams]) -> Iterable[list[int]]:
    """Group the indices of rows with equal prompts, images and parameters. Order the groups by their first index."""
    groups: dict[Any, list[int]] = {}
    for number, (row, chosen) in enumerate(zip(rows, params, strict=True)):
        digest = None if row.images is None else row.images.digest
        key = tuple(row.tokens), tuple(row.tail), digest, chosen.max_tokens, chosen.min_tokens
        groups.setdefault(key, []).append(number)
    return groups.values()


def rows_of(model: nn.Module, input_ids: Tensor, given: Mapping[str, Any], copies: int) -> list[Row]:
    """Return the rows of a batch.

    Args:
        model: the model, whose own position ids are compared with the caller's.
        input_ids: token ids [N, T], padded on the left where `attention_mask` is 0.
        given: the model arguments that `generate` prepared.
        copies: number of adjacent rows that `generate` made from each prompt (`num_return_sequences`).

    Raises:
        NotServed: some padding is not on the left, the caller's position ids differ, or images cannot be split into rows.
    """
    mask = given.get("attention_mask")
    real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    if real.shape != input_ids.shape or not (real[:, -1].all() and (real[:, 1:] >= real[:, :-1]).all()):
        raise NotServed("an attention_mask with zeros elsewhere than on the left")
    tokens = [ids[kept].tolist() for ids, kept in zip(input_ids.cpu(), real.cpu(), strict=True)]
    pixels = given.get("mm_encoder_outputs")
    if pixels and not isinstance(pixels, Pixels):
        raise NotServed("mm_encoder_outputs= of the caller")
    before = pixels.given if isinstance(pixels, Pixels) else {}
    _check_positions(model, input_ids[::copies], None if mask is None else mask[::copies], given, before, copies)
    if not pixels:
        return [Row(each) for each in tokens]
    firsts = _images(model, input_ids[::copies], pixels)
    return [Row(each, firsts[number // copies]) for number, each in enumerate(tokens)]


def _check_positions(
    model: Any, input_ids: Tensor, mask: Tensor | None, given: Mapping[str, Any], before: Mapping[str, Any], copies: int
) -> None:
    positions = given.get("position_ids")
    if positions is None:
        return
    known = {name: value for name, value in before.items() if name not in ("position_ids", *CACHES)}
    known["attention_mask"] = torch.ones_like(input_ids) if mask is None else mask
    expected = model._prepare_position_ids_for_generation(input_ids, known)
    own = positions[..., ::copies, :]
    if own.shape[-1] != expected.shape[-1] or not (own == expected.to(own)).all():
        raise NotServed("position_ids= of the caller")


def _images(model: Any, input_ids: Tensor, pixels: Pixels) -> list[ImageInputs | None]:
    """Return the images that fill each row's placeholder tokens, or None for a row without placeholder tokens."""
    if set(pixels.sizes) != {"image"}:
        raise NotServed(f"{', '.join(sorted(pixels.sizes))} in one batch: only images are split into rows")
    wanted = (input_ids == model.config.image_token_id).sum(1).tolist()
    sizes, numbers = iter(pixels.sizes["image"]), []
    for places in wanted:
        number = filled = 0
        while filled < places:
            filled += next(sizes, places + 1)
            number += 1
        if filled != places:
            raise NotServed("images whose embeddings do not fill the placeholders of a row")
        numbers.append(number)
    if next(sizes, None) is not None:
        raise NotServed("more images than placeholders")
    try:
        return images_of_rows(len(input_ids), pixels.taken | {"num_images": numbers})
    except (ValueError, RuntimeError) as error:
        raise NotServed(f"images: {error}") from None
