"""The rendering of a conversation to prompt token ids through the tokenizer's chat template.

A client may send back the token ids of earlier replies. They are reused as a prefix of the prompt, up to the last reply
whose digests match (`earlier_ids`). Only the text after that reply is tokenised. Contradictory options raise an error.
Rendering is thread-safe, because it uses a copy of the tokenizer, whose settings a trainer cannot change.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollout.errors import InvalidRequestError
from rollout.requests.prompt import SHOWN, Message, MessageImage, Tools, known_roles, plain_messages
from rollout.sampling_params import StructuredOutput
from rollout.server.chat_template.earlier_ids import latest_reply, text_behind_reply, text_digest, tokens_to_append
from rollout.server.chat_template.prompt_ids import PromptTokenizer
from rollout.server.chat_template.reply_grammar import forced_call, reply_constraint
from rollout.server.chat_template.reply_parser import (
    ReasoningParser,
    ReplyReader,
    marks_reasoning,
    opens_reasoning,
    parser_for,
)
from rollout.server.chat_template.tool_formats import format_of

WITH_IMAGES = "the conversation has images, whose placeholders are expanded again"
"""The reason why token ids are not reused in a conversation with images."""
NOT_TOLD = (
    "the text that the chat template writes after this reply cannot be separated from it: everything is tokenised again"
)

Process = Callable[[str, Sequence[MessageImage]], list[int]]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt, rendered from a conversation and tokenised."""

    token_ids: list[int]
    digest: str
    """The digest of the prompt's text, which a client sends back with the reply's token ids."""
    inside_reasoning: bool = False
    """Whether the prompt ends inside an open reasoning block."""
    reused: int = 0
    """The number of leading tokens reused from an earlier reply's ids."""
    retokenized: str | None = None
    """The reason why the ids sent back with the last reply were not reused. None if they were, or if no ids were sent."""


