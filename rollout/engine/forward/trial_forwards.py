"""Forwards of a model runner that serve no request: logits to verify a model by, and the memory of a full step.

All blocks and state slots of the pool are free, and zero afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.forward.choices import Replayed, Routes
from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.shortage import lacks_device_memory
from rollout.engine.sampling.sampler import token_logprobs


def difference(
    runner: ModelRunner,
    tokens: list[int],
    cuts: Sequence[int],
    own: Callable[[list[int]], Tensor],
    fine: Callable[[float], bool],
    beside: int | None = None,
) -> float:
    """Largest difference between the logits after `tokens`, in chunks that end at `cuts`, and `own(tokens)`, over the
    largest of these (at least 1).

    Args:
        beside: see `paged_logits`.

    If that is not `fine` and the model has routers, the two are compared along the same routes, with `own` taking those of
    the chunks, whose scores count too: by how much the chosen ones are lower, over the largest score.
    """
    found = over_largest(paged_logits(runner, tokens, *cuts, beside=beside), own(tokens))
    if fine(found):
        return found
    routes = Routes()
    paged = paged_logits(runner, tokens, *cuts, routes=routes)
    if not (given := routes.joined()):
        return found
    with Replayed(given) as choices:
        expected = own(tokens)
    return float(np.maximum(choices.worst, over_largest(paged, expected)))


def over_largest(logits: Tensor, expected: Tensor) -> float:
    """Largest difference between two rows of logits, over the largest of `expected` (at least 1)."""
    expected = expected.float()
    return float((logits.float() - expected).abs().max()) / max(1.0, float(expected.abs().max()))


def paged_logits(
    runner: ModelRunner, tokens: list[int], *cuts: int, routes: Routes | None = None, beside: int | None = None
) -> Tensor:
    """[V] logits after `tokens`, in chunks that end at `cuts`, in the first blocks and state slot (all free).

    Args:
        routes: gets the routes of all tokens; None: they are not recorded.
        beside: position of a token of another sequence that every forward computes too; None: it computes none.
    """
    size = runner.table.block_size
    blocks = np.arange(-(-len(tokens) // size), dtype=np.int64)
    runner.move_states([(-1, 0)])
    logits = torch.empty(0, device="cpu")
    for start, end in pairwise((0, *cuts, len(tokens))):
        count, tables, positions, ids = end - start, blocks[None], np.arange(start, end), tokens[start:end]
        offsets = np.array([0, count])
        if beside is not None:
            # What it attends to is of no interest.
            width = max(len(blocks), beside // size + 1)
            tables = np.full((2, width), len(blocks), np.int64)
            tables[0, : len(blocks)] = blocks
            offsets, positions, ids = np.append(offsets, count + 1), np.append(positions, beside), [*ids, 0]
        rows = _rows(runner, offsets, positions, tables)
        with nullcontext() if routes is None else routes.of_forward(runner):
            logits = runner.forward(np.asarray(ids, np.int64), rows, np.array([count - 1]))[0]
    _zero(runner, blocks if beside is None else np.append(blocks, len(blocks)))
    return logits.clone()


def _rows(
    runner: ModelRunner, offsets: NDArray[np.int64], positions: NDArray[np.int64], blocks: NDArray[np.int64]
) -> PagedRows:
    """Rows in these blocks [R, width]; where the memory of a block is several pages, they lie side by side."""
    count = runner.cache.num_groups
    tables, *others = (blocks * count + group for group in range(count))
    return PagedRows(offsets, positions, tables, runner.table.block_size, others=tuple(others))


def _zero(runner: ModelRunner, blocks: NDArray[np.int64]) -> None:
    count = runner.cache.num_groups
    runner.cache.zero_blocks((blocks.ravel()[:, None] * count + np.arange(count)).ravel().tolist())


def peak_bytes(runner: ModelRunner, tokens: int, longest: int, rows: int) -> int:
    """Device memory that a step takes beside weights and pool, measured by a prefill of `tokens` tokens; 0 on a CPU.

    All blocks of the pool are free. What the device has no memory for is not measured.

    Args:
        longest: most tokens of one sequence.
        rows: most rows that are sampled.
    """
    device = runner.layout.device
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    while tokens:
        try:
            run_prefill(runner, tokens, longest, rows)
            break
        except RuntimeError as exc:
            if not lacks_device_memory(exc):
                raise
            tokens //= 2
    runner.release_workspace()
    peak = int(torch.cuda.max_memory_allocated(device)) - before
    if tokens and runner.graphs is not None:
        runner.graphs.memory.expect(peak, tokens)
    return peak


def bytes_to_come(runner: ModelRunner) -> int:
    """Device memory that CUDA graphs and copies of weights will take beside what they hold, and beside a step's peak."""
    graphs = 0 if runner.graphs is None else runner.graphs.bytes_to_come
    return graphs + runner.copies.bytes_to_come


def run_prefill(runner: ModelRunner, tokens: int, longest: int, rows: int) -> None:
    """Prefill `tokens` tokens, or as many as the pool holds, in sequences of at most `longest`, and score `rows` logits.

    They lie in the pool's first blocks, which are zero afterwards.
    """
    size = runner.table.block_size
    width = -(-min(tokens, longest) // size)
    room = runner.cache.num_blocks // runner.cache.num_groups
    most = room // width
    if runner.states is not None:
        most = min(most, runner.states.num_blocks)
    count = max(1, min(-(-tokens // longest), most))
    width = min(width, room)
    length = min(longest, tokens // count, width * size)
    blocks = np.arange(count * width, dtype=np.int64).reshape(count, width)
    offsets, positions = np.arange(count + 1) * length, np.tile(np.arange(length), count)
    keep = np.arange(min(rows, count * length))
    logits = runner.forward(np.zeros(count * length, np.int64), _rows(runner, offsets, positions, blocks), keep)
    token_logprobs(logits, torch.zeros(len(keep), dtype=torch.int64, device=logits.device), 0)
    _zero(runner, blocks)
