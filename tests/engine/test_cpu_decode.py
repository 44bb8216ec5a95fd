"""The C++ decode kernel against float64, and what happens where it cannot be built."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from rollout.engine.kernels import cpu_decode
from rollout.engine.kernels.cpu_decode import HEAD_DIMS, load, serves
from rollout.engine.kernels.torch_paged import Tile, Workspace, paged_attention

BLOCK = 16

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def paged(batch: int, heads: int, kv_heads: int, dim: int, longest: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = -(-longest // BLOCK)
    pool = batch * width + 3
    return {
        "query": torch.randn(batch, heads, dim, generator=generator),
        "keys": torch.randn(pool, BLOCK, kv_heads, dim, generator=generator),
        "values": torch.randn(pool, BLOCK, kv_heads, dim, generator=generator),
        "table": torch.randperm(pool, generator=generator)[: batch * width].view(batch, width),
        "positions": torch.randint(0, longest, (batch, 1), generator=generator),
    }


def in_float64(case: dict[str, torch.Tensor], window: int | None, scaling: float) -> torch.Tensor:
    query, keys, values = (case[name].double() for name in ("query", "keys", "values"))
    own = query[:, : keys.shape[2]]
    tile = Tile(None, None, case["positions"], case["table"].reshape(-1), fresh=False)
    return paged_attention(query, own, own, keys, values, [tile], Workspace(), scaling=scaling, window=window)


@needs_compiler
@pytest.mark.parametrize("dim", sorted(HEAD_DIMS))
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 3), (9, 3), (8, 2), (14, 2), (7, 1)])
def test_the_kernel_equals_float64_for_every_head_size_and_grouping(dim: int, heads: int, kv_heads: int) -> None:
    kernel = load()
    assert kernel is not None
    case = paged(5, heads, kv_heads, dim, longest=90, seed=dim + heads)
    for window in (None, 1, 20, 1000):
        ours = kernel(*case.values(), window, dim**-0.5)
        torch.testing.assert_close(ours.double(), in_float64(case, window, dim**-0.5), atol=2e-6, rtol=2e-6)


@needs_compiler
def test_bfloat16_is_rounded_once_at_the_end() -> None:
    kernel = load()
    assert kernel is not None
    case = paged(9, 12, 4, 64, longest=300, seed=1)
    rounded = {name: value.bfloat16() if value.is_floating_point() else value for name, value in case.items()}
    exact = in_float64(rounded, None, 0.125)
    ours = kernel(*rounded.values(), None, 0.125)
    torch.testing.assert_close(ours.float(), exact.float(), atol=2e-3, rtol=2**-8)
    assert (ours == exact.bfloat16()).float().mean() > 0.98


@needs_compiler
def test_one_position_is_its_own_value_and_large_scores_do_not_overflow() -> None:
    kernel = load()
    assert kernel is not None
    case = paged(3, 4, 2, 32, longest=40, seed=2)
    case["positions"].zero_()
    ours = kernel(*case.values(), None, 1.0)
    first = case["values"][case["table"][:, 0], 0].repeat_interleave(2, 1)
    torch.testing.assert_close(ours, first)
    case["positions"] += 39
    case["query"] *= 1e3
    torch.testing.assert_close(
        kernel(*case.values(), None, 1.0).double(), in_float64(case, None, 1.0), atol=1e-4, rtol=1e-4
    )


@needs_compiler
def test_nan_stays_with_the_sequence_that_has_it() -> None:
    kernel = load()
    assert kernel is not None
    case = paged(4, 4, 2, 32, longest=40, seed=3)
    case["positions"].fill_(39)
    case["keys"][case["table"][1, 0]] = float("nan")
    ours = kernel(*case.values(), None, 0.2)
    assert ours[1].isnan().all()
    assert ours[[0, 2, 3]].isfinite().all()


@needs_compiler
def test_a_sequence_gets_the_same_bits_alone_and_among_many() -> None:
    kernel = load()
    assert kernel is not None
    case = paged(64, 12, 4, 64, longest=400, seed=4)
    together = kernel(*case.values(), None, 0.125)
    for row in (0, 17, 63):
        alone = {name: value[row : row + 1] if name in ("query", "table", "positions") else value
                 for name, value in case.items()}  # fmt: skip
        alone = {name: value.contiguous() for name, value in alone.items()}
        assert torch.equal(kernel(*alone.values(), None, 0.125)[0], together[row])


def test_shapes_it_does_not_know_are_left_to_torch() -> None:
    keys = torch.zeros(2, BLOCK, 2, 40)
    assert not serves(torch.zeros(1, 4, 40), keys, keys)
    assert not serves(torch.zeros(1, 4, 64, dtype=torch.float16), *[torch.zeros(2, BLOCK, 2, 64).half()] * 2)
    assert not serves(torch.zeros(1, 4, 64), torch.zeros(2, BLOCK, 2, 64), torch.zeros(2, BLOCK, 2, 32))


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_working_compiler_it_says_so_once_and_torch_serves(
    compiler: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_decode.load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert load() is None
            assert load() is None
        assert len(caplog.records) == 1
        assert "g++" in caplog.text
    finally:
        cpu_decode.load.cache_clear()
