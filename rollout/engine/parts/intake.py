"""Accepts requests for one engine: checks a prompt or a record, numbers it and queues its samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from rollout.engine.forward.model_watch import ModelWatch
from rollout.engine.parts.admission import Admission, prompt_of, refuse_what_is_not_served
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.parts.ledger import Ledger
from rollout.engine.parts.lifecycle import Lifecycle
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.errors import InvalidRequestError
from rollout.requests.images import ImagePrompt
from rollout.requests.prompt import Prompt
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.sampling_params import SamplingParams, one_each
from rollout.state import FinishReason
from rollout.threads.interrupts import uninterrupted


class Intake:
    """Queues the requests of one engine.

    Attributes:
        next_request_id: id of the next request that brings none.
        order: number of groups queued so far; ties in the queue are broken by it.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        controller: TextGenerationController,
        scheduler: Scheduler,
        admission: Admission,
        ledger: Ledger,
        watch: ModelWatch,
    ) -> None:
        self._lifecycle = lifecycle
        self._controller = controller
        self._scheduler = scheduler
        self._admission = admission
        self._ledger = ledger
        self._watch = watch
        self.next_request_id = 0
        self.order = 0

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: int | None,
        priority: int,
        metadata: Any,
        samples: Sequence[int] | None,
        arrival_time: float | None,
        client: Hashable,
    ) -> int:
        """Queue a prompt; see `DynamicInferenceEngine.add_request`."""
        with uninterrupted(), self._lifecycle.lock:
            self._lifecycle.refuse_when_stopped()
            number = self.next_request_id if request_id is None else request_id
            tokens = self._controller.tokenize(prompt)
            try:
                wanted = self._ledger.free_indices(number, params.n, samples)
                self._scheduler.check_fits(number, len(wanted))
                leader = self._admission.group(
                    number, tokens, params, order=(0, self.order), version=self._scheduler.version, priority=priority,
                    metadata=metadata, prompt=prompt if isinstance(prompt, str) else None, indices=wanted,
                    arrival_time=arrival_time,
                )  # fmt: skip
                self._queue(leader, client)
            except InvalidRequestError as exc:
                exc.request_id = number
                raise
            self.reserve(number + 1)
            self._ledger.accept(leader, *leader.siblings)
            self._ledger.counters["prompt_tokens"] += len(wanted) * len(tokens)
            return number

    def add_all(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[int]:
        """Queue prompts, or none of them; returns their ids."""
        numbers: list[int] = []
        try:
            for prompt in prompts:
                numbers.append(self.add(prompt, params, None, 0, None, None, None, None))
        except BaseException:
            for number in numbers:
                self.abort(number, None)
            self.take_ended(lambda key: key[0] in numbers)
            raise
        return numbers

    def add_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Queue an unfinished record; see `DynamicInferenceEngine.add_record`."""
        with uninterrupted(), self._lifecycle.lock:
            self._lifecycle.refuse_when_stopped()
            number = record.request_id
            if record.sample_index in self._ledger.live.get(number, ()):
                raise InvalidRequestError(f"request {number} sample {record.sample_index} is here already", number)
            sample = self._admission.continued(record, (0, self.order), self._scheduler.version)
            self._queue(sample, None)
            self._ledger.accept(sample)
            self.reserve(number + 1)

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None) -> list[int]:
        """Check a prompt without queueing it; see `DynamicInferenceEngine.check_request`."""
        (params,) = one_each(sampling_params, 1)
        number = self.next_request_id
        tokens = self._controller.tokenize(prompt)
        try:
            pictured = self._admission.images(number, tokens)
            self._check(number, tokens, params)
        except InvalidRequestError as exc:
            raise exc.at() from exc
        if pictured is not None and isinstance(tokens, ImagePrompt):
            tokens.keyed = pictured.keyed(tokens).tobytes()
        return tokens

    def check_record(self, record: DynamicInferenceRequestRecord) -> None:
        """Check a record that `add_record` would queue; nothing is queued.

        Raises:
            InvalidRequestError, ConfigError: no engine like this one could continue it.
        """
        refuse_what_is_not_served(record, self._admission.routes)
        self._admission.images(record.request_id, prompt_of(record[0]))
        self._check(self.next_request_id, record[0].prompt_tokens, record[0].sampling_params)

    def _check(self, number: int, tokens: list[int], params: SamplingParams) -> None:
        clamped = self._admission.check(number, tokens, params)
        self._controller.completion_text(clamped)
        self._scheduler.check_fits(number, params.n, len(tokens), len(tokens) + clamped.max_tokens)

    def _queue(self, leader: Sample, client: Hashable) -> None:
        """Append a new group to its client's queue."""
        group = (leader, *leader.siblings)
        charge = sum(each.max_length for each in group) - sum(len(each.tokens) for each in leader.siblings)
        turn = self._scheduler.shares.turn(leader.request.priority, client, charge)
        for each in group:
            each.order, each.client = (turn, self.order), client
        self._scheduler.add(leader, self._watch.variant())
        self.order += 1

    def abort(self, request_id: int, sample_index: int | None) -> int:
        """Abort a request or one sample; see `DynamicInferenceEngine.abort_request`."""
        with uninterrupted(), self._lifecycle.lock:
            removed = self._scheduler.remove(lambda key: key[0] == request_id and sample_index in (None, key[1]))
            for sample in removed:
                self._ledger.end(sample, FinishReason.ABORT, f"RequestAbortedError: request {request_id} was aborted")
            return len(removed)

    def take_ended(self, keys: Callable[[tuple[int, int]], bool]) -> list[DynamicInferenceRequestRecord]:
        """Hand out ended records; see `DynamicInferenceEngine.take_ended`."""
        with self._lifecycle.lock:
            return self._ledger.take(keys)

    def forget(self, request_id: int, sample_index: int) -> None:
        """Drop a sample that was never run here, uncounted; nothing is handed out. Unknown samples are ignored."""
        with self._lifecycle.lock:
            for sample in self._scheduler.remove(lambda key: key == (request_id, sample_index)):
                self._ledger.forget(sample)

    def has(self, request_id: int) -> bool:
        """Whether a request with this id is unfinished."""
        return request_id in self._ledger.live

    def new_id(self) -> int:
        """Reserve and return a request id."""
        with self._lifecycle.lock:
            self.next_request_id += 1
            return self.next_request_id - 1

    def reserve(self, start: int) -> None:
        """Mark ids below `start` as taken; the next id is at least `start`."""
        with self._lifecycle.lock:
            self.next_request_id = max(self.next_request_id, start)
