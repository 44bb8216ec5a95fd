"""Renders a conversation to prompt token ids through the tokenizer's chat template.

Token ids sent back with earlier replies are reused as a prefix of the prompt, as far as their digests match (`earlier_ids`);
text after the first difference is tokenised. Ambiguous cases raise an error. Thread-safe: the tokenizer is a copy, whose
settings a trainer cannot change.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from rollout.errors import InvalidRequestError
from rollout.requests.prompt import SHOWN, Message, MessageImage, Tools, known_roles, plain_messages
from rollout.sampling_params import StructuredOutput
from rollout.server.chat_template.earlier_ids import (
    EarlierReplies,
    EarlierReply,
    Write,
    text_behind_reply,
    text_digest,
    tokens_to_append,
)
from rollout.server.chat_template.prompt_ids import PromptTokenizer
from rollout.server.chat_template.reply_grammar import reply_constraint
from rollout.server.chat_template.reply_parser import ToolCallParser, marks_reasoning, opens_reasoning, parser_for
from rollout.server.chat_template.tool_formats import format_of

ToolChoice = str | Mapping[str, Any]

MAX_TRIED = 4
"""Maximum number of earlier replies tried. More than one is needed only if the template renders an edited reply differently
from its original prompt."""

WITH_IMAGES = "the conversation has images, whose placeholders are expanded again"
"""Reason for not reusing ids."""

Process = Callable[[str, Sequence[MessageImage]], list[int]]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A tokenised prompt."""

    token_ids: list[int]
    forced_prefix: str
    """Beginning of the reply's text that is part of the prompt; "" unless a call is forced."""
    digest: str
    """Digest of the prompt's text."""
    inside_reasoning: bool = False
    """Whether the prompt ends inside an open reasoning."""
    reused: int = 0
    """Number of leading tokens reused from an earlier reply's ids."""
    retokenized: str | None = None
    """Why the ids sent back with the last reply were not reused; None if they were, or none were sent."""


