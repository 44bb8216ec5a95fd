"""Tool-call formats by chat-template family, and their detection."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool-call syntax of a family of chat templates."""

    name: str
    """Name in errors and logs."""

    signs: tuple[str, ...]
    """Texts that every template of this family contains."""

    foreign: tuple[str, ...]
    """Texts that no template of this family contains."""

    marker: str
    """Text before a call."""

    bare: str
    """Beginning of a call without a marker, at the start of the reply or directly after a call; "" if not permitted.

    Needed because markers that are special tokens do not appear in the text.
    """

    closing: str
    """Text after a call; optional in a reply."""

    required: str
    """Beginning of a reply that must be a call."""

    named: str
    """Beginning of a reply that must be a call of the function NAME (a JSON string). Ends before a space, because models
    generate the space in one token with the text after it."""

    one_call_ends_at: str
    """Stop string that ends a reply after its first call and occurs in no call or text; "" if there is none."""

    id_prefix: str = "call_"
    """Prefix of call ids."""

    id_digits: int = 24
    """Number of hexadecimal digits in call ids."""

    def opening(self, function: str | None) -> str:
        """Return the beginning of a reply that must be a call of `function`; None: of any function."""
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
"""Mistral before tokenizer version 11. Its templates require call ids of nine letters or digits."""

FORMATS = (HERMES, LLAMA3, MISTRAL)


def format_of(template: str | None) -> ToolFormat | None:
    """Return the tool-call format of a chat template, or None if it is none of `FORMATS`."""
    for known in FORMATS:
        if template and all(s in template for s in known.signs) and not any(f in template for f in known.foreign):
            return known
    return None
