"""The open requests of all clients: admission, new tokens, texts, deadlines, outcomes. No I/O; the clock is passed in.

An accepted request finishes once, with an outcome for each of its samples or with one error that names the request.

Each client has a memory budget of `max_open_mb`. A request is charged to its client's budget when it is accepted, and the
charge is returned when the request finishes. Tokens from ranks are always accepted, but they are charged too, which leaves
less room for new requests.
"""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.dispatch import Dispatcher
from rollout.distributed.coordinator.core.peers import Peers, shortened
from rollout.distributed.coordinator.core.requests import (
    MAX_SAMPLES,
    Assignment,
    ClientPeer,
    OpenRequest,
    TextJob,
)
from rollout.distributed.protocol.messages import Accepted, RequestFailed, Stretch, Submit
from rollout.distributed.protocol.stretch import PartialGroup
from rollout.errors import SerializationError
from rollout.requests.block_hash import stream_key

REQUEST_BYTES = 4096
"""The number of bytes charged to a client per request, in addition to the prompt, parameters, samples and tokens."""
SAMPLE_BYTES = 128
"""The number of bytes charged per sample of a request, and per sample in each batch of tokens submitted with it."""


def cost(message: Submit) -> int:
    """Return the bytes to charge to the client for a new request. A text prompt's tokens are charged after tokenisation."""
    known = sum(row.buffer_bytes + SAMPLE_BYTES * len(row.indices) for row in message.known)
    prompt = sys.getsizeof(message.prompt) + len(message.images) + len(message.keyed)
    return REQUEST_BYTES + prompt + len(message.params) + SAMPLE_BYTES * message.n + known


_STOPPING = ("EngineStateError", "the job is stopping and accepts no requests; start another coordinator")


