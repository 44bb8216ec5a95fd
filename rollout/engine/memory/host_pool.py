"""Host memory beside the KV cache: flat, kept between suspends, in pinned chunks for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Thread

import torch
from torch import Tensor

CHUNK_BYTES = 2**30
"""Size of a pinned chunk. Torch rounds pinned memory up to a power of two and keeps what was outgrown: a pool in one
piece would take up to four times its size."""


class HostMemoryError(MemoryError):
    """The host has not so much (pinned) memory."""


class HostPool:
    """Elements of one dtype, numbered through over the chunks; as many as were ever asked for.

    Args:
        pinned: for asynchronous copies to and from a CUDA device; else there is one chunk, mapped when it is written.
    """

    def __init__(self, dtype: torch.dtype, *, pinned: bool) -> None:
        self._dtype = dtype
        self._pinned = pinned
        self.chunks: list[Tensor] = []
        self._growing: Thread | None = None

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self) * self._dtype.itemsize

    def prepare(self, numel: int, within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Pin memory for `numel` elements in the background, so that `grow` does not take seconds.

        Args:
            within: entered by the thread that pins.
        """
        if not self._pinned or len(self) >= numel or (self._growing is not None and self._growing.is_alive()):
            return

        def work() -> None:
            # `grow` tries again and says what is missing.
            with suppress(RuntimeError, MemoryError), within():
                self._add_chunks(numel)

        self._growing = Thread(target=work, name="rollout-pin", daemon=True)
        self._growing.start()

    def grow(self, numel: int, most: int) -> None:
        """Have at least `numel` elements; the content is lost where there were fewer.

        Args:
            most: elements that will ever be asked for.

        Raises:
            HostMemoryError: they cannot be had.
        """
        if self._growing is not None:
            self._growing.join()
        if len(self) >= numel:
            return
        kept = len(self.chunks)
        try:
            if self._pinned:
                self._add_chunks(numel)
            else:
                # Geometrically: mapping pages costs more than copying into them.
                grown, kept = max(numel, min(2 * len(self), most)), 0
                self.chunks.clear()
                self.chunks.append(torch.empty(grown, dtype=self._dtype, device="cpu"))
        except (RuntimeError, MemoryError) as exc:
            del self.chunks[kept:]
            kind = "pinned host memory" if self._pinned else "host memory"
            reason = str(exc).partition("\n")[0]
            raise HostMemoryError(f"{numel * self._dtype.itemsize / 2**30:.2f} GiB of {kind} ({reason})") from exc

    def span(self, begin: int, end: int) -> Tensor:
        """Elements `begin` to `end`: a view where they lie in one chunk, else a copy."""
        found = list(pieces(self.chunks, begin, end))
        return found[0] if len(found) == 1 else torch.cat([torch.empty(0, dtype=self._dtype, device="cpu"), *found])

    def _add_chunks(self, numel: int) -> None:
        while (missing := numel - len(self)) > 0:
            size = min(CHUNK_BYTES // self._dtype.itemsize, 1 << (missing - 1).bit_length())
            self.chunks.append(torch.empty(size, dtype=self._dtype, device="cpu", pin_memory=True))


def pieces(chunks: Sequence[Tensor], begin: int, end: int) -> Iterator[Tensor]:
    """Views of elements `begin` to `end` of flat tensors that are numbered through, in order."""
    start = 0
    for chunk in chunks:
        stop = start + len(chunk)
        if max(begin, start) < min(end, stop):
            yield chunk[max(begin, start) - start : min(end, stop) - start]
        start = stop
