"""The intake of requests, which checks prompts and records, assigns request ids, builds the samples and queues them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.config import InferenceConfig
from rollout.engine.forward.model_watch import ModelWatch
from rollout.engine.memory.kv_cache import RouteShape
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.parts.ledger import Ledger
from rollout.engine.parts.lifecycle import Lifecycle
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequences import PromptImages
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.errors import InvalidRequestError, warn_caller
from rollout.requests.block_hash import compute_block_hashes_batched, stream_key
from rollout.requests.images import PIXELS, ImageInputs, ImagePrompt, images_of
from rollout.requests.prompt import Prompt
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest, VLMInferenceRequest
from rollout.requests.token_columns import KeptTokens
from rollout.sampling_params import SamplingParams, one_each
from rollout.state import FinishReason
from rollout.threads.interrupts import uninterrupted


@dataclass(eq=False)
class Intake:
    """The part of one engine that accepts and queues requests.

    In its methods, `number` is a request id, `order` a group's place among groups of equal priority, and `version` the
    policy version to record.

    Args:
        _clock: function that returns the time in seconds, for arrival times.
        _routes: shape of the expert routes that the engine records. If None, the engine records no routes.

    Attributes:
        next_request_id: the id of the next request that is added without an id.
        order: the number of groups of samples queued so far. Requests of equal priority run in this order.
    """

    _config: InferenceConfig
    _lifecycle: Lifecycle
    _controller: TextGenerationController
    _scheduler: Scheduler
    _ledger: Ledger
    _watch: ModelWatch
    _max_sequence_length: int
    _clock: Callable[[], float]
    _routes: RouteShape | None
    next_request_id: int = 0
    order: int = 0
    _warned_clamped: bool = False

    # --- the engine's methods -----------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
        priority: int = 0,
        metadata: Any = None,
        samples: Sequence[int] | None = None,
        arrival_time: float | None = None,
    ) -> int:
        """Accept one prompt and its n samples, which run in the coming steps.

        Args:
            prompt: text, token ids, chat messages, or a processor's output for one prompt with images.
            sampling_params: the sampling parameters. If None, all have their defaults.
            request_id: id of the request. If None, the engine assigns its next id.
            priority: requests with a higher number run first; requests of equal priority run in order of arrival.
            metadata: any value that msgpack can serialize; results contain it unchanged.
            samples: indices of the samples that this engine computes; other ranks may compute the rest. None means all n.
            arrival_time: time on the engine's clock, in seconds, from which latency is measured. If None, the current time.

        Returns:
            The request id.

        Raises:
            InvalidRequestError: the request can never be served; nothing was queued.
            EngineStateError: the engine is stopping or stopped.
        """
        (params,) = one_each(sampling_params, 1)
        with uninterrupted(), self._lifecycle.lock:
            self._lifecycle.refuse_when_stopped()
            number = self.next_request_id if request_id is None else request_id
            tokens = self._controller.tokenize(prompt)
            try:
                wanted = self._ledger.free_indices(number, params.n, samples)
                self._scheduler.check_fits(number, len(wanted))
                leader = self.group(
                    number, tokens, params, wanted, order=self.order, version=self._scheduler.version,
                    prompt=prompt if isinstance(prompt, str) else None, priority=priority, metadata=metadata,
                    arrival_time=arrival_time,
                )  # fmt: skip
                self._queue(leader)
            except InvalidRequestError as exc:
                exc.request_id = number
                raise
            self.reserve(number + 1)
            self._ledger.accept(leader, *leader.siblings)
            self._ledger.counters["prompt_tokens"] += len(wanted) * len(tokens)
            return number

    def add_all(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[int]:
        """Queue all prompts and return their request ids. If this method raises, no prompt is queued."""
        numbers: list[int] = []
        try:
            for prompt in prompts:
                numbers.append(self.add_request(prompt, params))
        except BaseException:
            for number in numbers:
                self.abort_request(number)
            with self._lifecycle.lock:
                self._ledger.take(lambda key: key[0] in numbers)
            raise
        return numbers

    def add_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Continue an unfinished record (from `snapshot`, another engine or a checkpoint file) where it stopped.

        Raises:
            InvalidRequestError: this engine can never serve the record; nothing was queued.
        """
        with uninterrupted(), self._lifecycle.lock:
            self._lifecycle.refuse_when_stopped()
            number = record.request_id
            if record.sample_index in self._ledger.live.get(number, ()):
                raise InvalidRequestError(f"request {number} sample {record.sample_index} is here already", number)
            sample = self.continued(record, self.order, self._scheduler.version)
            self._queue(sample)
            self._ledger.accept(sample)
            self.reserve(number + 1)

    def check_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """Check a prompt and its parameters in the same way as `add_request`, and return the token ids. Queue nothing.

        Raises:
            InvalidRequestError, ConfigError, TypeError: `add_request` would raise the same error.
        """
        (params,) = one_each(sampling_params, 1)
        tokens = self._controller.tokenize(prompt)
        try:
            pictured = self.images(self.next_request_id, tokens)
            self._check(tokens, params)
        except InvalidRequestError as exc:
            raise exc.at() from exc
        if isinstance(tokens, ImagePrompt):
            tokens.keyed = pictured.keyed(tokens).tobytes()
        return tokens

    def check_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Check whether an engine with this configuration can continue a record. Queue nothing.

        Raises:
            InvalidRequestError, ConfigError: no engine with this configuration can continue the record.
        """
        _refuse_unserved(record, self._routes, self._controller.layout.vocab_size)
        self.images(record.request_id, prompt_of(record[0]))
        self._check(record[0].prompt_tokens, record[0].sampling_params)

    def abort_request(self, request_id: int, sample_index: int | None = None) -> int:
        """Abort a request at once, in any state. Its KV blocks are released when this method returns.

        Args:
            request_id: id of the request.
            sample_index: index of the only sample to abort. If None, all samples of the request are aborted.

        Returns:
            The number of aborted samples, which is 0 if the request had finished or never existed.
        """
        with uninterrupted(), self._lifecycle.lock:
            removed = self._scheduler.remove(lambda key: key[0] == request_id and sample_index in (None, key[1]))
            for sample in removed:
                self._ledger.end(sample, FinishReason.ABORT, f"RequestAbortedError: request {request_id} was aborted")
            return len(removed)

    def forget(self, request_id: int, sample_index: int) -> None:
        """Drop a sample that never ran on this engine, without counting or returning it. Ignore unknown samples."""
        with self._lifecycle.lock:
            for sample in self._scheduler.remove(lambda key: key == (request_id, sample_index)):
                self._ledger.forget(sample)

    def new_request_id(self) -> int:
        """Reserve and return a request id."""
        with self._lifecycle.lock:
            self.next_request_id += 1
            return self.next_request_id - 1

    def reserve(self, start: int) -> None:
        """Mark request ids below `start` as taken. The next assigned id is at least `start`."""
        with self._lifecycle.lock:
            self.next_request_id = max(self.next_request_id, start)

    # --- building samples ---------------------------------------------------------------------------------------

    def group(
        self,
        number: int,
        tokens: list[int],
        params: SamplingParams,
        indices: Sequence[int] = (0,),
        *,
        order: int,
        version: int,
        prompt: str | None = None,
        priority: int = 0,
        metadata: Any = None,
        arrival_time: float | None = None,
    ) -> Sample:
        """Build the samples with these `indices` of a new request. Return the first one; its `siblings` are the others.

        Raises:
            InvalidRequestError: the request can never be served.
        """
        pictured = self.images(number, tokens)
        params = self.clamped(number, tokens, params)
        # Store a seed in every request, even if the caller set none: a checkpoint needs it to continue the random stream.
        seed = stream_key(self._config.seed, number) if params.seed is None else params.seed
        samples: list[Sample] = []
        for index in indices:
            request = self._request(
                images_of(tokens), pictured, list(tokens),
                request_id=number, sample_index=index, prompt=prompt, sampling_params=params, priority=priority,
                arrival_time=self._clock() if arrival_time is None else arrival_time, metadata=metadata, seed=seed,
                policy_version=version, precomputed_block_hashes=samples[0].hashes if samples else [],
            )  # fmt: skip
            request.add_event_add_engine(timestamp=request.arrival_time)
            samples.append(self._sample(DynamicInferenceRequestRecord.from_request(request), order, pictured))
        samples[0].siblings = samples[1:]
        return samples[0]

    def continued(self, record: DynamicInferenceRequestRecord, order: int, version: int) -> Sample:
        """Build a sample that continues an unfinished record after its last token, and update the record in place.

        Raises:
            InvalidRequestError: this engine can never serve the record, the record's policy version is later than `version`,
                or the record's kept tokens (token ids left by top-p and the like) do not match its tokens.
        """
        number = record.request_id
        _refuse_unserved(record, self._routes, self._controller.layout.vocab_size)
        _fit_values(record, self._controller.runner.values.width)
        if record[-1].policy_version > version:
            raise InvalidRequestError(
                f"request {number} is of policy version {record[-1].policy_version} and the engine of {version}; call "
                f"weights_updated({record[-1].policy_version}) first",
                number,
            )
        if (newest := record[-1].policy_spans.newest() or 0) > record[-1].policy_version:
            raise InvalidRequestError(
                f"request {number} is of policy version {record[-1].policy_version} and has a token of version {newest}",
                number,
            )
        if record[-1].generated_tokens:
            record.checkpoint()
        request = record[-1]
        request.kv_spans.clear()
        if not request.completion_tokens:
            request.policy_spans.clear()
            request.routing_indices = None
        request.finished_chunk_token_count = 0
        request.block_size_tokens = self._config.advanced.block_size_tokens
        request.enable_prefix_caching = self._config.enable_prefix_caching
        request.precomputed_block_hashes = compute_block_hashes_batched(
            request.prompt_tokens, self._config.advanced.block_size_tokens, request.sampling_params.prefix_share
        )
        pictured = self.images(number, prompt_of(record[0]))
        request.sampling_params = self.clamped(number, request.prompt_tokens, request.sampling_params)
        record.advance_version(version, policy_only=True)
        return self._sample(record, order, pictured)

    def from_prompt(self, record: DynamicInferenceRequestRecord, order: int, version: int) -> Sample:
        """Build a sample that restarts a record from its prompt. Discard the record's tokens, but keep its events.

        Raises:
            InvalidRequestError: this engine can never serve the record.
        """
        first = record[0]
        prompt, params = first.prompt_tokens[: first.original_prompt_length], first.sampling_params
        # A checkpoint moves the completion tokens made so far into the next segment's prompt and lowers `max_tokens` by
        # their number. If the record starts with such a segment, undo this: raise `max_tokens` by that number again.
        if made := len(first.prompt_tokens) - len(prompt):
            params = params.replace(max_tokens=params.max_tokens + made)
        pictured = self.images(first.request_id, prompt_of(first))
        fresh = self._request(
            first.images, pictured, prompt,
            request_id=first.request_id, sample_index=first.sample_index, prompt=first.prompt,
            sampling_params=self.clamped(first.request_id, prompt, params), arrival_time=first.arrival_time,
            priority=first.priority, metadata=first.metadata, seed=first.seed, policy_version=version,
            events=record.joined("events"), event_add_engine=first.event_add_engine,
        )  # fmt: skip
        if fresh.event_add_engine is None:
            fresh.add_event_add_engine(timestamp=first.arrival_time)
        fresh.add_event_evict(timestamp=self._clock())
        return self._sample(DynamicInferenceRequestRecord.from_request(fresh), order, pictured)

    def restart(self, sample: Sample) -> bool:
        """Queue a stale sample, which is currently in no queue, to restart from its prompt. If that raises, fail the sample.

        Returns:
            Whether the sample was queued again.
        """
        try:
            fresh = self.from_prompt(sample.record, sample.order, self._scheduler.version)
            self._scheduler.add(fresh, sample.variant)
        except Exception as exc:  # noqa: BLE001 - any error fails this request only
            number, index = sample.key
            why = f"is too stale and cannot start again from its prompt: {type(exc).__name__}: {exc}"
            error = f"RequestFailedError: request {number} sample {index} {why}"
            self._ledger.end(sample, FinishReason.ERROR, error)
            return False
        self._ledger.accept(fresh)
        return True

    def images(self, number: int, tokens: list[int]) -> PromptImages:
        """Return the images of the prompt `tokens`, in the form that the scheduler uses.

        Raises:
            InvalidRequestError: the images do not fit the prompt or the model.
        """
        try:
            return self._controller.runner.vision.read(tokens, images_of(tokens))
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"request {number}: {exc}", number) from exc

    def clamped(self, number: int, tokens: list[int], params: SamplingParams) -> SamplingParams:
        """Check prompt tokens and parameters. Return the parameters with `max_tokens` clamped to the maximum length.

        Raises:
            InvalidRequestError: a request with this prompt and these parameters can never be served.
        """
        self._controller.check_tokens(tokens)
        self._controller.check_params(params)
        length = len(tokens)
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

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        number = self.next_request_id
        clamped = self.clamped(number, tokens, params)
        self._controller.completion_text(clamped)
        self._scheduler.check_fits(number, params.n, len(tokens), len(tokens) + clamped.max_tokens)

    def _queue(self, leader: Sample) -> None:
        self._scheduler.add(leader, self._watch.variant())
        self.order += 1

    def _request(
        self, images: ImageInputs | None, pictured: PromptImages, tokens: list[int], **fields: Any
    ) -> DynamicInferenceRequest:
        """Build a request for this engine: a `VLMInferenceRequest` if it has images, else a `DynamicInferenceRequest`."""
        fields |= {
            "prompt_tokens": tokens,
            "block_size_tokens": self._config.advanced.block_size_tokens,
            "enable_prefix_caching": self._config.enable_prefix_caching,
        }
        if images is None:
            return DynamicInferenceRequest(**fields)
        counts = [item.count for item in pictured.items]
        tile = math.gcd(*counts)
        return VLMInferenceRequest(
            **fields,
            imgs=images.tensors.get(PIXELS),
            image_inputs={name: value for name, value in images.tensors.items() if name != PIXELS},
            num_img_embeddings_per_tile=tile,
            num_tiles=[count // tile for count in counts],
            decoder_seq_length=len(tokens),
        )

    def _sample(self, record: DynamicInferenceRequestRecord, order: int, images: PromptImages) -> Sample:
        """Build the scheduler's sequence for the last segment of a record."""
        request, first = record[-1], record[0].sampling_params
        params, length = request.sampling_params, len(request.prompt_tokens)
        text = self._controller.completion_text(params)
        if text is not None:
            for position, token in enumerate(request.prompt_tokens[request.original_prompt_length :], 1):
                text.push(token, may_stop=position > first.min_tokens)
        tokens = images.keyed(request.prompt_tokens)
        if images.items and request.enable_prefix_caching:
            request.precomputed_block_hashes = compute_block_hashes_batched(
                tokens, self._config.advanced.block_size_tokens, params.prefix_share
            )
        return Sample(
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


def prompt_of(request: DynamicInferenceRequest) -> list[int]:
    """Return the original prompt of a record's first segment: its tokens, and its images if it has any."""
    given, images = request.prompt_tokens[: request.original_prompt_length], request.images
    return given if images is None else ImagePrompt(given, images)


def _refuse_unserved(record: DynamicInferenceRequestRecord, routes: RouteShape | None, vocabulary: int) -> None:
    """Raise `InvalidRequestError` if a record sets a field that the engine does not support and would ignore."""
    for request in record:
        if isinstance(request, VLMInferenceRequest) and request.images is None and request.num_tiles:
            field, cure = "num_tiles", "there is no image; give imgs, or clear it"
        elif why := _wrong_routes(request, routes):
            field, cure = "routing_indices", why
        elif why := _wrong_kept_tokens(request, vocabulary):
            field, cure = "generated_kept_tokens", why
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


def _wrong_routes(request: DynamicInferenceRequest, routes: RouteShape | None) -> str:
    """Return why the engine cannot continue a request with its recorded expert routes, or an empty string if it can."""
    indices = request.routing_indices
    if indices is None:
        return ""
    if routes is None:
        return "build the engine with InferenceConfig(record_routes=True), or clear them"
    shape, most = [routes.num_layers, routes.top_k], max(0, request.total_length - 1)
    if list(indices.shape[1:]) != shape or len(indices) > most:
        return f"shape {list(indices.shape)} is not [at most {most}, {routes.num_layers}, {routes.top_k}] of this model"
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < routes.num_experts:
        return f"they name an expert outside of this model's {routes.num_experts}"
    return ""


def _wrong_kept_tokens(request: DynamicInferenceRequest, vocabulary: int) -> str:
    """Return why a request cannot continue with its kept tokens (left by top-p etc.), or an empty string if it can."""
    sets = request.generated_kept_tokens
    if not request.sampling_params.return_kept_tokens:
        unwanted = "SamplingParams.return_kept_tokens is False, so later tokens would have none; set it"
        return "" if sets is None else unwanted
    if sets is not None and sets.ids.max(initial=0) >= vocabulary:
        return f"token {sets.ids.max()}: must be in [0, {vocabulary})"
    return (sets or KeptTokens.of(())).wrong_for(request.generated_tokens) or ""


def _fit_values(record: DynamicInferenceRequestRecord, width: int) -> None:
    """Fill a record's missing token values with NaN, or drop all values if `width` is 0 (there is no value function).

    Raises:
        InvalidRequestError: the values do not have `width` numbers for each token.
    """
    for segment in record:
        shape = (segment.generated_length, width)
        if not width:
            segment.generated_values = None
        elif segment.generated_values is None:
            segment.generated_values = np.full(shape, np.nan, np.float32)
        elif segment.generated_values.shape != shape:
            raise InvalidRequestError(
                f"request {record.request_id} sample {record.sample_index}: generated_values of shape "
                f"{segment.generated_values.shape} must be {shape}, as this engine's token_values returns them",
                record.request_id,
            )
