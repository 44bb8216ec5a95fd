"""Tests of the Triton draw against plain torch, in Triton's interpreter (a process of its own) and on a GPU."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.engine.kernels import cpu_draw, triton_draw
from rollout.engine.sampling.sampler import Sampled, sample
from rollout.engine.sampling.sampling_table import SamplingRows, SamplingTable
from rollout.sampling_params import SamplingParams
from tests.interpreter import INTERPRETED

try:
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:
    triton = None

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
VOCAB, ROWS = (200, 3) if INTERPRETED else (500, 24)
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.6},
    {"temperature": 1.4, "top_k": 30, "top_p": 0.95, "min_p": 0.05},
]


def on_the_device(function: Any) -> Any:
    if INTERPRETED:
        return function
    function = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(function)
    return pytest.mark.gpu(function)


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of a small vocabulary."""
    monkeypatch.setattr(triton_draw, "SPAN", 128)


def rows_of(params: list[SamplingParams]) -> SamplingRows:
    table = SamplingTable(DEVICE)
    for row, each in enumerate(params):
        table.set(row, each, 1000 + row)
    return table.select(np.arange(len(params)))


def both(monkeypatch: pytest.MonkeyPatch, logits: Tensor, params: list[SamplingParams], **more: Any) -> list[Sampled]:
    """Samples by plain torch and by Triton."""
    positions = torch.arange(len(params), device=DEVICE) * 3
    drawn = []
    monkeypatch.setattr(cpu_draw, "serves", lambda scores: False)
    for on in (False, True):
        monkeypatch.setattr(triton_draw, "serves", lambda scores, on=on: on)
        drawn.append(sample(logits, rows_of(params), positions, **more))
    return drawn


def assert_same(plain: Sampled, ours: Sampled) -> None:
    assert ours.token_ids.tolist() == plain.token_ids.tolist()
    torch.testing.assert_close(ours.logprobs, plain.logprobs, atol=1e-6, rtol=1e-6, equal_nan=True)