class Conversation:
    """Renders conversations with one tokenizer and one chat template.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat_template: a Jinja template instead of the tokenizer's.
        vocab_size: exclusive upper bound of token ids in earlier replies: the model's vocabulary size, which may exceed
            the tokenizer's. None: the tokenizer's.
        end_token_ids: the model's end-of-sequence ids, in addition to the tokenizer's.
        room: returns the current maximum number of tokens of a prompt. None: unlimited.
        process: returns the token ids of a written conversation and its images. None: images raise an error.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None = None,
        *,
        vocab_size: int | None = None,
        end_token_ids: Iterable[int] = (),
        room: Callable[[], int] | None = None,
        process: Process | None = None,
    ) -> None:
        self._process = process
        self._tokenizer = copy.deepcopy(tokenizer)
        self._reader = PromptTokenizer(self._tokenizer, room or (lambda: sys.maxsize), special=False)
        self._chat_template = chat_template
        self._printing: dict[str, bool] = {}
        self._vocab_size = vocab_size or len(tokenizer)
        self._end_token_ids = {*end_token_ids, tokenizer.eos_token_id} - {None}
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special_texts = [token.content for token in special]
        self._anchor = next((t.content for t in special if not (t.lstrip or t.rstrip or t.single_word)), "")
        self._anchor_ids = self._reader.ids(self._anchor, "messages")
        names = inspect.signature(tokenizer.apply_chat_template).parameters.values()
        own = {p.name for p in names if p.kind is not p.VAR_KEYWORD} - {"documents"}
        self._reserved = {"self", "messages", "conversations", *own}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render and tokenise the prompt of a conversation.

        Args:
            messages: in OpenAI's format; `rollout` of an assistant message holds the token ids of its reply and its prompt,
                and their digests.
            tools: in OpenAI's format. Not rendered if `tool_choice` is "none".
            tool_choice: "none", "auto" (None), "required", or an object that names one of `tools`; the last two end the
                prompt with the beginning of a call.
            template_kwargs: additional variables of the template.

        Raises:
            InvalidRequestError: a message, a choice or a variable cannot be honoured, or the template refuses them.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message=true with add_generation_prompt=true: the last message is either continued or "
                "answered; set add_generation_prompt=false"
            )
        shown_tools = None if tool_choice == "none" else tools or None
        variables = self._variables(template_kwargs)
        template = self._template(shown_tools)
        prefix = _forced_prefix(template, tool_choice)
        # A model may have learnt a tool that its template never prints; then the template writes calls of it.
        if shown_tools and format_of(template) is None and not self._prints_tools(template):
            raise InvalidRequestError(
                "tools: the chat template never prints them, and writes no calls; describe them in a message, or set "
                'tool_choice="none"'
            )
        if prefix and not add_generation_prompt:
            raise InvalidRequestError(
                "tool_choice: forcing a call needs add_generation_prompt=true; set it, or use auto"
            )

        def write(conversation: list[Message], *, closed: bool = False, asked: bool | None = None) -> str:
            text = self._write(
                known_roles(conversation, template),
                tools=shown_tools,
                add_generation_prompt=(add_generation_prompt and not closed) if asked is None else asked,
                continue_final_message=continue_final_message and not closed and asked is None,
                **variables,
            )
            self._reader.check(text, "messages")
            return text

        images: list[MessageImage] = []
        plain = plain_messages(messages, SHOWN, None if self._process is None else images)
        text = write(plain)
        digest = text_digest(text + prefix)
        thinks = not prefix and opens_reasoning(text)

        def rendered(ids: list[int], reused: int, why: str | None) -> RenderedPrompt:
            return RenderedPrompt(ids, prefix, digest, thinks, reused, why)

        if images and self._process is not None:
            sent_back = any(message.get("rollout") for message in messages)
            return rendered(self._process(text + prefix, images), 0, WITH_IMAGES if sent_back else None)
        earlier = EarlierReplies(messages, plain, lambda before: write(before, asked=True), self._vocab_size)
        for reply in islice(earlier.agreeing(), MAX_TRIED):
            why = earlier.why_not(reply)
            if reply.token_ids is not None:
                open_ended = continue_final_message and reply.index == len(plain) - 1
                ids, reused = self._go_on(plain, reply, write, prefix, open_ended)
                return rendered(ids, reused, why)
            if text.startswith(reply.prompt_text):
                rest = self._encode_behind(text[len(reply.prompt_text) :] + prefix)
                return rendered(reply.prompt_token_ids + rest, len(reply.prompt_token_ids), why)
        return rendered(self._reader.ids(text + prefix, "messages"), 0, earlier.why_not(None))

    def parser_for(self, tools: Tools | None, tool_choice: ToolChoice | None) -> Callable[[], ToolCallParser] | None:
        """Return a factory of tool-call parsers, or None if calls are not parsed: no tools, or an unknown format."""
        if tool_choice == "none" or not tools:
            return None
        return parser_for(self._template(tools), tools)

    def effort(self, asked: str | None, tools: Tools | None) -> dict[str, Any]:
        """Return the template variables for a reasoning effort; raises `InvalidRequestError` if there are none."""
        template = "" if asked is None else self._template(tools)
        if "reasoning_effort" in template:
            return {"reasoning_effort": asked}
        if asked not in (None, "none"):
            raise InvalidRequestError(
                f'reasoning_effort={asked!r}: the chat template does not use it; leave it out, or set "none"'
            )
        return {"enable_thinking": False} if "enable_thinking" in template else {}

    def marks_reasoning(self, tools: Tools | None) -> bool:
        """Whether the chat template marks reasoning apart from content."""
        return marks_reasoning(self._template(tools))

    def constraint_on(
        self, prompt: RenderedPrompt, schema: Any, tools: Tools | None, tool_choice: ToolChoice | None
    ) -> StructuredOutput | None:
        """Return the constraint that `response_format` and strict tools put on a reply; see `reply_constraint`."""
        shown = tools if tool_choice != "none" and tools else None
        reasoning: Literal["open", "possible"] | None = None
        if self.marks_reasoning(shown):
            reasoning = "open" if prompt.inside_reasoning else "possible"
        known = format_of(self._template(shown))
        return reply_constraint(schema, shown, known, forced_prefix=prompt.forced_prefix, reasoning=reasoning)

    def one_call_ends_at(self, tools: Tools | None, tool_choice: ToolChoice | None) -> str:
        """Return the stop string that ends a reply after its first call; "" if calls are not parsed.

        Raises `InvalidRequestError` if the template's call format has no such string.
        """
        known = format_of(self._template(tools))
        if known is None or not tools or tool_choice == "none":
            return ""
        if not known.one_call_ends_at:
            raise InvalidRequestError(
                f"parallel_tool_calls=false: nothing ends a reply of this chat template ({known.name}) behind its first "
                "call; leave it out, and use the first"
            )
        return known.one_call_ends_at

    def _go_on(
        self,
        plain: list[Message],
        earlier: EarlierReply,
        write: Write,
        prefix: str,
        open_ended: bool,
    ) -> tuple[list[int], int]:
        """Return (ids of the earlier prompt, its reply and all that follows, number of reused ids)."""
        text = text_behind_reply(plain, earlier.index, write, self._special_texts, closed=open_ended)
        written = earlier.token_ids or []
        kept, appended = tokens_to_append(written, self._encode_behind(text + prefix), self._end_token_ids)
        known = earlier.prompt_token_ids + (written[:kept] if open_ended else written)
        return known if open_ended else known + appended, len(known)

    def _template(self, tools: Tools | None) -> str:
        if self._chat_template is None and not self._tokenizer.chat_template:
            raise InvalidRequestError(
                "messages: the tokenizer has no chat template; start the server with one (chat_template), or send a "
                "prompt to /v1/completions"
            )
        try:
            return str(self._tokenizer.get_chat_template(self._chat_template, tools))
        except ValueError as exc:
            raise InvalidRequestError(f"messages: {exc}") from exc

    def _prints_tools(self, template: str) -> bool:
        """Whether the chat template shows a tool; assumed if it cannot write the conversation that is tried."""
        if template not in self._printing:
            tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
            user: list[Message] = [{"role": "user", "content": "?"}]
            try:
                shown = self._write(user, tools=[tool]) != self._write(user, tools=None)
            except InvalidRequestError:
                shown = True
            self._printing[template] = shown
        return self._printing[template]

    def _variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        taken = sorted(self._reserved.intersection(given or ()))
        if taken:
            raise InvalidRequestError(
                f"chat_template_kwargs: {', '.join(taken)} cannot be set there; use the field of the request"
            )
        return dict(given or {})

    def _write(self, messages: list[Message], **variables: Any) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, chat_template=self._chat_template, tokenize=False, **variables
                )
            )
        except Exception as exc:  # templates are third-party code and may raise anything
            raise InvalidRequestError(
                f"messages: the chat template cannot write them: {type(exc).__name__}: {str(exc)[:500]}"
            ) from exc

    def _encode_behind(self, text: str) -> list[int]:
        """Return the token ids of a text that continues another one.

        Some tokenizers insert a space at the start of a text; a special token before the text prevents this.
        """
        length = len(self._anchor_ids)
        together = self._reader.ids(self._anchor + text, "messages")
        if together[:length] == self._anchor_ids:
            return together[length:]
        return self._reader.ids(text, "messages")


def _forced_prefix(template: str, choice: ToolChoice | None) -> str:
    if choice in (None, "auto", "none"):
        return ""
    known = format_of(template)
    if known is None:
        raise InvalidRequestError(
            f"tool_choice={choice!r:.80}: a call cannot be forced, because it is not known how this chat template "
            'writes calls; use "auto"'
        )
    return known.opening(choice["function"]["name"] if isinstance(choice, Mapping) else None)
