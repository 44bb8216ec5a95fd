"""Tests of the trial of the Triton kernels: kernels that raise or err in one mode are not used. The kernels are stand-ins.

That the trial passes with kernels that are right is tested in `test_triton_paged.py`, in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.engine.forward.module_forward import _kernel_shapes as kernel_shapes
from rollout.engine.kernels.decode_parts import DecodeParts
from rollout.engine.kernels.torch_paged import write_slots
from rollout.engine.kernels.triton_trial import Heads, tried_out
from rollout.engine.models.model_support import inspect_model
from tests.engines import shared_model

CPU = torch.device("cpu")


class Kernels:
    """`TritonPaged` in plain torch, of which one mode may be broken."""

    def __init__(self, broken: str = "", error: Exception | None = None) -> None:
        self.tried: list[str] = []
        self._broken, self._error = broken, error

    def write(self, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        assert len(slots.unique()) == len(slots)
        write_slots(key, value, keys, values, slots)
        keys += self._broken_in("write")

    def decode(
        self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, parts: DecodeParts, *, scaling: float
    ) -> Tensor:
        last = parts.positions.tolist()
        out = [self._attend(query[row], keys, values, table[row], last[row], scaling) for row in range(len(query))]
        return torch.stack(out) + self._broken_in("decode")

    def prefill(self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, begins: Tensor, starts: Tensor,
                *, scaling: float) -> Tensor:  # fmt: skip
        rows = [
            self._attend(query[at], keys, values, table[row], int(starts[row]) + at - int(begins[row]), scaling)
            for row in range(len(starts)) for at in range(int(begins[row]), int(begins[row + 1]))
        ]  # fmt: skip
        return torch.stack(rows) + self._broken_in("prefill")

    def clear(self) -> None:
        pass

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, table: Tensor, last: int, scale: float) -> Tensor:
        groups = len(query) // keys.shape[2]
        k, v = (part[table.long()].flatten(0, 1)[: last + 1].repeat_interleave(groups, 1) for part in (keys, values))
        weights = (torch.einsum("hd,khd->hk", query, k) * scale).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, v)

    def _broken_in(self, mode: str) -> float:
        self.tried.append(mode)
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
    assert kernels.tried == ["write", "decode", "prefill"] * 2


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
