"""Request types, their fields and serialisation.

`InferenceRequest` has the fields that any engine needs. `DynamicInferenceRequest` is one segment of one sample in an engine
with continuous batching, and `VLMInferenceRequest` is such a segment with images. Requests are compared by identity, because
they change while they run. Times are in seconds. Token ids and log-probs are lists of Python numbers; only the properties
that return a torch tensor create one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from rollout.errors import ConfigError, InvalidRequestError, SerializationError
from rollout.requests import codec
from rollout.requests.block_hash import compute_block_hashes_batched, integer_array
from rollout.requests.codec import Codec, decode_fields, encode_fields, list_of, member_of, optional
from rollout.requests.codec import deserialize_tensor as deserialize_tensor
from rollout.requests.codec import serialize_tensor as serialize_tensor
from rollout.requests.events import EVENT, EventLog
from rollout.requests.events import DynamicInferenceEvent as DynamicInferenceEvent
from rollout.requests.events import DynamicInferenceEventType as DynamicInferenceEventType
from rollout.requests.images import PIXELS, ImageInputs
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import KEPT_TOKENS, KeptTokens, TopN
from rollout.sampling_params import LOGPROBS_MODES, MIRRORED, SamplingParams
from rollout.state import FinishReason, Status

if TYPE_CHECKING:
    import torch

_DEFAULT_PARAMS = SamplingParams()
_CODECS: dict[str, Codec] = {
    "Any": codec.OPAQUE, "bool": codec.BOOL, "float": codec.FLOAT, "int": codec.INT, "str": codec.STR,
    "str | int": codec.STR_OR_INT, "list[float]": codec.FLOATS, "list[int]": codec.INTS, "list[str]": list_of(codec.STR),
    "list[list[int]]": list_of(codec.INTS), "TopN": codec.TOP_N, "KeptTokens": KEPT_TOKENS, "NDArray[Any]": codec.INT_ARRAY,
    "NDArray[np.float32]": codec.FLOAT_ARRAY,
    "torch.Tensor": codec.TENSOR, "dict[str, torch.Tensor]": codec.TENSORS, "VersionSpans": codec.SPANS,
    "SamplingParams": codec.SAMPLING_PARAMS, "Status": member_of(Status), "FinishReason": member_of(FinishReason),
    "DynamicInferenceEvent": EVENT, "list[DynamicInferenceEvent]": list_of(EVENT),
}  # fmt: skip
"""The codec for each field type, by the type's annotation as written. A field of type `X | None` uses X's codec or None."""


@cache
def _codecs(kind: Any) -> dict[str, Codec]:
    types = {each.name: str(each.type) for each in fields(kind)}
    codecs = {name: _CODECS[written.removesuffix(" | None")] for name, written in types.items()}
    return {name: optional(each) if types[name].endswith(" | None") else each for name, each in codecs.items()}


@dataclass(kw_only=True, eq=False, repr=False)
class InferenceRequest:
    """A prompt with its sampling parameters and results.

    P is the number of prompt tokens, G the number of generated tokens. Token ids may be passed as any sequence, array or
    tensor of integers.

    Raises:
        InvalidRequestError: the id or a token id is not an integer, or the status is unknown.
    """

    request_id: int
    prompt: str | None = None
    """The text of the prompt, if given as text."""
    sampling_params: SamplingParams = _DEFAULT_PARAMS
    prompt_tokens: list[int] = field(default_factory=list)
    """The token ids of the prompt's P tokens."""
    arrival_time: float = field(default_factory=time.time)
    status: Status = Status.WAITING_IN_QUEUE
    encoder_prompt: str | None = None
    """The prompt for an encoder. The engine rejects a request with one, because it runs only decoders."""
    generated_text: str | None = None
    segments: list[str] | None = None
    """The text of each prompt token; None until `TextGenerationController.fill_segments` has set it."""
    generated_segments: list[str] | None = None
    generated_sequence_lengths: list[int] | None = None
    generated_tokens: list[int] = field(default_factory=list)
    """The ids of the G generated tokens."""
    prompt_log_probs: list[float] | None = None
    """The log-probs of the P prompt tokens from the second on, [P-1]; None if not computed."""
    generated_log_probs: list[float] = field(default_factory=list)
    """The log-probs of the G generated tokens; empty if not requested."""
    prompt_top_n_logprobs: TopN | None = None
    """The top (token id, log-prob) pairs for each of P prompt tokens from the second on, [P-1]; None if not computed."""
    generated_top_n_logprobs: TopN = field(default_factory=list)
    """The top (token id, log-prob) pairs for each of the G generated tokens; empty if not requested."""
    tpot: list[float] = field(default_factory=list)
    """The seconds between each generated token and the next (time per output token)."""

    def __post_init__(self) -> None:
        if not hasattr(self.request_id, "__index__"):
            raise InvalidRequestError(f"request_id={self.request_id!r}: must be an integer")
        try:
            self.status = Status.WAITING_IN_QUEUE if self.status is None else Status(self.status)
        except ValueError:
            raise InvalidRequestError(
                f"request {self.request_id}: status={self.status!r} must be None or one of {', '.join(Status.__members__)}",
                self.request_id,
            ) from None
        for name in ("prompt_tokens", "generated_tokens"):
            try:
                setattr(self, name, integer_array(name, _or_empty(getattr(self, name))).tolist())
            except ConfigError as exc:
                raise InvalidRequestError(f"request {self.request_id}: {exc}", self.request_id) from exc
        for name in ("generated_log_probs", "tpot"):
            setattr(self, name, _host_array(_or_empty(getattr(self, name))).tolist())
        self.generated_top_n_logprobs = list(_or_empty(self.generated_top_n_logprobs))
        if self.prompt_log_probs is not None:
            self.prompt_log_probs = _host_array(self.prompt_log_probs).tolist()

    @property
    def inference_parameters(self) -> SamplingParams:
        """An older name for `sampling_params`."""
        return self.sampling_params

    @inference_parameters.setter
    def inference_parameters(self, params: SamplingParams) -> None:
        self.sampling_params = params

    @property
    def generated_length(self) -> int:
        """The number of generated tokens."""
        return len(self.generated_tokens)

    @property
    def total_length(self) -> int:
        """The number of prompt tokens plus the number of tokens generated so far."""
        return len(self.prompt_tokens) + len(self.generated_tokens)

    def serialize(self) -> dict[str, Any]:
        """Encode as a plain dict for `msgpack.packb(…, use_bin_type=True)`."""
        kind: Any = type(self)
        return encode_fields(self, _codecs(kind))

    @classmethod
    def deserialize(cls, plain: Any) -> Self:
        """Decode a request; the exact inverse of `serialize`.

        Raises:
            SerializationError: a field is missing, unknown or malformed; the message names the field.
        """
        kind: Any = cls
        decoded = decode_fields(cls.__name__, plain, _codecs(kind))
        try:
            return cls(**decoded)
        except (InvalidRequestError, ConfigError) as exc:
            raise SerializationError(f"{cls.__name__}: {exc}") from exc

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(request_id={self.request_id}, {self.status.name}, "
            f"prompt={len(self.prompt_tokens)} tokens, generated={len(self.generated_tokens)} tokens)"
        )


