"""The data that TRL does not store for generated rows: expert routes, and kept tokens (ids that each token was drawn from).

The data is stored next to TRL's tensors, so TRL shuffles and splits it together with them. Routes are replayed in every
forward pass of the log-prob pass. After a forward pass with gradient, the replay lasts until the end of the training step,
because with gradient checkpointing the backward pass runs the routers again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.replay import Routed, RoutedRows, replay
from rollout.manager.batch.tree import PackedTree

_IDS, _COUNTS, _ROUTES = "rollout_kept_ids", "rollout_kept_counts", "rollout_routed_experts"


class GeneratedRows:
    """The kept tokens (ids that each token was drawn from) and expert routes of the rows in the next forward pass.

    Args:
        kept: whether kept tokens are replayed.
        routes: whether expert routes are replayed.
    """

    def __init__(self, trainer: Any, *, kept: bool, routes: bool) -> None:
        self._trainer = trainer
        self._kept = kept
        self._routes = routes
        self._now: dict[str, Tensor] = {}
        self._step: ExitStack | None = None

    # --- from generation to forward pass ------------------------------------------------------------------------

    def take(self, batch: RolloutBatch, completions: list[list[int]], failed: list[bool]) -> None:
        """Store the rows' expert routes and the ids left by top-p and the like, until TRL has scored the generated rows."""
        self._now = {}
        if self._kept:
            sets = [
                (list(row), [1] * len(row)) if lost or request.generated_kept_tokens is None
                else (request.generated_kept_tokens.ids.tolist(), request.generated_kept_tokens.counts.tolist())
                for request, row, lost in zip(batch, completions, failed, strict=True)
            ]  # fmt: skip
            device = self._trainer.accelerator.device
            self._now |= {
                name: _padded([each[part] for each in sets], device) for part, name in enumerate((_IDS, _COUNTS))
            }
        if self._routes and batch.routed_experts is not None:
            # Keep the routes on the host, because each router copies what it needs to its own device. Add a column for
            # the token that TRL gets as the completion of a failed row, and mark that row's routes as missing (-1).
            routes = pad(batch.routed_experts.cpu(), (0, 0, 0, 0, 0, 1), value=-1)
            routes[torch.tensor(failed)] = -1
            self._now[_ROUTES] = routes

    def scored(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Return TRL's outputs for a generation, with the stored expert routes and ids left by top-p and the like added."""
        now, self._now = self._now, {}
        return outputs | now

    def loss(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `_compute_loss` so that its forward pass replays the expert routes and token sets among its inputs."""

        def computed(model: Any, inputs: dict[str, Any]) -> Any:
            self._now = {name: inputs[name] for name in (_IDS, _COUNTS, _ROUTES) if name in inputs}
            try:
                return compute(model, inputs)
            finally:
                self._now = {}

        return computed

    def kept(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return each row's ids left by top-p and the like, and their number per token: int32 [N, ids] and [N, tokens]."""
        return self._now[_IDS][rows], self._now[_COUNTS][rows]

    # --- routes -------------------------------------------------------------------------------------------------

    def routes(self, rows: slice) -> Tensor | None:
        """Return the expert routes of `rows`, int16 [N, tokens, layers, k], or None if routes are not replayed."""
        return self._now[_ROUTES][rows] if _ROUTES in self._now else None

    @contextmanager
    def routed(self, model: Any, input_ids: Tensor, real: Tensor, rows: slice) -> Iterator[None]:
        """Replay any recorded expert routes in a forward pass over padded `rows`. `real` is False at padding tokens."""
        routes = self.routes(rows)
        if routes is None:
            yield
            return
        sampled = (routes >= 0).flatten(1).any(1)
        with self._replayed(RoutedRows(input_ids, real, real & sampled.to(real.device)[:, None], routes), model):
            yield

    @contextmanager
    def routed_tree(self, model: Any, packed: PackedTree) -> Iterator[None]:
        """Replay any recorded expert routes while the `with` block runs a forward pass over the prefix tree `packed`."""
        if packed.routed_experts is None:
            yield
            return
        with self._replayed(packed, model):
            yield

    def pass_over_rows(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap TRL's own log-prob pass so that it replays the recorded expert routes."""

        def computed(model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
            with self.routed(model, input_ids, attention_mask.bool(), slice(None)):
                return compute(model, input_ids, attention_mask, *args, **kwargs)

        return computed

    def training_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `training_step`, so that the replay of expert routes lasts until the step's backward pass has run."""

        def stepped(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as self._step:
                try:
                    return step(*args, **kwargs)
                finally:
                    self._step = None

        return stepped

    @contextmanager
    def _replayed(self, routed: Routed, model: Any) -> Iterator[None]:
        if self._step is not None and torch.is_grad_enabled():
            self._step.enter_context(replay(routed, model))
            yield
        else:
            with replay(routed, model):
                yield


def _padded(rows: list[list[int]], device: Any) -> Tensor:
    """Return the rows as an int32 tensor [N, longest row], padded with 0 on the right."""
    padded = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return torch.from_numpy(padded).to(device)
