"""The client side of one group: the tokens received for its samples, and the requests built from the tokens.

Every sample of the group is open, finished, or excluded by `want_only`. A finished sample receives no more tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import InitVar, dataclass, field

import numpy as np

from rollout.distributed.protocol.fields import LostFramesError
from rollout.distributed.protocol.messages import Stretch
from rollout.distributed.protocol.outcome import Outcome, unpack
from rollout.distributed.protocol.stretch import PartialGroup, oldest_version
from rollout.errors import InvalidRequestError, RolloutError, SerializationError
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.requests.delta import SampleDelta
from rollout.requests.events import unpack_events
from rollout.requests.images import ImageInputs
from rollout.requests.request import DynamicInferenceRequest, with_images
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason
from rollout.state import Status as RequestStatus

_FAILED = (FinishReason.ERROR, FinishReason.ABORT)


def noop(*_: object) -> None:
    """Do nothing. This is the default callback."""


@dataclass(eq=False, slots=True)
class OpenGroup:
    """A prompt, its parameters, and all tokens received for its n samples.

    Args:
        prompt: the prompt as text, or its token ids as little-endian int32 in bytes.
    """

    request_id: int
    """The id that the client chose for the request."""
    prompt: InitVar[str | bytes]
    params: SamplingParams
    """The sampling parameters that the caller submitted."""
    priority: int
    arrival_time: float
    """The time of arrival, in wall-clock seconds."""
    text: str | None = field(init=False)
    """The prompt's text; None if the prompt was given as token ids."""
    prompt_tokens: bytes | None = field(init=False)
    """The prompt's token ids as little-endian int32; None until the coordinator has tokenised a text prompt."""
    error: RolloutError | None = None
    """The error with which the group failed; None if it has not failed."""
    on_update: Callable[[OpenGroup, Stretch], object] = noop
    """The callback that runs when tokens have arrived or samples have finished."""
    on_done: Callable[[OpenGroup], object] = noop
    """The callback that runs when the group has finished, complete or with an error."""
    images: ImageInputs | None = None
    """The tensors of the prompt's images; None if the prompt has no images."""
    keyed: bytes = b""
    """The prompt's tokens as int32, with each image placeholder replaced by a key of its image. Block hashes are
    computed from these tokens. Empty if the prompt has no images."""
    _tokens: PartialGroup = field(default_factory=PartialGroup)
    _open: set[int] = field(init=False)
    _ended: set[int] = field(default_factory=set)
    _prompt_list: list[int] | None = None
    _hashes: list[int] = field(default_factory=list)

    def __post_init__(self, prompt: str | bytes) -> None:
        self.text = prompt if isinstance(prompt, str) else None
        self.prompt_tokens = None if isinstance(prompt, str) else prompt
        self._open = set(range(self.params.n))

    @property
    def complete(self) -> bool:
        return not self._open

    @property
    def done(self) -> bool:
        return self.complete or self.error is not None

    def open_samples(self) -> list[int]:
        """Return the indices of the wanted samples that have not finished."""
        return sorted(self._open)

    def want_only(self, wanted: Collection[int]) -> None:
        """Restrict the open samples to the indices in `wanted`. Finished samples stay readable.

        Raises:
            InvalidRequestError: an index is outside the group.
        """
        foreign = [index for index in wanted if type(index) is not int or not 0 <= index < self.params.n]
        if foreign:
            raise InvalidRequestError(f"wanted={foreign}: must be samples in [0, n={self.params.n})")
        self._open = set(wanted).difference(self._ended)

    def oldest_version(self) -> int | None:
        """Return the lowest policy version among the tokens of the open samples, or None if they have no tokens yet."""
        return oldest_version(self._tokens.deltas(self._open).values())

    def take(self, stretch: Stretch) -> None:
        """Add a stretch, which is a batch of new tokens of the group's samples.

        Raises:
            LostFramesError: some tokens that precede those in the stretch were not received.
            SerializationError: a sample of the stretch does not exist or has already finished.
        """
        if not self._open.issuperset(stretch.indices):
            index = next(index for index in stretch.indices if index not in self._open)
            state = "has ended" if index in self._ended else f"is none of n={self.params.n} or was not asked for"
            raise SerializationError(f"request {self.request_id}: tokens of sample {index}, which {state}")
        try:
            self._tokens.take(stretch)
        except LostFramesError as exc:
            raise LostFramesError(f"request {self.request_id}: {exc}") from None
        if "outcome" in stretch.columns:
            ended = stretch.ended()
            self._open.difference_update(ended)
            self._ended.update(ended)

    def known(self, samples: Collection[int] | None = None) -> list[Stretch]:
        """Return all tokens received for these samples (all if None), as the argument `known` for a later `submit`.

        The list contains one batch of tokens, or is empty if there are none. Finished samples are included with their
        outcomes, so that they are not computed again.
        """
        return self._tokens.known(self._tokens.lengths if samples is None else samples)

    def delta(self, index: int) -> SampleDelta:
        """Return all tokens received for a sample as one delta."""
        if not self._open:
            self._tokens.compact()
        return self._tokens.deltas([index]).get(index) or SampleDelta(self.request_id, index)

    def result(self) -> list[DynamicInferenceRequest]:
        """Return the finished samples as requests, in order. All of them share one `prompt_tokens` list.

        Raises:
            RolloutError: the group failed.
            RuntimeError: the group has not finished.
        """
        if self.error is not None:
            raise self.error
        if not self.complete:
            raise RuntimeError(
                f"request {self.request_id}: of n={self.params.n} samples {len(self.open_samples())} have not ended; wait "
                "for them"
            )
        return [self.request(index) for index in sorted(self._ended)]

    def request(self, index: int) -> DynamicInferenceRequest:
        """Build the request of a finished sample. It equals the request that an engine in this process would return.

        Raises:
            RuntimeError: the sample has not finished.
            SerializationError: the sample's outcome is malformed.
        """
        if index not in self._ended:
            raise RuntimeError(f"request {self.request_id} sample {index} has not ended, or was not asked for")
        sample = self.delta(index)
        if self._prompt_list is None:
            self._prompt_list = np.frombuffer(self.prompt_tokens or b"", "<i4").tolist()
        outcome = unpack(sample.outcome or b"")
        if outcome.block_size_tokens is not None and not self._hashes:
            hashed = np.frombuffer(self.keyed, "<i4") if self.keyed else self._prompt_list
            self._hashes = compute_block_hashes_batched(hashed, outcome.block_size_tokens, self.params.prefix_share)
        request = DynamicInferenceRequest(
            request_id=self.request_id,
            sample_index=index,
            prompt=self.text,
            prompt_tokens=self._prompt_list,
            sampling_params=self._params_used(outcome),
            arrival_time=self.arrival_time,
            priority=self.priority,
            status=RequestStatus.FAILED if outcome.finish_reason in _FAILED else RequestStatus.COMPLETED,
            finish_reason=outcome.finish_reason,
            stop_reason=outcome.stop_reason,
            error=outcome.error,
            seed=outcome.seed,
            generated_text=sample.text,
            prompt_log_probs=outcome.prompt_log_probs,
            prompt_top_n_logprobs=outcome.prompt_top_n,
            generated_top_n_logprobs=sample.top_n_rows(),
            routing_indices=sample.route_rows(len(self._prompt_list) + sample.count - 1),
            generated_kept_tokens=sample.kept_tokens(),
            generated_values=sample.value_rows(),
            tpot=outcome.tpot,
            ttft=outcome.ttft if sample.ttft is None else sample.ttft,
            latency=outcome.latency,
            policy_version=outcome.policy_version,
            num_cached_tokens=outcome.num_cached_tokens,
            finished_chunk_token_count=min(len(outcome.kv_spans), len(self._prompt_list)),
            generated_tokens=sample.token_list(),
            generated_log_probs=sample.log_prob_list(),
            policy_spans=outcome.policy_spans,
            kv_spans=outcome.kv_spans,
            block_size_tokens=outcome.block_size_tokens,
            enable_prefix_caching=outcome.block_size_tokens is not None,
            precomputed_block_hashes=self._hashes,
        )
        request.put_events_before(unpack_events(sample.events or b""))
        request = with_images(request, self.images)
        request.prompt_tokens = self._prompt_list
        return request

    def _params_used(self, outcome: Outcome) -> SamplingParams:
        most = outcome.max_tokens
        if most == self.params.max_tokens:
            return self.params
        return self.params.replace(max_tokens=most, min_tokens=min(self.params.min_tokens, most))
