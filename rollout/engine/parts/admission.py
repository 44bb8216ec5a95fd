"""Admission: turns prompts and records into sequences, or refuses them by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rollout.config import InferenceConfig
from rollout.engine.memory.kv_cache import RouteShape
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.scheduling.prompt_images import PromptImages
from rollout.engine.scheduling.sequences import Order, Sequence
from rollout.errors import InvalidRequestError, warn_caller
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.requests.images import PIXELS, ImageInputs, ImagePrompt, images_of
from rollout.requests.kept_tokens import KeptTokens
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest, VLMInferenceRequest
from rollout.requests.seeds import stream_key
from rollout.sampling_params import SamplingParams


def refuse_what_is_not_served(record: DynamicInferenceRequestRecord, routes: RouteShape | None = None) -> None:
    """Refuse a record with fields that the engine does not support, instead of ignoring them silently.

    Args:
        routes: shape of the expert routes that the engine records; None: it records none.

    Raises:
        InvalidRequestError: names the field, its value and what to do instead.
    """
    for request in record:
        if isinstance(request, VLMInferenceRequest) and request.images is None and request.num_tiles:
            field, cure = "num_tiles", "there is no image; give imgs, or clear it"
        elif request.routing_indices is not None and (why := _refused_routes(request, routes)) is not None:
            field, cure = "routing_indices", why
        elif request.encoder_prompt is not None:
            field, cure = "encoder_prompt", "only decoder models are supported; put the text into the prompt"
        elif request.stop_word_ids is not None:
            field, cure = "stop_word_ids", "give SamplingParams.stop, or stop_token_ids for single tokens"
        else:
            continue
        raise InvalidRequestError(
            f"request {record.request_id} sample {record.sample_index} sets {type(request).__name__}.{field}: {cure}",
            record.request_id,
        )


def _refused_routes(request: DynamicInferenceRequest, routes: RouteShape | None) -> str | None:
    """Why the engine cannot go on after these expert routes; None: it can."""
    indices = request.routing_indices
    assert indices is not None
    if routes is None:
        return "build the engine with InferenceConfig(record_routes=True), or clear them"
    shape, most = [routes.num_layers, routes.top_k], max(0, request.total_length - 1)
    if list(indices.shape[1:]) != shape or len(indices) > most:
        return f"shape {list(indices.shape)} is not [at most {most}, {routes.num_layers}, {routes.top_k}] of this model"
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < routes.num_experts:
        return f"they name an expert outside of this model's {routes.num_experts}"
    return None


class Admission:
    """Validates requests and builds the scheduler's `Sequence` objects for one engine.

    Args:
        clock: seconds, for arrival times.
        routes: shape of the expert routes that the engine records; None: it records none.
    """

    def __init__(
        self,
        config: InferenceConfig,
        controller: TextGenerationController,
        max_sequence_length: int,
        clock: Callable[[], float],
        routes: RouteShape | None = None,
    ) -> None:
        self._config = config
        self._controller = controller
        self._max_sequence_length = max_sequence_length
        self._clock = clock
        self.routes = routes
        self._warned_clamped = False

    def group(
        self,
        number: int,
        tokens: list[int],
        params: SamplingParams,
        *,
        order: Order,
        version: int,
        prompt: str | None,
        priority: int,
        metadata: Any,
        indices: Iterable[int] | None = None,
        arrival_time: float | None = None,
    ) -> Sequence:
        """Build the sequence group of a new request: the first sample, with the others as its unforked `siblings`.

        Args:
            indices: which of the `n` samples to build; None: all.
            arrival_time: None: now.

        Raises:
            InvalidRequestError: the request can never be served as asked.
        """
        images, pictured = images_of(tokens), self.images(number, tokens)
        params = self.check(number, tokens, params)
        # Every request has a seed, its own or a derived one, so that its random stream survives checkpoints.
        seed = stream_key(self._config.seed, number) if params.seed is None else params.seed
        samples: list[Sequence] = []
        for index in range(params.n) if indices is None else indices:
            request = _kind(images)(
                request_id=number,
                sample_index=index,
                prompt=prompt,
                prompt_tokens=list(tokens),
                sampling_params=params,
                arrival_time=self._clock() if arrival_time is None else arrival_time,
                priority=priority,
                metadata=metadata,
                seed=seed,
                policy_version=version,
                block_size_tokens=self._config.advanced.block_size_tokens,
                enable_prefix_caching=self._config.enable_prefix_caching,
                precomputed_block_hashes=samples[0].hashes if samples else [],
                **_image_fields(images, pictured, len(tokens)),
            )
            request.add_event_add_engine(timestamp=request.arrival_time)
            samples.append(self.sample(DynamicInferenceRequestRecord.from_request(request), order, pictured))
        samples[0].siblings = samples[1:]
        return samples[0]

    def images(self, number: int, tokens: list[int]) -> PromptImages | None:
        """The images that a prompt carries; None: it is text.

        Raises:
            InvalidRequestError: they do not fit the prompt or the model.
        """
        try:
            return self._controller.runner.vision.read(tokens, images_of(tokens))
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"request {number}: {exc}", number) from exc

    def check(self, number: int, tokens: list[int], params: SamplingParams) -> SamplingParams:
        """Validate prompt tokens and parameters; return the parameters with `max_tokens` clamped to the context length.

        Raises:
            InvalidRequestError: such a request can never be served.
        """
        self._controller.check_tokens(tokens)
        self._controller.check_params(params)
        return self._clamped(number, len(tokens), params)

    def continued(self, record: DynamicInferenceRequestRecord, order: Order, version: int) -> Sequence:
        """Build a sequence that continues an unfinished record after its last token; updates the record in place.

        Raises:
            InvalidRequestError: it can never be served here, its policy version is later than `version`, or its kept tokens
                are not those of its tokens.
        """
        number = record.request_id
        refuse_what_is_not_served(record, self.routes)
        self._refuse_wrong_kept_tokens(record)
        if record[-1].policy_version > version:
            raise InvalidRequestError(
                f"request {number} is of policy version {record[-1].policy_version} and the engine of {version}; call "
                f"weights_updated({record[-1].policy_version}) first",
                number,
            )
        if (record[-1].policy_spans.newest() or 0) > record[-1].policy_version:
            raise InvalidRequestError(
                f"request {number} is of policy version {record[-1].policy_version} and has a token of version "
                f"{record[-1].policy_spans.newest()}",
                number,
            )
        if record[-1].generated_tokens:
            record.checkpoint()
        request = record[-1]
        request.kv_spans.clear()
        if not request.completion_tokens:
            request.policy_spans.clear()
        request.finished_chunk_token_count = 0
        if not request.completion_tokens:
            request.routing_indices = None
        request.block_size_tokens = self._config.advanced.block_size_tokens
        request.enable_prefix_caching = self._config.enable_prefix_caching
        request.precomputed_block_hashes = compute_block_hashes_batched(
            request.prompt_tokens, self._config.advanced.block_size_tokens, request.sampling_params.prefix_share
        )
        pictured = self.images(number, prompt_of(record[0]))
        self._controller.check_tokens(request.prompt_tokens)
        self._controller.check_params(request.sampling_params)
        request.sampling_params = self._clamped(number, len(request.prompt_tokens), request.sampling_params)
        record.advance_version(version, policy_only=True)
        return self.sample(record, order, pictured)

    def from_prompt(self, record: DynamicInferenceRequestRecord, order: Order, version: int) -> Sequence:
        """Build a sequence that restarts a sample from its prompt: tokens are discarded, events are kept.

        Raises:
            InvalidRequestError: it can never be served here.
        """
        first = record[0]
        prompt, params = _as_given(first)
        images, pictured = _images(first), self.images(first.request_id, prompt_of(first))
        fresh = _kind(images)(
            request_id=first.request_id,
            sample_index=first.sample_index,
            prompt=first.prompt,
            prompt_tokens=prompt,
            sampling_params=self.check(first.request_id, prompt, params),
            arrival_time=first.arrival_time,
            priority=first.priority,
            metadata=first.metadata,
            seed=first.seed,
            policy_version=version,
            block_size_tokens=self._config.advanced.block_size_tokens,
            enable_prefix_caching=self._config.enable_prefix_caching,
            events=[event for segment in record for event in segment.events],
            event_add_engine=first.event_add_engine,
            **_image_fields(images, pictured, len(prompt)),
        )
        if fresh.event_add_engine is None:
            fresh.add_event_add_engine(timestamp=first.arrival_time)
        fresh.add_event_evict(timestamp=self._clock())
        return self.sample(DynamicInferenceRequestRecord.from_request(fresh), order, pictured)

    def sample(
        self, record: DynamicInferenceRequestRecord, order: Order, images: PromptImages | None = None
    ) -> Sequence:
        """Build the sequence for the last segment of a record."""
        request = record[-1]
        params = request.sampling_params
        length = len(request.prompt_tokens)
        text = self._controller.completion_text(params)
        completed = request.prompt_tokens[request.original_prompt_length :]
        first = record[0].sampling_params
        for position, token in enumerate(completed, 1):
            if text is not None:
                text.push(token, may_stop=position > first.min_tokens)
        tokens = np.asarray(request.prompt_tokens, np.int32)
        if images is not None:
            tokens = images.keyed(request.prompt_tokens)
            if request.enable_prefix_caching:
                request.precomputed_block_hashes = compute_block_hashes_batched(
                    tokens, self._config.advanced.block_size_tokens, params.prefix_share
                )
        return Sequence(
            record=record,
            order=order,
            tokens=tokens,
            stop_ids=self._controller.stop_ids(params),
            max_length=length + params.max_tokens,
            min_length=length + params.min_tokens,
            hashes=request.precomputed_block_hashes,
            text=text,
            wants_prompt_logprobs=params.prompt_logprobs is not None and record[0].prompt_log_probs is None,
            images=images,
        )

    def _refuse_wrong_kept_tokens(self, record: DynamicInferenceRequestRecord) -> None:
        vocabulary = self._controller.layout.vocab_size
        for index, segment in enumerate(record):
            sets, wrong = segment.generated_kept_tokens, None
            if segment.sampling_params.return_kept_tokens:
                wrong = (sets or KeptTokens.of(())).wrong_for(segment.generated_tokens)
                if sets is not None and sets.ids.max(initial=0) >= vocabulary:
                    wrong = f"token {sets.ids.max()}: must lie in [0, {vocabulary})"
            elif sets is not None:
                wrong = "SamplingParams.return_kept_tokens is False, so later tokens would have none; set it"
            if wrong is not None:
                raise InvalidRequestError(
                    f"request {record.request_id} sample {record.sample_index} segment {index}: generated_kept_tokens: "
                    f"{wrong}",
                    record.request_id,
                )

    def _clamped(self, number: int, length: int, params: SamplingParams) -> SamplingParams:
        room = self._max_sequence_length - length
        if room < 0 or (room == 0 and params.max_tokens > 0):
            raise InvalidRequestError(
                f"request {number}: a prompt of {length} tokens leaves no room within max_sequence_length="
                f"{self._max_sequence_length}; shorten it or raise max_sequence_length"
            )
        if params.max_tokens <= room:
            return params
        if not self._warned_clamped:
            self._warned_clamped = True
            warn_caller(
                f"max_tokens={params.max_tokens} is clamped to {room}: max_sequence_length={self._max_sequence_length} "
                f"leaves no more after a prompt of {length} tokens; set SamplingParams(max_tokens={room}) for such prompts, "
                "or raise InferenceConfig.max_sequence_length up to what the model can have (warned once per engine)"
            )
        return params.replace(max_tokens=room, min_tokens=min(params.min_tokens, room))


def prompt_of(request: DynamicInferenceRequest) -> list[int]:
    """Prompt tokens of a record's first segment as they were given, with the images."""
    given, images = request.prompt_tokens[: request.original_prompt_length], _images(request)
    return given if images is None else ImagePrompt(given, images)


