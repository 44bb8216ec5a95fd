"""Choices of experts of one forward, replayed in another, so that the two can be compared along the same routes.

Where two experts score almost the same, rounding decides which of them a router takes, and from there on two right forwards
differ by the output of an expert. Every choice of a router is a `topk`, whatever the router is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.models.routers import TOPK


class Routes:
    """What the routers of a model choose for the positions of one sequence, in forwards of consecutive chunks."""

    def __init__(self) -> None:
        self._chunks: list[list[Tensor]] = []

    @contextmanager
    def of_forward(self, runner: ModelRunner) -> Iterator[None]:
        """A block with the forward of the next chunk, by the fused forward if the model goes through one."""
        chunk: list[Tensor] = []
        self._chunks.append(chunk)
        fused = runner.fused if runner.why_not_fused() is None else None
        # Nothing is recorded by what is replayed.
        graphs, runner.graphs = runner.graphs, None
        try:
            if fused is not None:
                fused.record = lambda index, experts: chunk.append(experts)
            with _Recorded(chunk) if fused is None else nullcontext():
                yield
        finally:
            runner.graphs = graphs
            if fused is not None:
                fused.record = None

    def joined(self) -> list[Tensor | None]:
        """int64 [rows, k] of each choice in its order; None where k differs between chunks. Empty: there are no choices, or
        not equally many in each chunk."""
        if len(set(map(len, self._chunks))) != 1:
            return []
        choices = zip(*self._chunks, strict=True)
        return [torch.cat(each) if len({part.shape[1] for part in each}) == 1 else None for each in choices]


class _Recorded(TorchFunctionMode):
    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__()
        self._chosen = chosen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in TOPK:
            self._chosen.append(found[1].flatten(0, -2))
        return found


class Replayed(TorchFunctionMode):
    """Answers the choices of one forward of all chunks with given ones, at the live scores.

    Args:
        given: as of `Routes.joined`; a choice of another shape stays the live one.

    Attributes:
        worst: largest distance in a row between the lowest score that would be chosen and the lowest of those given, of the
            row's largest score: how far the given choices are from what rounding can explain.
    """

    def __init__(self, given: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._given = iter(given)
        self.worst = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls `func`, and puts the given indices into the place of those of a topk."""
        live = func(*args, **(kwargs or {}))
        if func not in TOPK:
            return live
        scores: Tensor = args[0] if args else kwargs["input"]
        given = next(self._given, None)
        if given is None or given.numel() != live[1].numel() or live[1].shape[:-1] != scores.shape[:-1]:
            return live
        chosen = given.view_as(live[1]).to(scores.device)
        values = scores.gather(-1, chosen)
        least, got = live[0].float().amin(-1), values.float().amin(-1)
        largest = scores.float().nan_to_num(0.0, 0.0, 0.0).abs().amax(-1)
        short = torch.where(least == got, 0.0, (least - got) / largest)
        self.worst = float(torch.maximum(short.max(), torch.tensor(self.worst, device=short.device)))
        return torch.return_types.topk((values, chosen))
