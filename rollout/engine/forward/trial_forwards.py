"""Trial forward passes without requests, which verify a model or measure the memory that a full step takes.

All KV blocks and state slots must be free. The blocks that a trial has used contain zeros afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.forward.module_forward import VERIFY_TOKENS
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import lacks_device_memory
from rollout.engine.models.originals import foreign_part
from rollout.engine.models.routers import Topk
from rollout.engine.sampling.sampler import token_logprobs
from rollout.errors import UnsupportedModelError

SAME_ATTENTION = 1e-2
"""The largest allowed difference between logits with and without CUDA graphs, relative to the largest logit."""
FOREIGN_TOKENS = 4096
"""The maximum number of tokens in the verification of a model that has parts from outside transformers."""


# --- verification ---------------------------------------------------------------------------------------------------------


def verify_model(runner: ModelRunner, room: int, all_ranks: Callable[[bool], bool] = bool) -> None:
    """Compare the logits of chunked forward passes over the paged KV cache with those of the model's own forward pass.

    The comparison detects layers that pass state between positions outside of attention. On a GPU the last chunk is a decode
    step, so that errors in decode kernels and CUDA graphs are detected too. If the logits of CUDA graphs or of the fused
    forward pass differ, that faster path is no longer used. If attention or rotary positions are not transformers' own,
    errors may show only in a long sequence, so a long sequence is compared too.

    Args:
        runner: the runner of the forward passes.
        room: maximum number of tokens in a sequence.
        all_ranks: function that returns whether a condition is True on all ranks that compute forward passes together. All
            of these ranks call it at the same time.

    Raises:
        UnsupportedModelError: the logits differ, on this rank or on a rank that computes together with it.
    """
    short = min(room, VERIFY_TOKENS)
    _verify(runner, short, [short - short // 2], all_ranks)
    foreign = foreign_part(runner.model, runner.layout.layer_of)
    if foreign is not None and room > short:
        longest = min(room, FOREIGN_TOKENS)
        _verify(runner, longest, sorted({short, longest - longest // 2}), all_ranks, foreign)


def _verify(
    runner: ModelRunner, length: int, cuts: list[int], all_ranks: Callable[[bool], bool], foreign: str = ""
) -> None:
    if length < 2:
        return
    name, layout = type(runner.model).__name__, runner.layout
    tokens = [(7 * position + 3) % layout.vocab_size for position in range(length)]
    alone = bool(layout.states) or all_ranks(runner.module.paged is not None or runner.graphs is not None)
    if alone and length > cuts[-1] + 1:
        # Add a chunk of a single token: recurrent layers and Triton kernels have separate code for it.
        cuts = [*cuts, length - 1]
    tolerance = 2e-3 if layout.narrowest_dtype == torch.float32 else 1e-1

    def fine(found: float) -> bool:
        return all_ranks(found <= tolerance)

    if all_ranks(runner.graphs is not None):
        replayed = paged_logits(runner, tokens, *cuts)
        with _without(runner, "graphs") as graphs:
            apart = _relative(replayed, paged_logits(runner, tokens, *cuts))
        if not all_ranks(apart <= min(tolerance, SAME_ATTENTION)) and graphs is not None:
            graphs.give_up(
                f"a replayed step differs from the same forward without one by {apart:.3g} of the largest logit"
            )
    worst = difference(runner, tokens, cuts, fine)
    passed = fine(worst)
    if not passed and not runner.exact and all_ranks(runner.fused is not None):
        with _without(runner, "fused") as fused:
            rest = difference(runner, tokens, cuts, fine)
        if passed := fine(rest):
            fused.give_up(f"the fused forward differs from the forward by {worst:.3g} of the largest logit")
        else:
            worst = rest
    if passed:
        return
    if worst <= tolerance:
        raise UnsupportedModelError(
            f"{name}: on another rank of the group the paged path differs from the model's own forward; the error of that "
            "rank says by how much"
        )
    if foreign:
        raise UnsupportedModelError(
            f"{name}: {foreign} is not transformers' own, and the model's forward of {length} tokens differs from ours by "
            f"{worst:.3g} of the largest logit (allowed: {tolerance:g}). The engine serves causal attention, in windows "
            "that the mask or an argument shows. Rotary positions must be the same in sequences of any length. Load the "
            "model with attn_implementation='sdpa', or lower InferenceConfig.max_sequence_length to where they are the same"
        )
    implementation = getattr(getattr(runner.model, "config", None), "_attn_implementation", None)
    raise UnsupportedModelError(
        f"{name}: {length} tokens in chunks through the paged path differ from the model's own forward by {worst:.3g} of "
        f"the largest logit (allowed: {tolerance:g}). Either some layer keeps state that is not in the KV cache, or the "
        f"model's own attention ({implementation!r}) leaves out what the layers ask for (sdpa ignores soft-capping in some "
        "versions of transformers: load the model with attn_implementation='eager'). To build it anyway: "
        "InferenceConfig(advanced=Advanced(verify_model=False))"
    )


def difference(runner: ModelRunner, tokens: list[int], cuts: Sequence[int], fine: Callable[[float], bool]) -> float:
    """Return the largest difference of the logits after `tokens`, in chunks that end at `cuts`, from the model's own logits.

    The difference is relative to the largest of the model's own logits (at least 1). If `fine` rejects it and the model has
    routers, the model's own forward pass is repeated with the chunks' expert choices, because rounding may decide between
    two experts with similar scores. The result is then at least `_Replayed.worst`, so it also covers the routers.
    """
    found = _relative(paged_logits(runner, tokens, *cuts), runner.module.own_logits(tokens))
    if fine(found):
        return found
    chunks: list[list[Tensor]] = []
    paged = paged_logits(runner, tokens, *cuts, routes=chunks)
    if len(set(map(len, chunks))) != 1 or not chunks[0]:
        return found
    # Let a router choose freely if it chose different numbers of experts in different chunks: these cannot be joined.
    joined = [
        torch.cat(each) if len({part.shape[1] for part in each}) == 1 else None for each in zip(*chunks, strict=True)
    ]
    with _Replayed(joined) as choices:
        expected = runner.module.own_logits(tokens)
    return float(np.maximum(choices.worst, _relative(paged, expected)))


def paged_logits(
    runner: ModelRunner, tokens: list[int], *cuts: int, routes: list[list[Tensor]] | None = None
) -> Tensor:
    """Compute the logits [V] after `tokens`, in chunks that end at `cuts`. Use the first KV blocks and first state slot.

    Args:
        routes: an output list, to which one list per chunk is appended: the routers' choices in order, each [L, k] with k
            experts for each of the chunk's L tokens. If None, choices are not recorded.
    """
    size = runner.table.block_size
    blocks = np.arange(-(-len(tokens) // size), dtype=np.int64)
    runner.move_states([(-1, 0)])
    logits = torch.empty(0, device="cpu")
    for start, end in pairwise((0, *cuts, len(tokens))):
        rows = PagedRows(np.array([0, end - start]), np.arange(start, end), blocks[None], size)
        if routes is not None:
            routes.append([])
        with nullcontext() if routes is None else _recorded(runner, routes[-1]):
            logits = runner.forward(np.asarray(tokens[start:end], np.int64), rows, np.array([end - start - 1]))[0]
    runner.cache.zero_blocks(blocks.ravel().tolist())
    return logits.clone()


def _relative(logits: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    return float((logits.float() - expected).abs().max()) / max(1.0, float(expected.abs().max()))


@contextmanager
def _without(runner: ModelRunner, lane: str) -> Iterator[Any]:
    """Set the runner's attribute `lane` (`graphs` or `fused`) to None inside the `with` block. Yield its old value."""
    faster = getattr(runner, lane)
    setattr(runner, lane, None)
    try:
        yield faster
    finally:
        setattr(runner, lane, faster)


