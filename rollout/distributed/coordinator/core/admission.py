"""Admission of requests: limits per request, memory budgets per client and in total; pending tokenizer jobs. No I/O.

Always true: memory is charged before it is used and released when it is freed, that of a tokenizer job when it is
answered; a client holds at most `max_open_mb`, all clients at most `max_total_open_mb`. `max_open_requests` bounds the
fixed cost of requests. Tokens computed by ranks are charged and never refused, but they reduce the budget for new
requests.
"""

from __future__ import annotations

import reprlib
import sys
from typing import NamedTuple

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.requests import MAX_SAMPLES, ClientPeer, OpenRequest, TextJob
from rollout.distributed.protocol.frames import MAX_REQUEST_BYTES
from rollout.distributed.protocol.messages import Stretch, Submit

REQUEST_BYTES = 1024
"""Free allowance per request for parameters and samples."""
SAMPLE_BYTES = 128
"""Charged per sample and per row of known tokens."""
TOKENIZER_BYTES = 128
"""Memory per character during tokenisation; measured: at most 140, if every character is a token."""


class Admission:
    """Memory accounting per client, and the admission check."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.total_bytes = 0
        """Bytes charged to all clients."""
        self._config = config

    def charge(self, client: ClientPeer, size: int) -> None:
        """Charge `size` bytes to a client; negative: release them."""
        client.open_bytes += size
        self.total_bytes += size

    def refusal(self, client: ClientPeer, message: Submit) -> tuple[str, str] | None:
        """Return (error name, reason) if a request is refused; None: admitted."""
        config, prompt = self._config, message.prompt
        if not 1 <= message.n <= MAX_SAMPLES:
            return "InvalidRequestError", f"n={message.n}: must be in [1, {MAX_SAMPLES}]"
        if message.wanted and max(message.wanted) >= message.n:
            return (
                "InvalidRequestError",
                f"wanted={reprlib.repr(message.wanted)}: must be samples below n={message.n}",
            )
        if len(client.requests) >= config.max_open_requests:
            limit = config.max_open_requests
            return "QueueFullError", f"{limit} requests of this client are open (max_open_requests); wait for some"
        size = bytes_to_assign(message)
        if size > MAX_REQUEST_BYTES:
            return (
                "InvalidRequestError",
                f"{size} bytes of prompt, images, parameters and known tokens: at most {MAX_REQUEST_BYTES} are taken",
            )
        if isinstance(prompt, str):
            if config.tokenizer is None:
                return (
                    "InvalidRequestError",
                    "its prompt is text and the coordinator has no tokenizer (one in Python does not reach so far): send "
                    "token ids, or set CoordinatorConfig.tokenizer to the path of a tokenizer.json, which "
                    "save_pretrained() writes",
                )
            most = (config.max_open_mb << 20) // TOKENIZER_BYTES
            if len(prompt) > most:
                return (
                    "InvalidRequestError",
                    f"its prompt is {len(prompt)} characters: at most {most} become tokens here (max_open_mb="
                    f"{config.max_open_mb}, {TOKENIZER_BYTES} bytes each); send token ids",
                )
        return self._no_room(client, cost_of(message))

    def _no_room(self, client: ClientPeer, size: int) -> tuple[str, str] | None:
        config = self._config
        if client.open_bytes + size > config.max_open_mb << 20:
            whose, option = "this client's open requests", f"max_open_mb={config.max_open_mb}"
        elif self.total_bytes + size > config.max_total_open_mb << 20:
            whose, option = "the open requests of all clients", f"max_total_open_mb={config.max_total_open_mb}"
        else:
            return None
        return "QueueFullError", f"{whose} would take more than {option} with {size} bytes more; wait for some"


def bytes_to_assign(message: Submit) -> int:
    """Size of a request's variable parts in an `Assign`, which must fit into one frame."""
    images = len(message.images) + len(message.keyed)
    return len(message.prompt) + images + len(message.params) + sum(row.buffer_bytes for row in message.known)


def cost_of(message: Submit) -> int:
    """Memory that a request holds until it ends; a text prompt: until it is tokenised."""
    prompt = sys.getsizeof(message.prompt) if isinstance(message.prompt, str) else len(message.prompt)
    return prompt + cost_besides_prompt(message)


def cost_besides_prompt(message: Submit) -> int:
    """`cost_of` without the prompt."""
    known = sum(row.buffer_bytes + SAMPLE_BYTES * len(row.indices) for row in message.known)
    images = len(message.images) + len(message.keyed)
    books = len(message.params) + SAMPLE_BYTES * (message.n - 1)
    return known + images + max(0, books - REQUEST_BYTES)


class PendingText(NamedTuple):
    """A `TextJob` at the tokenizer: its request, the stretch to forward with the texts, and the bytes charged."""

    request: OpenRequest
    stretch: Stretch | None
    size: int


class TextJobs:
    """Jobs at the tokenizer, and the new ones."""

    def __init__(self, admission: Admission) -> None:
        self.pending: dict[int, PendingText] = {}
        """By job id."""
        self._admission = admission
        self._new: list[TextJob] = []
        self._next_job = 0

    def tokenize(self, request: OpenRequest, text: str, size: int) -> None:
        """Start a job that tokenises the prompt of a request."""
        self._start(request, None, size, TextJob(self._next_job, text))

    def detokenize(self, request: OpenRequest, stretch: Stretch, token_ids: list[bytes]) -> None:
        """Start a job for the texts of the completions that ended with a stretch, which waits for them."""
        size = stretch.buffer_bytes + sum(map(len, token_ids))
        self._start(request, stretch, size, TextJob(self._next_job, None, token_ids))

    def _start(self, request: OpenRequest, stretch: Stretch | None, size: int, job: TextJob) -> None:
        self._next_job += 1
        self.pending[job.job_id] = PendingText(request, stretch, size)
        self._admission.charge(request.client, size)
        request.text_jobs[job.job_id] = job
        self._new.append(job)

    def done(self, job_id: int) -> tuple[OpenRequest | None, Stretch | None]:
        """Remove an answered job; returns its request and stretch, or (None, None) if the request has ended."""
        done = self.pending.pop(job_id, None)
        if done is None:
            return None, None
        self._admission.charge(done.request.client, -done.size)
        done.request.text_jobs.pop(job_id, None)
        return (None, None) if done.request.closed else (done.request, done.stretch)

    def take_new(self) -> list[TextJob]:
        taken, self._new = self._new, []
        return taken