def _images(request: DynamicInferenceRequest) -> ImageInputs | None:
    return request.images if isinstance(request, VLMInferenceRequest) else None


def _kind(images: ImageInputs | None) -> type[DynamicInferenceRequest]:
    return DynamicInferenceRequest if images is None else VLMInferenceRequest


def _image_fields(images: ImageInputs | None, pictured: PromptImages | None, length: int) -> dict[str, Any]:
    """Fields of a `VLMInferenceRequest`; none for a text."""
    if images is None or pictured is None:
        return {}
    counts = [item.count for item in pictured.items]
    tile = math.gcd(*counts)
    return {
        "imgs": images.tensors.get(PIXELS),
        "image_inputs": {name: value for name, value in images.tensors.items() if name != PIXELS},
        "num_img_embeddings_per_tile": tile,
        "num_tiles": [count // tile for count in counts],
        "decoder_seq_length": length,
    }


def _as_given(first: DynamicInferenceRequest) -> tuple[list[int], SamplingParams]:
    """Original prompt and parameters of a request, also where the record begins with a checkpointed segment."""
    prompt, params = first.prompt_tokens[: first.original_prompt_length], first.sampling_params
    made = len(first.prompt_tokens) - len(prompt)
    return prompt, params.replace(max_tokens=params.max_tokens + made) if made else params
