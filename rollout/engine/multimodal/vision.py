"""Image support: reads a prompt's images at admission, and computes the image embeddings and positions of steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.multimodal.families import FAMILIES, family_of
from rollout.engine.multimodal.family import ImageItem, StepImages
from rollout.engine.scheduling.sequences import NO_IMAGES, PromptImages, SequenceTable, image_keys, is_video
from rollout.engine.scheduling.step import ScheduledStep
from rollout.errors import InvalidRequestError
from rollout.requests.images import ImageInputs

Embeddings = list[Tensor]
VIDEO = 2
"""The token type with which models mark video placeholders; image placeholders have type 1."""


class EncodingError(Exception):
    """Raised if the vision tower fails; the original exception is available as `__cause__`.

    Attributes:
        request_id: the id of the request that contains the image.
    """

    def __init__(self, request_id: int) -> None:
        super().__init__(f"the vision tower failed at an image of request {request_id}")
        self.request_id = request_id


class FeatureCache:
    """A cache of image embeddings by digest of the image, shared by all samples of a group and later turns of a dialogue.

    Always true: cached embeddings were computed with the current weights and adapters, because the engine calls `clear` when
    either changes.

    Args:
        limit: maximum size of the cache in bytes; the least recently used items are evicted. An item larger than the limit
            is encoded again whenever a step needs it.
        encode: function that computes the embeddings of an item.

    Attributes:
        bytes: size of the cached embeddings, in bytes.
        encoded: number of items encoded so far.
        reused: number of look-ups that found a cached item.
    """

    def __init__(self, limit: int, encode: Callable[[ImageItem], Embeddings]) -> None:
        self._limit = limit
        self._encode = encode
        self._kept: OrderedDict[bytes, Embeddings] = OrderedDict()
        self.bytes = 0
        self.encoded = 0
        self.reused = 0

    def of(self, item: ImageItem) -> Embeddings:
        """Return the embeddings of an item (image, tile or video). If they are not cached, compute and cache them."""
        known = self._kept.get(item.digest)
        if known is not None:
            self._kept.move_to_end(item.digest)
            self.reused += 1
            return known
        made = self._encode(item)
        self.encoded += 1
        self._kept[item.digest] = made
        self.bytes += sum(each.nbytes for each in made)
        while self.bytes > self._limit:
            self.bytes -= sum(each.nbytes for each in self._kept.popitem(last=False)[1])
        return made

    def clear(self) -> None:
        """Drop all embeddings from the cache."""
        self._kept.clear()
        self.bytes = 0


class Vision:
    """The image support of one model, which reads and encodes the images in prompts and computes their positions.

    Args:
        cache_bytes: maximum size of cached embeddings, in bytes.
        longest_run: maximum number of positions that one step can compute.
    """

    def __init__(self, model: nn.Module, device: torch.device, cache_bytes: int, longest_run: int) -> None:
        self._model = model
        self._device = device
        self._longest_run = longest_run
        config: Any = model.config
        self.image_token: int | None = getattr(config, "image_token_id", None)
        self.video_token: int | None = getattr(config, "video_token_id", None)
        self.family = None if self.image_token is None else family_of(model)
        self.causal_without_window = self.family is not None and self.family.bidirectional_in_windows
        """Whether images attend in both directions only in layers with a sliding window."""
        self._is_split = self.family is not None and _has_split_tower(model)
        self.features = FeatureCache(cache_bytes, self._encode)

    # --- admission of prompts -----------------------------------------------------------------------------------

    def read(self, tokens: Sequence[int], images: ImageInputs | None) -> PromptImages:
        """Read the images of a prompt.

        Args:
            tokens: token ids of the original prompt, without sampled tokens.
            images: tensors of the prompt's images, or None if the prompt has no images.

        Raises:
            InvalidRequestError: the images do not fit the model or the prompt's placeholders.
        """
        if self.family is None:
            if images is None:
                return NO_IMAGES
            served = ", ".join(kind for family in FAMILIES for kind in family.types)
            kind = getattr(self._model.config, "model_type", "?")
            raise InvalidRequestError(
                f"the prompt has images, and {type(self._model).__name__} ({kind}) is not among the models that are served "
                f"images: {served}; send the text alone"
            )
        if images is not None and self._is_split:
            raise InvalidRequestError(
                f"the prompt has images, and the vision tower of {type(self._model).__name__} is split over ranks: leave it "
                "out of the tp_plan"
            )
        array = np.asarray(tokens, np.int64)
        kinds = np.where(array == self.image_token, 1, np.where(array == self.video_token, VIDEO, 0))
        if images is None and not kinds.any():
            return NO_IMAGES
        items, places = self._placed([] if images is None else self.family.items(images), kinds)
        assert images is not None, "placeholders without images were refused"
        positions = self.family.positions(torch.from_numpy(array), torch.from_numpy(kinds), images)
        found = PromptImages(
            items=tuple(items),
            places=places,
            keys=image_keys(
                [item.digest for item in items], [item.count for item in items], [item.video for item in items]
            ),
            positions=None if positions is None else positions.cpu().numpy().astype(np.int64),
            whole=_runs(places) if self.family.bidirectional else (),
        )
        if found.longest_whole > self._longest_run:
            raise InvalidRequestError(
                f"an image of {found.longest_whole} tokens that attend to each other must be computed in one step, and "
                f"max_tokens_per_step={self._longest_run}; raise it"
            )
        return found

    def _placed(
        self, items: Sequence[ImageItem], kinds: NDArray[np.int64]
    ) -> tuple[list[ImageItem], NDArray[np.int64]]:
        """Return the items (images, tiles or videos) in placeholder order, and the prompt positions of all placeholders.

        Args:
            items: the items of the prompt.
            kinds: see `Family.positions`.

        Raises:
            InvalidRequestError: the placeholders do not fit the images or videos.
        """
        assert self.family is not None
        if (kinds == VIDEO).any() and not self.family.videos:
            raise InvalidRequestError(f"the prompt has placeholders of a video (token {self.video_token}): not served")
        placed: list[tuple[ImageItem, NDArray[np.int64]]] = []
        for video, token, what in ((False, self.image_token, "image"), (True, self.video_token, "video")):
            of_kind, places = [item for item in items if item.video == video], np.flatnonzero(kinds == 1 + video)
            counts = [item.count for item in of_kind]
            if len(places) != sum(counts):
                raise InvalidRequestError(
                    f"the prompt has {len(places)} placeholders (token {token}), and its {what}s become "
                    f"{sum(counts)} embeddings ({len(counts)} {what}s or tiles of {sorted(set(counts))} each): every {what} "
                    "takes as many placeholders as embeddings; send all that the processor returned, token ids and pixels"
                )
            placed += zip(of_kind, np.split(places, np.cumsum(counts)[:-1]), strict=False)
        placed.sort(key=lambda each: int(each[1][0]))
        places = np.concatenate([np.zeros(0, np.int64), *(at for _, at in placed)])
        if (np.diff(places) < 0).any():
            raise InvalidRequestError("the prompt has placeholders of an image between those of a video")
        return [item for item, _ in placed], places

    # --- steps --------------------------------------------------------------------------------------------------

    def text_ids(self, ids: NDArray[Any]) -> NDArray[Any]:
        """Return `ids` with placeholder tokens in place of the scheduler's image keys, which are negative."""
        if self.image_token is None:
            return ids
        plain = np.where(ids < 0, self.image_token, ids)
        return plain if self.video_token is None else np.where(is_video(ids), self.video_token, plain)

    def of_step(
        self, step: ScheduledStep, table: SequenceTable, offsets: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> StepImages | None:
        """Return the changes that images make to the forward pass of a step, or None if there are none.

        The caller must disable gradients.

        Args:
            step: the step, with R rows and P packed positions.
            table: the table of sequences.
            offsets: index of each row's first packed token, and P as the last entry, [R + 1].
            positions: position of each packed token in its sequence, [P].

        Raises:
            EncodingError: the vision tower raised an exception.
        """
        shifts = table.position_shift[step.rows]
        pictured = [
            (entry, sequence.images, sequence.record.request_id)
            for entry, sequence in enumerate(step.prefills, step.num_decodes)
            if sequence.images.items
        ]
        if not pictured and not shifts.any():
            return None
        rotary = positions + np.repeat(shifts, step.counts)
        if any(images.positions is not None for _, images, _ in pictured):
            rotary = np.stack([positions, rotary, rotary, rotary])
        seen = positions.copy() if any(images.whole for _, images, _ in pictured) else None
        index: list[NDArray[np.int64]] = []
        parts: list[list[Tensor]] = []
        for entry, images, request_id in pictured:
            packed = slice(offsets[entry], offsets[entry + 1])
            start = int(step.starts[entry])
            stop = start + int(step.counts[entry])
            if images.positions is not None:
                rotary[1:, packed] = images.rotary(start, stop)
            if seen is not None:
                seen[packed] = images.seen(start, stop)
            low, high = np.searchsorted(images.places, (start, stop)).tolist()
            index.append(images.places[low:high] - start + offsets[entry])
            try:
                parts += self._embeddings(images.items, low, high)
            except torch.OutOfMemoryError:
                raise
            except Exception as exc:
                raise EncodingError(request_id) from exc
        joined = [torch.cat(layer) for layer in zip(*parts, strict=True)]
        return StepImages(np.concatenate([*index, np.zeros(0, np.int64)]), joined, rotary, seen)

    def _embeddings(self, items: tuple[ImageItem, ...], low: int, high: int) -> Iterator[list[Tensor]]:
        first = 0
        for item in items:
            begin, end = max(low - first, 0), min(high - first, item.count)
            if begin < end:
                yield [layer[begin:end] for layer in self.features.of(item)]
            first += item.count

    def _encode(self, item: ImageItem) -> Embeddings:
        """Compute the embeddings of an item (image, tile or video). The caller must disable gradients."""
        assert self.family is not None
        made = self.family.encode(item, self._device)
        if len(made[0]) != item.count:
            raise RuntimeError(
                f"{type(self._model).__name__}.get_image_features gave {len(made[0])} embeddings for an image of "
                f"{item.count} placeholders"
            )
        return made

    @contextmanager
    def inputs(self, tokens: Tensor, images: StepImages) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs that replace `input_ids` in one forward pass of the model, which must run inside the block.

        Args:
            tokens: token ids, int64 [B, L], negative at the positions of image embeddings.
            images: image embeddings of the forward pass.
        """
        assert self.family is not None
        inputs = self.family.embed(tokens)
        if not images.embeddings:
            yield inputs
            return
        text = inputs["inputs_embeds"]
        index = torch.from_numpy(images.index).to(self._device)
        first, *deeper = (each.to(text) for each in images.embeddings)
        inputs["inputs_embeds"] = text.flatten(0, 1).index_copy(0, index, first).view_as(text)
        if not deeper:
            yield inputs
            return
        mask = torch.zeros(tokens.numel(), dtype=torch.bool, device=self._device)
        mask[index] = True

        def deepen(module: nn.Module, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, arguments | {"visual_pos_masks": mask.view_as(tokens), "deepstack_visual_embeds": deeper}

        # Pass the embeddings for deeper layers (deepstack) by a hook on the decoder, which takes them. The model's forward
        # has no such argument.
        handle = self.family.core.language_model.register_forward_pre_hook(deepen, with_kwargs=True)
        try:
            yield inputs
        finally:
            handle.remove()


def _has_split_tower(model: nn.Module) -> bool:
    """Return whether a parameter outside the model's text decoder and head is split over ranks."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()  # type: ignore[operator]
    text = {parameter for module in (decoder, head) if module is not None for parameter in module.parameters()}
    return any(hasattr(each, "device_mesh") and each not in text for each in model.parameters())


def _runs(places: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of each run of consecutive placeholder positions in `places`."""
    if not len(places):
        return ()
    cuts = np.flatnonzero(np.diff(places) > 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(places, cuts))