@dataclass(kw_only=True, eq=False, repr=False)
class DynamicInferenceRequest(EventLog, InferenceRequest):
    """One segment of one sample, from admission until it finishes or until the next checkpoint.

    A position is an index into the prompt and generated tokens (T = P + G). `policy_spans` has the policy version that
    sampled each token, and `kv_spans` the version that computed each position's KV. Positions after the end of these spans
    have the version `policy_version`.
    """

    sample_index: int = 0
    """The index of the sample among the prompt's n samples. (request_id, sample_index) identifies a sample."""
    priority: int = 0
    """Requests with a higher priority run first."""
    seed: int | None = None
    """The effective seed: the caller's seed, or the seed that the engine derived."""
    rng_offset: int = 0
    """The number of completion tokens in earlier segments, which is this segment's offset in the random stream."""
    original_prompt_length: int = -1
    """The prompt length of the first segment. The default of -1 is replaced by this segment's own prompt length."""
    stream_offset: int = 0
    """The number of completion tokens already streamed to the caller."""
    metadata: Any = None
    """The caller's msgpack-able value, which the engine never reads."""
    policy_version: int = 0
    """The policy version under which the next token and its KV are computed."""
    policy_spans: VersionSpans = field(default_factory=VersionSpans)
    kv_spans: VersionSpans = field(default_factory=VersionSpans)
    finished_chunk_token_count: int = 0
    """The number of prompt tokens whose KV has been computed or was found in the prefix cache."""
    num_cached_tokens: int = 0
    """The number of prompt tokens found in the prefix cache."""
    block_size_tokens: int | None = None
    enable_prefix_caching: bool = False
    precomputed_block_hashes: list[int] = field(default_factory=list)
    """The hashes of the prompt's complete blocks. If prefix caching is on and they are not given, they are computed on
    construction."""
    stop_word_ids: list[list[int]] | None = None
    """Stop words as token ids. Not supported: a request with them is rejected. Use `SamplingParams.stop` instead."""
    routing_indices: NDArray[Any] | None = None
    """The k experts chosen at each position, integers [T - 1, layers, k]; see `token_columns.Routes`. A later segment has
    only the routes after the earlier segments' routes. None unless `InferenceConfig.record_routes` is set."""
    generated_kept_tokens: KeptTokens | None = None
    """The set of token ids that each generated token was drawn from; None unless `return_kept_tokens` is set."""
    generated_values: NDArray[np.float32] | None = None
    """The k numbers for each of G generated tokens from `token_values=…`, float32 [G, k]; None if that is not set."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that finished the request; None if there was none."""
    error: str | None = None
    """The error of a failed request, as `Type: message`; None if the request did not fail."""
    latency: float | None = None
    ttft: float | None = None
    """Seconds from arrival to the first token; None before the first token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.original_prompt_length < 0:
            self.original_prompt_length = len(self.prompt_tokens)
        if self.routing_indices is not None:
            self.routing_indices = _host_array(self.routing_indices)
        self._check_at_most("original_prompt_length", self.original_prompt_length, len(self.prompt_tokens))
        self._check_at_most("finished_chunk_token_count", self.finished_chunk_token_count, len(self.prompt_tokens))
        self._check_at_most("len(policy_spans)", len(self.policy_spans), self.total_length)
        self._check_at_most("len(kv_spans)", len(self.kv_spans), self.total_length)
        size = self.block_size_tokens if self.enable_prefix_caching else None
        # Skip the computation for a prompt shorter than a block, which has no hashes.
        shorter = size is not None and 0 < len(self.prompt_tokens) < size
        if size is not None and not shorter and not self.precomputed_block_hashes:
            share = self.sampling_params.prefix_share
            self.precomputed_block_hashes = compute_block_hashes_batched(self.prompt_tokens, size, share)

    def _check_at_most(self, name: str, value: int, limit: int) -> None:
        if not 0 <= value <= limit:
            raise InvalidRequestError(
                f"request {self.request_id}: {name}={value!r} must be in [0, {limit}]", self.request_id
            )

    def succeeded(self) -> bool:
        """Return whether the request finished with a result."""
        return self.status is Status.COMPLETED

    def failed(self) -> bool:
        """Return whether the request finished without a result."""
        return self.status is Status.FAILED

    # --- lengths ------------------------------------------------------------------------------------------------

    @property
    def remaining_prompt_tokens(self) -> list[int]:
        """The prompt tokens whose KV is still to be computed."""
        return self.prompt_tokens[self.finished_chunk_token_count :]

    @property
    def remaining_prompt_length(self) -> int:
        """The number of `remaining_prompt_tokens`."""
        return len(self.prompt_tokens) - self.finished_chunk_token_count

    @property
    def kv_length(self) -> int:
        """The number of positions whose KV has been computed.

        Once a token has been generated, the whole prompt has KV. The last token's own KV is computed by the next step.
        """
        if self.generated_tokens:
            return self.total_length - 1
        return self.finished_chunk_token_count

    @property
    def completion_tokens(self) -> list[int]:
        """The token ids after the user's prompt, including the tokens of earlier segments."""
        return self.prompt_tokens[self.original_prompt_length :] + self.generated_tokens

    @property
    def images(self) -> ImageInputs | None:
        """All tensors of the request's images and videos; None if there are none."""
        return None

    # --- versions -----------------------------------------------------------------------------------------------

    def advance_version(self, version: int, *, policy_only: bool = False) -> None:
        """Advance to policy version `version`, in O(1). Existing tokens and KV keep the previous version.

        Args:
            version: the new policy version.
            policy_only: whether the request is waiting and has no KV. If so, the versions in `kv_spans` rise by as much as
                the policy version, and `policy_spans` stays empty until there is a token.

        Raises:
            ValueError: `version` is below `policy_version`.
        """
        if version < self.policy_version:
            raise ValueError(
                f"request {self.request_id}: version={version!r} must be at least policy_version="
                f"{self.policy_version}; versions only rise"
            )
        if not policy_only or self.policy_spans or self.generated_tokens:
            self.policy_spans.extend_to(self.total_length, self.policy_version)
        if policy_only:
            # Shift the KV versions by as much as the policy version, so that the difference, the staleness, stays the same.
            self.kv_spans.shift(version - self.policy_version)
        else:
            self.kv_spans.extend_to(self.kv_length, self.policy_version)
        self.policy_version = int(version)

    def increment_staleness(self, policy_only: bool = False) -> None:
        """Advance the policy version by 1; see `advance_version`."""
        self.advance_version(self.policy_version + 1, policy_only=policy_only)

    @property
    def policy_versions(self) -> NDArray[np.int64]:
        """The policy version that sampled each of T tokens, int64 [T]; for prompt tokens, the version at their admission."""
        return self._versions(self.policy_spans)

    @property
    def kv_versions(self) -> NDArray[np.int64]:
        """The policy version that computed each of T positions' KV, int64 [T]; if not yet computed, the current version."""
        return self._versions(self.kv_spans)

    @property
    def policy_staleness(self) -> torch.Tensor:
        """The number of weight updates since each of T tokens was sampled, int32 [T]."""
        return self._staleness(self.policy_versions)

    @property
    def kv_cache_staleness(self) -> torch.Tensor:
        """The number of weight updates since the KV of each of T positions was computed, int32 [T]."""
        return self._staleness(self.kv_versions)

    def _versions(self, spans: VersionSpans) -> NDArray[np.int64]:
        known = spans.dense()[: self.total_length]
        versions = np.full(self.total_length, self.policy_version, np.int64)
        versions[: len(known)] = known
        return versions

    def _staleness(self, versions: NDArray[np.int64]) -> torch.Tensor:
        import torch

        return torch.from_numpy((self.policy_version - versions).astype(np.int32))

    # --- sampling options stored on the device ------------------------------------------------------------------

    @staticmethod
    def get_metadata_types() -> list[tuple[str, torch.dtype, bool]]:
        """Return (name, dtype, whether stored on the device) for each per-request sampling option that the engine stores."""
        import torch

        return [(name, getattr(torch, dtype), on_device) for name, dtype, on_device in MIRRORED]

    @property
    def tracked_metadata(self) -> dict[str, int | float]:
        """The value of each option in `get_metadata_types`, by name; None becomes -1, and `logit_bias` its length."""
        params = self.sampling_params
        values = {name: getattr(params, name) for name, _, _ in MIRRORED} | {
            "seed": self.seed,
            "logprobs_mode": LOGPROBS_MODES.index(params.logprobs_mode),
            "logit_bias": len(params.logit_bias or ()),
        }
        return {name: -1 if value is None else value for name, value in values.items()}


