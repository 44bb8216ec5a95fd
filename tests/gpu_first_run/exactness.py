"""Stages `kernels` and `truth`: the attention kernels against float64, and log-probs against the trainer's own forward."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.kernels import triton_paged
from rollout.engine.kernels.decode_parts import SharedPrefixes
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.findings import HEAD_DIM, Run, captured, prompts

BLOCK = 16
LENGTHS = [3000, 1, 257, 1024, 640, 4095, 256, 16]
SHARED = 512
CHUNKED = {"enable_prefix_caching": False, "max_tokens_per_step": 1024}
"""Options of an engine that captures the chunks of prompts: none is cached, and those of a step fit into a graph."""


class Pool:
    """A bf16 pool of more than 2^31 elements, and sequences at its end."""

    def __init__(self, run: Run, heads: int, kv_heads: int) -> None:
        device = self.device = run.device
        self.groups = heads // kv_heads
        blocks = 2**31 // (BLOCK * kv_heads * HEAD_DIM) + 4096 if run.large else 100
        self.keys = torch.empty(blocks, BLOCK, kv_heads, HEAD_DIM, dtype=torch.bfloat16, device=device).normal_()
        self.values = torch.empty_like(self.keys).normal_()
        self.lengths = [run.scaled(length) for length in LENGTHS]
        count, width = len(LENGTHS), -(-max(self.lengths) // BLOCK)
        table = blocks - 1 - torch.arange(count * width, dtype=torch.int32).view(count, width)
        # One block of each sequence lies at the other end.
        table[:, 0] = torch.arange(count)
        self.table = table.to(device)

    def exact(self, row: int, query: Tensor, last: int, window: int | None = None) -> Tensor:
        """Attention of one query [H, D] that is at position `last`, in float64."""
        first = 0 if window is None else max(0, last + 1 - window)
        seen = torch.arange(first, last + 1, device=self.device)
        blocks = self.table[row].long()[seen // BLOCK]
        keys, values = (
            part[blocks, seen % BLOCK].double().repeat_interleave(self.groups, 1) for part in (self.keys, self.values)
        )
        scores = torch.einsum("hd,shd->hs", query.double(), keys) * HEAD_DIM**-0.5
        return torch.einsum("hs,shd->hd", scores.softmax(-1), values)


def kernels(run: Run) -> None:
    """Real head counts in bf16 against float64; a row alone and among others; a prefix that rows share."""
    paged = triton_paged.load(run.device)
    if paged is None:
        raise RuntimeError("the Triton kernels do not load; see the warning above")
    for heads, kv_heads in ((16, 8), (32, 8), (28, 4), (8, 8)) if run.large else ((6, 2),):
        pool = Pool(run, heads, kv_heads)
        shape = {"heads": heads, "kv_heads": kv_heads}
        _decode(run, paged, pool, shape)
        _prefill(run, paged, pool, shape)
        _shared(run, paged, pool, shape)
        del pool
        run.collect()


def _query(pool: Pool, count: int) -> Tensor:
    heads = pool.keys.shape[2] * pool.groups
    return torch.randn(count, heads, HEAD_DIM, device=pool.device, dtype=torch.bfloat16)


def _decode(run: Run, paged: triton_paged.TritonPaged, pool: Pool, shape: dict[str, int]) -> None:
    query, scale = _query(pool, len(LENGTHS)), HEAD_DIM**-0.5
    last = torch.tensor(pool.lengths, device=pool.device, dtype=torch.int32) - 1
    for window in (None, run.scaled(300)):
        out, _ = paged.decode_with_lse(query, pool.keys, pool.values, pool.table, last, window, scale)
        worst, same = 0.0, True
        for row, length in enumerate(pool.lengths):
            worst = max(worst, _difference(out[row], pool.exact(row, query[row], length - 1, window)))
            only = slice(row, row + 1)
            alone, _ = paged.decode_with_lse(
                query[only], pool.keys, pool.values, pool.table[only], last[only], window, scale
            )
            same &= torch.equal(alone[0], out[row])
        run.say("decode", **shape, window=window, worst=worst, ok=worst < 2e-2, same_bits_alone=same)


def _prefill(run: Run, paged: triton_paged.TritonPaged, pool: Pool, shape: dict[str, int]) -> None:
    rows, counts, starts = (0, 3, 5), (run.scaled(300), 1, run.scaled(129)), (0, run.scaled(500), run.scaled(1000))
    query, ends = _query(pool, sum(counts)), np.cumsum((0, *counts))
    out = paged.prefill(
        query, pool.keys, pool.values, pool.table[list(rows)].contiguous(),
        torch.tensor(ends, device=pool.device, dtype=torch.int32),
        torch.tensor(starts, device=pool.device, dtype=torch.int32), None, HEAD_DIM**-0.5,
    )  # fmt: skip
    worst = 0.0
    for row, start, (begin, end) in zip(rows, starts, pairwise(ends.tolist()), strict=True):
        for at in range(begin, end, 37):
            worst = max(worst, _difference(out[at], pool.exact(row, query[at], start + at - begin)))
    run.say("prefill", **shape, worst=worst, ok=worst < 2e-2)


def _shared(run: Run, paged: triton_paged.TritonPaged, pool: Pool, shape: dict[str, int]) -> None:
    common = run.scaled(SHARED)
    pool.table[1:4, : common // BLOCK] = pool.table[0, : common // BLOCK]
    query, count = _query(pool, len(LENGTHS)), len(LENGTHS)
    ends = [run.scaled(end) for end in (3000, 701, 901, 1501, 640, 4095, 256, 16)]
    last, members, begins, lengths = (
        torch.tensor(each, device=pool.device, dtype=torch.int32)
        for each in ([end - 1 for end in ends], range(4), [0, 4], [common] * 4 + [0] * (count - 4))
    )
    shared = SharedPrefixes(members, begins, lengths)
    inputs = (query, pool.keys, pool.values, pool.table, last, None, HEAD_DIM**-0.5)
    once, _ = paged.decode_with_lse(*inputs, shared=shared)
    each, _ = paged.decode_with_lse(*inputs)
    run.say("shared prefix", **shape, worst=_difference(once, each), same_bits=torch.equal(once, each))


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def truth(run: Run) -> None:
    """Log-probs of samples against the trainer's forward, in bf16, fp32 and fp32 with TF32; graphs on and off; alone."""
    before, captures = torch.backends.cuda.matmul.allow_tf32, []
    try:
        for dtype, tf32 in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            captures.append(_truth(run, run.model(run.sizes[0], dtype), {"dtype": str(dtype), "tf32": tf32}))
            run.collect()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    require_chunks(run, captures)


