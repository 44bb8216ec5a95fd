"""Exact mode's Triton half: kernels against float64, and the rollout's log-probs against the trainer's, to the bit.

The kernels run in Triton's interpreter, in a process of its own (tests/engine/test_in_tritons_interpreter.py), and on a GPU.
The interpreter leaves matrix products to a BLAS, which orders a row's sums by its place in the tile, as no tensor core does:
here they are summed in the order of the depth.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rollout import UnsupportedModelError, exact
from rollout.engine.graphs import cuda_graphs
from rollout.engine.graphs.decode_kernels import TritonDecode
from rollout.engine.kernels import triton_exact, triton_paged
from rollout.engine.kernels.triton_exact import AttendedRows
from rollout.engine.sampling.numerics import softmax_logprobs
from rollout.engine.training import kernels as exact_kernels
from rollout.engine.training import operations
from rollout.engine.training.paged_forward import PagedForward
from rollout.requests.request import DynamicInferenceRequest
from tests.capturable import Rerun
from tests.engine.training.test_exact import distance, padded, whole
from tests.engines import at_random, finish, make_engine, pass_suspended, steps, token_ids
from tests.interpreter import INTERPRETED
from tests.models import make_model

try:
    from triton.runtime import interpreter
except ImportError:
    interpreter = None

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::UserWarning:triton")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
LONG = 70 if INTERPRETED else 600
"""Tokens that make more than one part of attention."""
KV_HEADS = 1 if INTERPRETED else 2
DTYPES = [torch.float32, torch.bfloat16]
ONE_LAYER = {"num_hidden_layers": 1}
MIXED = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True,
         "sliding_window": 8}  # fmt: skip
CASES: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("qwen3", torch.float32, ONE_LAYER), ("qwen2", torch.bfloat16, MIXED),
]  # fmt: skip
if not INTERPRETED:
    CASES = [(name, dtype, {}) for name in ("qwen3", "llama", "qwen2", "mistral") for dtype in DTYPES]
    CASES += [("qwen2", dtype, MIXED) for dtype in DTYPES]


def on_the_device(test: Any) -> Any:
    if INTERPRETED:
        return test
    test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test)
    return pytest.mark.gpu(test)


def dot(self: object, left: Any, right: Any, sums: Any, *rest: object) -> Any:
    """The interpreter's matrix product with every row summed in the order of the depth."""
    product = (left.data[:, :, None] * right.data[None]).sum(1)
    return interpreter.TensorHandle(sums.data + product, sums.dtype.scalar)


@pytest.fixture(scope="module")
def served() -> Iterator[None]:
    """Exact mode on `DEVICE` runs on Triton's kernels."""
    with pytest.MonkeyPatch.context() as patched:
        if INTERPRETED:
            patched.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
            patched.setitem(exact_kernels.BY_DEVICE, "cpu", triton_exact)
            patched.setattr(triton_exact, "SPLIT", 64)
            patched.setattr(cuda_graphs, "STATE_LENGTH", 64)
        yield


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# --- the kernels ------------------------------------------------------------------------------------------------------


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if found.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.double(), expected.to(found.device), atol=tolerance, rtol=tolerance)


