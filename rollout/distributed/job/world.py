"""The rank, world size and key-value store of a job, taken from torch.distributed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d

from rollout.distributed.transport.keys import is_loopback
from rollout.errors import ConfigError, ConnectionLostError, DeadlineError

_numbers = count()
WILDCARDS = ("0.0.0.0", "*", "[::]", "::")
"""The host values that mean "listen on all interfaces"."""
_CALLS_ENDED = "calls_ended"
LOOK_S = 5.0
"""Seconds between two checks for a failed rank or Ctrl-C while a rank waits for other ranks."""
HOSTS_TIMEOUT_S = 120.0
"""Seconds to wait until each rank has published its host or, in `World.leaders`, the leader of its group."""


@dataclass(frozen=True)
class World:
    """The ranks of one manager and their shared store.

    Attributes:
        rank: the rank of this process, from 0.
        size: the number of ranks.
        store: the key-value store that all ranks share.
        prefix: the prefix of this manager's keys in the store. It is the same on all ranks if they create their managers in
            the same order.
        one_host: whether all ranks run on this host.
    """

    rank: int
    size: int
    store: Store
    prefix: str
    one_host: bool

    @classmethod
    def of_torch(cls) -> World | None:
        """Return the world of the default process group, or None if there is no group or it has a single rank."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        size = dist.get_world_size()
        store = distributed_c10d._get_default_store()
        world = cls(dist.get_rank(), size, store, f"rollout/{next(_numbers)}", one_host=True)
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            return world
        return replace(world, one_host=world._share_a_host())

    @classmethod
    def alone(cls) -> World:
        """Return the world that consists only of this process."""
        return cls(0, 1, HashStore(), "rollout/alone", one_host=True)

    def within(self, ranks: Sequence[int], name: str) -> World:
        """Return the world of a subset of the ranks, which must include this rank.

        Args:
            ranks: the ranks of the new world; a rank's number in it is its index in `ranks`.
            name: part of the new world's keys in the store. Every such world must have a different name.
        """
        return replace(self, rank=ranks.index(self.rank), size=len(ranks), prefix=f"{self.prefix}/{name}")

    def leaders(self, leader: int) -> list[int]:
        """Publish the leader (first rank) of this rank's group; return all leaders in order. Call it on all ranks."""
        self.publish(f"leader/{self.rank}", str(leader).encode())
        return sorted({int(self.wait_for(f"leader/{rank}", HOSTS_TIMEOUT_S)) for rank in range(self.size)})

    def _share_a_host(self) -> bool:
        mine = loopback_identity().encode()
        self.publish(f"host/{self.rank}", mine)
        return all(self.wait_for(f"host/{rank}", HOSTS_TIMEOUT_S) == mine for rank in range(self.size))

    def publish(self, key: str, value: bytes) -> None:
        self.store.set(f"{self.prefix}/{key}", value)  # type: ignore[arg-type]  # torch's type stub lacks bytes

    def is_published(self, key: str) -> bool:
        """Return whether a key has a value. Return False if the process that holds the store has exited."""
        try:
            return bool(self.store.check([f"{self.prefix}/{key}"]))
        except dist.DistError:
            return False

    def settle(self, key: str, value: bytes) -> None:
        """Publish a value unless the key already has one. If several ranks call this, only the first value is stored."""
        self.store.compare_set(f"{self.prefix}/{key}", "", value.decode())

    def wait_until(self, key: str, timeout_s: float) -> bool:
        """Wait for a key; return whether it was published within `timeout_s` seconds.

        Raises:
            ConnectionLostError: the process that holds the store has exited.
        """
        full = f"{self.prefix}/{key}"
        try:
            # Wait at least 1 ms: a timeout that rounds to 0 ms would mean waiting forever.
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
        """Publish this rank's number of completed collective calls. Every rank does this before its next call."""
        # Ignore errors: the store disappears when the process that holds it exits, and then no rank can read the number.
        with suppress(dist.DistError):
            self.publish(_CALLS_ENDED, str(count).encode())

    def calls_ended(self) -> int:
        """Return the latest number of completed collective calls that any rank has published, or 0 if there is none."""
        return int(self.store.get(f"{self.prefix}/{_CALLS_ENDED}")) if self.is_published(_CALLS_ENDED) else 0

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Publish an exception that is raised inside the block, so that ranks that wait for this rank soon fail too."""
        try:
            yield
        except BaseException as exc:
            with suppress(dist.DistError):
                self.store.compare_set(
                    self._failed, "", f"rank {self.rank} could not join: {type(exc).__name__}: {exc}"
                )
            raise

    def refuse_when_failed(self) -> None:
        """Raise `ConfigError` if a rank has failed to join the job."""
        with suppress(dist.DistError):
            if self.store.check([self._failed]):
                raise ConfigError(f"rank {self.rank}: {bytes(self.store.get(self._failed)).decode()}")

    @property
    def _failed(self) -> str:
        # Use only the first two parts of the prefix, so that all worlds of one manager share the key.
        return "/".join(self.prefix.split("/")[:2]) + "/failed"

    def wait_for(self, key: str, timeout_s: float) -> bytes:
        """Wait for a key and return its value.

        Raises:
            DeadlineError: the key was not published within `timeout_s` seconds.
            ConfigError: a rank has failed to join the job.
            ConnectionLostError: the process that holds the store has exited.
        """
        deadline = time.monotonic() + timeout_s
        while not self.wait_until(key, min(LOOK_S, deadline - time.monotonic())):
            self.refuse_when_failed()
            if time.monotonic() >= deadline:
                raise DeadlineError(
                    f"rank {self.rank}: {self.prefix}/{key} was not published within {timeout_s} s; does every rank build "
                    "a RolloutManager?"
                )
        return bytes(self.store.get(f"{self.prefix}/{key}"))

    def address_for_others(self) -> str:
        """Return an address of this host that the job's other hosts can reach.

        Raises:
            ConfigError: the address cannot be determined.
        """
        master = os.environ.get("MASTER_ADDR", "")
        try:
            family, _, _, _, target = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Connect a datagram socket. This sends nothing, but the kernel then selects the route's local address.
                probe.connect(target)
                mine = str(probe.getsockname()[0])
        except OSError as exc:
            raise ConfigError(
                f"MASTER_ADDR={master!r} does not give this host's address ({exc}); set CoordinatorConfig(host=...)"
            ) from exc
        if is_loopback(mine):
            raise ConfigError(
                f"MASTER_ADDR={master!r} is {mine} on this host, where the other hosts of the job cannot reach it; set "
                "CoordinatorConfig(host=...) to an address that they can"
            )
        return mine

    def reachable(self, address: str) -> str:
        """Return `tcp://host:port` with a wildcard host replaced by an address to which the other ranks can connect."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if host not in WILDCARDS:
            return address
        mine = "127.0.0.1" if self.one_host else self.address_for_others()
        return f"tcp://[{mine}]:{port}" if ":" in mine else f"tcp://{mine}:{port}"


def loopback_identity() -> str:
    """Return a string that is the same for two processes only if they share a loopback device.

    The string contains host name, boot id and network namespace. The host name alone is not enough, because containers on
    different hosts may have the same name.
    """
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        # Read the thread's namespace: the threads of a process may be in different namespaces.
        parts.append(os.readlink("/proc/thread-self/ns/net"))
    return " ".join(parts)