class RequestTable:
    """The table of open requests. The requests themselves are stored in `ClientPeer.requests` of each client."""

    def __init__(self, config: CoordinatorConfig, peers: Peers, dispatcher: Dispatcher) -> None:
        self.texts: dict[int, tuple[OpenRequest, Stretch | None]] = {}
        """The pending tokenizer jobs: job id → (request, tokens to forward with the decoded texts; None for a prompt)."""
        self._new_jobs: list[TextJob] = []
        self._next_job = 0
        self._config = config
        self._peers = peers
        self._dispatcher = dispatcher
        self._due = math.inf
        """The time of the next check for deadlines: the earliest deadline among all requests that were open at or after the
        last check. The request with this deadline may already have finished."""
        self._without_rank_since = math.inf
        self._next_request_id = 0

    def __iter__(self) -> Iterator[OpenRequest]:
        """Iterate over all open requests. Requests may be closed during the iteration."""
        yield from [request for client in self._peers.clients.values() for request in client.requests.values()]

    # --- submission -------------------------------------------------------------------------------------------------

    def submit(self, client: ClientPeer, message: Submit, now: float, *, stopping: bool) -> None:
        """Queue a request, or reject it with a reason. If the job is `stopping`, every request is rejected."""
        if message.request_id <= client.last_request_id:
            text = (
                f"request id {message.request_id}: must be above {client.last_request_id}, the last one of this client"
            )
            self._peers.refuse(client.identity, "malformed", text)
            return
        client.last_request_id = message.request_id
        refusal = _STOPPING if stopping else self._refusal(client, message)
        if refusal is not None:
            self._say_failed(client, message.request_id, *refusal)
            return
        try:
            request = self._opened(client, message, now)
        except SerializationError as exc:
            why = f"what is known of it does not fit: {exc}"
            self._say_failed(client, message.request_id, "InvalidRequestError", why)
            return
        self._next_request_id += 1
        client.requests[message.request_id] = request
        self._charge(request, cost(message))
        self._due = min(self._due, request.deadline)
        if isinstance(message.prompt, str):
            self._start(TextJob(self._next_job, message.prompt), request, None)
        else:
            request.prompt = message.prompt
        self._dispatcher.enqueue(request)

    def _opened(self, client: ClientPeer, message: Submit, now: float) -> OpenRequest:
        number, seed = self._next_request_id, message.seed
        request = OpenRequest(
            number,
            client,
            message.request_id,
            message.n,
            message.params,
            message.share,
            stream_key(self._config.seed, number) if seed is None else seed,
            message.priority,
            0.0 if message.arrival_time is None else message.arrival_time,
            message.interval or self._config.advanced.progress_interval,
            math.inf if message.timeout_s is None else now + message.timeout_s,
        )
        request.since = now
        request.images, request.keyed = message.images, message.keyed
        request.newest_version = message.min_policy_version
        request.open = set(message.wanted) or set(range(message.n))
        request.queued = set(request.open)
        for row in message.known:
            if row.ended():
                raise SerializationError("a sample that has ended is not continued")
            request.absorb(row)
        return request

    def _refusal(self, client: ClientPeer, message: Submit) -> tuple[str, str] | None:
        """Return (error name, reason) if a request must be rejected, or None if the request is admitted."""
        prompt, limit = message.prompt, self._config.advanced.max_open_mb
        if not 1 <= message.n <= MAX_SAMPLES:
            return "InvalidRequestError", f"n={message.n}: must be in [1, {MAX_SAMPLES}]"
        if message.wanted and max(message.wanted) >= message.n:
            why = f"wanted={reprlib.repr(message.wanted)}: must be samples below n={message.n}"
            return "InvalidRequestError", why
        if isinstance(prompt, str) and self._config.tokenizer is None:
            return (
                "InvalidRequestError",
                "its prompt is text and the coordinator has no tokenizer (one in Python does not reach so far): send "
                "token ids, or set CoordinatorConfig.tokenizer to the path of a tokenizer.json, which "
                "save_pretrained() writes",
            )
        size = cost(message)
        if client.open_bytes + size <= limit << 20:
            return None
        why = f"this client's open requests would take more than max_open_mb={limit} with {size} bytes more; wait for some"
        return "QueueFullError", why

    # --- tokenizing and detokenizing --------------------------------------------------------------------------------

    def _start(self, job: TextJob, request: OpenRequest, stretch: Stretch | None) -> None:
        self._next_job += 1
        self.texts[job.job_id] = request, stretch
        request.text_jobs[job.job_id] = job
        self._new_jobs.append(job)

    def _done(self, job_id: int) -> tuple[OpenRequest | None, Stretch | None]:
        """Remove a finished tokenizer job; return its entry of `texts`, or (None, None) if the request is closed."""
        request, stretch = self.texts.pop(job_id)
        request.text_jobs.pop(job_id, None)
        return (None, None) if request.closed else (request, stretch)

    def take_text_jobs(self) -> list[TextJob]:
        """Return the tokenizer jobs created since the last call."""
        taken, self._new_jobs = self._new_jobs, []
        return taken

    def tokenized(self, job_id: int, tokens: Sequence[int] | Exception) -> None:
        """Queue the request whose prompt was tokenised, or fail the request if `tokens` is an error."""
        request, _ = self._done(job_id)
        if request is None:
            return
        if isinstance(tokens, Exception):
            self.fail(request, "InvalidRequestError", f"its prompt cannot be tokenised: {tokens}")
            return
        prompt = np.asarray(tokens, "<i4").tobytes()
        self._charge(request, len(prompt))
        request.prompt = prompt
        self._peers.say(request.client, Accepted(request.client_request_id, prompt))
        self._dispatcher.enqueue(request)

    def detokenized(self, job_id: int, texts: Sequence[str | None]) -> None:
        """Add the decoded texts of finished completions to the tokens that wait for them; send both to the client."""
        request, stretch = self._done(job_id)
        if request is not None and stretch is not None:
            remaining = iter(texts)
            outcomes = stretch.columns["outcome"]
            stretch.columns["text"] = [None if outcome is None else next(remaining) for outcome in outcomes]
            self._forward(request, stretch)

    # --- new tokens -------------------------------------------------------------------------------------------------

    def advance(self, assignment: Assignment, stretch: Stretch) -> None:
        """Add a rank's new tokens to their request, and forward them to the request's client.

        Raises:
            SerializationError: the tokens do not fit the request.
        """
        request = assignment.request
        ended = request.absorb(stretch)
        self._charge(request, stretch.buffer_bytes)
        if request.losses and any(stretch.counts):
            # Reset the count of lost ranks: a new token shows that the request does not kill every rank that computes it.
            request.losses = 0
        wants_text = ended and self._config.tokenizer is not None and "text" not in stretch.columns
        token_ids = [each.token_ids for each in request.tokens.deltas(ended).values()] if wants_text else []
        if ended:
            if request.open:
                request.tokens.forget(ended)
            self._dispatcher.ended(assignment, ended)
        if not wants_text:
            self._forward(request, stretch)
            return
        # Forward the tokens of running samples now. Finished samples are forwarded once their text is decoded.
        going_on = set(stretch.indices).difference(ended)
        if going_on:
            self._forward(request, stretch.only(going_on))
            stretch = stretch.only(set(ended))
        self._start(TextJob(self._next_job, None, token_ids), request, stretch)

    def _forward(self, request: OpenRequest, stretch: Stretch) -> None:
        client = request.client
        if client.requests.get(request.client_request_id) is not request:
            return
        stretch.request_id, stretch.attempt = request.client_request_id, 0
        self._peers.say_stretch(client, stretch)
        if not request.open and not request.text_jobs:
            self.close(request)

    # --- completion, failure and deadlines --------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """Return the time at which `expire` must be called next; infinity if no request has a deadline."""
        return self._due

    def expire(self, now: float) -> None:
        """Fail the requests whose deadline has passed."""
        if now >= self._due:
            for request in self:
                if request.deadline <= now:
                    self.fail(request, "RequestTimeoutError", "its timeout_s has passed; raise it, or lower max_tokens")
            self._due = min((request.deadline for request in self), default=math.inf)

    def look_for_ranks(self, now: float) -> None:
        """Record for `give_up` the time since which no rank has been ready, or reset it if a rank is ready now."""
        ready = self._dispatcher.any_rank_ready
        self._without_rank_since = math.inf if ready else min(self._without_rank_since, now)

    def give_up(self, now: float) -> None:
        """Fail the requests that have waited `no_rank_timeout_s` for a ready rank or for a suitable policy version."""
        limit, ranks = self._config.advanced.no_rank_timeout_s, self._peers.by_name
        if now - self._without_rank_since >= limit:
            here = f"{len(ranks)} of data_parallel_size={self._config.data_parallel_size} are here"
            why = f"there has been no rank that is ready for {limit} s (no_rank_timeout_s); {here}"
            for request in self:
                if request.queued:
                    self.fail(request, "RequestTimeoutError", why)
        for request in list(self._dispatcher.too_new):
            request.too_new_since = min(request.too_new_since, now)
            if not request.closed and now - request.too_new_since >= limit:
                version = request.newest_version
                versions = [f"{name} has {ranks[name].policy_version}" for name in sorted(ranks)]
                why = (
                    f"no rank has had policy version {version}, of its tokens or its asker, for {limit} s "
                    f"(no_rank_timeout_s); {', '.join(versions)}"
                )
                self.fail(request, "RequestTimeoutError", why)
        self._dispatcher.too_new = [request for request in self._dispatcher.too_new if not request.closed]

    def fail(self, request: OpenRequest, error: str, why: str) -> None:
        client = request.client
        self.close(request)
        self._say_failed(client, request.client_request_id, error, why)

    def fail_queued(self, error: str, why: str) -> None:
        """Fail the requests without an assigned rank, with the error class named `error` and the reason `why`."""
        for request in self:
            if not request.assignments and request.open:
                self.fail(request, error, why)

    def fail_all(self, error: str, why: str) -> None:
        for request in self:
            self.fail(request, error, why)

    def close(self, request: OpenRequest) -> None:
        """Remove a request and return its memory to the client's budget. No message is sent to the client."""
        self._dispatcher.cancel(request)
        request.closed = True
        request.open.clear()
        request.tokens = PartialGroup()
        for job in request.text_jobs.values():
            job.drop()
        self._charge(request, -request.charged)
        request.client.requests.pop(request.client_request_id, None)

    def _say_failed(self, client: ClientPeer, request_id: int, error: str, why: str) -> None:
        text = f"request {request_id} of client {client.name!r}: {why}"
        self._peers.say(client, RequestFailed(request_id, error, shortened(text)))

    def _charge(self, request: OpenRequest, size: int) -> None:
        request.charged += size
        request.client.open_bytes += size