@on_the_device
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_and_rows_equal_float64_and_a_row_has_its_bits_alone(dtype: torch.dtype) -> None:
    x, weight, bias = drawn(133, 70, dtype=dtype), drawn(65, 70, dtype=dtype, seed=1), drawn(65, dtype=dtype, seed=2)
    x, weight = x / 8, weight / 8
    found = triton_exact.linear(x, weight, bias)
    assert_close(found, x.double() @ weight.double().T + bias.double())
    places = torch.arange(133, device=DEVICE).flip(0) + 2
    placed = triton_exact.linear(x, weight, bias, places, 140)
    assert torch.equal(placed[places], found)
    assert not placed[[0, 1, 135, 139]].any()
    normed = triton_exact.rms_norm(x.view(133, 2, 35), bias[:35], 1e-5)
    wide = x.double().view(133, 2, 35)
    assert_close(normed, wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * bias[:35].double())
    for row in (0, 64, 132):
        only = slice(row, row + 1)
        assert torch.equal(triton_exact.linear(x[only], weight, bias), found[only])
        assert torch.equal(triton_exact.rms_norm(x.view(133, 2, 35)[only], bias[:35], 1e-5), normed[only])
    assert_close(triton_exact.silu_times(x, x), nn.functional.silu(x.double()) * x.double())
    positions, angles = torch.arange(133, device=DEVICE) % 50, drawn(50, 7, dtype=torch.float32)
    cosines, sines = (f(angles).repeat(1, 2).to(dtype) for f in (torch.cos, torch.sin))
    heads = x.view(133, 5, 14)
    low, high = heads.double().chunk(2, -1)
    turned = torch.cat((-high, low), -1) * sines[positions, None].double()
    expected = heads.double() * cosines[positions, None].double() + turned
    assert_close(triton_exact.rotate(heads, cosines, sines, positions), expected)
    assert triton_exact.linear(x[:0], weight, None).shape == (0, 65)


