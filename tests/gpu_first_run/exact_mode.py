"""Stage `exact`: are the rollout's log-probs and the trainer's the same bits in exact mode, and what does it cost?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout import exact
from rollout.engine.kernels import triton_exact
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.gpu_first_run.findings import Run, captured, prompts
from tests.gpu_first_run.speed import seconds

ROUNDS = 3


def exact_mode(run: Run) -> None:
    """Log-probs of samples against the trainer's forward, padded, packed, alone, in bf16 and fp32; seconds beside plain."""
    for dtype, layers in ((torch.bfloat16, None), (torch.float32, 4)):
        model = run.model(run.sizes[0], dtype, layers if run.large else None)
        case = {"dtype": str(dtype), "layers": model.config.num_hidden_layers}
        rows = _same_bits(run, model, case)
        _price(run, model, rows, case)
        del model
        run.collect()


def _same_bits(run: Run, model: PreTrainedModel, case: dict[str, object]) -> list[list[int]]:
    """Returns the token ids of the samples."""
    longest = 700 if run.large else 30
    asked = prompts(model, 24 if run.large else 2, 5, longest, seed=1)
    asked += [prompt[:-3] + prompt[:3] for prompt in asked[:4]]
    params = SamplingParams(max_tokens=96 if run.large else 4, ignore_eos=True, seed=5, temperature=0.7)
    for graphs in (True, False):
        with run.engine(model, exact=True, cuda_graphs=graphs, kv_cache_memory_gb=8 if run.large else 0.1) as engine:
            done = [*engine.generate(asked, params), *engine.generate(asked[:1], params)]
            found = captured(engine)
        rows = [[*request.prompt_tokens, *request.generated_tokens] for request in done]
        with exact(model), torch.no_grad():
            for layout, forward in (("padded", _padded), ("packed", _packed)):
                worst = max(_difference(*each) for each in zip(forward(run, model, rows), rows, done, strict=True))
                run.say("exact", **case, **found, cuda_graphs=graphs, layout=layout, worst=worst, same_bits=worst == 0)
            alone = [model(torch.tensor([row], device=run.device)).logits[0] for row in rows[:4]]
            worst = max(_difference(*each) for each in zip(alone, rows, done, strict=False))
            run.say("exact", **case, cuda_graphs=graphs, layout="alone", worst=worst, same_bits=worst == 0)
        with torch.no_grad():
            worst = max(_difference(*each) for each in zip(_padded(run, model, rows), rows, done, strict=True))
            run.say("plain", **case, cuda_graphs=graphs, layout="padded", worst=worst)
    if run.cuda:
        # One per window and dtype, if decoding, chunks and training ran the same.
        compiled = {
            name: sum(len(each[0]) for each in _compiled(getattr(triton_exact._kernels(), name)))
            for name in ("attend", "fold", "product", "rms_norm", "rotate", "silu_times")
        }
        run.say("kernels compiled", **case, **compiled)
    return rows


def _compiled(kernel: Any) -> Iterable[tuple[Any, ...]]:
    """Of each device, what Triton keeps for a kernel; the first are those that were compiled."""
    # One that is interpreted has no such.
    found: Iterable[tuple[Any, ...]] = getattr(kernel, "device_caches", {}).values()
    return found


def _price(run: Run, model: PreTrainedModel, rows: list[list[int]], case: dict[str, object]) -> None:
    """Seconds of sampling, and of forward and backward over the samples, exact beside plain."""
    asked = [row[: len(row) // 2] for row in rows]
    params = SamplingParams(max_tokens=64 if run.large else 4, ignore_eos=True, seed=5)
    found: dict[str, dict[str, float]] = {"sampling": {}, "training": {}}
    for mode in ("plain", "exact"):
        with run.engine(model, exact=mode == "exact", kv_cache_memory_gb=8 if run.large else 0.1) as engine:
            found["sampling"][mode] = seconds(run, lambda e=engine: e.generate(asked, params), ROUNDS)  # type: ignore[misc]
    few = rows[:8]
    for mode in ("plain", "exact"):
        around: AbstractContextManager[None] = exact(model) if mode == "exact" else nullcontext()
        with around:
            found["training"][mode] = seconds(run, lambda: _train(run, model, few), ROUNDS)
    for work, each in found.items():
        run.say("price", **case, work=work, **each, ratio=each["exact"] / each["plain"])


def _train(run: Run, model: PreTrainedModel, rows: list[list[int]]) -> None:
    ids, mask = _batch(run, rows)
    logprobs = model(ids, attention_mask=mask, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    (logprobs.gather(-1, ids[:, 1:, None])[..., 0] * mask[:, 1:]).mean().backward()
    model.zero_grad()


def _batch(run: Run, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask, padded on the right."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = torch.tensor(row), 1
    return ids.to(run.device), mask.to(run.device)


def _padded(run: Run, model: PreTrainedModel, rows: list[list[int]]) -> Iterator[Tensor]:
    """Logits of each row, four rows at once: a whole batch of a real vocabulary does not fit."""
    for start in range(0, len(rows), 4):
        ids, mask = _batch(run, rows[start : start + 4])
        yield from model(ids, attention_mask=mask, use_cache=False).logits


def _packed(run: Run, model: PreTrainedModel, rows: list[list[int]]) -> Iterator[Tensor]:
    for start in range(0, len(rows), 4):
        part = rows[start : start + 4]
        ids = torch.tensor([token for row in part for token in row], device=run.device)
        positions = torch.cat([torch.arange(len(row)) for row in part]).to(run.device)
        logits = model(ids[None], position_ids=positions[None], use_cache=False).logits[0]
        yield from logits.split([len(row) for row in part])


def _difference(logits: Tensor, row: list[int], request: DynamicInferenceRequest) -> float:
    """Largest absolute difference of a completion's log-probs."""
    start = len(request.prompt_tokens)
    scores = logits[start - 1 : len(row) - 1].float() / (request.sampling_params.temperature or 1.0)
    wanted = torch.tensor(row[start:], device=logits.device)[:, None]
    mine = scores.log_softmax(-1).gather(-1, wanted)[:, 0].cpu()
    return float((mine - torch.tensor(request.generated_log_probs)).abs().max())