@contextmanager
def _recorded(runner: ModelRunner, chosen: list[Tensor]) -> Iterator[None]:
    """Append the experts that the routers choose inside the `with` block to `chosen`, one tensor per router call."""
    fused = runner.fused if runner.why_not_fused() is None else None

    def keep(scores: Tensor, live: Tensor) -> None:
        chosen.append(live.flatten(0, -2))

    # Run without CUDA graphs: replaying a graph does not call this Python code, so nothing would be recorded.
    with _without(runner, "graphs"):
        if fused is None:
            with Topk(keep):
                yield
            return
        fused.record = lambda index, experts: chosen.append(experts)
        try:
            yield
        finally:
            fused.record = None


class _Replayed(Topk):
    """A context manager in which the routers choose the experts in `given` during one forward pass.

    Args:
        given: the experts [rows, k] of each `topk` call, in order. If an entry is None or does not fit, the router chooses.

    Attributes:
        worst: the largest gap of any row, which is large only if more than rounding decided between experts. A row's gap is
            the lowest score of the router's own experts minus the lowest score of the given experts, relative to the row's
            largest score.
    """

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__(self._next)
        self._given = iter(given)
        self.worst = 0.0

    def _next(self, scores: Tensor, live: Tensor) -> Tensor | None:
        given = next(self._given, None)
        if given is None or given.numel() != live.numel() or live.shape[:-1] != scores.shape[:-1]:
            return None
        chosen = given.view_as(live).to(scores.device)
        least, got = (scores.gather(-1, each).float().amin(-1) for each in (live, chosen))
        largest = scores.float().nan_to_num(0.0, 0.0, 0.0).abs().amax(-1)
        short = torch.where(least == got, 0.0, (least - got) / largest)
        self.worst = float(torch.maximum(short.max(), torch.tensor(self.worst, device=short.device)))
        return chosen


