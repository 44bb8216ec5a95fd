"""The coordinator as a thread or a process of its own, and its routing decisions for inspection."""

from __future__ import annotations

import gc
import resource
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from rollout import state
from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.loop import CoordinatorLoop
from rollout.distributed.protocol.messages import Message
from rollout.distributed.transport.keys import JobKeys
from rollout.errors import DeadlineError
from rollout.requests.block_hash import compute_block_hashes_batched

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event


class DataParallelInferenceCoordinator(CoordinatorLoop):
    """Routes the requests of a job to its ranks, over the messages of `rollout.distributed.protocol.messages`.

    Use `start()` and `stop()` for a thread of this process, or `bind()` and `run()`. The methods about ranks and hashes
    are not thread-safe: call them before it is started, or on its thread.

    Args:
        keys: of the job, with the server's secret. None on loopback.

    Raises:
        ConfigError: the host is not loopback, and there are neither keys nor `insecure`.
    """

    CoordinatorState = state.CoordinatorState
    """States of the job."""

    def __init__(self, config: CoordinatorConfig, keys: JobKeys | None = None) -> None:
        super().__init__(config, keys)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until shut down, `stop()`, `idle_exit_s` without peers, or the end of the launcher and all peers."""
        try:
            self._loop()
        finally:
            self.close()

    def start(self) -> str:
        """Bind, and serve in a daemon thread.

        Returns:
            The address, as of `bind`.
        """
        address = self.bind()
        self._thread = threading.Thread(target=self.run, name="coordinator", daemon=True)
        self._thread.start()
        return address

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop serving: disconnect all peers; open requests fail with a named error. Call it from another thread.

        Raises:
            DeadlineError: it still runs after `timeout_s`.
        """
        self._ask_to_stop("the coordinator was stopped")
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise DeadlineError(f"coordinator: has not ended within timeout_s={timeout_s}")

    @classmethod
    def entrypoint(
        cls, pipe: Connection, ready_event: Event, config: CoordinatorConfig, keys: JobKeys | None = None
    ) -> None:
        """Target of a `multiprocessing.Process`: sends the address through the pipe, sets the event, serves.

        It ends when the parent process has died and no peer is connected.
        """
        from multiprocessing import parent_process

        parent = parent_process()
        coordinator = cls(config, keys)

        def announce(address: str) -> None:
            pipe.send(address)
            ready_event.set()

        coordinator.serve(announce, None if parent is None else parent.sentinel)

    def serve(self, announce: Callable[[str], None], launcher: int | None) -> None:
        """Bind, announce the address and run on the main thread of a dedicated process. SIGTERM ends it in order.

        Args:
            announce: called with the address.
            launcher: a descriptor that becomes readable or closes when the launcher dies.
        """
        # Ctrl-C in a terminal reaches all its processes; only the trainer handles it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._ask_to_stop("the coordinator was terminated"))
        # Otherwise a signal just before the poll would be handled only after it.
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        _allow_many_connections()
        # No reference cycles are created here, and a collection would block for 0.3 s per 100,000 requests.
        gc.freeze()
        gc.disable()
        if launcher is not None:
            self._launcher = launcher
            self._poll.register(launcher, select.POLLIN)
        try:
            announce(self.bind())
            self._loop()
        finally:
            signal.set_wakeup_fd(-1)
            self.close()

    # --- routing, for inspection --------------------------------------------------------------------------------------

    def get_next_data_parallel_rank(self) -> str | None:
        """Rank that a request without a cached prefix would go to; None if no rank has room."""
        return self.get_best_data_parallel_rank(())

    def get_best_data_parallel_rank(self, hashes: Sequence[int]) -> str | None:
        """Rank that a request with these block hashes would go to; None if no rank has room."""
        placements = self._core.router.place(hashes, 1)
        return placements[0].rank if placements else None

    def compute_request_hashes(self, prompt: str | Sequence[int]) -> list[int]:
        """Block hashes of a prompt, as ranks compute them; [] without prefix caching.

        Raises:
            InvalidRequestError: a text that cannot be tokenised, or no tokenizer is configured.
        """
        if not self._config.enable_prefix_caching:
            return []
        tokens = self._codec.tokenize(prompt) if isinstance(prompt, str) else prompt
        return compute_block_hashes_batched(tokens, self._config.block_size_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str | None:
        """Text of a completion, special tokens skipped; None if it cannot be decoded."""
        return self._codec.detokenize([np.asarray(token_ids, "<i4").tobytes()])[0]

    def _update_rank_hashes(self, name: str, hashes: Sequence[int]) -> None:
        self._core.router.reported(name, hashes, (), False)

    def _remove_engine(self, name: str) -> None:
        identity = self._core.peers.rank_named(name).identity
        self._core.unreachable(identity, "it was removed", time.monotonic())

    def _send_to_engine(self, name: str, message: Message) -> bool:
        """Send a message to a rank; returns whether the rank is still connected."""
        if not self._core.peers.has_rank(name):
            return False
        self._core.peers.say(self._core.peers.rank_named(name), message)
        self._send(time.monotonic())
        return self._core.peers.has_rank(name)


def _allow_many_connections() -> None:
    """Raise the soft limit of open files (usually 1024) to the hard limit: each peer takes one descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
