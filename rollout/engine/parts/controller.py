"""Facade over tokenisation, forward, sampling and detokenisation of one model."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.forward.trial_forwards import difference, over_largest, paged_logits
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.models.originals import foreign_part
from rollout.engine.multimodal.pictures import MAX_PROMPT_PIXELS, open_picture
from rollout.engine.sampling.constraints import Constraints
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from rollout.requests.chat_messages import MessageImage, known_roles, plain_messages
from rollout.requests.detokenizer import CompletionText, pieces_of
from rollout.requests.images import ImagePrompt, processed_prompt
from rollout.requests.prompt import Prompt, unpadded
from rollout.requests.request import InferenceRequest
from rollout.requests.seeds import stream_key
from rollout.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

VERIFY_TOKENS = 12
SAME_ATTENTION = 1e-2
"""Largest difference between logits of a replayed step and of the module's forward by the same kernels, over the largest."""
FOREIGN_TOKENS = 4096
"""As many at most where parts of the model are not transformers' own."""


class TextGenerationController:
    """One model with its tokenizer, or the processor around it (None: prompts are token ids and no text is produced).

    Args:
        image_folder: the folder that images of messages may be read from; None: none.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        layout: ModelLayout,
        runner: ModelRunner,
        image_folder: str | None = None,
    ) -> None:
        self.model = model
        self.processor = tokenizer if hasattr(tokenizer, "image_processor") else None
        self.tokenizer = tokenizer if self.processor is None else tokenizer.tokenizer
        self._image_folder = image_folder
        self.layout = layout
        self.runner = runner
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        _warn_of_other_eos(model, self.tokenizer)
        self.constraints = runner.constraints = Constraints(tokenizer, layout.vocab_size, self.eos_token_ids)

    def unpadded(self, prompts: Any, name: str = "prompts", *, single: bool = False) -> Any:
        """See `rollout.requests.prompt.unpadded`."""
        config = getattr(self.model, "config", None)
        owners = (self.tokenizer, getattr(self.model, "generation_config", None), config)
        return unpadded(prompts, *owners, name=name, single=single)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, an `ImagePrompt` if it has images; chat messages go through the tokenizer's chat template
        with a generation prompt.

        Raises:
            TypeError: the prompt is none of text, token ids, chat messages, a processor's output.
            InvalidRequestError: a message has no role, or content that is not text, such as an image.
            ConfigError: text or messages without a tokenizer.
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
            # A template raises what it likes.
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
        """Whether the model is of a family that is served images."""
        return self.runner.vision.family is not None

    @property
    def chat_template(self) -> str | None:
        """The processor's chat template, which writes what the processor expands; None: the tokenizer's."""
        template = getattr(self.processor, "chat_template", None)
        return template if isinstance(template, str) else None

    def process(self, text: str, images: Sequence[MessageImage]) -> list[int]:
        """The prompt of a text with one placeholder per image, expanded by the processor.

        Args:
            images: in the order of their placeholders.

        Raises:
            InvalidRequestError: there is no processor, an image cannot be read or is too large, alone or with the others,
                or the processor refuses it.
        """
        if self.processor is None:
            raise InvalidRequestError(
                f"{images[0].where}: an image in a message needs the model's processor: pass it as tokenizer= "
                "(AutoProcessor.from_pretrained(...)), or send what the processor returned as the prompt"
            )
        pictures: list[Any] = []
        pixels = 0
        for image in images:
            pictures.append(open_picture(image.source, self._image_folder, image.where))
            pixels += pictures[-1].width * pictures[-1].height
            if pixels > MAX_PROMPT_PIXELS:
                raise InvalidRequestError(
                    f"{image.where}: images up to here have {pixels:,} pixels; {MAX_PROMPT_PIXELS:,} are decoded for a "
                    "prompt at most: send fewer or smaller ones"
                )
        try:
            inputs = self.processor(text=[text], images=pictures, return_tensors="pt")
        except (ValueError, TypeError, IndexError, RuntimeError, KeyError) as exc:
            self._refuse_picture([image.where for image in images], pictures)
            raise InvalidRequestError(
                f"{type(self.processor).__name__} refuses {len(pictures)} images with this text: {exc} (the chat template "
                "has to write one placeholder for each)"
            ) from exc
        return processed_prompt(inputs)

    def _refuse_picture(self, places: list[str], pictures: list[Any]) -> None:
        """Raises: InvalidRequestError: the image processor refuses one of the images alone; names its place."""
        assert self.processor is not None
        for where, picture in zip(places, pictures, strict=True):
            try:
                self.processor.image_processor(images=[picture], return_tensors="pt")
            except (ValueError, TypeError, IndexError, RuntimeError, KeyError) as exc:
                raise InvalidRequestError(
                    f"{where}: {type(self.processor.image_processor).__name__} refuses an image of {picture.width} x "
                    f"{picture.height} pixels: {exc}"
                ) from exc

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Check that prompt tokens are valid model input.

        Raises:
            InvalidRequestError: the prompt is empty or holds an id outside the vocabulary.
        """
        if not tokens:
            raise InvalidRequestError("the prompt is empty: at least one token is needed (a BOS token will do)")
        if not 0 <= min(tokens) <= max(tokens) < self.layout.vocab_size:
            bad = next(token for token in tokens if not 0 <= token < self.layout.vocab_size)
            raise InvalidRequestError(f"prompt token {bad}: must lie in [0, {self.layout.vocab_size})")

    def check_params(self, params: SamplingParams) -> None:
        """Check sampling parameters against the vocabulary and the loaded adapters; compile `structured`.

        Raises:
            InvalidRequestError: `adapter` is not loaded; `structured` does not compile; an id of `logit_bias`,
                `stop_token_ids` or `logprob_token_ids` is outside the vocabulary; or `min_tokens` with the stop ids leaves
                no token to draw.
        """
        named = {name: getattr(params, name) or () for name in ("logit_bias", "stop_token_ids", "logprob_token_ids")}
        for name, tokens in named.items():
            bad = next((token for token in tokens if token >= self.layout.vocab_size), None)
            if bad is not None:
                raise InvalidRequestError(f"{name} of token {bad}: must lie in [0, {self.layout.vocab_size})")
        if params.structured is not None:
            self.constraints.check(params.structured)
        self.runner.adapters.check(params.adapter)
        if params.min_tokens and len(stops := self.stop_ids(params)) >= self.layout.vocab_size:
            left = self.layout.vocab_size - len({token for token in stops if token < self.layout.vocab_size})
            if not left:
                raise InvalidRequestError(
                    f"min_tokens={params.min_tokens}: every one of the {self.layout.vocab_size} tokens is a stop id, so no "
                    "token can be drawn before one; drop min_tokens or some stop_token_ids"
                )

    def completion_text(self, params: SamplingParams) -> CompletionText | None:
        """Stop-string detector for these parameters; None without stop strings.

        Raises:
            ConfigError: stop strings without a tokenizer.
        """
        if not params.stop:
            return None
        tokenizer = self._require_tokenizer(f"stop={list(params.stop)!r}")
        return CompletionText(tokenizer, params.stop, params.include_stop_str_in_output)

    def detokenize(self, tokens: Sequence[int]) -> str | None:
        """Text of completion tokens without special tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def fill_segments(self, request: InferenceRequest) -> None:
        """Fill in a request's `segments`, `generated_segments` and `generated_sequence_lengths`.

        One piece of text per token; joined they equal `decode` of all tokens. The piece of a special token, or of a token
        that ends inside a character, is empty.

        Raises:
            ConfigError: there is no tokenizer.
        """
        tokenizer = self._require_tokenizer("fill_segments()")
        request.segments = pieces_of(tokenizer, request.prompt_tokens)
        request.generated_segments = pieces_of(tokenizer, request.generated_tokens)
        request.generated_sequence_lengths = [request.generated_length]

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Token ids that end a request: its own and, unless `ignore_eos`, the model's end-of-sequence ids."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*params.stop_token_ids, *eos)))

    def admit(self, sample: Sample) -> None:
        """Write a sample's parameters into the sampling table, the constraints and the adapters, in its row."""
        request = sample.request
        key = stream_key(int(request.seed or 0), sample.record.sample_index)
        self.runner.sampling.set(sample.row, sample.params, key)
        self.constraints.set(sample.row, sample.params.structured)
        self.runner.adapters.set(sample.row, sample.params.adapter)

    def forward_logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[V] logits after `tokens`, by the model's own unpaged attention, in eval mode."""
        ids = torch.tensor([list(tokens)], device=self.layout.device)
        training = [module for module in self.model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            with torch.no_grad():
                # Of all positions, as what honours `logits_to_keep` is verified too, but not thousands.
                kept = {} if len(tokens) <= VERIFY_TOKENS else {"logits_to_keep": ids.new_tensor([len(tokens) - 1])}
                logits: torch.Tensor = self.model(input_ids=ids, use_cache=False, **kept).logits[0, -1]
        finally:
            for module in training:
                module.training = True
        return logits

    def verify_model(self, room: int, all_ranks: Callable[[bool], bool] = bool) -> None:
        """Compare tokens in chunks through the paged path with the model's own forward, along the same routes.

        This catches state that travels between positions by other ways than attention, and on a GPU kernels and graphs that
        compute something else: its last token is a decode step. Where attention or positions are not transformers' own,
        they may differ from ours only far into a sequence, or beside a long one: both are compared too.

        Args:
            room: most tokens of a sequence.
            all_ranks: whether something holds on each of the ranks that compute a forward together, which all ask at once.

        Raises:
            UnsupportedModelError: they differ, here or on one of those ranks.
        """
        short = min(room, VERIFY_TOKENS)
        self._verify(short, all_ranks)
        foreign = foreign_part(self.model, self.layout.layer_of)
        if foreign is not None and room > short:
            longest = min(room, FOREIGN_TOKENS)
            # Recurrent layers take sequences of one length together; the other sequence takes a block.
            if not self.layout.states and longest >= short + self.runner.table.block_size:
                self._verify(short, all_ranks, foreign, longest - 1)
            self._verify(longest, all_ranks, foreign)

    def _verify(
        self, length: int, all_ranks: Callable[[bool], bool], foreign: str = "", beside: int | None = None
    ) -> None:
        if length < 2:
            return
        tokens = [(7 * position + 3) % self.layout.vocab_size for position in range(length)]
        cuts = [length - length // 2]
        alone = bool(self.layout.states) or all_ranks(self.runner.paged is not None or self.runner.graphs is not None)
        if alone and length > cuts[0] + 1:
            # Recurrent layers and Triton's kernels compute a single token otherwise than a chunk.
            cuts.append(length - 1)
        tolerance = 2e-3 if self.layout.narrowest_dtype == torch.float32 else 1e-1

        if beside is None and all_ranks(self.runner.graphs is not None):
            self._verify_graphs(tokens, cuts, min(tolerance, SAME_ATTENTION), all_ranks)

        def fine(found: float) -> bool:
            return all_ranks(found <= tolerance)

        def measured() -> float:
            return difference(self.runner, tokens, cuts, self.forward_logits, fine, beside)

        worst = measured()
        passed = fine(worst)
        if not passed and self.runner.fused is not None and not self.runner.exact:
            by_fused = worst
            self.runner.drop_fused("it differs from the model's own forward")
            worst = measured()
            passed = fine(worst)
            if passed:
                _log.warning(
                    "%s: the fused forward differs from the model's own by %.3g of the largest logit, so the model's own "
                    "runs; please report it",
                    type(self.model).__name__,
                    by_fused,
                )
        if not passed and worst <= tolerance:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: on another rank of the group the paged path differs from the model's own "
                "forward; the error of that rank says by how much"
            )
        if not passed and foreign:
            where = f"{length} tokens" if beside is None else f"{length} tokens beside a sequence of {beside + 1}"
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: {foreign} is not transformers' own, and the model's forward of {where} "
                f"differs from ours by {worst:.3g} of the largest logit (allowed: {tolerance:g}). The engine serves causal "
                "attention, in windows that the mask or an argument shows, and rotary positions that are the same in "
                "sequences of any length: load the model with attn_implementation='sdpa', or lower "
                "InferenceConfig.max_sequence_length to where they are the same"
            )
        if not passed:
            implementation = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: {length} tokens in chunks through the paged path differ from the "
                f"model's own forward by {worst:.3g} of the largest logit (allowed: {tolerance:g}). Either some layer "
                f"keeps state that the engine does not see, or the model's own attention ({implementation!r}) leaves out "
                "what the layers ask for (sdpa ignores soft-capping in some versions of transformers: load the model "
                "with attn_implementation='eager'). If you know better: "
                "InferenceConfig(advanced=Advanced(verify_model=False))"
            )

    def _verify_graphs(
        self, tokens: list[int], cuts: list[int], tolerance: float, all_ranks: Callable[[bool], bool]
    ) -> None:
        """Give graphs up unless they give the logits of the same forward and the same attention without them."""
        graphs = self.runner.graphs
        found = paged_logits(self.runner, tokens, *cuts)
        self.runner.graphs = None
        try:
            worst = over_largest(found, paged_logits(self.runner, tokens, *cuts))
        finally:
            self.runner.graphs = graphs
        if not all_ranks(worst <= tolerance) and graphs is not None:
            graphs.give_up(
                f"a replayed step differs from the same forward without one by {worst:.3g} of the largest logit"
            )

    def _require_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ConfigError(f"{what} needs a tokenizer and there is none; pass tokenizer= or use token ids")
        return self.tokenizer


def _warn_of_other_eos(model: nn.Module, tokenizer: Any) -> None:
    own, text = _eos_token_ids(model, None), getattr(tokenizer, "eos_token_id", None)
    if own and text is not None and text not in own:
        _log.warning(
            "the tokenizer's end-of-sequence token %r (%d) is not among the model's %s: each of them ends a completion; set "
            "tokenizer.eos_token or model.generation_config.eos_token_id so that they agree",
            getattr(tokenizer, "eos_token", None), text, list(own),
        )  # fmt: skip


def _eos_token_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for owner in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        value = getattr(owner, "eos_token_id", None)
        for token in value if isinstance(value, list | tuple) else (value,):
            if token is not None:
                found[int(token)] = None
    return tuple(found)
