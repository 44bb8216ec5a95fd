"""Prompts in all accepted forms: helpers that normalise `prompts` arguments, remove padding and simplify chat messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from rollout.errors import InvalidRequestError, warn_caller
from rollout.requests.images import NO_TENSORS, ImagePrompt

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A prompt: text, token ids, chat messages, or the processor's result for one prompt with images."""


def unpadded(prompts: Any, *owners: Any, name: str = "prompts", single: bool = False) -> Any:
    """Convert a tokenizer's batch of prompts to lists of token ids without padding; return anything else unchanged.

    If a mapping has several rows of `input_ids`, positions that `attention_mask` masks are removed. A 2-D array has no mask,
    so a row that begins or ends with the padding token raises an error. Lists of equal length only cause a warning. There is
    an exception if the padding token is also the bos or eos token and every row has exactly one at the same end. That token
    then counts as part of the prompt, because the longest row of a padded batch would have no padding.

    Args:
        owners: the tokenizer and the model's configurations, which define the padding, bos and eos tokens.
        name: name of the argument, for messages.
        single: whether to return a mapping with one row unchanged.

    Raises:
        InvalidRequestError: a row may have padding, or the mask has another shape than `input_ids`.
        TypeError: a mapping has several prompts with images.
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
        cure = (
            "padding would be sampled from as part of the prompt; pass the tokenizer's whole output, whose attention_mask "
            "tells padding apart, or ids without padding: tokenizer(texts)['input_ids']"
        )
        if is_array:
            raise InvalidRequestError(f"{name}{found}: {cure}")
        if len(rows) > 1:  # The text names no row, so Python shows the warning once per calling line.
            warn_caller(f"{name}: a row begins or ends with the padding token: {cure}")
    return rows if is_array else prompts


def _rows(values: Any) -> list[list[int]] | None:
    """Return the rows of a 2-D array, or of a list of lists or 1-D arrays of token ids. Return None for anything else."""
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
    """Describe a row that begins or ends with padding, for a message; "" if there is no such row."""
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
    """Return whether a prompt is a processor's result, or chat messages with parts other than text."""
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
    """Return the prompts as a list, and whether the argument was a single prompt. `[]` means no prompts at all.

    Args:
        prompts: a `Prompt`, or a list of prompts of one kind; tuples, numpy arrays and tensors count as lists.

    Raises:
        TypeError: `prompts` has another form. The message names the position of the wrong item.
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
    """Return whether the item is a processor's result for one prompt."""
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
    """Return the kind of all `items`, such as "text", or None if there are none. Raise `TypeError` if kinds differ."""
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


# --- chat messages --------------------------------------------------------------------------------------------------------

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]

SHOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""The keys of an HTTP message that are passed to the chat template."""

IMAGES = ("image_url", "image")
"""The `type` of a content part that is an image, in OpenAI's API and in transformers' chat templates."""


class MessageImage(NamedTuple):
    """An image in a message. `where` is its place in the messages, for errors; `source` is read by `open_picture`."""

    where: str
    source: Any


def plain_messages(
    messages: Sequence[Mapping[str, Any]],
    shown: Collection[str] | None = None,
    images: list[MessageImage] | None = None,
) -> list[Message]:
    """Copy messages for a template: join text parts, parse call arguments into objects, drop None values.

    Args:
        shown: keys to copy, because the template may read them. If None, all keys are copied.
        images: list to which every image is appended. Content with images then stays a list of parts, as the templates of
            vision models require. If None, images are rejected.

    Raises:
        InvalidRequestError: a message is malformed.
    """
    if not messages:
        raise InvalidRequestError("messages: empty; give at least one message")
    return [_message(message, f"messages[{index}]", shown, images) for index, message in enumerate(messages)]


def known_roles(messages: list[Message], template: str) -> list[Message]:
    """Replace the role "developer" with "system" if `template` lacks it, because most templates drop unknown roles."""
    if "developer" in template:
        return messages
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _message(
    message: Mapping[str, Any], where: str, keys: Collection[str] | None, images: list[MessageImage] | None
) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where}={message!r:.80}: must be an object with a role")
    shown = {key: message[key] for key in keys or message if message.get(key) is not None}
    if "content" in shown:
        shown["content"] = _content(shown["content"], f"{where}.content", images)
    if "tool_calls" in shown:
        calls = shown.pop("tool_calls")
        if not isinstance(calls, list):
            raise InvalidRequestError(f"{where}.tool_calls={calls!r:.80}: must be a list of calls")
        # Leave out an empty list: templates only test whether the key exists.
        if calls:
            shown["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return shown


def image_of(part: Any, where: str) -> MessageImage | None:
    """Return the image that a content part names, in OpenAI's or transformers' form, or None if it is another kind of part.

    The forms are {"type": "image_url", "image_url": {"url": …}} and {"type": "image", "image": …} (or "url", "path").

    Raises:
        InvalidRequestError: the part does not name exactly one image, has other fields, or is a video.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("video_url", "video"):
        raise InvalidRequestError(
            f"{where}: videos in messages are not decoded; call the model's processor with text and videos, and send what "
            "it returns as the prompt"
        )
    if kind not in IMAGES:
        return None
    said = {key: value for key, value in part.items() if value is not None and key != "type"}
    if isinstance(said.get("image_url"), Mapping):
        said |= {key: value for key, value in said.pop("image_url").items() if value not in (None, "auto")}
    sources = [said.pop(key) for key in (*IMAGES, "url", "path") if key in said]
    if said or len(sources) != 1:
        wrong = (
            f"{', '.join(map(repr, said))} is not read here" if said else f"names {len(sources)} images, must name one"
        )
        raise InvalidRequestError(
            f'{where}={part!r:.80}: {wrong}; {{"type": "image_url", "image_url": {{"url": …}}}} or '
            '{"type": "image", "image": …}'
        )
    return MessageImage(where, sources[0])


def _content(content: Any, where: str, images: list[MessageImage] | None) -> str | list[dict[str, Any]]:
    if images is None or not isinstance(content, list):
        return _text(content, where)
    found = [image_of(part, f"{where}[{place}]") for place, part in enumerate(content)]
    if all(each is None for each in found):
        return _text(content, where, IMAGES)
    parts: list[dict[str, Any]] = []
    for place, (part, each) in enumerate(zip(content, found, strict=True)):
        if each is None:
            parts.append({"type": "text", "text": _text([part], where, IMAGES, place)})
        else:
            images.append(each)
            parts.append({"type": "image"})
    return parts


def _text(content: Any, where: str, others: Sequence[str] = (), first: int = 0) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}={content!r:.80}: must be text or a list of text parts")
    for place, part in enumerate(content, first):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            beside = f", and parts of type {', '.join(others)}," if others else ""
            raise InvalidRequestError(
                f'{where}[{place}]={part!r:.80}: only {{"type": "text", "text": …}}{beside} can be shown to this model'
            )
    return "".join(part["text"] for part in content)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}={call!r:.80}: must be an object with a function that has a name")
    return {**call, "function": {**function, "arguments": plain_arguments(function.get("arguments"))}}


def plain_arguments(written: Any) -> Any:
    """Return a tool call's arguments for a template: parsed if they are a JSON object, {} if None, else unchanged."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        read = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return read if isinstance(read, dict) else written
