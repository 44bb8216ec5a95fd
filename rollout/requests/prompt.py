"""The type of one prompt, as every caller may pass it; padding of prompts that a tokenizer returned together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rollout.errors import InvalidRequestError, warn_caller

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, chat messages, or what a processor returned for one prompt with images."""

NO_TENSORS = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""What tokenizers return, and processors next to the images' tensors; token types follow from the token ids."""


def unpadded(prompts: Any, *owners: Any, name: str = "prompts", single: bool = False) -> Any:
    """Return prompts that a tokenizer returned together as lists of token ids without padding; anything else as it is.

    A mapping with `input_ids` of several rows loses the positions that its `attention_mask` masks. A 2-D array or tensor
    has no mask, so a row that begins or ends with the padding token is refused; lists of equal length are warned of. One
    bos or eos token that also is the padding token is a token if every row has it: the longest row has no padding.

    Args:
        owners: tokenizer and configurations of the model, which name the padding, bos and eos tokens.
        name: of the argument, for messages.
        single: leave a mapping with one row as it is: one prompt.

    Raises:
        InvalidRequestError: a row may have padding; or the mask has another shape.
        TypeError: several prompts with images in one mapping.
    """
    if isinstance(prompts, Mapping):
        ids, mask = prompts.get("input_ids"), prompts.get("attention_mask")
        images = not prompts.keys() <= NO_TENSORS
        if (rows := _rows(ids)) is None or (len(rows) == 1 and (single or images)):
            return prompts
        if images:
            kind = type(prompts).__name__
            raise TypeError(f"{name} is one {kind} of {len(rows)} prompts with images: pass a list, one each")
        if mask is None:
            return unpadded(ids, *owners, name=name)
        masks = _rows(mask) or []
        if [len(each) for each in masks] != [len(each) for each in rows]:
            raise InvalidRequestError(
                f"{name}: attention_mask has another shape than input_ids: pass what one call of the tokenizer returned"
            )
        return [[token for token, kept in zip(*each, strict=True) if kept] for each in zip(rows, masks, strict=True)]
    rows = _rows(prompts)
    if rows is None:
        return prompts
    is_array = getattr(prompts, "ndim", 0) == 2
    if (is_array or len({len(row) for row in rows}) == 1) and (found := _padded(rows, owners)):
        message = (
            f"{name}{found}: padding would be sampled from as part of the prompt; pass the tokenizer's whole output, "
            "whose attention_mask tells padding apart, or ids without padding: tokenizer(texts)['input_ids']"
        )
        if is_array:
            raise InvalidRequestError(message)
        if len(rows) > 1:
            warn_caller(message)
    return rows if is_array else prompts


def _rows(values: Any) -> list[list[int]] | None:
    """The rows of a 2-D array, or of a list of lists or 1-D arrays of token ids; None: it is something else."""
    ndim = getattr(values, "ndim", None)
    if ndim is not None:
        rows: list[list[int]] | None = values.tolist() if ndim == 2 else None
        return rows
    if not isinstance(values, list | tuple) or not values:
        return None
    plain = [each.tolist() if getattr(each, "ndim", 0) == 1 else each for each in values]
    fits = all(isinstance(each, list | tuple) and (not each or hasattr(each[0], "__index__")) for each in plain)
    return plain if fits else None


def _padded(rows: Sequence[Sequence[int]], owners: Sequence[Any]) -> str:
    """Which row begins or ends with padding, for a message; "" if none does."""
    found = [getattr(owner, "pad_token_id", None) for owner in owners]
    pad = next((each for each in found if isinstance(each, int)), None)
    special: list[Any] = []
    for owner in owners:
        for each in (getattr(owner, "bos_token_id", None), getattr(owner, "eos_token_id", None)):
            special += each if isinstance(each, list | tuple) else [each]
    for verb, step in (("begins", 1), ("ends", -1)):
        runs = [len(list(takewhile(lambda token: token == pad, row[::step]))) for row in rows]
        if any(runs) and not (pad in special and set(runs) == {1}):
            index = runs.index(max(runs))
            return f"[{index}] {verb} with {runs[index]} times the padding token {pad}"
    return ""


def has_images(prompt: object) -> bool:
    """Whether a prompt is what a processor returned, or chat messages with parts that are not text."""
    if isinstance(prompt, Mapping):
        return True
    if not isinstance(prompt, list | tuple) or not prompt or not isinstance(prompt[0], Mapping):
        return False
    contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)
