"""Tool-call formats by chat-template family, and their detection."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of chat templates has its model write calls."""

    name: str
    """What errors and logs call it."""

    signs: tuple[str, ...]
    """Texts that a template of this family holds, all of them."""

    foreign: tuple[str, ...]
    """Texts that no template of this family holds."""

    marker: str
    """Text before a call, wherever it stands."""

    bare: str
    """What a call may begin with where no marker is: at the start of the reply and behind a call; "" for nothing.

    Markers that are special tokens are not in the text at all.
    """

    closing: str
    """Text behind a call; may be missing."""

    required: str
    """What a reply begins with that has to be a call."""

    named: str
    """What a reply begins with that has to be a call of the function NAME (a JSON string). Ends before a space: models
    write it in one token with what follows."""

    one_call_ends_at: str
    """Stop string that ends a reply behind its first call, and stands in no call and no text; "" where there is none."""

    id_prefix: str = "call_"
    """What the ids of its calls begin with."""

    id_digits: int = 24
    """Hexadecimal digits behind it."""

    def opening(self, function: str | None) -> str:
        """What a reply begins with that has to be a call (of this function)."""
        return self.required if function is None else self.named.replace("NAME", json.dumps(function))


HERMES = ToolFormat(
    name="hermes",
    signs=("<tool_call>", "arguments"),
    foreign=("<function=", "<arg_key>"),
    marker="<tool_call>",
    bare="",
    closing="</tool_call>",
    required="<tool_call>\n",
    named='<tool_call>\n{"name": NAME, "arguments":',
    one_call_ends_at="</tool_call>",
)
"""Hermes 2 and 3, Qwen 2.5 and 3."""

LLAMA3 = ToolFormat(
    name="llama3",
    signs=("<|start_header_id|>", "ipython", "parameters"),
    foreign=("<tool_call>", "func_name1("),
    marker="<|python_tag|>",
    bare="{",
    closing=";",
    required='{"name": "',
    named='{"name": NAME, "parameters":',
    one_call_ends_at="",
)
"""Llama 3.1 to 3.3, calls in JSON."""

MISTRAL = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    foreign=("[ARGS]", "[CALL_ID]"),
    marker="[TOOL_CALLS]",
    bare="[",
    closing="",
    required="[TOOL_CALLS] [",
    named='[TOOL_CALLS] [{"name": NAME, "arguments":',
    one_call_ends_at="",
    id_prefix="",
    id_digits=9,
)
"""Mistral before its tokenizer's version 11. Its templates refuse ids that are not nine letters or digits."""

FORMATS = (HERMES, LLAMA3, MISTRAL)


def format_of(template: str | None) -> ToolFormat | None:
    """The format a chat template teaches its model; None if it is none of `FORMATS`."""
    for known in FORMATS:
        if template and all(s in template for s in known.signs) and not any(f in template for f in known.foreign):
            return known
    return None