@on_the_device
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("dtype", "window"),
    [(torch.bfloat16, None), (torch.float32, 9)] + [(torch.float32, None), (torch.bfloat16, 9)] * (not INTERPRETED),
    ids=str,
)
def test_attention_has_the_same_bits_packed_in_chunks_decoded_and_however_its_parts_are_spread(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, heads, kv_heads, dim = (LONG, 5), 3 * KV_HEADS, KV_HEADS, 24
    starts = np.cumsum([0, *lengths])
    query, key, value = (
        drawn(sum(lengths), count, dim, dtype=dtype, seed=count + seed)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    )
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    whole, _ = triton_exact.attention(query, key, value, starts, positions, 0.2, window)
    for begin, end in pairwise(starts):
        seen = torch.ones(end - begin, end - begin, dtype=torch.bool, device=DEVICE).tril()
        seen &= ~seen.tril(-(window or 10**6))
        parts = [part[begin:end].double().transpose(0, 1) for part in (query, key, value)]
        parts[1:] = [part.repeat_interleave(heads // kv_heads, 0) for part in parts[1:]]
        expected = nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, scale=0.2).transpose(0, 1)
        assert_close(whole[begin:end], expected)
    size, table, pool = 8, np.random.default_rng(0).permutation(lengths[0] // 8 + 3), {}
    for name, part in (("key", key), ("value", value)):
        pool[name] = torch.full((len(table) * size, kv_heads, dim), torch.nan, dtype=dtype, device=DEVICE)
        slots = [table[at // size] * size + at % size for at in range(lengths[0])]
        # A part that is multiplied by 0 must not be NaN; what no query sees may be.
        pool[name][slots] = part[: lengths[0]]
    blocks = torch.from_numpy(table[None].astype(np.int32)).to(DEVICE)
    last = lengths[0] - 1
    for spread in (0, 2**40):
        monkeypatch.setattr(triton_exact, "SPREAD_BYTES", spread)
        assert torch.equal(triton_exact.attention(query, key, value, starts, positions, 0.2, window)[0], whole)
        # A row of padding, a decoding one, a chunk.
        at, begins = [0, last, 33, 34, 35], torch.tensor([0, 1, 2, 5], dtype=torch.int32, device=DEVICE)
        seen = torch.tensor([-1, *at[1:]], dtype=torch.int32, device=DEVICE)
        rows = AttendedRows(blocks.expand(3, -1), begins, seen, last + 100, size, size)
        found = triton_exact.paged_attention(query[at], pool["key"], pool["value"], rows, 0.2, window)
        assert not found[0].any()
        assert torch.equal(found[1:], whole[at[1:]])


# --- engine and trainer -----------------------------------------------------------------------------------------------


def graphed(engine: Any) -> Any:
    """Decode steps that are captured: by CUDA, or in the interpreter by a stand-in; returns what knows how many."""
    runner = engine.controller.runner
    assert isinstance(runner.fused, PagedForward)
    if INTERPRETED:
        kernels = TritonDecode(triton_paged.load(DEVICE), engine.cache)
        runner.graphs = cuda_graphs.GraphedDecode(
            runner.model, runner.layout, engine.cache, 4, Rerun(), kernels, runner.fused.decode
        )
    return runner.graphs


def sampled(model: nn.Module) -> list[DynamicInferenceRequest]:
    """Samples after prefix hits, in chunks, decoded by graphs, among others, after suspensions, by a pool that moved."""
    prefix = token_ids(20 if INTERPRETED else 300, seed=1)
    engine = make_engine(
        model, exact="experimental", kv_cache_blocks=48 if INTERPRETED else 400, max_tokens_per_step=12
    )
    graphs = graphed(engine)
    engine.add_request(prefix, at_random(2))
    ended = list(finish(engine).values())
    engine.add_request(prefix[:13] + token_ids(4, seed=2), at_random(4, n=2, temperature=0.7))
    engine.add_request(token_ids(7, seed=3), at_random(5, temperature=0))
    records = steps(engine, 3)
    for mode in ("offload",) if INTERPRETED else ("persist", "offload", "recompute"):
        pass_suspended(engine, mode)
        records += steps(engine, 1 if INTERPRETED else 2)
    ended += finish(engine, records).values()
    assert engine.stats()["prefill_tokens_saved"] > 0
    assert graphs._replays > 0, graphs.why_not
    return ended


def logprobs_of(logits: Tensor, tokens: list[int], request: DynamicInferenceRequest) -> Tensor:
    """Of the completion, from the logits [T, V] of the whole sequence, as a loss computes them on the device."""
    start = len(request.prompt_tokens)
    scores = logits[start - 1 : len(tokens) - 1].float() / (request.sampling_params.temperature or 1.0)
    return scores.log_softmax(-1).gather(-1, torch.tensor(tokens[start:], device=DEVICE)[:, None])[:, 0].cpu()


def forwards(model: nn.Module, rows: list[list[int]]) -> Iterator[list[Tensor]]:
    """Logits of each row [T, V], the rows padded on the left, and packed; on a device also on the right, and alone."""
    for left in (True,) if INTERPRETED else (True, False):
        ids, mask = (each.to(DEVICE) for each in padded(rows, left=left))
        logits = model(ids, attention_mask=mask).logits
        assert not logits[mask == 0].any()
        yield [logits[index][mask[index].bool()] for index in range(len(rows))]
    ids = torch.tensor([token for row in rows for token in row], device=DEVICE)
    positions = torch.cat([torch.arange(len(row)) for row in rows]).to(DEVICE)
    yield list(model(ids[None], position_ids=positions[None]).logits[0].split([len(row) for row in rows]))
    if not INTERPRETED:
        yield [model(torch.tensor([row], device=DEVICE)).logits[0] for row in rows]


@on_the_device
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(("name", "dtype", "changes"), CASES)
def test_the_first_ratio_is_one_to_the_bit_on_triton(name: str, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    model = make_model(name, dtype=dtype, **changes).to(DEVICE)
    requests = sampled(model)
    rows = [whole(request) for request in requests]
    with exact(model), torch.no_grad():
        for logits in forwards(model, rows):
            for request, tokens, own in zip(requests, rows, logits, strict=True):
                assert torch.equal(logprobs_of(own, tokens, request), torch.tensor(request.generated_log_probs))
    with torch.no_grad():
        plain = [model(torch.tensor([row], device=DEVICE)).logits[0] for row in rows]
    differences = [
        (logprobs_of(own, tokens, request) - torch.tensor(request.generated_log_probs)).abs().max()
        for request, tokens, own in zip(requests, rows, plain, strict=True)
    ]
    assert 0 < max(differences) < (1e-3 if dtype == torch.float32 else 1)


def gradients(model: nn.Module, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Of a weighted sum of log-probs at the real tokens."""
    model.zero_grad()
    logprobs = model(ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    weights = torch.linspace(-1, 1, ids.shape[1] - 1, device=DEVICE) * mask[:, 1:]
    (logprobs.gather(-1, ids[:, 1:, None])[..., 0] * weights).sum().backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


@on_the_device
@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("name", ["mistral"] if INTERPRETED else ["mistral", "qwen3", "qwen2"])
def test_gradients_through_triton_are_those_of_the_model_in_float64(name: str) -> None:
    model = make_model(name, num_hidden_layers=1).to(DEVICE)
    ids, mask = (each.to(DEVICE) for each in padded([token_ids(n, n) for n in (19, 17, 3)], left=False))
    truth = gradients(copy.deepcopy(model).double(), ids, mask)
    with exact(model):
        assert distance(gradients(model, ids, mask), truth) < 2e-4


@on_the_device
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_a_row_of_torchs_log_softmax_has_the_same_bits_alone_and_divided_as_a_trainer_divides_triton(
    temperature: float,
) -> None:
    logits = drawn(9, 1028 if INTERPRETED else 151936, dtype=torch.float32) * 5
    whole = (logits / temperature).log_softmax(-1)
    ids = torch.arange(9, device=DEVICE)[:, None] * 7
    divisors = torch.full((9,), temperature, device=DEVICE)
    assert torch.equal(softmax_logprobs(logits, ids, divisors), whole.gather(1, ids))
    for row in range(9):
        only = slice(row, row + 1)
        assert torch.equal(softmax_logprobs(logits[only], ids[only], divisors[only]), whole[only].gather(1, ids[only]))
        assert torch.equal((logits[only].clone() / temperature).log_softmax(-1), whole[only])


@on_the_device
@pytest.mark.usefixtures("served")
def test_triton_refuses_sizes_that_it_does_not_serve() -> None:
    model = make_model("qwen3", num_hidden_layers=1, vocab_size=1026).to(DEVICE)
    with pytest.raises(UnsupportedModelError, match="1,026 is not divisible by 4"), exact(model):
        pass
    with pytest.raises(UnsupportedModelError, match="1,026 is not divisible by 4"):
        make_engine(model, exact="experimental")
    odd = make_model("qwen3", num_hidden_layers=1, head_dim=6, num_key_value_heads=1, dtype=torch.bfloat16).to(DEVICE)
    with pytest.raises(UnsupportedModelError, match="block_size_tokens=1 a multiple of 8"):
        make_engine(odd, exact="experimental", block_size_tokens=1)


@on_the_device
@pytest.mark.usefixtures("served")
def test_exact_mode_on_cuda_has_to_be_asked_for_as_an_experiment() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Give InferenceConfig\(exact='experimental'\)"):
        make_engine(make_model("qwen3", num_hidden_layers=1).to(DEVICE), exact=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_the_backward_of_attention_takes_a_windows_queries_in_steps_without_a_mask_of_all(
    window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "LEAST_QUERIES", 4)
    largest, seen_by = [0], operations._seen

    def watched(*given: Any) -> Tensor:
        seen = seen_by(*given)
        largest.append(seen.numel())
        return seen

    monkeypatch.setattr(operations, "_seen", watched)
    generator = torch.Generator().manual_seed(0)
    query, key, value, upstream = (
        torch.randn(2, heads, 30, 8, generator=generator, dtype=torch.float64).to(dtype) for heads in (6, 2, 2, 6)
    )
    found = operations._recomputed_gradients(upstream, [query, key, value], window, 0.3)
    exact = [part.double().requires_grad_() for part in (query, key, value)]
    wide = [part.repeat_interleave(3, 1) for part in exact[1:]]
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    mask &= ~mask.tril(-(window or 30))
    out = nn.functional.scaled_dot_product_attention(exact[0], *wide, attn_mask=mask, scale=0.3)
    for mine, wanted in zip(found, torch.autograd.grad(out, exact, upstream.double()), strict=True):
        tolerance = 1e-6 if dtype == torch.float64 else 0.1
        torch.testing.assert_close(mine.double(), wanted, atol=tolerance, rtol=tolerance)
    assert max(largest) <= 2 * max(window or 0, 4) ** 2
