"""The control channel of a tensor-parallel group: messages from its first rank to the others, over a separate gloo group.

Always true: a member that loses the channel raises an `EngineDeadError` that names the group. The first rank sends at least
one message per control timeout. Other members wait for `IDLE_TIMEOUTS` control timeouts, but at least `LEAST_TIMEOUT_S`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from rollout.errors import ConfigError, DeadlineError, EngineDeadError

HEADER_BYTES = 4096
"""The size of a message's first broadcast, in bytes. The rest of a longer message is sent in a second broadcast."""
_LENGTH_BYTES = 8
IDLE_TIMEOUTS = 2.0
"""The maximum time that members wait for the next message, as a multiple of the control timeout."""
LEAST_TIMEOUT_S = 60.0
"""The minimum time, in seconds, that members wait for a message, because other ranks may build their engines first."""
_built: dict[tuple[int, ...], int] = {}
"""The number, counted from 0, of the latest group that each tuple of ranks has built; equal on all ranks of the tuple."""


class TensorParallelGroup:
    """The ranks that hold the shards of one model. All of them must construct this object at the same time.

    Args:
        mesh: one-dimensional device mesh of the group.
        timeout_s: control timeout in seconds.
        kind: kind of the group, for error messages.

    Attributes:
        ranks: ranks of the members in the default process group. The first rank decides what the group computes.
        place: index of this rank in `ranks`.

    Raises:
        DeadlineError: some ranks did not construct the group within the timeout.
    """

    def __init__(self, mesh: Any, timeout_s: float, kind: str = "tensor-parallel") -> None:
        self.kind = kind
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(mesh.get_group()))
        self.place = self.ranks.index(dist.get_rank())
        self._lost: str | None = None
        number = _built[self.ranks] = _built.get(self.ranks, -1) + 1
        # Create the group without `new_group`. It could reuse the name of an earlier group of these ranks, and then find
        # that group's outdated addresses in the store.
        prefix = f"rollout/{kind}/{'-'.join(map(str, self.ranks))}/{number}"
        store = distributed_c10d.PrefixStore(prefix, distributed_c10d._get_default_store())
        timeout = timedelta(seconds=max(LEAST_TIMEOUT_S, IDLE_TIMEOUTS * timeout_s))
        try:
            self._channel: Any = dist.ProcessGroupGloo(store, self.place, len(self.ranks), timeout)
        except RuntimeError as exc:
            raise DeadlineError(
                f"{self.name}: the ranks have not found each other ({' '.join(str(exc).split())[:300]}); every rank of the "
                "group builds its engine at the same time"
            ) from exc

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of the group, which decides what all members compute."""
        return self.place == 0

    @property
    def name(self) -> str:
        """The group's name in error messages."""
        return f"{self.kind} group of ranks {', '.join(map(str, self.ranks))}"

    def send(self, message: bytes) -> None:
        """Broadcast a message from the first rank to the other ranks, which call `receive`.

        Raises:
            EngineDeadError: the connection to a member is lost.
        """
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        room = HEADER_BYTES - _LENGTH_BYTES
        header[:_LENGTH_BYTES] = _bytes(len(message).to_bytes(_LENGTH_BYTES, "little"))
        header[_LENGTH_BYTES : _LENGTH_BYTES + len(message[:room])] = _bytes(message[:room])
        self._broadcast(header)
        if len(message) > room:
            self._broadcast(_bytes(message[room:]))

    def receive(self) -> bytes:
        """Wait for the first rank's next message, and return it.

        Raises:
            EngineDeadError: the connection to the first rank is lost, or the first rank sent nothing for too long.
        """
        header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        self._broadcast(header)
        data = header.numpy().tobytes()
        length, rest = int.from_bytes(data[:_LENGTH_BYTES], "little"), data[_LENGTH_BYTES:]
        if length > len(rest):
            tail = torch.empty(length - len(rest), dtype=torch.uint8, device="cpu")
            self._broadcast(tail)
            rest += tail.numpy().tobytes()
        return rest[:length]

    def least(self, value: int) -> int:
        """Return the smallest of the members' values. Every member must call this."""
        told = torch.tensor([value], dtype=torch.int64, device="cpu")
        self._exchange(lambda: self._channel.allreduce(told, dist.ReduceOp.MIN))
        return int(told)

    def refuse_unequal(self, what: str, value: str) -> None:
        """Check that a setting is equal on all members. Every member must call this.

        Args:
            what: name of the setting, for the message.
            value: this rank's value.

        Raises:
            ConfigError: the setting differs; the message names the ranks that differ from the first rank.
        """
        mine = torch.tensor([zlib.crc32(value.encode())], dtype=torch.int64, device="cpu")
        told = [torch.empty_like(mine) for _ in self.ranks]
        self._exchange(lambda: self._channel.allgather(told, mine))
        if others := [rank for rank, each in zip(self.ranks, told, strict=True) if int(each) != int(told[0])]:
            raise ConfigError(
                f"{self.name}: {what} of ranks {others} differs from rank {self.ranks[0]} ({value} on rank "
                f"{self.ranks[self.place]}); give all of them the same"
            )

    def refuse_when_lost(self) -> None:
        """Raise `EngineDeadError` if the group is lost."""
        if self._lost is not None:
            raise EngineDeadError(self._lost)

    def lose(self, why: BaseException | str) -> EngineDeadError:
        """Mark the group as lost, and close the channel to notify the other members. Return the error to raise."""
        if self._lost is None:
            others = ", ".join(f"rank {rank}" for rank in self.ranks if rank != self.ranks[self.place])
            said = why if isinstance(why, str) else f"{type(why).__name__}: {' '.join(str(why).split())[:300]}"
            self._lost = (
                f"the {self.name} has ended on rank {self.ranks[self.place]}: {others} has ended, failed, or does not "
                f"answer ({said}); start the job again, from a checkpoint where samples were in flight"
            )
            self.close()
        return EngineDeadError(self._lost)

    def lose_after(self, failed: BaseException, lost: BaseException) -> EngineDeadError:
        """Mark the group as lost after a forward pass failed on this rank. Return an error that names both exceptions."""
        said = self.lose(lost)
        return EngineDeadError(f"{said}; before, the forward raised {type(failed).__name__} here: {failed}")

    def close(self) -> None:
        """Close this rank's end of the channel. Repeated calls have no effect."""
        # Drop the only reference to the channel, so that its connections are closed.
        self._channel = None
        self._lost = self._lost or f"the {self.name} was closed on rank {self.ranks[self.place]}; build another engine"

    def _broadcast(self, data: Tensor) -> None:
        self._exchange(lambda: self._channel.broadcast(data, root=0))

    def _exchange(self, collective: Callable[[], Any]) -> None:
        self.refuse_when_lost()
        try:
            collective().wait()
        # Catch RuntimeError, the base class of the errors that backends raise for a closed connection and for a timeout.
        except RuntimeError as exc:
            raise self.lose(exc) from exc


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
