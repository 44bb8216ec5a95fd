"""Tests of the trial of the Triton kernels, and of what a step asks of them, with kernels that are stand-ins.

That the trial passes with kernels that are right is tested in `test_triton_paged.py`, in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.forward.module_forward import _kernel_shapes as kernel_shapes
from rollout.engine.kernels.decode_parts import DecodeParts
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention, write_slots
from rollout.engine.kernels.triton_attention import TABLE_STEP, TritonPagedAttention
from rollout.engine.kernels.triton_trial import Heads, tried_out
from rollout.engine.models.model_support import inspect_model
from tests.engine.kernels.paged_step import Step
from tests.engines import shared_model

CPU = torch.device("cpu")


class Kernels:
    """`TritonPaged` in plain torch, of which one mode may be broken; notes queries and columns of tables."""

    def __init__(self, broken: str = "", error: Exception | None = None) -> None:
        self.tried: list[tuple[str, int, int]] = []
        self._broken, self._error = broken, error

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        assert len(slots.unique()) == len(slots)
        write_slots(key, value, keys, values, slots)
        keys += self._broken_in("write", len(key))

    def decode(
        self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, parts: DecodeParts, **rules: Any
    ) -> Tensor:
        counts = torch.ones(len(table), dtype=torch.int64)
        return self._attend("decode", query, keys, values, table, parts.positions, counts, rules)

    def prefill(
        self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, begins: Tensor, starts: Tensor, **rules: Any
    ) -> Tensor:
        assert begins[[0, -1]].tolist() == [0, len(query)]
        return self._attend("prefill", query, keys, values, table, starts, begins.diff(), rules)

    def clear(self) -> None:
        pass

    def _attend(
        self, mode: str, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, starts: Tensor, counts: Tensor,
        rules: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        offsets = np.concatenate([[0], counts.cumsum(0).numpy()])
        positions = [
            np.arange(start, start + count) for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        ]
        rows = PagedRows(offsets, np.concatenate(positions), table.long().numpy(), keys.shape[1])
        out = TorchPagedAttention(rows, CPU)(query, keys, values, **rules)
        return out + self._broken_in(mode, len(query), table.shape[1])

    def _broken_in(self, mode: str, queries: int, columns: int = 0) -> float:
        self.tried.append((mode, queries, columns))
        if mode != self._broken:
            return 0.0
        if self._error is not None:
            raise self._error
        return 0.1


@pytest.mark.parametrize("block_size", [4, 7, 16, 300])
def test_kernels_that_are_right_are_used(block_size: int) -> None:
    kernels = Kernels()
    kinds = [Heads(4, 2, 16, 16), Heads(6, 2, 24, 40)]
    assert tried_out(kernels, kinds, torch.float32, block_size, CPU) is kernels
    assert [mode for mode, *_ in kernels.tried] == ["write", "decode", "prefill"] * 2


@pytest.mark.parametrize("error", [None, RuntimeError("out of resource: shared memory\nRequired: 300000")])
@pytest.mark.parametrize("mode", ["write", "decode", "prefill"])
def test_kernels_that_raise_or_err_are_not_used(mode: str, error: Exception | None, caplog: Any) -> None:
    kernels = Kernels(mode, error)
    used = tried_out(kernels, [Heads(4, 2, 16, 16)], torch.float32, 16, CPU)
    reason = "differs from plain torch by 0.1" if error is None else "out of resource: shared memory"
    assert reason in caplog.text
    assert "300000" not in caplog.text
    assert used is None


def test_the_shapes_of_a_model_are_tried_once_each_and_those_the_kernels_refuse_not_at_all() -> None:
    found = inspect_model(shared_model("gemma3"))
    assert len(found.layers) > 1
    kinds = set(zip((call.num_heads for call in found.calls), found.layers, strict=True))
    assert len(kernel_shapes(found)) == len(kinds)
    assert kernel_shapes(inspect_model(shared_model("llama"))) == [], "its heads of 12 are too small for the kernels"


@pytest.mark.parametrize(("counts", "ends", "dim", "asked"), [
    ([1, 1, 40, 1], [20, 100, 300, 7], 16, [("decode", 2, TABLE_STEP), ("prefill", 41, 2 * TABLE_STEP)]),
    ([1, 1], [20, 100], 16, [("decode", 2, TABLE_STEP)]),
    ([9], [20], 16, [("prefill", 9, TABLE_STEP)]),
    ([1, 3], [20, 30], 8, []),
], ids=["both", "decodes", "a chunk", "heads that the kernels do not take"])  # fmt: skip
def test_leading_rows_of_one_position_decode_and_all_others_prefill(
    counts: list[int], ends: list[int], dim: int, asked: list[Any]
) -> None:
    step, kernels = Step(counts, ends, dim=dim), Kernels()
    attend = TritonPagedAttention(kernels, step.rows, CPU, TorchPagedAttention(step.rows, CPU))  # type: ignore[arg-type]
    out = attend(step.query, step.keys, step.values, scaling=0.3)
    assert kernels.tried == asked
    torch.testing.assert_close(out.double(), step.expected(0.3), atol=1e-5, rtol=1e-5)
