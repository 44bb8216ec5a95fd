"""Images of a batch, as the trainer's forward takes them.

Always true: the placeholders of the chosen rows and the images' embeddings agree, or `inputs` raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from rollout.requests.images import PIXELS, TILED_DIMENSIONS
from rollout.requests.request import DynamicInferenceRequest, VLMInferenceRequest


@dataclass(frozen=True)
class ImageLayout:
    """How a model finds images among its tokens.

    Attributes:
        placeholder: token id.
        tiled: whether tensors of a row are [1, tiles, …].
        video: token id of the placeholder of videos; None: there is none.
        token_types: argument of the forward that marks the placeholders; None: it needs none.
    """

    placeholder: int
    token_types: str | None
    tiled: bool = False
    video: int | None = None


@dataclass(frozen=True, eq=False)
class BatchImages:
    """Images of N rows.

    Attributes:
        tensors: per row what its prompt brought, shared by the samples of a group; None: a row of text.
        placeholders: uint8 [N, T], 1 where embeddings of images go, 2 where those of videos go, 0 elsewhere.
        sampled: int64 [N], placeholders that were sampled, to which no image belongs.
    """

    layout: ImageLayout
    tensors: tuple[Mapping[str, Tensor] | None, ...]
    placeholders: Tensor
    sampled: Tensor

    @classmethod
    def of(
        cls,
        layout: ImageLayout | None,
        rows: Sequence[DynamicInferenceRequest],
        input_ids: NDArray[np.int64],
        sampled: NDArray[np.bool_],
        device: torch.device | str | None,
    ) -> BatchImages | None:
        """Images of a batch; None: no row has any.

        Args:
            input_ids: [N, T].
            sampled: bool [N, T], tokens that were sampled.
        """
        images = [row.images if isinstance(row, VLMInferenceRequest) else None for row in rows]
        if layout is None or not any(images):
            return None
        kinds = (input_ids == layout.placeholder).astype(np.uint8)
        if layout.video is not None:
            kinds[input_ids == layout.video] = 2
        return cls(
            layout,
            tuple(None if each is None else each.tensors for each in images),
            torch.from_numpy(np.where(sampled, 0, kinds)).to(device),
            torch.from_numpy((sampled & (kinds > 0)).sum(1)).to(device),
        )

    def to(self, device: torch.device | str) -> BatchImages:
        """The same with masks on `device`; `inputs` moves the pixels it takes."""
        return replace(self, placeholders=self.placeholders.to(device), sampled=self.sampled.to(device))

    def inputs(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Arguments of the trainer's forward beside tokens and mask, on the device of the masks.

        Raises:
            ValueError: a placeholder was sampled in one of the rows.
        """
        chosen = [self.tensors[row] for row in rows]
        named = [each for each in chosen if each is not None]
        if not named:
            return {}
        device = self.placeholders.device
        index = torch.tensor(list(rows), dtype=torch.long, device=device)
        if self.sampled[index].any():
            wrong = [row for row in rows if self.sampled[row]]
            of_video = "" if self.layout.video is None else f", or {self.layout.video} of a video"
            bias = {token: -100 for token in (self.layout.placeholder, self.layout.video) if token is not None}
            raise ValueError(
                f"rows {wrong}: a placeholder of an image (token {self.layout.placeholder}{of_video}) was sampled, and the "
                "model's forward would look for its image: leave these rows out, or sample with "
                f"SamplingParams(logit_bias={bias})"
            )
        joined = {}
        for name in {name: None for each in named for name in each}:
            parts = [each[name] for each in named if name in each]
            tiled = self.layout.tiled and named[0][PIXELS].ndim == TILED_DIMENSIONS
            joined[name] = _tiled(parts, [each is not None for each in chosen]) if tiled else _filled(name, parts)
        found = {name: value.to(device) for name, value in joined.items()}
        if self.layout.token_types is not None:
            found[self.layout.token_types] = self.placeholders[index].long()
        return found


def _filled(name: str, parts: list[Tensor]) -> Tensor:
    """Parts behind each other. Images of unequal numbers of squares are filled up with zeros, which models leave out."""
    if name != PIXELS or parts[0].ndim != TILED_DIMENSIONS:
        return torch.cat(parts)
    most = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, [0] * 7 + [most - part.shape[1]]) for part in parts])


def _tiled(parts: Iterable[Tensor], present: Sequence[bool]) -> Tensor:
    """[1, tiles, …] of the rows that have images → [rows, most tiles, …], filled up with zeros, which models leave out."""
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
