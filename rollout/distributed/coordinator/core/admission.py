"""Admission of requests: limits per request, memory budgets per client and for all. No I/O, no clock.

Always true: memory is charged before it is taken and given back when it is free; one client holds at most
`max_open_mb`, all together at most `max_total_open_mb`. What a request costs whatever is in it (its objects,
`REQUEST_BYTES` of parameters and samples) is bounded by `max_open_requests` instead. Tokens that ranks compute are
charged as they come: they are never refused, but no further request is taken for them.
"""

from __future__ import annotations

import reprlib
import sys

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.requests import MAX_SAMPLES, ClientPeer
from rollout.distributed.protocol.frames import MAX_REQUEST_BYTES
from rollout.distributed.protocol.messages import Submit

REQUEST_BYTES = 1024
"""Of parameters and samples, not charged."""

SAMPLE_BYTES = 128
"""Of each sample in the books, and of each row of known tokens."""

TOKENIZER_BYTES = 128
"""Per character, while a text becomes tokens; measured: 140 where every character is a token, else less."""


class Admission:
    """What is charged to whom, and who is refused."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.total_bytes = 0
        """Charged at present."""
        self._config = config

    def charge(self, client: ClientPeer, size: int) -> None:
        """So much more is held for this client; negative: less."""
        client.open_bytes += size
        self.total_bytes += size

    def refusal(self, client: ClientPeer, message: Submit) -> tuple[str, str] | None:
        """(error, why) of a request that is not taken; None: there is room for it."""
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
                f"{size} bytes of prompt, parameters and known tokens: at most {MAX_REQUEST_BYTES} are taken",
            )
        if isinstance(prompt, str):
            if config.tokenizer is None:
                return (
                    "InvalidRequestError",
                    "its prompt is text and the coordinator has no tokenizer (a rank's own does not reach so far): send "
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
    """What of a request travels to a rank, besides numbers per sample: with them it must fit into one frame again."""
    return len(message.prompt) + len(message.params) + sum(row.buffer_bytes for row in message.known)


def cost_of(message: Submit) -> int:
    """What a request takes until it ends; of a text, until it has become tokens."""
    prompt = sys.getsizeof(message.prompt) if isinstance(message.prompt, str) else len(message.prompt)
    return prompt + cost_besides_prompt(message)


def cost_besides_prompt(message: Submit) -> int:
    """The same, without the prompt."""
    known = sum(row.buffer_bytes + SAMPLE_BYTES * len(row.indices) for row in message.known)
    books = len(message.params) + SAMPLE_BYTES * (message.n - 1)
    return known + max(0, books - REQUEST_BYTES)
