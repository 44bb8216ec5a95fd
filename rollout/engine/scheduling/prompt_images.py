"""What the scheduler knows of a prompt's images: their places, keys, positions, and where no chunk may end. No tensors.

In the arrays of the scheduler the placeholder of an image is replaced by a *key*, a negative number made of the image's
content. Block hashes, comparisons of cached blocks and forks then tell images apart like tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, shared by its samples.

    Attributes:
        items: one per image (or tile of one), each with a `digest` of its content and the `count` of its embeddings.
        places: [I] positions of the placeholders, ascending; those of an item follow each other.
        keys: [I] negative keys.
        positions: [3, P + 1] rotary positions of the prompt and of the token after it (time, height, width); None: those of
            text.
        whole: (start, stop) of the runs whose positions see each other in both directions.
    """

    items: tuple[Any, ...]
    places: NDArray[np.int64]
    keys: IntArray
    positions: NDArray[np.int64] | None = None
    whole: tuple[tuple[int, int], ...] = ()

    @property
    def shift(self) -> int:
        """What is added to a position after the prompt for its rotary position."""
        if self.positions is None:
            return 0
        return int(self.positions[0, -1]) + 1 - int(self.positions.shape[1])

    @property
    def longest_whole(self) -> int:
        """Tokens of the longest run that one step has to compute at once."""
        return max((stop - start for start, stop in self.whole), default=0)

    def keyed(self, tokens: Sequence[int]) -> IntArray:
        """Token ids with keys in place of the placeholders."""
        array = np.asarray(tokens, np.int32)
        array[self.places] = self.keys
        return array

    def fitting(self, start: int, count: int) -> int:
        """The most positions, at most `count`, that a chunk from `start` may have without ending inside a run."""
        for first, stop in self.whole:
            if first < start + count < stop:
                return max(0, first - start)
        return count

    def rotary(self, start: int, stop: int) -> NDArray[np.int64]:
        """[3, stop - start] rotary positions."""
        own = np.broadcast_to(np.arange(start, stop, dtype=np.int64), (3, stop - start))
        if self.positions is None:
            return own
        known = self.positions[:, start:stop]
        return np.concatenate([known, own[:, known.shape[1] :] + self.shift], axis=1)

    def seen(self, start: int, stop: int) -> NDArray[np.int64]:
        """[stop - start] last position that each of these sees: its own, or the last of its run."""
        last = np.arange(start, stop, dtype=np.int64)
        for first, end in self.whole:
            last[max(0, first - start) : max(0, end - start)] = end - 1
        return last


def image_keys(digests: Sequence[bytes], counts: Sequence[int], videos: Sequence[bool]) -> IntArray:
    """[sum of counts] int32 keys below 0: the words of each digest in turn, 31 bits of each, whose lowest tells a video."""
    words = [
        np.frombuffer(digest, "<u4").astype(np.int64) & 0x7FFFFFFE | video
        for digest, video in zip(digests, videos, strict=True)
    ]
    keys = [np.resize(-1 - each, count) for each, count in zip(words, counts, strict=True)]
    return np.concatenate([*keys, np.zeros(0, np.int64)]).astype(np.int32)


def is_video(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of the ids, some of them keys, are keys of videos."""
    keys: NDArray[np.bool_] = (ids < 0) & ((-1 - ids) % 2 == 1)
    return keys
