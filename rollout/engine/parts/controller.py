"""The part of the engine that tokenizes prompts, checks sampling parameters, and turns tokens into text."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.multimodal.pictures import MAX_PROMPT_PIXELS, open_picture
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.errors import ConfigError, InvalidRequestError
from rollout.requests.block_hash import stream_key
from rollout.requests.detokenizer import CompletionText, pieces_of
from rollout.requests.images import ImagePrompt, processed_prompt
from rollout.requests.prompt import MessageImage, Prompt, known_roles, plain_messages, unpadded
from rollout.requests.request import InferenceRequest
from rollout.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_PROCESSOR_ERRORS = (ValueError, TypeError, IndexError, RuntimeError, KeyError)
"""The exceptions that Hugging Face processors raise for input that they do not support."""


class TextGenerationController:
    """A model together with its tokenizer and its runner.

    `tokenizer` may be a processor, which contains a tokenizer. If it is None, prompts are token ids and there is no text.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, layout: ModelLayout, runner: ModelRunner) -> None:
        self.model = model
        self.processor = tokenizer if hasattr(tokenizer, "image_processor") else None
        self.tokenizer = tokenizer if self.processor is None else tokenizer.tokenizer
        self.layout = layout
        self.runner = runner
        self.eos_token_ids = eos_token_ids(model, tokenizer)
        _warn_of_other_eos(model, self.tokenizer)

    def unpadded(self, prompts: Any, name: str = "prompts", *, single: bool = False) -> Any:
        """Convert a tokenizer's batch of prompts to token ids without padding (see `rollout.requests.prompt.unpadded`)."""
        config = getattr(self.model, "config", None)
        owners = (self.tokenizer, getattr(self.model, "generation_config", None), config)
        return unpadded(prompts, *owners, name=name, single=single)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids, or an `ImagePrompt` if the prompt has images.

        Chat messages are rendered with the chat template, which also adds the generation prompt.

        Raises:
            TypeError: the prompt is not text, token ids, chat messages or a processor's output.
            InvalidRequestError: a message has no role, or has content that this model does not support, such as an image.
            ConfigError: the prompt is text or messages, and there is no tokenizer.
        """
        if isinstance(prompt, str):
            return [int(token) for token in self._require_tokenizer("a text prompt")(prompt)["input_ids"]]
        if isinstance(prompt, ImagePrompt):
            return prompt
        if isinstance(prompt, Mapping):
            if "attention_mask" not in prompt:
                self.unpadded(prompt.get("input_ids"), "prompt")
            return processed_prompt(prompt)
        if getattr(prompt, "ndim", 1) == 2 and len(prompt) == 1:
            (prompt,) = self.unpadded(prompt, "prompt")
        tolist = getattr(prompt, "tolist", None)
        items = tolist() if tolist is not None else prompt
        if not isinstance(items, Sequence) or isinstance(items, bytes):
            raise TypeError(f"prompt of type {type(prompt).__name__}: must be text, token ids or chat messages")
        if items and all(isinstance(item, Mapping) for item in items):
            tokenizer = self._require_tokenizer("a prompt of chat messages")
            images: list[MessageImage] = []
            template = self.chat_template or getattr(tokenizer, "chat_template", None)
            if template is None:
                raise ConfigError(
                    f"chat messages need a chat template, and this {type(tokenizer).__name__} has none: set "
                    "tokenizer.chat_template, load the tokenizer of an instruction-tuned model, or pass a text"
                )
            messages = known_roles(
                plain_messages(cast(Sequence[Mapping[str, Any]], items), images=images if self.takes_images else None),
                str(template),
            )
            options = {"chat_template": self.chat_template, "add_generation_prompt": True}
            try:
                written = tokenizer.apply_chat_template(messages, tokenize=not images, return_dict=False, **options)
            # Catch every exception: a template is third-party code and may raise an exception of any class.
            except Exception as exc:
                raise InvalidRequestError(f"the chat template refuses these messages: {exc}") from exc
            return self.process(written, images) if images else [int(token) for token in written]
        for position, item in enumerate(items):
            if isinstance(item, bool) or not hasattr(item, "__index__"):
                raise TypeError(
                    f"prompt[{position}]={item!r}: a prompt is text, a sequence of token ids, or a list of chat messages"
                )
        return [operator.index(item) for item in cast(Sequence[int], items)]

    @property
    def takes_images(self) -> bool:
        """Whether prompts for this model may contain images."""
        return self.runner.vision.family is not None

    @property
    def chat_template(self) -> str | None:
        """The processor's chat template, whose image placeholders the processor expands, or None if it has no template."""
        template = getattr(self.processor, "chat_template", None)
        return template if isinstance(template, str) else None

    def process(self, text: str, images: Sequence[MessageImage]) -> list[int]:
        """Return a text with images as an `ImagePrompt` of token ids. The processor expands each image's placeholder.

        Args:
            text: the text, which contains one placeholder per image.
            images: the images, in the order of their placeholders.

        Raises:
            InvalidRequestError: there is no processor, the processor rejects an image, an image cannot be read, or the
                images together have too many pixels.
        """
        if self.processor is None:
            raise InvalidRequestError(
                f"{images[0].where}: an image in a message needs the model's processor: pass it as tokenizer= "
                "(AutoProcessor.from_pretrained(...)), or send what the processor returned as the prompt"
            )
        pictures: list[Any] = []
        pixels = 0
        for image in images:
            pictures.append(open_picture(image.source, image.where))
            pixels += pictures[-1].width * pictures[-1].height
            if pixels > MAX_PROMPT_PIXELS:
                raise InvalidRequestError(
                    f"{image.where}: images up to here have {pixels:,} pixels; {MAX_PROMPT_PIXELS:,} are decoded for a "
                    "prompt at most: send fewer or smaller ones"
                )
        try:
            inputs = self.processor(text=[text], images=pictures, return_tensors="pt")
        except _PROCESSOR_ERRORS as exc:
            # Process the images one by one, so that the error message can name the image that the processor rejects.
            for image, picture in zip(images, pictures, strict=True):
                try:
                    self.processor.image_processor(images=[picture], return_tensors="pt")
                except _PROCESSOR_ERRORS as alone:
                    raise InvalidRequestError(
                        f"{image.where}: {type(self.processor.image_processor).__name__} refuses an image of "
                        f"{picture.width} x {picture.height} pixels: {alone}"
                    ) from alone
            raise InvalidRequestError(
                f"{type(self.processor).__name__} refuses {len(pictures)} images with this text: {exc} (the chat template "
                "has to write one placeholder for each)"
            ) from exc
        return processed_prompt(inputs)

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Check that prompt tokens are valid model input.

        Raises:
            InvalidRequestError: the prompt is empty, or contains a token id outside the vocabulary.
        """
        if not tokens:
            raise InvalidRequestError("the prompt is empty: at least one token is needed, such as a BOS token")
        if not 0 <= min(tokens) <= max(tokens) < self.layout.vocab_size:
            bad = next(token for token in tokens if not 0 <= token < self.layout.vocab_size)
            raise InvalidRequestError(f"prompt token {bad}: must be in [0, {self.layout.vocab_size})")

    def check_params(self, params: SamplingParams) -> None:
        """Check sampling parameters against the vocabulary and the loaded adapters. Compile the `structured` constraint.

        Raises:
            InvalidRequestError: the adapter is not loaded, `structured` does not compile, a token id is outside the
                vocabulary, or `min_tokens` and the stop ids leave no token to draw.
        """
        named = {name: getattr(params, name) or () for name in ("logit_bias", "stop_token_ids")}
        for name, tokens in named.items():
            bad = next((token for token in tokens if token >= self.layout.vocab_size), None)
            if bad is not None:
                raise InvalidRequestError(f"{name} of token {bad}: must be in [0, {self.layout.vocab_size})")
        if params.structured is not None:
            self.runner.constraints.check(params.structured)
        self.runner.adapters.check(params.adapter)
        stops, vocabulary = self.stop_ids(params) if params.min_tokens else (), self.layout.vocab_size
        # Compare the lengths first, which is cheap, and build the set only if needed.
        if len(stops) >= vocabulary and len({token for token in stops if token < vocabulary}) == vocabulary:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens}: every one of the {vocabulary} tokens is a stop id, so no token can be "
                "drawn before one; drop min_tokens or some stop_token_ids"
            )

    def completion_text(self, params: SamplingParams) -> CompletionText | None:
        """Return a detector for the stop strings in `params`, or None if there are no stop strings.

        Raises:
            ConfigError: there are stop strings, but there is no tokenizer.
        """
        if not params.stop:
            return None
        tokenizer = self._require_tokenizer(f"stop={list(params.stop)!r}")
        return CompletionText(tokenizer, params.stop, params.include_stop_str_in_output)

    def detokenize(self, tokens: Sequence[int]) -> str | None:
        """Return the text of completion tokens without special tokens, or None if there is no tokenizer."""
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def fill_segments(self, request: InferenceRequest) -> None:
        """Fill in a request's `segments`, `generated_segments` and `generated_sequence_lengths`.

        A segment is the piece of text that one token adds. The joined segments equal the decoded text of all tokens.

        Raises:
            ConfigError: there is no tokenizer.
        """
        tokenizer = self._require_tokenizer("fill_segments()")
        request.segments = pieces_of(tokenizer, request.prompt_tokens)
        request.generated_segments = pieces_of(tokenizer, request.generated_tokens)
        request.generated_sequence_lengths = [request.generated_length]

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the token ids that finish a request: its `stop_token_ids` and, unless `ignore_eos`, the model's EOS ids."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *eos)))

    def admit(self, sample: Sample) -> None:
        """Store a sample's sampling parameters, constraint and adapter under the sample's row in the sequence table."""
        request = sample.request
        key = stream_key(int(request.seed or 0), sample.record.sample_index)
        self.runner.sampling.set(sample.row, sample.params, key)
        self.runner.constraints.set(sample.row, sample.params.structured)
        self.runner.adapters.set(sample.row, sample.params.adapter)

    def _require_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ConfigError(f"{what} needs a tokenizer and there is none; pass tokenizer= or use token ids")
        return self.tokenizer


def _warn_of_other_eos(model: nn.Module, tokenizer: Any) -> None:
    own, text = eos_token_ids(model, None), getattr(tokenizer, "eos_token_id", None)
    if own and text is not None and text not in own:
        _log.warning(
            "the tokenizer's end-of-sequence token %r (%d) is not among the model's %s: each of them ends a completion; set "
            "tokenizer.eos_token or model.generation_config.eos_token_id so that they agree",
            getattr(tokenizer, "eos_token", None), text, list(own),
        )  # fmt: skip


def eos_token_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Return the EOS token ids of a model's generation config, its config and its tokenizer (which may be None)."""
    found: dict[int, None] = {}
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        value = getattr(owner, "eos_token_id", None)
        for token in value if isinstance(value, list | tuple) else (value,):
            if token is not None:
                found[int(token)] = None
    return tuple(found)
