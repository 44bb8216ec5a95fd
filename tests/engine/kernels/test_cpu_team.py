"""Tests of the C++ kernels' threads: equal bits for any number of threads and callers, also in a forked child."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollout.engine.kernels import cpu_draw, cpu_library

pytestmark = pytest.mark.skipif(cpu_library.load() is None, reason="no C++ compiler")

ROWS = 40


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def drawn(rows: int = ROWS) -> list[Tensor]:
    """Tokens, peaks, sums and scores of logits that are always the same."""
    kernel = cpu_draw.load()
    assert kernel is not None
    logits = torch.randn(ROWS, 3000, generator=torch.Generator().manual_seed(1))[:rows]
    number = torch.arange(rows)
    found = kernel(logits, torch.ones(rows), torch.zeros(rows, dtype=torch.bool), number, number)
    return [each for each in found if each is not None]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def our_threads() -> int:
    """Threads of this process that the kernels have made."""
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("no /proc")
    return sum((task / "comm").read_text().strip() == "rollout-kernels" for task in tasks.iterdir())


def test_any_number_of_threads_and_of_rows_gives_the_same_bits() -> None:
    expected = drawn()
    for count in (1, 2, 7):
        torch.set_num_threads(count)
        assert same(drawn(), expected)
        assert same(drawn(1), [column[:1] for column in expected])


def test_threads_are_made_once_and_as_many_as_torch_has() -> None:
    drawn()
    before = our_threads()
    torch.set_num_threads(before + 3)
    drawn()
    assert our_threads() == before + 2, "the caller is one of them"
    torch.set_num_threads(2)
    drawn()
    assert our_threads() == before + 2


def test_more_callers_than_have_places_at_once_each_get_their_own() -> None:
    expected, wrong = drawn(), []

    def call(_: int) -> None:
        # The number of threads is the calling thread's own.
        torch.set_num_threads(3)
        for _ in range(30):
            if not same(drawn(), expected):
                wrong.append(1)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(12)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=300)
        assert not caller.is_alive()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_threads_of_its_own_and_no_process_prints_anything_at_its_end() -> None:
    script = """if True:
        import os, signal
        from tests.engine.kernels.test_cpu_team import drawn, our_threads, same, torch
        torch.set_num_threads(3)
        expected = drawn()
        assert our_threads() == 2
        child = os.fork()
        if not child:
            signal.alarm(120)  # a child that waits for threads it does not have
            assert our_threads() == 0
            for _ in range(20):
                assert same(drawn(), expected)
            assert our_threads() == 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert same(drawn(), expected)
        """
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
