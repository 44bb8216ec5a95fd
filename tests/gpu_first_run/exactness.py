"""Stages `kernels` and `truth`: the attention kernels against float64, and log-probs against the trainer's own forward."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.kernels import triton_paged
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.findings import HEAD_DIM, Run, captured, prompts
from tests.gpu_first_run.memory import poison

BLOCK = 16
LENGTHS = [3000, 1, 257, 1024, 640, 4095, 256, 16]


class Pool:
    """A bf16 pool of more than 2^31 elements, and sequences at its end."""

    def __init__(self, run: Run, heads: int, kv_heads: int) -> None:
        device = self.device = run.device
        self.groups = heads // kv_heads
        blocks = 2**31 // (BLOCK * kv_heads * HEAD_DIM) + 4096
        self.keys = torch.empty(blocks, BLOCK, kv_heads, HEAD_DIM, dtype=torch.bfloat16, device=device).normal_()
        self.values = torch.empty_like(self.keys).normal_()
        count, width = len(LENGTHS), -(-max(LENGTHS) // BLOCK)
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
    """Real head counts in bf16 against float64, a row alone and among others; and what a failed capture leaves behind."""
    paged = triton_paged.load(run.device)
    if paged is None:
        raise RuntimeError("the Triton kernels do not load; see the warning above")
    for heads, kv_heads in ((16, 8), (32, 8), (28, 4), (8, 8)):
        pool = Pool(run, heads, kv_heads)
        shape = {"heads": heads, "kv_heads": kv_heads}
        _decode(run, paged, pool, shape)
        _prefill(run, paged, pool, shape)
        del pool
        run.collect()
    poison(run)


def _query(pool: Pool, count: int) -> Tensor:
    heads = pool.keys.shape[2] * pool.groups
    return torch.randn(count, heads, HEAD_DIM, device=pool.device, dtype=torch.bfloat16)


def _decode(run: Run, paged: triton_paged.TritonPaged, pool: Pool, shape: dict[str, int]) -> None:
    query, scale = _query(pool, len(LENGTHS)), HEAD_DIM**-0.5
    last = torch.tensor(LENGTHS, device=pool.device, dtype=torch.int32) - 1
    for window in (None, 300):
        out = paged.decode(query, pool.keys, pool.values, pool.table, last, window, scale)
        worst, same = 0.0, True
        for row, length in enumerate(LENGTHS):
            worst = max(worst, _difference(out[row], pool.exact(row, query[row], length - 1, window)))
            only = slice(row, row + 1)
            alone = paged.decode(query[only], pool.keys, pool.values, pool.table[only], last[only], window, scale)
            same &= torch.equal(alone[0], out[row])
        run.say("decode", **shape, window=window, worst=worst, ok=worst < 2e-2, same_bits_alone=same)


def _prefill(run: Run, paged: triton_paged.TritonPaged, pool: Pool, shape: dict[str, int]) -> None:
    rows, counts, starts = (0, 3, 5), (300, 1, 129), (0, 500, 1000)
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


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def truth(run: Run) -> None:
    """Log-probs of samples against the trainer's forward, in bf16, fp32 and fp32 with TF32; graphs on and off; alone.

    Raises:
        RuntimeError: a case ran without graphs, or the log-probs of float32 are not those of the trainer.
    """
    before, wrong = torch.backends.cuda.matmul.allow_tf32, []
    try:
        for dtype, tf32 in ((torch.bfloat16, False), (torch.float32, False), (torch.float32, True)):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            wrong += _truth(run, run.model(run.sizes[0], dtype), {"dtype": str(dtype), "tf32": tf32})
            run.collect()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    if wrong:
        raise RuntimeError("; ".join(wrong))


def _truth(run: Run, model: PreTrainedModel, case: dict[str, object]) -> list[str]:
    """What is wrong."""
    asked = prompts(model, 24 if run.cuda else 2, 5, 700 if run.cuda else 40, seed=1)
    params = SamplingParams(max_tokens=96 if run.cuda else 4, ignore_eos=True, seed=5)
    tokens: dict[bool, list[list[int]]] = {}
    wrong = []
    for graphs in (True, False):
        with run.engine(model, cuda_graphs=graphs, kv_cache_memory_gb=8 if run.cuda else 0.1) as engine:
            done = engine.generate(asked, params)
            tokens[graphs] = [request.generated_tokens for request in done]
            errors = np.concatenate([logprob_errors(run, model, request) for request in done])
            found = captured(engine)
            run.say(
                "log-probs", **case, cuda_graphs=graphs, **found, mean=errors.mean(), p99=np.quantile(errors, 0.99),
                max=errors.max(), tokens=len(errors),
            )  # fmt: skip
            if run.cuda and graphs and not found["graphs"]:
                wrong.append(f"{case}: no decode step was captured: {found['why_not']}")
            if model.dtype == torch.float32 and not case["tf32"] and errors.max() > 1e-3:
                wrong.append(f"{case}, cuda_graphs={graphs}: log-probs differ by up to {errors.max():.3g}")
            if graphs:
                alone = _alone(engine, asked[:6], params)
                same = sum(one == other for one, other in zip(alone, tokens[True], strict=False))
                run.say("sampled alone", **case, same=same, of=len(alone))
    same = sum(one == other for one, other in zip(*tokens.values(), strict=True))
    run.say("graphs on and off", **case, same=same, of=len(asked))
    return wrong


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
