"""The ranks of a job and the store in which they leave each other a word, as torch.distributed knows them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rollout.errors import ConfigError, DeadlineError

_numbers = count()


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: Any) -> object:
        """Leave a value."""

    def get(self, key: str) -> bytes:
        """Its value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""

    def wait(self, keys: list[str], timeout: timedelta) -> object:
        """Return when all are there; raise when they are not in time."""


@dataclass(frozen=True)
class World:
    """Who takes part.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
        store: shared by all of them.
        prefix: of this manager's keys in the store; equal on all ranks that build their managers in the same order.
        one_host: all ranks run on this host.
    """

    rank: int
    size: int
    store: Store
    prefix: str
    one_host: bool

    @classmethod
    def of_torch(cls) -> World | None:
        """The process group's; None where there is none, or one rank only."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        size = dist.get_world_size()
        return cls(
            dist.get_rank(),
            size,
            distributed_c10d._get_default_store(),
            f"rollout/{next(_numbers)}",
            os.environ.get("LOCAL_WORLD_SIZE") == str(size) or _same_host(size),
        )

    def publish(self, key: str, value: bytes) -> None:
        """Leave a value for the others."""
        self.store.set(f"{self.prefix}/{key}", value)

    def is_published(self, key: str) -> bool:
        """Whether it is there."""
        return self.store.check([f"{self.prefix}/{key}"])

    def wait_for(self, key: str, timeout_s: float) -> bytes:
        """The value, as soon as it is there.

        Raises:
            DeadlineError: it is not, after `timeout_s`.
        """
        full = f"{self.prefix}/{key}"
        try:
            self.store.wait([full], timedelta(seconds=timeout_s))
        except RuntimeError as exc:
            raise DeadlineError(
                f"rank {self.rank}: {full} was not published within {timeout_s} s; does every rank build a RolloutManager?"
            ) from exc
        return bytes(self.store.get(full))

    def address_for_others(self) -> str:
        """This host's address, as the other hosts of the job reach it.

        Raises:
            ConfigError: it cannot be told.
        """
        master = os.environ.get("MASTER_ADDR", "")
        try:
            family, _, _, _, target = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Sends nothing: it asks the kernel which of its addresses leads there.
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError as exc:
            raise ConfigError(
                f"MASTER_ADDR={master!r} does not tell this host's address ({exc}); set CoordinatorConfig(host=...)"
            ) from exc


def _same_host(size: int) -> bool:
    names: list[str | None] = [None] * size
    dist.all_gather_object(names, socket.gethostname())
    return len(set(names)) == 1
