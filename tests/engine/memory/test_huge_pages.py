"""Huge pages under parameters: which are asked for, and that content and addresses stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollout.engine.memory import huge_pages
from rollout.engine.memory.huge_pages import HUGE_PAGE, collapse


def test_every_page_of_the_parameters_is_asked_for_once() -> None:
    first, second = torch.zeros(6 << 20), torch.zeros(1 << 20)
    asked: list[int] = []

    def advise(address: int, size: int) -> bool:
        assert address % HUGE_PAGE == 0
        assert size == HUGE_PAGE
        asked.append(address)
        return len(asked) % 2 == 0

    assert collapse([first, second, first.view(-1)], advise) == len(asked) // 2 * HUGE_PAGE
    assert len(set(asked)) == len(asked)
    for each in (first, second):
        pages = range(each.data_ptr() // HUGE_PAGE * HUGE_PAGE, each.data_ptr() + each.nbytes, HUGE_PAGE)
        assert set(pages) <= set(asked)


def test_few_parameters_and_other_devices_are_left_alone() -> None:
    def advise(address: int, size: int) -> bool:
        raise AssertionError("was asked")

    assert collapse([torch.zeros(1 << 20), torch.zeros(8 << 20, device="meta")], advise) == 0


@pytest.mark.skipif(huge_pages._madvise() is None, reason="no transparent huge pages")
def test_content_and_addresses_stay() -> None:
    tensor = torch.arange(8 << 20, dtype=torch.int32)
    before, address = tensor.clone(), tensor.data_ptr()
    assert 0 <= collapse([tensor]) <= tensor.nbytes + 2 * HUGE_PAGE
    assert tensor.data_ptr() == address
    assert torch.equal(tensor, before)


@pytest.mark.parametrize(
    ("switch", "there"), [("always [madvise] never", True), ("always madvise [never]", False), (None, False)]
)
def test_the_administrator_decides(
    switch: str | None, there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "enabled"
    if switch is not None:
        path.write_text(switch)
    monkeypatch.setattr(huge_pages, "_SWITCH", path)
    monkeypatch.setattr("sys.platform", "linux")
    assert (huge_pages._madvise.__wrapped__() is not None) == there