def require_chunks(run: Run, captures: list[bool]) -> None:
    """Fail at the end of a stage if the chunks of prompts were not captured in all of its cases."""
    if run.cuda and not all(captures):
        raise RuntimeError(f"no prefill chunks were captured in {captures.count(False)} of {len(captures)} cases")


def _truth(run: Run, model: PreTrainedModel, case: dict[str, object]) -> bool:
    """Whether chunks of prompts were captured."""
    asked = prompts(model, 24 if run.large else 2, 5, 700 if run.large else 40, seed=1)
    params = SamplingParams(max_tokens=96 if run.large else 4, ignore_eos=True, seed=5)
    tokens: dict[bool, list[list[int]]] = {}
    chunks = False
    for graphs in (True, False):
        with run.engine(model, cuda_graphs=graphs, kv_cache_memory_gb=8 if run.large else 0.1, **CHUNKED) as engine:
            done = engine.generate(asked, params)
            tokens[graphs] = [request.generated_tokens for request in done]
            errors = np.concatenate([logprob_errors(run, model, request) for request in done])
            run.say(
                "log-probs", **case, cuda_graphs=graphs, **captured(engine), mean=errors.mean(),
                p99=np.quantile(errors, 0.99), max=errors.max(), tokens=len(errors),
            )  # fmt: skip
            if graphs:
                chunks = captured_prefill(run, engine, model, asked, params, **case)
                alone = _alone(engine, asked[:6], params)
                same = sum(one == other for one, other in zip(alone, tokens[True], strict=False))
                run.say("sampled alone", **case, same=same, of=len(alone))
    same = sum(one == other for one, other in zip(*tokens.values(), strict=True))
    run.say("graphs on and off", **case, same=same, of=len(asked))
    return chunks


def captured_prefill(
    run: Run, engine: DynamicInferenceEngine, model: PreTrainedModel, asked: list[list[int]], params: SamplingParams,
    **case: object,
) -> bool:  # fmt: skip
    """Log-probs of a second batch, whose chunks are replayed from its first step on; whether there are graphs of chunks."""
    errors = np.concatenate([logprob_errors(run, model, request) for request in engine.generate(asked, params)])
    counts = captured(engine)
    run.say(
        "log-probs, captured prefill", **case, **counts, mean=errors.mean(), p99=np.quantile(errors, 0.99),
        max=errors.max(), tokens=len(errors),
    )  # fmt: skip
    return bool(counts.get("chunk_graphs", 0))


def _alone(engine: DynamicInferenceEngine, asked: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [engine.generate([prompt], params)[0].generated_tokens for prompt in asked]


@torch.no_grad()
def logprob_errors(run: Run, model: PreTrainedModel, request: DynamicInferenceRequest) -> np.ndarray:
    start, tokens = len(request.prompt_tokens), [*request.prompt_tokens, *request.generated_tokens]
    ids = torch.tensor([tokens], device=run.device)
    model.eval()
    logits = model(ids, use_cache=False).logits[0, start - 1 : -1].float()
    model.train()
    mine = logits.log_softmax(-1).gather(1, ids[0, start:, None])[:, 0].cpu().numpy()
    return np.abs(mine - np.array(request.generated_log_probs))
