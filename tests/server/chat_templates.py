"""Chat templates of four families, with tokenizers and messages for them."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout.server.chat_template.conversation import Conversation, RenderedPrompt
from rollout.server.chat_template.earlier_ids import ReplyDigest

_HERMES_TOOLS = r"""
{%- macro tool_list() %}
    {{- '\n\n# Tools\n\nFunctions:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' ~ (tool | tojson) }}{%- endfor %}
    {{- '\n</tools>\nFor a call write <tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>' }}
{%- endmacro %}
{%- macro calls(message, before) %}
    {%- for call in message.tool_calls %}
        {%- set call = call.function if call.function else call %}
        {{- (before if loop.first else '\n') ~ '<tool_call>\n{"name": "' ~ call.name ~ '", "arguments": ' }}
        {{- (call.arguments if call.arguments is string else call.arguments | tojson) ~ '}\n</tool_call>' }}
    {%- endfor %}
{%- endmacro %}
{%- macro result(message, first, last) %}
    {{- ('<|im_start|>user' if first else '') ~ '\n<tool_response>\n' ~ message.content ~ '\n</tool_response>' }}
    {{- '<|im_end|>\n' if last else '' }}
{%- endmacro %}
{%- macro system() %}
    {%- if messages[0].role == 'system' or tools %}
        {{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else 'You help.') }}
        {{- tool_list() if tools else '' }}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endmacro %}
{%- macro others(message, loop) %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- result(message, loop.previtem.role != 'tool', loop.last or loop.nextitem.role != 'tool') }}
    {%- endif %}
{%- endmacro %}
{{- system() }}
"""

QWEN25 = (
    _HERMES_TOOLS
    + r"""
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant' ~ ('\n' ~ message.content if message.content else '') }}
        {{- ('' if message.content or message.tool_calls else '\n') }}
        {{- (calls(message, '\n') if message.tool_calls else '') ~ '<|im_end|>\n' }}
    {%- else %}
        {{- others(message, loop) }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""
)
"""ChatML with calls as Hermes has them."""

QWEN3 = (
    _HERMES_TOOLS
    + r"""
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content if message.content is string else '' %}
        {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > last.query and (loop.last or thought) %}
            {{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- (calls(message, '\n' if content else '') if message.tool_calls else '') ~ '<|im_end|>\n' }}
    {%- else %}
        {{- others(message, loop) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '' }}
{%- endif %}"""
)
"""The same, but the thoughts of earlier turns are left out."""

LLAMA31 = r"""{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' ~ ('Environment: ipython\n' if tools else '') }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- system ~ '<|eot_id|>' }}
{%- for message in messages %}
    {%- if tools and loop.first and message.role == 'user' %}
        {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
        {{- 'Respond in the format {"name": function name, "parameters": dictionary}.\n\n' ~ (tools | tojson) ~ '\n\n' }}
        {{- message['content'] | trim ~ '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- if call.name in (builtin_tools or []) %}
            {{- '<|python_tag|>' ~ call.name ~ '.call(' ~ (call.arguments | tojson) ~ ')<|eom_id|>' }}
        {%- else %}
            {{- '{"name": "' ~ call.name ~ '", "parameters": ' ~ (call.arguments | tojson) ~ '}<|eot_id|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' ~ (message.content | tojson) ~ '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ message['content'] | trim ~ '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' if add_generation_prompt else '' }}"""
"""Headers; calls in JSON, or in Python for built-in tools; content is trimmed."""

PLAIN = r"""
{%- for message in messages %}
    {{- message.role ~ ': ' ~ message.content ~ '\n\n' }}
{%- endfor %}
{{- 'assistant:' if add_generation_prompt else '' }}"""
"""No special tokens; a turn ends with an empty line."""

TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "llama3.1": LLAMA31}
END = {"qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3.1": "<|eot_id|>"}

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<|eom_id|>", "<|python_tag|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
           "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]  # fmt: skip
ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
CORPUS = [
    "user assistant system the weather in Paris is fine, and in Oslo it rains.\n\n",
    '{"name": "get_weather"}',
] * 8

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def call(name: str = "get_weather", arguments: str = '{"city": "Paris"}', call_id: str = "abcdef123") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish(tokenizer: Tokenizer, template: str | None, end: str) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=end, pad_token="<pad>")
    made.chat_template = template
    return made


@cache
def byte_level(name: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, lines apart from words, as Qwen and Llama 3 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\w+| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finish(tokenizer, TEMPLATES.get(name, PLAIN), END.get(name, "</s>"))


@cache
def sentencepiece(name: str) -> PreTrainedTokenizerFast:
    """Pieces with a space put before a text's beginning and bytes for what is unknown, as Llama 2 and Mistral have it."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    names = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finish(tokenizer, TEMPLATES.get(name, PLAIN), END.get(name, "</s>"))


MAKERS = {"byte_level": byte_level, "sentencepiece": sentencepiece}
USER = {"role": "user", "content": "Weather?"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def reply(text: str | None, rollout: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({} if rollout is None else {"rollout": rollout}), **more}


def ids(prompt: list[int], written: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "token_ids": written, "log_probs": [0.0] * len(written)}


def came(
    conversation: Conversation,
    before: list[dict[str, Any]],
    message: dict[str, Any],
    prompt: list[int],
    written: list[int],
    **options: Any,
) -> dict[str, Any]:
    """A reply's message as the server gives it out: with these ids, whatever they are, and the digests of its text."""
    digest = ReplyDigest()
    digest.add(message.get("content") or "", message.get("tool_calls") or ())
    rendered = conversation.render(before, **options)
    digests = {"prompt_digest": rendered.digest, "content_digest": digest.hexdigest()}
    return message | {"rollout": ids(prompt, written) | digests}


def plainly(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def text_of(tokenizer: PreTrainedTokenizerFast, prompt: RenderedPrompt) -> str:
    return str(tokenizer.decode(prompt.token_ids, skip_special_tokens=False))


def behind(tokenizer: PreTrainedTokenizerFast, prompt: RenderedPrompt, earlier: list[int]) -> str:
    """Text of what was put behind the ids of an earlier reply."""
    assert prompt.reused
    assert prompt.token_ids[: len(earlier)] == earlier
    return str(tokenizer.decode(prompt.token_ids[len(earlier) :], skip_special_tokens=False))