class Conversation:
    """A renderer of conversations with one tokenizer and one chat template.

    Args:
        tokenizer: a Hugging Face tokenizer, which is copied.
        chat_template: a Jinja template to use instead of the tokenizer's. If None, the tokenizer's is used.
        vocab_size: exclusive upper bound of token ids in earlier replies: the model's vocabulary size, which may exceed
            the tokenizer's. If None, the tokenizer's vocabulary size.
        end_token_ids: the model's end-of-sequence ids. The tokenizer's id is always added.
        room: function that returns the current maximum length of a prompt, in tokens. If None, there is no maximum.
        process: function that returns the token ids of a rendered conversation with images. If None, images raise an error.
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
        self._vocab_size = vocab_size or len(tokenizer)
        self._end_token_ids = {*end_token_ids, tokenizer.eos_token_id} - {None}
        special = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._special_texts = [token.content for token in special]
        self._anchor = next((t.content for t in special if not (t.lstrip or t.rstrip or t.single_word)), "")
        self._anchor_ids = self._reader.ids(self._anchor, "messages")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render and tokenise the prompt of a conversation.

        Args:
            messages: the conversation in OpenAI's format. An assistant message may have a field `rollout` with the token
                ids and digests of the reply and its prompt.
            tools: the offered tools in OpenAI's format.
            add_generation_prompt: whether to add the text that begins a new reply.
            continue_final_message: whether the reply continues the last message.
            template_kwargs: additional variables for the template.

        Raises:
            InvalidRequestError: a message or variable is not supported, or the template rejects it.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message=true with add_generation_prompt=true: the last message is either continued or "
                "answered; set add_generation_prompt=false"
            )
        template = self._template(tools)
        # Accept a template that lists no tools if it can format calls: the model may have learnt the tools in training.
        if tools and "tools" not in template and format_of(template) is None:
            raise InvalidRequestError(
                "tools: the chat template never prints them, and writes no calls; describe them in a message, or set "
                'tool_choice="none"'
            )

        def write(
            conversation: list[Message], asks: bool = add_generation_prompt, continues: bool = continue_final_message
        ) -> str:
            text = self._write(
                known_roles(conversation, template),
                template_kwargs or {},
                tools=tools or None,
                add_generation_prompt=asks,
                continue_final_message=continues,
            )
            self._reader.check(text, "messages")
            return text

        images: list[MessageImage] = []
        plain = plain_messages(messages, SHOWN, None if self._process is None else images)
        text = write(plain)

        def rendered(ids: list[int], reused: int, why: str | None) -> RenderedPrompt:
            return RenderedPrompt(ids, text_digest(text), opens_reasoning(text), reused, why)

        if images and self._process is not None:
            sent_back = any(message.get("rollout") for message in messages)
            return rendered(self._process(text, images), 0, WITH_IMAGES if sent_back else None)
        reply, why = latest_reply(messages, plain, lambda before: write(before, True, False), self._vocab_size)
        if reply is not None:
            known, written = reply.prompt_token_ids, list(reply.token_ids)
            if continue_final_message and reply.index == len(plain) - 1:
                while written and written[-1] in self._end_token_ids:
                    written.pop()
                return rendered(known + written, len(known + written), why)
            behind = text_behind_reply(plain, reply.index, write, self._special_texts)
            if behind is not None:
                appended = tokens_to_append(written, self._encode_behind(behind), self._end_token_ids)
                return rendered(known + written + appended, len(known + written), why)
            why = f"messages[{reply.index}].rollout: {NOT_TOLD}"
        return rendered(self._reader.ids(text, "messages"), 0, why)

    def reader_for(self, prompt: RenderedPrompt, tools: Tools | None, *, reasons: bool) -> Callable[[], ReplyReader]:
        """Return a function that builds a reader for one reply (sample) to `prompt`.

        Args:
            tools: the offered tools, whose calls the reader splits off.
            reasons: whether to split off the reasoning, if the template marks it with tags.
        """
        template = self._template(tools)
        parser = parser_for(template, tools)
        reasons = reasons and marks_reasoning(template)

        def reader() -> ReplyReader:
            return ReplyReader(
                ReasoningParser(prompt.inside_reasoning) if reasons else None, None if parser is None else parser()
            )

        return reader

    def constraint_on(
        self, prompt: RenderedPrompt, schema: Any, tools: Tools | None, forced: Tools
    ) -> StructuredOutput | None:
        """Return the constraint on the reply to a prompt, or None if every text is allowed.

        Args:
            schema: JSON schema from `response_format`, or None if the content is free text.
            tools: the offered tools.
            forced: the tools of which the reply must call one. If empty, no call is forced.
        """
        template = self._template(tools)
        known = format_of(template)
        if forced:
            if known is None:
                raise InvalidRequestError(
                    "tool_choice: a call cannot be forced, because it is not known how this chat template writes calls; "
                    'use "auto"'
                )
            return forced_call(forced, known)
        reasoning: Literal["open", "possible"] | None = None
        if marks_reasoning(template):
            reasoning = "open" if prompt.inside_reasoning else "possible"
        return reply_constraint(schema, tools, known, reasoning=reasoning)

    def one_call_ends_at(self, tools: Tools | None) -> str:
        """Return the stop string that ends a reply after its first tool call; "" if calls are not parsed.

        Raises `InvalidRequestError` if the template's tool-call format has no such string.
        """
        known = format_of(self._template(tools)) if tools else None
        if known is None:
            return ""
        if not known.one_call_ends_at:
            raise InvalidRequestError(
                f"parallel_tool_calls=false: nothing ends a reply of this chat template ({known.name}) behind its first "
                "call; leave it out, and use the first"
            )
        return known.one_call_ends_at

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

    def _write(self, messages: list[Message], variables: Mapping[str, Any], **options: Any) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, chat_template=self._chat_template, tokenize=False, **options, **variables
                )
            )
        except Exception as exc:  # A template is third-party code and may raise anything.
            raise InvalidRequestError(
                f"messages: the chat template cannot write them: {type(exc).__name__}: {str(exc)[:500]}"
            ) from exc

    def _encode_behind(self, text: str) -> list[int]:
        """Return the token ids of a string that follows other text.

        Some tokenizers insert a space at the start of a string. A special token before the string prevents this. The id of
        this token is removed from the result.
        """
        length = len(self._anchor_ids)
        together = self._reader.ids(self._anchor + text, "messages")
        if together[:length] == self._anchor_ids:
            return together[length:]
        return self._reader.ids(text, "messages")
