"""The ranks that compute forward passes together with this one: a tensor-parallel or an expert-parallel group."""

from __future__ import annotations

from rollout.config import InferenceConfig
from rollout.engine.parallel.group import TensorParallelGroup
from rollout.engine.parallel.leading import Leader, Together
from rollout.engine.parallel.lockstep import Lockstep
from rollout.engine.weights.base import Weights
from rollout.engine.weights.tensor_parallel import modules_split_over
from rollout.errors import EngineStateError


class Peers:
    """This rank's role among the ranks that compute forward passes with it. All of them construct it at the same time.

    Attributes:
        group: the tensor-parallel ranks, which compute every step together, each with its shard of the weights. None: this
            rank steps alone.
        leader: sends work to the other members if this rank is the group's first; None: this rank is not the first.
        lockstep: the expert-parallel ranks, whose layers exchange tokens, so that all run each forward pass together.
            None: there are no such ranks.
    """

    def __init__(self, weights: Weights, config: InferenceConfig) -> None:
        self.group: TensorParallelGroup | None = None
        self.lockstep: Lockstep | None = None
        mesh = weights.tensor_parallel_mesh
        if mesh is not None and mesh.size() > 1:
            self.group = TensorParallelGroup(mesh, config.advanced.control_timeout_s)
            self.group.refuse_unequal("InferenceConfig", repr(config))
        if (mesh := weights.expert_parallel_mesh) is not None:
            exchange = TensorParallelGroup(mesh, config.advanced.control_timeout_s, "expert-parallel")
            # Require equal settings: the verification runs forward passes in which all ranks take part, or none.
            exchange.refuse_unequal("Advanced.verify_model", str(config.advanced.verify_model))
            self.lockstep = Lockstep(exchange, modules_split_over("ep", weights.trained))
        self.leader = Leader(self.group) if self.group is not None and self.group.leads else None
        self.together: Together = self.lockstep or self.leader or Together()
        """The object that involves the other ranks in each forward pass; if there are none, it only runs the pass."""

    @property
    def everyone(self) -> TensorParallelGroup | None:
        """The ranks that must take part in every forward pass of this rank; None: it computes alone."""
        return self.group if self.lockstep is None else self.lockstep.group

    def least(self, value: int) -> int:
        """Return the smallest `value` in the tensor-parallel group. All members of the group must call this method."""
        return value if self.group is None else self.group.least(value)

    def all_hold(self, holds: bool) -> bool:
        """Return whether `holds` is True on all ranks that compute forward passes together. All of them must call this."""
        return holds if self.everyone is None else self.everyone.least(int(holds)) == 1

    def refuse_alone(self) -> None:
        """Raise `EngineStateError` if a step needs the other ranks, but they are not inside a joint call."""
        self.together.refuse_alone()
        if self.group is not None and self.leader is None:
            raise EngineStateError(
                f"step() on rank {self.group.ranks[self.group.place]}: in a {self.group.name} rank {self.group.ranks[0]} "
                "decides and the others follow; generate by RolloutManager or LLM, on every rank of the group"
            )
