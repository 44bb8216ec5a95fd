"""The type of one prompt, as every caller may pass it, and the `prompts` argument normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout.requests.images import ImagePrompt

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""Text, token ids, chat messages, or what a processor returned for one prompt with images."""


def has_images(prompt: object) -> bool:
    """Whether a prompt is what a processor returned, or chat messages with parts that are not text."""
    if isinstance(prompt, Mapping):
        return True
    if not isinstance(prompt, list | tuple) or not prompt or not isinstance(prompt[0], Mapping):
        return False
    contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(isinstance(part, Mapping) and part.get("type") != "text" for part in parts)


_RULE = (
    "prompts must be a text, a list of token ids, a list of chat messages, or a list of one of these (all of one kind)"
)


def normalized(prompts: object) -> tuple[list[Prompt], bool]:
    """The prompts, and whether it was a single one. `[]` is no prompt.

    Args:
        prompts: str, list[int], list[dict] (messages), what a processor returned, or list[str], list[list[int]],
            list[list[dict]], list of what a processor returned; tuples, numpy arrays and tensors count as lists.

    Raises:
        TypeError: anything else; names the position.
    """
    if isinstance(prompts, str | ImagePrompt) or _processed(prompts):
        return [prompts], True  # type: ignore[list-item]
    items = _list(prompts)
    if items is None:
        raise TypeError(f"prompts of type {type(prompts).__name__}: {_RULE}")
    kind = _kind(items, "prompts")
    if kind in ("token id", "message"):
        return [_plain(items, kind)], True
    return [_one(item, f"prompts[{position}]") for position, item in enumerate(items)], False


def _processed(item: object) -> bool:
    """Whether it is what a processor returned for one prompt."""
    return isinstance(item, Mapping) and "input_ids" in item


def _one(item: object, name: str) -> Prompt:
    if isinstance(item, str | ImagePrompt) or _processed(item):
        return item  # type: ignore[return-value]
    items = _list(item) or []
    kind = _kind(items, name)
    if kind not in (None, "token id", "message"):
        raise TypeError(f"{name} is a list of {kind}s: {_RULE}")
    return _plain(items, kind)


def _kind(items: list[Any], name: str) -> str | None:
    """What the items are, all of them; None: there is none."""
    first = None
    for position, item in enumerate(items):
        kind = _kind_of(item)
        if kind is None or (first is not None and kind != first):
            expected = "" if first is None else f" among {first}s"
            raise TypeError(f"{name}[{position}] is a {type(item).__name__}{expected}: {_RULE}")
        first = kind
    return first


def _kind_of(item: object) -> str | None:
    if isinstance(item, str):
        return "text"
    if _processed(item):
        return "processed prompt"
    if isinstance(item, Mapping):
        return "message"
    if _list(item) is not None:
        return "list"
    return "token id" if hasattr(item, "__index__") and not isinstance(item, bool) else None


def _list(value: object) -> list[Any] | None:
    tolist = getattr(value, "tolist", None)
    plain = tolist() if tolist is not None else value
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes | bytearray):
        return list(plain)
    return None


def _plain(items: list[Any], kind: str | None) -> Prompt:
    return [dict(item) for item in items] if kind == "message" else [int(item) for item in items]
