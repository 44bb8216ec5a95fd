"""The launch of the coordinator on rank 0, which publishes its address and keys for the other ranks in the job's store.

Keys are used only if the coordinator does not listen on loopback and is not `insecure`.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import msgpack

from rollout.config import CoordinatorConfig, InferenceConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.coordinator.launch import CoordinatorHandle, launch_coordinator
from rollout.distributed.job.world import World
from rollout.distributed.transport.keys import JobKeys, is_loopback
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError
from rollout.requests.codec import refuse, unpack_msgpack

START_TIMEOUT_S = 120.0
"""Seconds within which all ranks must connect. It is long because the ranks may load their models one after the other."""


class JobCoordinator:
    """The address and keys of the job's coordinator, and its process on rank 0.

    Args:
        config: the user's options. The number of ranks, block size and seed are taken from the job. If the ranks are on
            several hosts, a loopback host is replaced by an address that all hosts can reach.
        engine: this rank's engine.
        world: the ranks of the job.

    Attributes:
        address: the address of the current coordinator.
        keys: the job's keys; None if the coordinator listens on loopback or is insecure.
        handle: the handle of the coordinator's process on rank 0; None on the other ranks.

    Raises:
        ConfigError: an option contradicts the job.
    """

    def __init__(self, config: CoordinatorConfig, engine: DynamicInferenceEngine, world: World) -> None:
        self.address = ""
        self.keys: JobKeys | None = None
        self.handle: CoordinatorHandle | None = None
        self._world = world
        self._config = _completed(config, engine, world)
        self._incarnation = -1

    def launch_or_learn(self) -> None:
        """Launch the first or the next coordinator on rank 0; on the other ranks, wait for the coordinator's address.

        Raises:
            DeadlineError: rank 0 published no address in time, or the coordinator did not listen in time.
            ConfigError, ConnectionLostError: the coordinator cannot listen as configured, or exited immediately. The other
                ranks then raise a `ConfigError`.
        """
        key = self._key(self._incarnation + 1)
        # If the first coordinator cannot be launched or found, publish the error. Ranks that wait for this rank then fail
        # within seconds instead of at their deadline. Do not publish later errors, because this rank may try again.
        with nullcontext() if self._incarnation >= 0 else self._world.joining():
            if self._world.rank == 0:
                self._launch()
                keys = None if self.keys is None else self.keys.client_side().serialize()
                self._world.publish(key, msgpack.packb([self.address, keys]))
            else:
                self._learn(key)
        self._incarnation += 1

    def client(self, name: str, control_timeout_s: float) -> InferenceClient:
        """Return a new client of the current coordinator. It is not started, and barriers do not wait for it."""
        return InferenceClient(self.address, name=name, keys=self.keys, control_timeout_s=control_timeout_s)

    @property
    def next_is_published(self) -> bool:
        """Whether rank 0 has published the address of a coordinator that replaces the current one."""
        return self._world.is_published(self._key(self._incarnation + 1))

    def _launch(self) -> None:
        config = self._config
        if self.address:
            if config.schedule_output_path is not None:
                config = config.replace(schedule_output_path=f"{config.schedule_output_path}.{self._incarnation + 1}")
            # Reuse the port: peers that still use the old address are then rejected at once and reconnect.
            with suppress(ConfigError):
                port = int(self.address.rpartition(":")[2])
                self.handle = launch_coordinator(config.replace(inference_coordinator_port=port), self.keys)
                return
        elif not (config.insecure or is_loopback(config.host)):
            self.keys = JobKeys.generate()
        self.handle = launch_coordinator(config, self.keys)
        self.address = self._world.reachable(self.handle.address)

    def _learn(self, key: str) -> None:
        published = unpack_msgpack(key, self._world.wait_for(key, START_TIMEOUT_S))
        if type(published) is not list or len(published) != 2 or type(published[0]) is not str:
            refuse(key, published, "[address, keys]")
        self.address, keys = published
        self.keys = None if keys is None else JobKeys.deserialize(keys)

    def _key(self, incarnation: int) -> str:
        return f"coordinator/{incarnation}"


def _completed(config: CoordinatorConfig, engine: DynamicInferenceEngine, world: World) -> CoordinatorConfig:
    host = config.host
    if world.rank == 0 and not world.one_host and is_loopback(host):
        host = world.address_for_others()
    seed = engine.config.seed
    block_size = engine.config.advanced.block_size_tokens
    known = [
        ("data_parallel_size", world.size, "the number of ranks"),
        ("block_size_tokens", block_size, "Advanced.block_size_tokens"),
        # Compare the seeds only if the user set the engine's seed: by default the coordinator's seed is used.
        *([("seed", seed, "InferenceConfig.seed")] if seed != InferenceConfig.seed else []),
    ]
    for name, value, where in known:
        if (said := getattr(config, name)) not in (value, getattr(CoordinatorConfig, name)):
            raise ConfigError(f"CoordinatorConfig.{name}={said}: {where} is {value}; leave it out, or give the same")
    tokenizer = config.tokenizer
    if tokenizer is None and world.rank == 0:
        tokenizer = _portable(engine.controller.tokenizer)
    return config.replace(
        tokenizer=tokenizer,
        data_parallel_size=world.size,
        block_size_tokens=block_size,
        enable_prefix_caching=config.enable_prefix_caching and engine.config.enable_prefix_caching,
        seed=config.seed if seed == InferenceConfig.seed else seed,
        host=host,
    )


def _portable(tokenizer: Any) -> str | None:
    """Return a tokenizer as the content of a `tokenizer.json`, or None if the tokenizer depends on custom Python code."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    ours = type(tokenizer).__module__.startswith("transformers.")
    return str(backend.to_str()) if ours and hasattr(backend, "to_str") else None