# --- memory ---------------------------------------------------------------------------------------------------------------


def peak_bytes(runner: ModelRunner, tokens: int, longest: int, rows: int) -> int:
    """Return the device bytes that a step takes in addition to weights and KV pool, measured by `run_prefill`; 0 on a CPU.

    If the device lacks the memory for `tokens` tokens, measure with fewer tokens.

    Args:
        runner: the runner of the forward pass.
        tokens: number of tokens in the step.
        longest: maximum length of a sequence, in tokens.
        rows: number of rows of logits that the step computes.
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
        runner.graphs.expect(peak, tokens)
    return peak


def bytes_to_come(runner: ModelRunner) -> int:
    """Return the bytes to reserve for captured and later CUDA graphs, in addition to a step's peak; 0 without graphs."""
    return 0 if runner.graphs is None else runner.graphs.bytes_to_come


def run_prefill(runner: ModelRunner, tokens: int, longest: int, rows: int) -> None:
    """Prefill `tokens` tokens, or as many as the KV cache's blocks can hold, in sequences of at most `longest` tokens.

    Compute logits and log-probs for the first `rows` of these tokens.
    """
    size = runner.table.block_size
    width = -(-min(tokens, longest) // size)
    room = runner.cache.num_blocks
    most = room // width
    if runner.layout.states:
        most = min(most, runner.states.num_blocks)
    count = max(1, min(-(-tokens // longest), most))
    width = min(width, room)
    length = min(longest, tokens // count, width * size)
    blocks = np.arange(count * width, dtype=np.int64).reshape(count, width)
    offsets, positions = np.arange(count + 1) * length, np.tile(np.arange(length), count)
    keep = np.arange(min(rows, count * length))
    logits = runner.forward(np.zeros(count * length, np.int64), PagedRows(offsets, positions, blocks, size), keep)
    token_logprobs(logits, torch.zeros(len(keep), dtype=torch.int64, device=logits.device), 0)
    runner.cache.zero_blocks(blocks.ravel().tolist())
