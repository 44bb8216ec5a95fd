"""Rewards for TRL and `generate_scored`, computed in other processes while the engine runs. Each call has a timeout.

    with RewardPool(reward, processes=4, timeout_s=10.0) as pool:
        manager.generate_scored(tasks, pool, params, groups=32)
        GRPOTrainer(model, pool, ...)

Threads send each process one call at a time. If a call takes too long, its process is killed and replaced.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from queue import SimpleQueue
from typing import Any

from rollout import ConfigError

Rewards = list[float]
NOT_PASSED = frozenset({"trainer_state", "log_extra", "log_metric", "environments"})
"""The arguments of TRL's reward functions that are not sent to the processes: they exist only in the trainer's process."""


class RewardPool:
    """A reward function that runs in other processes.

    Args:
        reward: a reward function for `generate_scored` (samples of a group → numbers) or for TRL (columns of rows →
            numbers). It is pickled together with its arguments, so it must be a module-level function.
        processes: number of processes, and so the maximum number of simultaneous calls.
        timeout_s: maximum duration of one call, in seconds.
        on_timeout: reward of every sample in a call that takes longer. If None, the call raises `TimeoutError`.

    Raises:
        ConfigError: an argument is out of its range.
    """

    def __init__(
        self,
        reward: Callable[..., Sequence[float]],
        *,
        processes: int = 2,
        timeout_s: float = 60.0,
        on_timeout: float | None = None,
    ) -> None:
        if type(processes) is not int or processes < 1:
            raise ConfigError(f"processes={processes!r}: must be an integer of at least 1")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s={timeout_s!r}: must be above 0")
        # Set `__wrapped__`, so that inspect.signature returns the signature of `reward`.
        self.__wrapped__ = reward
        self.__name__ = getattr(reward, "__name__", type(reward).__name__)
        self._timeout_s, self._on_timeout = timeout_s, on_timeout
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(processes):
            self._free.put(_Worker(reward))
        self._processes = processes
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="rewards")

    def submit(self, samples: Sequence[Any]) -> Future[Rewards]:
        """Start computing the rewards of a group; the future raises the reward function's exception, or `TimeoutError`."""
        return self._threads.submit(self._call, len(samples), (list(samples),), {})

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> Rewards:
        """Return one reward per row, as TRL requires. The reward function is called once for the rows of each prompt."""
        rows = {name: value for name, value in columns.items() if name not in NOT_PASSED} | {"completions": completions}
        prompts = columns.get("prompts", completions)
        futures = []
        for _, numbers in groupby(range(len(completions)), key=lambda row: str(prompts[row])):
            chosen = list(numbers)
            part = {name: [value[row] for row in chosen] for name, value in rows.items()}
            futures.append(self._threads.submit(self._call, len(chosen), (), part))
        return [reward for future in futures for reward in future.result()]

    def close(self) -> None:
        """Stop the processes. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for _ in range(self._free.qsize()):
            self._free.get().end()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, count: int, args: tuple[Any, ...], columns: dict[str, Any]) -> Rewards:
        worker = self._free.get()
        try:
            return worker.call(args, columns, self._timeout_s)
        except TimeoutError:
            if self._on_timeout is None:
                raise
            return [self._on_timeout] * count
        finally:
            self._free.put(worker)


class _Worker:
    """A process that computes rewards. The first call starts it."""

    def __init__(self, reward: Callable[..., Sequence[float]]) -> None:
        self._reward = reward
        self._process: Any = None
        self._pipe: Any = None

    def call(self, args: tuple[Any, ...], columns: dict[str, Any], timeout_s: float) -> Rewards:
        if self._process is None:
            # Spawn the process: a fork would copy locks that threads of the training process hold at that moment.
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._reward), daemon=True)
            self._process.start()
            theirs.close()
            # Wait until the process has started, so that its imports do not count towards the timeout.
            self._pipe.recv()
        try:
            self._pipe.send((args, columns))
            # Start the timeout when the process has unpickled the arguments, which may import more modules.
            self._pipe.recv()
            if not self._pipe.poll(timeout_s):
                raise TimeoutError(f"{self._reward!r} took longer than timeout_s={timeout_s}; its process was ended")
            result, error = self._pipe.recv()
        except (TimeoutError, OSError, EOFError) as failure:
            self.end()
            if isinstance(failure, TimeoutError):
                raise
            raise RuntimeError(f"the process of {self._reward!r} has died") from failure
        if error is not None:
            raise error
        found: Rewards = result
        return found

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _serve(pipe: Any, reward: Callable[..., Sequence[float]]) -> None:
    pipe.send(None)
    while True:
        try:
            args, columns = pipe.recv()
        except EOFError:
            return
        pipe.send(None)
        try:
            answer: tuple[Rewards | None, Exception | None] = ([float(each) for each in reward(*args, **columns)], None)
        except Exception as error:  # noqa: BLE001 - the training process raises it
            answer = (None, error)
        pipe.send(answer)
