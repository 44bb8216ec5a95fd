"""The images of a batch, as arguments of the trainer's forward pass.

Always true: `inputs` raises unless the chosen rows have as many placeholders as their images have embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from rollout.manager.batch.tree import PackedTree, pack_tree
from rollout.requests.images import PIXELS, TILED_DIMENSIONS, ImageInputs

Rotary = Callable[[Tensor, Tensor, ImageInputs], Tensor | None]
"""A function (token ids, kinds, images) → rotary positions of a prompt and of the next token, as in
`multimodal.family.Family.positions`. A token's kind is 1 for image placeholders, 2 for video placeholders, 0 otherwise."""


@dataclass(frozen=True)
class ImageLayout:
    """The way a model finds images among its tokens.

    Attributes:
        placeholder: token id of the image placeholder.
        tiled: whether a row's image tensors are [1, tiles, …].
        video: token id of the video placeholder; None if the model has no videos.
        token_types: name of the forward pass's argument that marks the placeholders; None if the model has no such argument.
        bidirectional: whether positions of an image attend to each other in both directions.
        rotary: function that returns rotary positions, used only to build a batch; None if positions are as in text.
    """

    placeholder: int
    token_types: str | None
    tiled: bool = False
    video: int | None = None
    bidirectional: bool = False
    rotary: Rotary | None = None


