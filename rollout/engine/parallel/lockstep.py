"""Forward passes in lock-step, for ranks whose expert layers exchange tokens while each rank has its own batches.

    agree(state)    the ranks exchange their states, to find out whether any of them has a forward pass to compute
    round()         every rank computes one forward pass; expert layers that its own step skips are called without tokens

Always true: in a round every rank calls each expert module once, in the same order. A step that schedules nothing, or fails
outside the expert modules, does not affect the other ranks. If a step fails inside an expert module, the group is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from rollout.engine.parallel.group import TensorParallelGroup
from rollout.engine.parallel.leading import ForwardWork, Together
from rollout.errors import EngineStateError, UnsupportedModelError

LEFT, BUSY, IDLE, DONE = range(4)
"""A rank's state before a round: it left with an error, has a forward pass to compute, waits for work, or has finished."""


class Lockstep(Together):
    """Runs one rank's part of each round: a forward pass, and a call without tokens of each expert module that it skips.

    Args:
        group: the ranks that exchange tokens.
        modules: the expert modules of the model.
    """

    def __init__(self, group: TensorParallelGroup, modules: list[nn.Module]) -> None:
        self.group = group
        self._layers = modules
        self._empty: dict[nn.Module, tuple[Tensor, ...]] = {}
        """The inputs with which to call each expert module without tokens."""
        self._done: list[nn.Module] | None = None
        """The expert modules called in the current round; None outside a round."""
        self._inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the `with` block, make expert modules raise an error if they are called outside a round or twice in a round."""
        with ExitStack() as undo:
            for layer in self._layers:
                undo.callback(layer.register_forward_pre_hook(self._begin).remove)
                undo.callback(layer.register_forward_hook(self._end).remove)
            yield

    def learn(self, forward: Callable[[], object]) -> None:
        """Find the call order of the expert modules and the shapes of their inputs. Every rank of the group must call this.

        Args:
            forward: function that runs a forward pass of the model.

        Raises:
            UnsupportedModelError: the forward pass does not call each expert module exactly once.
        """
        order = self._done = []
        try:
            with self.watching():
                forward()
        finally:
            self._done = None
        if len(order) != len(self._layers):
            raise UnsupportedModelError(
                f"{self.group.name}: a forward calls {len(order)} of {len(self._layers)} modules of experts; a rank without "
                "work could not compute its part of the others' forwards"
            )
        self._layers = order

    def agree(self, state: int) -> int:
        """Return the smallest of the ranks' states. Every rank must call this before each round.

        Raises:
            EngineDeadError: a rank is lost, and therefore the whole group.
        """
        return self.group.least(state)

    def refuse_alone(self) -> None:
        self.group.refuse_when_lost()
        if self._done is None:
            raise EngineStateError(
                f"step() in the {self.group.name}, whose other ranks compute no forward now: generate by RolloutManager, on "
                "every rank"
            )

    @contextmanager
    def round(self) -> Iterator[None]:
        """Run a round: at most one forward pass in the `with` block. On exit, call the expert modules that the pass skipped.

        Raises:
            EngineDeadError: a rank is lost, or this rank failed inside an expert module.
        """
        done = self._done = []
        try:
            yield
        finally:
            try:
                with torch.no_grad(), self._ended_by_failures():
                    for layer in self._layers[len(done) :]:
                        self.group.refuse_when_lost()
                        layer(*self._empty[layer])
            finally:
                self._done = None

    def run(self, work: ForwardWork, compute: Callable[[ForwardWork], Tensor]) -> Tensor:
        with self._ended_by_failures():
            return compute(work)

    @contextmanager
    def _ended_by_failures(self) -> Iterator[None]:
        """Turn an exception inside an expert module into an `EngineDeadError`, and mark the group as lost.

        The group cannot continue, because the other ranks are waiting for tokens that this rank will not send.
        """
        try:
            yield
        except BaseException as exc:
            if not self._inside:
                raise
            self._inside = False
            lost = self.group.lose(exc)
            if isinstance(exc, Exception):
                raise lost from exc
            raise

    def _begin(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Record that an expert module is called, or raise if the other ranks are not calling the same module."""
        self.refuse_alone()
        done = self._done
        assert done is not None
        # Reject repeated calls and calls out of order. Only repeated calls can be rejected while `learn` finds the order.
        if layer in done or (layer in self._empty and self._layers[len(done)] is not layer):
            raise EngineStateError(
                f"{self.group.name}: a step calls a module of experts twice or in another order than the other ranks' steps "
                "do; only steps of one forward each are served"
            )
        self._empty.setdefault(layer, tuple(each.new_empty((0, *each.shape[1:])) for each in inputs))
        self._inside = True

    def _end(self, layer: nn.Module, *_: object) -> None:
        assert self._done is not None
        self._done.append(layer)
        self._inside = False
