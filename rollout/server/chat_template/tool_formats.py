"""Tool-call formats by chat-template family, and their detection."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rollout.server.chat_template.tool_blocks import Block, deepseek, glm, kimi, qwen_xml


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Tool-call syntax of a family of chat templates."""

    name: str
    """Name in errors and logs."""

    signs: tuple[str, ...]
    """Texts that every template of this family contains."""

    marker: str
    """Text before a call."""

    required: str
    """Beginning of a reply that must be a call."""

    named: str
    """Beginning of a reply that must be a call of the function NAME (a JSON string) or BARE (its name). Ends before a space,
    because models generate the space in one token with the text after it."""

    foreign: tuple[str, ...] = ()
    """Texts that no template of this family contains."""

    bare: str = ""
    """Beginning of a call without a marker, at the start of the reply or directly after a call; "" if not permitted.

    Needed because markers that are special tokens do not appear in the text.
    """

    closing: str = ""
    """Text after a call; optional in a reply. "": there is none."""

    one_call_ends_at: str = ""
    """Stop string that ends a reply after its first call and occurs in no call or text; "" if there is none."""

    ending: tuple[str, ...] = ()
    """What follows the arguments of a forced call, with white space in between."""

    parameter: tuple[str, str] | None = None
    """Texts around a parameter's value, the first with its name KEY; None: the arguments are a JSON object."""

    block: Block | None = None
    """Reads what is between `marker` and `closing`, in formats whose calls are not JSON objects; None: JSON."""

    closed: bool = False
    """A block counts only with its closing text: without it, a block that was cut off would look complete."""

    id_prefix: str = "call_"
    """Prefix of call ids."""

    id_digits: int = 24
    """Number of hexadecimal digits in call ids."""

    def opening(self, function: str | None) -> str:
        """Return the beginning of a reply that must be a call of `function`; None: of any function."""
        if function is None:
            return self.required
        return self.named.replace("NAME", json.dumps(function)).replace("BARE", function)


HERMES = ToolFormat(
    name="hermes",
    signs=("<tool_call>", "arguments"),
    foreign=("<function=", "<arg_key>"),
    marker="<tool_call>",
    closing="</tool_call>",
    required="<tool_call>\n",
    named='<tool_call>\n{"name": NAME, "arguments":',
    one_call_ends_at="</tool_call>",
    ending=("}", "</tool_call>"),
)
"""Hermes 2 and 3, Qwen 2.5 and 3."""

LLAMA3 = ToolFormat(
    name="llama3",
    signs=("<|start_header_id|>", "ipython", "parameters"),
    foreign=("<tool_call>", "func_name1("),
    marker="<|python_tag|>",
    closing=";",
    bare="{",
    required='{"name": "',
    named='{"name": NAME, "parameters":',
    ending=("}",),
)
"""Llama 3.1 to 3.3, calls in JSON."""

MISTRAL = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    foreign=("[ARGS]", "[CALL_ID]"),
    marker="[TOOL_CALLS]",
    bare="[",
    required="[TOOL_CALLS] [",
    named='[TOOL_CALLS] [{"name": NAME, "arguments":',
    ending=("}", "]"),
    id_prefix="",
    id_digits=9,
)
"""Mistral before tokenizer version 11. Its templates require call ids of nine letters or digits."""

QWEN_XML = ToolFormat(
    name="qwen_xml",
    signs=("<tool_call>", "<function=", "<parameter="),
    marker="<tool_call>",
    closing="</tool_call>",
    required="<tool_call>\n<function=",
    named="<tool_call>\n<function=BARE>",
    one_call_ends_at="</tool_call>",
    ending=("</function>", "</tool_call>"),
    parameter=("<parameter=KEY>\n", "\n</parameter>"),
    block=qwen_xml,
)
"""Qwen3-Coder and Qwen 3.5."""

GLM = ToolFormat(
    name="glm",
    signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    foreign=("<function=",),
    marker="<tool_call>",
    closing="</tool_call>",
    required="<tool_call>",
    named="<tool_call>BARE",
    ending=("</tool_call>",),
    parameter=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>"),
    block=glm,
    closed=True,
)
"""GLM-4.5 and later."""

KIMI = ToolFormat(
    name="kimi",
    signs=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
    marker="<|tool_calls_section_begin|>",
    closing="<|tool_calls_section_end|>",
    required="<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    named="<|tool_calls_section_begin|><|tool_call_begin|>functions.BARE:0<|tool_call_argument_begin|>",
    ending=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    block=kimi,
)
"""Kimi K2. Call ids are those that the model writes."""

DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    signs=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
    marker="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    required="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    named="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>BARE\n```json\n",
    ending=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    block=deepseek,
)
"""DeepSeek V3 and R1."""

DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    signs=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    foreign=("```json",),
    marker="<｜tool▁calls▁begin｜>",
    closing="<｜tool▁calls▁end｜>",
    required="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    named="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>BARE<｜tool▁sep｜>",
    ending=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    block=deepseek,
)
"""DeepSeek V3.1."""

FORMATS = (HERMES, LLAMA3, MISTRAL, QWEN_XML, GLM, KIMI, DEEPSEEK_V3, DEEPSEEK_V31)


def format_of(template: str | None) -> ToolFormat | None:
    """Return the tool-call format of a chat template, or None if it is none of `FORMATS`."""
    for known in FORMATS:
        if template and all(s in template for s in known.signs) and not any(f in template for f in known.foreign):
            return known
    return None
