"""Lock-step forwards of ranks whose layers exchange tokens, each rank with batches of its own.

    agree(state)    one number of every rank: whether some rank has a forward to compute
    round()         every rank computes one; the layers that its own step leaves out, it computes without tokens

Always true: in a round every rank calls each module of experts once, in the same order. A step that schedules nothing, or
fails outside of the experts, does not affect the other ranks; if a step fails inside the experts, the group is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engine.parallel.group import TensorParallelGroup
from rollout.engine.parallel.leading import ForwardWork, Together
from rollout.errors import EngineStateError, UnsupportedModelError

LEFT, BUSY, IDLE, DONE = range(4)
"""State of a rank before a round: left its call, has a forward to compute, waits for work, has reached its goal."""


class Lockstep(Together):
    """The rounds of one rank's engine.

    Args:
        group: the ranks that exchange tokens.
        modules: the modules of experts.
    """

    def __init__(self, group: TensorParallelGroup, modules: list[nn.Module]) -> None:
        self.group = group
        self._layers = [_Experts(module, self) for module in modules]
        self._done: list[_Experts] | None = None
        """Layers computed in this round; None: outside of a round."""
        self._inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager in which the modules of experts raise if called outside of a round, or twice in one."""
        with ExitStack() as undo:
            for layer in self._layers:
                undo.enter_context(layer.in_place())
            yield

    def learn(self, forward: Callable[[], object]) -> None:
        """Find the order of the layers and the shapes of their inputs, by a forward of the model on every rank of the group.

        Raises:
            UnsupportedModelError: it does not call each of them once.
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
        self._layers = list(order)

    def agree(self, state: int) -> int:
        """The smallest of the ranks' states; every rank calls it before each round.

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
        """Context manager for at most one forward of this rank; layers that it does not call are computed on exit.

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
                        layer.compute_without_tokens()
            finally:
                self._done = None

    def run(self, work: ForwardWork, compute: Callable[[ForwardWork], Tensor]) -> Tensor:
        with self._ended_by_failures():
            return compute(work)

    @contextmanager
    def _ended_by_failures(self) -> Iterator[None]:
        """Context manager of forwards. An exception inside experts, where other ranks wait for this rank's tokens, makes the
        group fail and becomes an `EngineDeadError`.
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

    def begin(self, layer: _Experts) -> None:
        """Record that a module of experts is called.

        Raises:
            EngineStateError: the call is outside of a round, or not in the order that `learn` found.
            EngineDeadError: the group has ended.
        """
        self.refuse_alone()
        done = self._done
        assert done is not None
        # While `learn` finds the order, only a second call is wrong.
        if layer in done or (layer.known and self._layers[len(done)] is not layer):
            raise EngineStateError(
                f"{self.group.name}: a step calls a module of experts twice or in another order than the other ranks' steps "
                "do; only steps of one forward each are served"
            )
        self._inside = True

    def end(self, layer: _Experts) -> None:
        """Record that a module of experts has returned."""
        assert self._done is not None
        self._done.append(layer)
        self._inside = False


class _Experts:
    """One module of experts, and its forward while it is watched."""

    def __init__(self, module: nn.Module, lockstep: Lockstep) -> None:
        self._module = module
        self._lockstep = lockstep
        self._forward: Callable[..., Tensor] = module.forward
        self._empty: tuple[Tensor, ...] | None = None

    @property
    def known(self) -> bool:
        """Whether it has been called."""
        return self._empty is not None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context manager in which this object is the module's forward."""
        own: dict[str, Any] = vars(self._module)
        before = own.get("forward")
        self._forward = self._module.forward
        own["forward"] = self
        try:
            yield
        finally:
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before

    def __call__(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        self._lockstep.begin(self)
        output = self._forward(hidden, experts, weights)
        self._lockstep.end(self)
        if self._empty is None:
            self._empty = tuple(each.new_empty((0, *each.shape[1:])) for each in (hidden, experts, weights))
        return output

    def compute_without_tokens(self) -> None:
        """Join the exchange without tokens, and run this rank's experts on the tokens of the others."""
        assert self._empty is not None
        self(*self._empty)
