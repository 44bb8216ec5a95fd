"""Cost of a routing decision from 1 to 1,000 ranks: `python -m tests.benchmarks.routing`.

Prompts of 1,000 tokens: 16 blocks that every rank holds, the rest their own. A request is placed and assigned, and the
oldest open one ends and is released. Rounds go through all numbers of ranks in turn, and medians are shown. Hashing the
prompt does not depend on the ranks and stands beside it. The last column is a decision when no rank has room.

Two tables: as many open requests whatever the number of ranks shows what a rank costs; as many on each rank shows what
a table of hashes beyond the processor's caches costs as well.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from rollout.distributed.coordinator.core.routing import Claim, Router
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.state import PrefixCachingCoordinatorPolicy

RANKS = (1, 4, 16, 64, 256, 1000)
TOKENS, BLOCK_SIZE = 1000, 16
BLOCKS, SHARED_BLOCKS = TOKENS // BLOCK_SIZE, 16
SLOTS = 256
OPEN, OPEN_PER_RANK = 128, 4
SHARED = list(range(1, SHARED_BLOCKS + 1))
COLUMNS = ("hash", "place", "keep", "refuse")
"""Computing the hashes; `place`; `assigned`, `ended` and `released`; `place` without room. Microseconds."""


class Bench:
    """A router with ranks at work.

    Args:
        ranks: how many.
        opened: requests at work, on all of them together.
        seed: of the prompts.
    """

    def __init__(self, ranks: int, opened: int, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._open: deque[tuple[str, Claim]] = deque()
        self._router, self._full = (Router(PrefixCachingCoordinatorPolicy.LONGEST_PREFIX) for _ in range(2))
        for index in range(ranks):
            for router in (self._router, self._full):
                router.add_rank(f"rank-{index:04}", SLOTS)
                router.reported(f"rank-{index:04}", SHARED, (), flushed=False)
            self._full.assigned(f"rank-{index:04}", SHARED, 2 * SLOTS)
        while len(self._open) < opened:
            self._open.append(self._assign(self._hashes()))

    def _hashes(self) -> list[int]:
        return SHARED + [self._random.getrandbits(61) for _ in range(BLOCKS - SHARED_BLOCKS)]

    def _assign(self, hashes: list[int]) -> tuple[str, Claim]:
        (placement,) = self._router.place(hashes, 1)
        return placement.rank, self._router.assigned(placement.rank, hashes, 1)

    def round(self, requests: int) -> dict[str, float]:
        """Microseconds per request."""
        tokens = [[self._random.randrange(1 << 17) for _ in range(TOKENS)] for _ in range(requests)]
        prompts = [self._hashes() for _ in range(requests)]
        place, keep = [], []
        for hashes in prompts:
            start = time.perf_counter()
            (placement,) = self._router.place(hashes, 1)
            placed = time.perf_counter()
            self._open.append((placement.rank, self._router.assigned(placement.rank, hashes, 1)))
            rank, claim = self._open.popleft()
            self._router.ended(rank)
            self._router.released(claim)
            keep.append(time.perf_counter() - placed)
            place.append(placed - start)
        return {
            "hash": _each(lambda prompt: compute_block_hashes_batched(prompt, BLOCK_SIZE), tokens),
            "place": 1e6 * statistics.median(place),
            "keep": 1e6 * statistics.median(keep),
            "refuse": _each(lambda hashes: self._full.place(hashes, 1), prompts),
        }


def _each(call: Callable[[list[int]], object], arguments: list[list[int]]) -> float:
    """Median microseconds of a call."""
    seconds = []
    for argument in arguments:
        start = time.perf_counter()
        call(argument)
        seconds.append(time.perf_counter() - start)
    return 1e6 * statistics.median(seconds)


def measure(opened: Callable[[int], int], rounds: int, requests: int) -> dict[int, dict[str, float]]:
    """Number of ranks → column → median over the rounds, in microseconds; `opened`: requests at work by ranks."""
    benches = {ranks: Bench(ranks, opened(ranks)) for ranks in RANKS}
    seen: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in RANKS}
    for number in range(rounds):
        for ranks in RANKS[number % len(RANKS) :] + RANKS[: number % len(RANKS)]:
            seen[ranks].append(benches[ranks].round(requests))
    return {
        ranks: {column: statistics.median(each[column] for each in results) for column in COLUMNS}
        for ranks, results in seen.items()
    }


def table(title: str, results: dict[int, dict[str, float]]) -> Table:
    """One row per number of ranks."""
    shown = Table(title=f"routing, µs per request of {TOKENS:,} tokens, {title}", title_justify="left")
    for column in ("ranks", "hash the prompt", "place", "assigned, ended, released", "routing", "of 1 rank", "no room"):
        shown.add_column(column, justify="right")
    routing = {ranks: result["place"] + result["keep"] for ranks, result in results.items()}
    for ranks, result in results.items():
        shown.add_row(
            f"{ranks:,}", *(f"{result[column]:.1f}" for column in ("hash", "place", "keep")),
            f"{routing[ranks]:.1f}", f"{routing[ranks] / routing[RANKS[0]]:.2f}", f"{result['refuse']:.1f}",
        )  # fmt: skip
    return shown


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=300, help="per number of ranks and round")
    options = parser.parse_args()
    console = Console()
    for title, opened in (
        (f"{OPEN} open requests", lambda ranks: OPEN),
        (f"{OPEN_PER_RANK} open requests on each rank", lambda ranks: OPEN_PER_RANK * ranks),
    ):
        console.print(table(title, measure(opened, options.rounds, options.requests)))


if __name__ == "__main__":
    main()
