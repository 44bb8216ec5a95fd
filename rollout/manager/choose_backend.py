"""Chooses the backend of a manager: the local engine, or all ranks of the job."""

from __future__ import annotations

from rollout.config import CoordinatorConfig
from rollout.distributed.job.data_parallel import DataParallelBackend
from rollout.distributed.job.world import World
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError
from rollout.manager.backend import Backend, LocalBackend


def choose_backend(engine: DynamicInferenceEngine, coordinator: CoordinatorConfig | bool) -> Backend:
    """A `DataParallelBackend` where torch.distributed has several ranks and `coordinator` is not False.

    Raises:
        ConfigError: `coordinator` asks for a schedule file, and there is one rank.
        DeadlineError: the ranks have not found each other.
    """
    world = World.of_torch() if coordinator is not False else None
    options = coordinator if isinstance(coordinator, CoordinatorConfig) else None
    if world is None:
        if options is not None and options.schedule_output_path is not None:
            raise ConfigError(
                f"CoordinatorConfig.schedule_output_path={options.schedule_output_path!r}: there is one rank, and "
                "nothing to route; leave it None, or initialise torch.distributed with several ranks first"
            )
        return LocalBackend(engine)
    return DataParallelBackend(engine, options, world)
