"""Coordinators of the tests, in processes of their own and in threads."""

from __future__ import annotations

import socket
import string
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollout.distributed.coordinator.launch import CoordinatorHandle, launch_coordinator
from rollout.distributed.coordinator.process import DataParallelInferenceCoordinator
from rollout.distributed.transport.keys import JobKeys
from tests.configs import coordinator_config
from tests.distributed.raw_peers import PATIENCE_S

ROOT = Path(__file__).parents[3]

starts_processes = pytest.mark.distributed
needs_curve = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")


@contextmanager
def launched(keys: JobKeys | None = None, **options: Any) -> Iterator[CoordinatorHandle]:
    handle = launch_coordinator(coordinator_config(**options), keys)
    try:
        yield handle
    finally:
        handle.kill()


@contextmanager
def in_a_thread(keys: JobKeys | None = None, **options: Any) -> Iterator[str]:
    coordinator = DataParallelInferenceCoordinator(coordinator_config(**options), keys)
    try:
        yield coordinator.start()
    finally:
        coordinator.stop(PATIENCE_S)


@contextmanager
def never_started(**options: Any) -> Iterator[DataParallelInferenceCoordinator]:
    coordinator = DataParallelInferenceCoordinator(coordinator_config(**options))
    try:
        yield coordinator
    finally:
        coordinator.close()


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def wait_for_the_end(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        # A child of a child that nobody reaps in a container has ended too.
        while process.status() != psutil.STATUS_ZOMBIE:
            with suppress(psutil.TimeoutExpired):
                process.wait(0.1)
                return


def lowercase_tokenizer() -> str:
    """One token per letter; words and spaces are kept apart; `<eos>` (id 1) is special."""
    vocabulary = {"<unk>": 0, "<eos>": 1} | {letter: 2 + i for i, letter in enumerate(string.ascii_lowercase + " ")}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    content: str = tokenizer.to_str()
    return content