@dataclass(frozen=True, eq=False)
class BatchImages:
    """The images of N rows, the longest of T tokens.

    Attributes:
        tensors: the image tensors of each row's prompt, which the samples of a group share; None if the row has no images.
        placeholders: uint8 [N, T], 1 at image placeholders, 2 at video placeholders, 0 elsewhere.
        sampled: int64 [N], number of placeholders in each row that were sampled, so that no image belongs to them.
        rotary: int64 [3, N, T], positions in time, height and width; None if positions are as in text.
    """

    layout: ImageLayout
    tensors: tuple[Mapping[str, Tensor] | None, ...]
    placeholders: Tensor
    sampled: Tensor
    rotary: Tensor | None = None

    @classmethod
    def of(
        cls,
        layout: ImageLayout | None,
        images: Sequence[ImageInputs | None],
        input_ids: NDArray[np.int64],
        sampled: NDArray[np.bool_],
        device: torch.device | str | None,
    ) -> BatchImages | None:
        """Collect the images of a batch; return None if no row has an image.

        Args:
            images: the images of each row; None if the row has no images.
            input_ids: [N, T], padded on the right.
            sampled: bool [N, T], the tokens that were sampled.
        """
        if layout is None or not any(images):
            return None
        kinds = (input_ids == layout.placeholder).astype(np.uint8)
        if layout.video is not None:
            kinds[input_ids == layout.video] = 2
        given = np.where(sampled, 0, kinds)
        rotary = None if layout.rotary is None else _rotary(layout.rotary, images, input_ids, given)
        return cls(
            replace(layout, rotary=None),
            tuple(None if each is None else each.tensors for each in images),
            torch.from_numpy(given).to(device),
            torch.from_numpy((sampled & (kinds > 0)).sum(1)).to(device),
            None if rotary is None else torch.from_numpy(rotary).to(device),
        )

    def to(self, device: torch.device | str) -> BatchImages:
        """Return the same images with their masks on `device`. Pixels are moved later, by `inputs`."""
        return replace(
            self,
            placeholders=self.placeholders.to(device),
            sampled=self.sampled.to(device),
            rotary=None if self.rotary is None else self.rotary.to(device),
        )

    def inputs(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the image arguments of the trainer's forward pass, on the device of the masks.

        Raises:
            ValueError: a placeholder was sampled in one of the rows.
        """
        if not any(self.tensors[row] is not None for row in rows):
            return {}
        self._check_sampled(rows)
        found = self._pixels(rows)
        if self.layout.token_types is not None:
            found[self.layout.token_types] = self.placeholders[list(rows)].long()
        return found

    def tree(
        self, input_ids: Tensor, real: Tensor, wanted: Tensor, rows: Tensor, routed_experts: Tensor | None
    ) -> PackedTree:
        """Pack R rows of the batch as a prefix tree. An image in a prefix that several rows share is included once.

        Args:
            input_ids, real, wanted, routed_experts: the rows' tensors, as in `pack_tree`.
            rows: int64 [R], the rows' numbers in the batch.

        Raises:
            ValueError: a placeholder was sampled in one of the rows.
        """
        numbers: list[int] = rows.tolist()
        self._check_sampled(numbers)
        keyed, first_of = input_ids.clone(), self._mark(input_ids, numbers)
        kinds = self.placeholders[rows]
        for row, first in enumerate(first_of):
            keyed[row, kinds[row] > 0] = -1 - first
        packed = pack_tree(keyed, real, wanted, rows, routed_experts)
        nodes = packed.nodes[real]

        def of_tree(values: Tensor) -> Tensor:
            """Return the values of the tree's L tokens, [..., L], given the values in R rows of T tokens, [..., R, T]."""
            whole = values.new_zeros(*values.shape[:-2], len(packed))
            whole[..., nodes] = values[..., real]
            return whole

        marked = packed.input_ids[0, packed.input_ids[0] < 0].tolist()
        # Order the images as their placeholders appear in the tree, which sorts the rows.
        shown = [numbers[-1 - mark] for mark in dict.fromkeys(marked)]
        inputs = self._pixels(shown, joined=True) if shown else {}
        if self.layout.token_types is not None:
            inputs[self.layout.token_types] = of_tree(kinds)[None].long()
        if self.rotary is not None:
            rotary = of_tree(self.rotary[:, rows])[:, None]
            inputs["position_ids"] = torch.cat([packed.position_ids[None], rotary])
        packed = replace(packed, input_ids=of_tree(input_ids)[None], image_inputs=inputs)
        if not self.layout.bidirectional:
            return packed
        lasts = of_tree(packed.nodes.gather(1, _last_columns(kinds))).to(packed.attention_mask)
        return replace(packed, attention_mask=torch.cat([packed.attention_mask, lasts[None, None, None]], dim=2))

    def _mark(self, input_ids: Tensor, numbers: Sequence[int]) -> list[int]:
        """Return, for each row in `numbers`, the first row with the same tokens and images up to the last placeholder."""
        known: dict[Any, int] = {}
        first_of: list[int] = []
        digest, before = b"", None
        for row, number in enumerate(numbers):
            places, tensors = self.placeholders[number].nonzero()[:, 0], self.tensors[number]
            if tensors is None or not len(places):
                first_of.append(row)
                continue
            if before is None or not _same(tensors, before):
                digest, before = ImageInputs(tensors).digest, tensors
            tokens = input_ids[row, : int(places[-1]) + 1].tolist()
            first_of.append(known.setdefault((digest, *tokens), row))
        return first_of

    def _check_sampled(self, rows: Sequence[int]) -> None:
        if self.sampled[list(rows)].any():
            wrong = [row for row in rows if self.sampled[row]]
            of_video = "" if self.layout.video is None else f", or {self.layout.video} of a video"
            bias = {token: -100 for token in (self.layout.placeholder, self.layout.video) if token is not None}
            raise ValueError(
                f"rows {wrong}: a placeholder of an image (token {self.layout.placeholder}{of_video}) was sampled, and the "
                "model's forward would look for its image: leave these rows out, or sample with "
                f"SamplingParams(logit_bias={bias})"
            )

    def _pixels(self, rows: Sequence[int], joined: bool = False) -> dict[str, Tensor]:
        """Concatenate the image tensors of rows.

        Args:
            joined: whether to lay the tensors out as if one row had all the images.
        """
        chosen = [self.tensors[row] for row in rows]
        named = [each for each in chosen if each is not None]
        found = {}
        for name in {name: None for each in named for name in each}:
            parts = [each[name] for each in named if name in each]
            tiled = self.layout.tiled and named[0][PIXELS].ndim == TILED_DIMENSIONS
            whole = _tiled(parts, [each is not None for each in chosen]) if tiled else _filled(name, parts)
            # Joining surplus tiles is harmless: they are zeros, which models ignore.
            found[name] = (whole.flatten(0, 1)[None] if tiled and joined else whole).to(self.placeholders.device)
        return found


def _rotary(
    rotary: Rotary, images: Sequence[ImageInputs | None], input_ids: NDArray[np.int64], kinds: NDArray[np.uint8]
) -> NDArray[np.int64] | None:
    """Return the rotary positions, int64 [3, N, T] for time, height and width; None if positions are as in text."""
    count, width = input_ids.shape
    found = np.broadcast_to(np.arange(width), (3, count, width)).copy()
    before: tuple[int, int] | None = None
    for row, each in enumerate(images):
        places = np.flatnonzero(kinds[row])
        if each is None or not len(places):
            continue
        stop, earlier = int(places[-1]) + 1, None if before is None else images[before[0]]
        if before is not None and earlier is not None and before[1] == stop and _same(each.tensors, earlier.tensors) and (
            (input_ids[row, :stop] == input_ids[before[0], :stop]).all()
        ):  # fmt: skip
            found[:, row] = found[:, before[0]]
            continue
        known = rotary(
            torch.from_numpy(input_ids[row, :stop]), torch.from_numpy(kinds[row, :stop].astype(np.int64)), each
        )
        if known is None:
            return None
        positions = known.cpu().numpy()
        found[:, row, :stop] = positions[:, :stop]
        found[:, row, stop:] += positions[0, stop] - stop
        before = row, stop
    return found


def _last_columns(kinds: Tensor) -> Tensor:
    """Return int64 [N, T]: for a placeholder, the last column of its run; for other tokens, their own column.

    Args:
        kinds: uint8 [N, T], above 0 at placeholders. A run is a sequence of placeholders next to each other.
    """
    columns = torch.arange(kinds.shape[1], device=kinds.device).expand(kinds.shape)
    behind = torch.where(kinds > 0, kinds.shape[1], columns).flip(1).cummin(1).values.flip(1)
    return torch.where(kinds > 0, behind - 1, columns)


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(value is other[name] for name, value in one.items())


def _filled(name: str, parts: list[Tensor]) -> Tensor:
    """Concatenate `parts`, the tensors `name` of several rows. Missing tiles are filled with zeros, which models ignore."""
    if name != PIXELS or parts[0].ndim != TILED_DIMENSIONS:
        return torch.cat(parts)
    most = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, [0] * 7 + [most - part.shape[1]]) for part in parts])


def _tiled(parts: Iterable[Tensor], present: Sequence[bool]) -> Tensor:
    """Stack the tensors [1, tiles, …] of the rows that have images into [rows, max tiles, …].

    Missing tiles, and rows without images, are zeros, which models ignore.
    """
    parts = list(parts)
    largest = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    filled = iter(
        pad(
            part,
            [side for size, most in zip(part.shape[:0:-1], largest[::-1], strict=True) for side in (0, most - size)],
        )
        for part in parts
    )
    empty = parts[0].new_zeros(1, *largest)
    return torch.cat([next(filled) if there else empty for there in present])
