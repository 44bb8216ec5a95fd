"""Ranks of the job and its key-value store, from torch.distributed."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from rollout.distributed.transport.keys import is_loopback
from rollout.errors import ConfigError, ConnectionLostError, DeadlineError

_numbers = count()
WILDCARDS = ("0.0.0.0", "*", "[::]", "::")
"""Hosts that mean: listen everywhere."""
_CALLS_ENDED = "calls_ended"
HOSTS_TIMEOUT_S = 120.0
"""For all ranks to say on which host they are."""


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def set(self, key: str, value: Any) -> object:
        """Leave a value."""

    def get(self, key: str) -> bytes:
        """Its value."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Leave `desired` where `expected` is (empty: nothing); the value that is there then."""

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
        store = distributed_c10d._get_default_store()
        world = cls(dist.get_rank(), size, store, f"rollout/{next(_numbers)}", one_host=True)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            return world
        return replace(world, one_host=world._share_a_host())

    def _share_a_host(self) -> bool:
        mine = socket.gethostname().encode()
        self.publish(f"host/{self.rank}", mine)
        return all(self.wait_for(f"host/{rank}", HOSTS_TIMEOUT_S) == mine for rank in range(self.size))

    def publish(self, key: str, value: bytes) -> None:
        """Leave a value for the others."""
        self.store.set(f"{self.prefix}/{key}", value)

    def is_published(self, key: str) -> bool:
        """Whether it is there; nothing is in a store that has gone with the process that held it."""
        try:
            return self.store.check([f"{self.prefix}/{key}"])
        except dist.DistError:
            return False

    def settle(self, key: str, value: bytes) -> None:
        """Leave a value where there is none: of several ranks that try, one succeeds."""
        self.store.compare_set(f"{self.prefix}/{key}", "", value.decode())

    def wait_until(self, key: str, timeout_s: float) -> bool:
        """Whether a value is there within that time.

        Raises:
            ConnectionLostError: the store has gone with the process that held it.
        """
        full = f"{self.prefix}/{key}"
        try:
            # Nothing, in whole milliseconds, means for ever.
            self.store.wait([full], timedelta(seconds=max(0.001, timeout_s)))
        except dist.DistNetworkError as exc:
            raise ConnectionLostError(
                f"rank {self.rank}: the store of the process group is gone ({exc}); the process that held it, rank 0 or the "
                "launcher, has ended: its own error says why"
            ) from exc
        except RuntimeError:
            return False
        return True

    def publish_calls_ended(self, count: int) -> None:
        """So many calls of all ranks together have ended. Every rank says so of each, before it makes the next."""
        # The store dies with the process that holds it; whoever goes on without can do without this, too.
        with suppress(dist.DistError):
            self.publish(_CALLS_ENDED, str(count).encode())

    def calls_ended(self) -> int:
        """The highest count that any rank has published."""
        return int(self.store.get(f"{self.prefix}/{_CALLS_ENDED}")) if self.is_published(_CALLS_ENDED) else 0

    def wait_for(self, key: str, timeout_s: float) -> bytes:
        """The value, as soon as it is there.

        Raises:
            DeadlineError: it is not, after `timeout_s`.
            ConnectionLostError: the store has gone with the process that held it.
        """
        if not self.wait_until(key, timeout_s):
            raise DeadlineError(
                f"rank {self.rank}: {self.prefix}/{key} was not published within {timeout_s} s; does every rank build a "
                "RolloutManager?"
            )
        return bytes(self.store.get(f"{self.prefix}/{key}"))

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
                mine = str(probe.getsockname()[0])
        except OSError as exc:
            raise ConfigError(
                f"MASTER_ADDR={master!r} does not tell this host's address ({exc}); set CoordinatorConfig(host=...)"
            ) from exc
        if is_loopback(mine):
            raise ConfigError(
                f"MASTER_ADDR={master!r} is {mine} on this host, where the other hosts of the job cannot reach it; set "
                "CoordinatorConfig(host=...) to an address that they can"
            )
        return mine

    def reachable(self, address: str) -> str:
        """`tcp://host:port` with a host that the other ranks can connect to, where it is a wildcard.

        Raises:
            ConfigError: it cannot be told.
        """
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if host not in WILDCARDS:
            return address
        mine = "127.0.0.1" if self.one_host else self.address_for_others()
        return f"tcp://[{mine}]:{port}" if ":" in mine else f"tcp://{mine}:{port}"
