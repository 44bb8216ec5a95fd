"""Tests of what a tensor-parallel group's first rank sends, and of its encoding, without a process group."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.multimodal.family import StepImages
from rollout.engine.parallel.group import TensorParallelGroup
from rollout.engine.parallel.leading import BEAT_S, CHECK, END, FORWARD, WORK, ForwardWork, Leader, follow
from rollout.errors import EngineDeadError, EngineStateError


class FakeGroup(TensorParallelGroup):
    """Remembers what was sent; `least` of the others is given."""

    def __init__(self, others: int = 1) -> None:
        self.ranks, self.place, self.kind = (0, 1), 0, "tensor-parallel"
        self._lost, self._channel = None, None
        self.sent: list[tuple[str, Any]] = []
        self.others = others

    def send(self, message: bytes) -> None:
        self.sent.append(tuple(msgpack.unpackb(message)))

    def receive(self) -> bytes:
        return msgpack.packb(self.sent.pop(0))

    def least(self, value: int) -> int:
        return min(value, self.others)


def work() -> ForwardWork:
    rows = PagedRows(np.array([0, 1, 3]), np.array([4, 0, 1]), np.array([[7, 9], [3, 0]]), 4)
    return ForwardWork(np.array([5, 6, 7]), rows, np.array([0, 2]), [(1, 2), (2, ~5), (~0, 1)], [3])


def test_a_forward_arrives_as_it_was_sent() -> None:
    seen, embeddings = np.array([4, 1, 1]), [torch.rand(2, 8, dtype=torch.bfloat16), torch.rand(2, 8)]
    images = StepImages(np.array([1, 2]), embeddings, np.arange(12).reshape(4, 3), seen)
    sent = replace(work(), rows=replace(work().rows, seen=seen), images=images)
    came = WORK.decode(msgpack.unpackb(msgpack.packb(WORK.encode(sent))))
    for name in ("ids", "keep"):
        assert getattr(came, name).tolist() == getattr(sent, name).tolist()
    for name in ("offsets", "positions", "tables", "slots", "seen"):
        assert getattr(came.rows, name).tolist() == getattr(sent.rows, name).tolist()
    assert (came.copies, came.zeroed_blocks, came.rows.block_size) == ([[1, 2], [2, ~5], [~0, 1]], [3], 4)
    for name in ("index", "positions", "seen"):
        assert getattr(came.images, name).tolist() == getattr(images, name).tolist()
    assert all(torch.equal(mine, other) for mine, other in zip(came.images.embeddings, embeddings, strict=True))


def test_blocks_zeroed_between_two_forwards_go_with_the_next_one_alone() -> None:
    group = FakeGroup()
    leader = Leader(group)
    with leader.leading(lambda failed: None):
        leader.zero_blocks([11])
        for _ in range(2):
            leader.run(work(), lambda each: torch.zeros(1))
    first, second = (WORK.decode(content) for kind, content in group.sent if kind == FORWARD)
    assert (first.zeroed_blocks, second.zeroed_blocks) == ([11], [])


def test_it_does_nothing_while_the_others_do_not_follow_and_beats_while_they_do() -> None:
    now = [0.0]
    group = FakeGroup()
    leader = Leader(group, clock=lambda: now[0])
    with pytest.raises(EngineStateError, match="other members do not compute now"):
        leader.refuse_alone()
    with leader.leading(lambda failed: "done"):
        leader.refuse_alone()
        leader.beat()
        now[0] += 2 * BEAT_S
        leader.beat()
        leader.beat()
    assert group.sent == [("beat", None), (END, "done")]


def fail(_: object) -> Any:
    raise ArithmeticError("no such number")


def test_a_failure_of_all_members_is_the_models_own_and_the_group_goes_on() -> None:
    group = FakeGroup(others=1)
    leader = Leader(group)
    with leader.leading(lambda failed: "done"), pytest.raises(ArithmeticError):
        leader.run(work(), fail)
    assert [kind for kind, _ in group.sent] == [FORWARD, CHECK, END]
    assert follow(group, fail) == "done"


def test_a_failure_of_the_first_rank_alone_ends_the_group() -> None:
    group = FakeGroup(others=0)
    with pytest.raises(EngineDeadError, match="ArithmeticError"), Leader(group).leading(lambda failed: "done"):
        Leader(group).run(work(), fail)
    follower = FakeGroup()
    follower.sent = group.sent
    with pytest.raises(EngineDeadError, match="failed there and not here"):
        follow(follower, lambda each: None)


def test_a_failure_of_a_follower_alone_ends_the_group() -> None:
    group = FakeGroup()
    leader = Leader(group)
    with leader.leading(lambda failed: "done"):
        leader.run(work(), lambda each: torch.zeros(1))
    with pytest.raises(EngineDeadError, match="ArithmeticError: no such number"):
        follow(group, fail)
