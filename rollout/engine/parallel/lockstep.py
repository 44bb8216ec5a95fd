"""Lock-step forwards of ranks whose layers exchange tokens, each rank with its own batches.

    agree(state)    one number of every rank: whether some rank has a forward to compute
    round()         every rank computes one forward; layers that its own step skips get inputs without tokens

Always true: in a round every rank calls each module of experts once, in the same order. A step that schedules nothing, or
fails outside of the experts, does not affect the other ranks; if a step fails inside the experts, the group is lost.
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
"""The state of a rank before a round: left its call, has a forward to compute, waits for work, has reached its goal."""


class Lockstep(Together):
    """The rounds of one rank's engine.

    Args:
        group: the ranks that exchange tokens.
        modules: the modules of experts.
    """

    def __init__(self, group: TensorParallelGroup, modules: list[nn.Module]) -> None:
        self.group = group
        self._layers = modules
        self._empty: dict[nn.Module, tuple[Tensor, ...]] = {}
        """Inputs without tokens of each layer."""
        self._done: list[nn.Module] | None = None
        """Layers computed in this round; None: outside of a round."""
        self._inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Make the modules of experts raise, inside the block, if they are called outside of a round or twice in one."""
        with ExitStack() as undo:
            for layer in self._layers:
                undo.callback(layer.register_forward_pre_hook(self._begin).remove)
                undo.callback(layer.register_forward_hook(self._end).remove)
            yield

    def learn(self, forward: Callable[[], object]) -> None:
        """Find the order of the layers and the shapes of their inputs, by a forward of the model on every rank of the group.

        Raises:
            UnsupportedModelError: the forward does not call each layer exactly once.
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
        """Return the smallest of the ranks' states; every rank calls it before each round.

        Raises:
            EngineDeadError: a rank is lost, and so is the group.
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
        """Enclose at most one forward of this rank; on exit, compute the layers that it did not call.

        Raises:
            EngineDeadError: a rank is lost, or this rank failed inside its experts.
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
        """Turn an exception inside experts, where other ranks wait for this rank's tokens, into an `EngineDeadError`.

        The group has then failed.
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
        """Record that a module of experts is called, unless the other ranks would not expect it."""
        self.refuse_alone()
        done = self._done
        assert done is not None
        # Reject a repeated call, and a call out of order. While `learn` still finds the order, only a repeated call is
        # wrong.
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
