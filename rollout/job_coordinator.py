"""The coordinator of a job: rank 0 starts it and leaves its address in the job's store, where the others find it."""

from __future__ import annotations

from contextlib import suppress

import msgpack

from rollout.codec import refuse, unpack_msgpack
from rollout.config import CoordinatorConfig
from rollout.coordinator.launch import CoordinatorHandle, launch_coordinator
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError
from rollout.keys import JobKeys, is_loopback
from rollout.world import World

START_TIMEOUT_S = 120.0
"""For all ranks to find each other: they may load their models one after the other."""


class JobCoordinator:
    """Where the coordinator is, and on rank 0 its process.

    Args:
        config: the user's options; size and block size are the job's, and so is the host where it is loopback and the
            ranks are on several.
        world: the ranks; None: this process alone.

    Attributes:
        address: of the present one.
        keys: of the job, where the ranks are on several hosts.
        handle: its process, on rank 0.
    """

    def __init__(self, config: CoordinatorConfig, engine: DynamicInferenceEngine, world: World | None) -> None:
        self.address = ""
        self.keys: JobKeys | None = None
        self.handle: CoordinatorHandle | None = None
        self._world = world
        self._config = _completed(config, engine, world)
        self._incarnation = -1

    @property
    def primary(self) -> bool:
        """Whether this rank starts it."""
        return self._world is None or self._world.rank == 0

    def launch_or_learn(self) -> None:
        """The first one, or the next after a lost one.

        Raises:
            DeadlineError: rank 0 did not say where it is, or it did not listen in time.
            ConfigError, ConnectionLostError: it cannot listen as configured, or has ended at once.
        """
        key = self._key(self._incarnation + 1)
        if self.primary:
            self._launch()
            self._publish(key)
        else:
            self._learn(key)
        self._incarnation += 1

    @property
    def next_is_published(self) -> bool:
        """Whether rank 0 has started another one."""
        return self._world is not None and self._world.is_published(self._key(self._incarnation + 1))

    def _launch(self) -> None:
        config = self._config
        if self.address:
            # Whoever still talks to the old address is told at once that its session is over.
            with suppress(ConfigError):
                port = int(self.address.rpartition(":")[2])
                self.handle = launch_coordinator(config.replace(inference_coordinator_port=port), self.keys)
                return
        elif not (config.insecure or is_loopback(config.host)):
            self.keys = JobKeys.generate()
        self.handle = launch_coordinator(config, self.keys)
        address = self.handle.address
        self.address = address if self._world is None else self._world.reachable(address)

    def _publish(self, key: str) -> None:
        if self._world is not None:
            told = None if self.keys is None else self.keys.client_side().serialize()
            self._world.publish(key, msgpack.packb([self.address, told]))

    def _learn(self, key: str) -> None:
        assert self._world is not None
        published = unpack_msgpack(key, self._world.wait_for(key, START_TIMEOUT_S))
        if type(published) is not list or len(published) != 2:
            refuse(key, published, "[address, keys]")
        self.address, told = published
        self.keys = None if told is None else JobKeys.deserialize(told)

    def _key(self, incarnation: int) -> str:
        return f"coordinator/{incarnation}"


def _completed(config: CoordinatorConfig, engine: DynamicInferenceEngine, world: World | None) -> CoordinatorConfig:
    """The user's options, with what the job knows better."""
    host = config.host
    if world is not None and world.rank == 0 and not world.one_host and is_loopback(host):
        host = world.address_for_others()
    return config.replace(
        data_parallel_size=1 if world is None else world.size,
        block_size_tokens=engine.config.block_size_tokens,
        enable_prefix_caching=config.enable_prefix_caching and engine.config.enable_prefix_caching,
        host=host,
    )
