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
    """The groups of this rank, and its role in them. All ranks of a group must construct a `Peers` at the same time.

    Attributes:
        group: the tensor-parallel group, whose ranks compute every step together, each with its shard of the weights.
            None if this rank is in no such group.
        leader: the object that sends work to the other ranks of `group`. None if this rank is not the first of a group.
        lockstep: the expert-parallel ranks. Their expert layers exchange tokens, so all ranks run every forward pass
            together. None if the experts are not split over ranks.
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
            # Require equal settings: if only some ranks verified the model, they would wait forever for the others.
            exchange.refuse_unequal("Advanced.verify_model", str(config.advanced.verify_model))
            self.lockstep = Lockstep(exchange, modules_split_over("ep", weights.trained))
        self.leader = Leader(self.group) if self.group is not None and self.group.leads else None
        self.together: Together = self.lockstep or self.leader or Together()
        """The object that runs each forward pass together with the other ranks, if there are any."""

    @property
    def everyone(self) -> TensorParallelGroup | None:
        """The group whose ranks compute every forward pass together with this rank. None if this rank computes alone."""
        return self.group if self.lockstep is None else self.lockstep.group

    def least(self, value: int) -> int:
        """Return the smallest `value` in the tensor-parallel group. All members of the group must call this method."""
        return value if self.group is None else self.group.least(value)

    def all_hold(self, holds: bool) -> bool:
        """Return whether `holds` is True on this rank and all that compute together with it. All must call this method."""
        return holds if self.everyone is None else self.everyone.least(int(holds)) == 1

    def refuse_alone(self) -> None:
        """Raise `EngineStateError` if a step needs other ranks, but they are not ready to compute it with this rank."""
        self.together.refuse_alone()
        if self.group is not None and self.leader is None:
            raise EngineStateError(
                f"step() on rank {self.group.ranks[self.group.place]}: in a {self.group.name} rank {self.group.ranks[0]} "
                "decides and the others follow; generate by RolloutManager or LLM, on every rank of the group"
            )
