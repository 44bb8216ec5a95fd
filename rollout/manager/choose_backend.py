"""Chooses the backend of a manager: the local engine, or all ranks of the job."""

from __future__ import annotations

from rollout.config import CoordinatorConfig
from rollout.distributed.job.data_parallel import DataParallelBackend
from rollout.distributed.job.world import World
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError
from rollout.manager.backend import Backend, LocalBackend
from rollout.manager.tensor_parallel import FollowerBackend


def choose_backend(
    engine: DynamicInferenceEngine, coordinator: CoordinatorConfig | bool, world: World | None
) -> Backend:
    """A `DataParallelBackend` where there are several ranks and `coordinator` is not False.

    A tensor-parallel group is one rank: its first member is asked, and the others follow.

    Args:
        world: the job's ranks; None: this one alone.

    Raises:
        ConfigError: `coordinator` asks for a schedule file, and there is one rank.
        DeadlineError: the ranks have not found each other.
    """
    if coordinator is False:
        world = None
    if (group := engine.peers.group) is not None and world is not None:
        leaders = world.leaders(group.ranks[0])
        world = world.within(leaders, "leaders") if group.leads and len(leaders) > 1 else None
    if group is not None and not group.leads:
        return FollowerBackend(engine)
    options = coordinator if isinstance(coordinator, CoordinatorConfig) else None
    if world is None:
        if options is not None and options.schedule_output_path is not None:
            raise ConfigError(
                f"CoordinatorConfig.schedule_output_path={options.schedule_output_path!r}: there is one rank, and "
                "nothing to route; leave it None, or initialise torch.distributed with several ranks first"
            )
        return LocalBackend(engine)
    return DataParallelBackend(engine, options, world)