def logits_of(rows: int, seed: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    drawn = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    return drawn.to(DEVICE, dtype)


@on_the_device
@pytest.mark.parametrize(
    ("filters", "dtype"),
    # In the interpreter those whose batch is drawn by other code; each filter has a row of the next test.
    [*((each, torch.float16) for each in (FILTERS[:8:4] if INTERPRETED else FILTERS)),
     *((each, torch.float32) for each in FILTERS[-5::2])],
    ids=str,
)  # fmt: skip
def test_tokens_are_those_of_plain_torch(filters, dtype, monkeypatch) -> None:
    logits = logits_of(ROWS, 1, dtype)
    assert_same(*both(monkeypatch, logits, [SamplingParams(**filters)] * ROWS))


@on_the_device
def test_rows_with_different_filters_are_drawn_together(monkeypatch) -> None:
    params = [SamplingParams(**filters) for filters in FILTERS]
    assert_same(*both(monkeypatch, logits_of(len(params), 2, torch.float16, 1.5), params))


@on_the_device
@pytest.mark.parametrize("filters", [{"top_k": 90}, {"top_p": 0.5}, {"top_k": 100, "top_p": 0.8}, {}], ids=str)
def test_of_equal_logits_those_with_lower_ids_are_kept_and_two_zeros_are_equal(filters, monkeypatch) -> None:
    logits = torch.zeros(ROWS, VOCAB, device=DEVICE)
    logits[:, ::3] = -0.0
    logits[:, 7::50] = 0.5
    assert_same(*both(monkeypatch, logits, [SamplingParams(**filters)] * ROWS))


@on_the_device
def test_a_row_without_a_finite_largest_logit_gets_nan_and_harms_no_neighbour(monkeypatch) -> None:
    logits = logits_of(5, 3, torch.float32)
    logits[0] = -torch.inf
    logits[1, 130] = torch.nan
    logits[2, 17] = torch.inf
    for filters in ({}, {"top_p": 0.9}):
        plain, ours = both(monkeypatch, logits, [SamplingParams(**filters)] * 5)
        assert ours.logprobs[:3].isnan().all()
        assert ((ours.token_ids >= 0) & (ours.token_ids < VOCAB)).all()
        assert ours.token_ids[3:].tolist() == plain.token_ids[3:].tolist()
        torch.testing.assert_close(ours.logprobs[3:], plain.logprobs[3:], atol=1e-6, rtol=1e-6)


@on_the_device
def test_banned_tokens_biases_penalties_and_raw_log_probs_come_before_the_draw(monkeypatch) -> None:
    params = [
        SamplingParams(top_p=0.9, logit_bias={4: 5.0}),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(logprobs_mode="raw", top_k=20),
    ]
    histories = [(np.arange(3), np.arange(5))] * 3
    logits = logits_of(3, 4, torch.float32)
    assert_same(*both(monkeypatch, logits, params, histories=histories, banned=[(0, [1, 2]), (2, [3])]))


@on_the_device
def test_a_row_alone_equals_itself_among_others(monkeypatch) -> None:
    logits, params = logits_of(6, 5, torch.float16), SamplingParams(top_p=0.8, temperature=1.2)
    monkeypatch.setattr(triton_draw, "serves", lambda scores: True)
    rows = rows_of([params] * 6)
    together = sample(logits, rows, torch.arange(6, device=DEVICE))
    table = SamplingTable(DEVICE)
    table.set(0, params, 1005)
    alone = sample(logits[5:6], table.select(np.arange(1)), torch.tensor([5], device=DEVICE))
    assert alone.token_ids[0] == together.token_ids[5]
    assert alone.logprobs[0] == together.logprobs[5]


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_kernels_that_fail_leave_sampling_to_torch(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_draw.load.cache_clear()
    triton_draw._kernels.cache_clear()
    try:
        assert triton_draw.load(torch.device("cpu"), torch.bfloat16) is None
    finally:
        triton_draw.load.cache_clear()
    assert "sampling from torch.bfloat16 on cpu runs on plain torch" in caplog.text


@pytest.mark.skipif(INTERPRETED or triton is None, reason="compiles, and so needs Triton, and not its interpreter")
def test_kernels_compile_for_a_device_that_is_not_there(monkeypatch, tmp_path) -> None:
    """With the exponential of the CUDA library, which the interpreter does not have."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from rollout.engine.kernels import triton_draw_kernels as device_code  # needs Triton

    words = ("wanted", "before", "after", "low", "low_out", "edge", "room", "ties_before", "total", "above", "keys",
             "positions", "token", "weight")  # fmt: skip
    types = dict.fromkeys(words, "*i64") | dict.fromkeys(("stride", "vocabulary", "shift", "chunks"), "i32")
    types |= {"scores": "*bf16", "best": "*i32", "greedy": "*i1"}
    fixed = {
        "span": 4096, "bits": 16, "precise": True, "cut": True, "floored": True, "counts": False, "padded_chunks": 64,
        **triton_draw._SPLITMIX,
    }  # fmt: skip
    for name in ("peaks", "sums", "narrow", "ties", "choose"):
        kernel = getattr(device_code, name)
        names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
        signature = {each: "constexpr" if each in fixed else types.get(each, "*fp32") for each in names}
        constants = {(names.index(each),): fixed[each] for each in names if each in fixed}
        aligned = {(names.index(each),): [["tt.divisibility", 16]] for each in ("scores", "stride", "vocabulary")}
        source = ASTSource(triton.jit(kernel), signature, constants, aligned)
        options = {"num_warps": 8, "enable_fp_fusion": False}
        ptx = str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
        assert "ld.global.v4" in ptx
        assert "fma.rn.f32" not in ptx or name != "peaks"
        # Approximate where it would come from Triton alone.
        assert ("ex2.approx.ftz.f32" in ptx) == (name != "peaks")