@dataclass(kw_only=True, eq=False, repr=False)
class VLMInferenceRequest(DynamicInferenceRequest):
    """A request with images. Its prompt tokens have one placeholder per embedding, as processors return them."""

    num_img_embeddings_per_tile: int = 0
    """The number of embeddings, and so of placeholders, per tile; set at admission."""
    imgs: torch.Tensor | None = None
    """The processor's `pixel_values`; None if the request has only videos."""
    image_inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """The processor's other tensors, by name: `image_grid_thw`, `pixel_values_videos` (Qwen-VL), `pixel_attention_mask`."""
    num_tiles: list[int] = field(default_factory=list)
    """The number of tiles in each image, which the vision tower encodes separately; set at admission."""
    decoder_seq_length: int | None = None
    """The number of prompt positions after images have been replaced by embeddings; set at admission."""

    @property
    def images(self) -> ImageInputs | None:
        tensors = self.image_inputs if self.imgs is None else {PIXELS: self.imgs, **self.image_inputs}
        return ImageInputs(tensors) if tensors else None


def _decode_request(plain: Any) -> DynamicInferenceRequest:
    kind = VLMInferenceRequest if isinstance(plain, dict) and "imgs" in plain else DynamicInferenceRequest
    return kind.deserialize(plain)


REQUEST = Codec(DynamicInferenceRequest.serialize, _decode_request)
"""A codec for requests with and without images."""


# --- requests with images -------------------------------------------------------------------------------------------------


def with_images(request: DynamicInferenceRequest, images: ImageInputs | None) -> DynamicInferenceRequest:
    """Return a copy of the request with `images`. None returns the request itself."""
    if images is None:
        return request
    tensors = dict(images.tensors)
    values = {each.name: getattr(request, each.name) for each in fields(request) if each.init}
    return VLMInferenceRequest(**values, imgs=tensors.pop(PIXELS, None), image_inputs=tensors)


def _or_empty(values: Any) -> Any:
    return [] if values is None else values


def _host_array(values: Any) -> NDArray[Any]:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)
