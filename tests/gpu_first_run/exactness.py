"""Stages `kernels` and `truth`: the attention kernels against float64, and log-probs against the trainer's own forward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.kernels import triton_paged
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention
from rollout.engine.kernels.triton_attention import TritonPagedAttention
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.findings import HEAD_DIM, Run, captured, prompts

BLOCK = 16
LENGTHS = [3000, 1, 257, 1024, 640, 4095, 256, 16]
"""Lengths of the sequences that decode."""
CHUNKS = [(300, 300), (1, 501), (129, 1129)]
"""Tokens of each chunk, and where it ends."""


def kernels(run: Run) -> None:
    """Real head counts in bf16 against float64, a row alone and among others."""
    paged = triton_paged.load(run.device)
    if paged is None or not run.cuda:
        raise RuntimeError("the Triton kernels do not load; they need Triton and a CUDA device")
    for heads, kv_heads in ((16, 8), (32, 8), (28, 4), (8, 8)):
        for window in (None, 300):
            _step(run, paged, heads, kv_heads, window)
        run.collect()


def _step(run: Run, paged: triton_paged.TritonPaged, heads: int, kv_heads: int, window: int | None) -> None:
    """A step over a pool of more than 2^31 elements, whose sequences have blocks at both ends."""
    blocks = 2**31 // (BLOCK * kv_heads * HEAD_DIM) + 4096
    shape = blocks, BLOCK, kv_heads, HEAD_DIM
    pool = [torch.empty(shape, dtype=torch.bfloat16, device=run.device).normal_() for _ in range(2)]
    counts, ends = (np.array(each) for each in zip(*[(1, length) for length in LENGTHS], *CHUNKS, strict=True))
    width = -(-int(ends.max()) // BLOCK)
    tables = blocks - 1 - np.arange(len(ends) * width).reshape(len(ends), width)
    tables[:, 0] = np.arange(len(ends))
    positions = np.concatenate([np.arange(end - count, end) for count, end in zip(counts, ends, strict=True)])
    rows = PagedRows(np.concatenate([[0], np.cumsum(counts)]), positions, tables, BLOCK)
    query = torch.randn(len(positions), heads, HEAD_DIM, device=run.device, dtype=torch.bfloat16)

    def attend(rows: PagedRows, query: Tensor) -> Tensor:
        plain = TorchPagedAttention(rows, run.device)
        return TritonPagedAttention(paged, rows, run.device, plain)(query, *pool, scaling=HEAD_DIM**-0.5, window=window)

    out = attend(rows, query)
    used, own = np.unique(tables, return_inverse=True)
    few = TorchPagedAttention(replace(rows, tables=own.reshape(tables.shape)), run.device)
    held = [part[torch.from_numpy(used).to(run.device)].double() for part in pool]
    worst = float((out - few(query.double(), *held, scaling=HEAD_DIM**-0.5, window=window)).abs().max())
    alone = [attend(rows.select(np.array([row]))[0], query[row : row + 1])[0] for row in range(len(LENGTHS))]
    same = torch.equal(torch.stack(alone), out[: len(LENGTHS)])
    run.say(
        "attention", heads=heads, kv_heads=kv_heads, window=window, worst=worst, ok=worst < 2e-2, same_bits_alone=same
    )


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
    """Return what is wrong, one line each."""
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
