"""Launches the coordinator on rank 0 and publishes its address in the job's store for the other ranks.

Every process derives the job's keys from the launcher's secret, if there is one: rank 0 publishes its address with a
salt and a tag, an HMAC over both, and nothing secret. Without one the keys themselves are published if the ranks are
on several hosts, and a warning says so.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgpack

from rollout.config import CoordinatorConfig, InferenceConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.coordinator.launch import CoordinatorHandle, launch_coordinator
from rollout.distributed.job.world import World
from rollout.distributed.transport.keys import JobKeys, is_loopback
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError
from rollout.requests.codec import refuse, unpack_msgpack

SECRET, SECRET_FILE = "ROLLOUT_JOB_SECRET", "ROLLOUT_JOB_SECRET_FILE"
"""Environment variables with the secret, or with the path of a file that contains it."""
SHORTEST = 32
"""Characters. Captured handshakes allow offline guesses, so that the secret must be random, not a password."""
SALT_BYTES = 16
_MAKE = "make one with `openssl rand -hex 32`"


@dataclass(frozen=True)
class JobSecret:
    """The launcher's secret. Excluded from the repr. Keys are HMAC-SHA256 of a salt under it."""

    value: bytes = field(repr=False)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Read it from the environment or from the file named there; None: neither variable is set.

        Raises:
            ConfigError: both are set, the file cannot be read, or the secret is shorter than `SHORTEST`.
        """
        value, path = environment.get(SECRET), environment.get(SECRET_FILE)
        if value is not None and path is not None:
            raise ConfigError(f"{SECRET} and {SECRET_FILE} are both set: leave one out")
        source = SECRET if path is None else f"{SECRET_FILE}={path}"
        if path is not None:
            try:
                value = Path(path).read_text()
            except (OSError, UnicodeDecodeError) as exc:
                raise ConfigError(f"{source}: {exc}; every host of the job needs this file") from exc
        if value is None:
            return None
        secret = value.strip()
        if len(secret) < SHORTEST:
            raise ConfigError(
                f"{source}: {len(secret)} characters; a secret has at least {SHORTEST}, and is random: {_MAKE}"
            )
        return cls(secret.encode())

    @staticmethod
    def new_salt() -> bytes:
        """Random bytes, public, for `keys` and `tag`."""
        return secrets.token_bytes(SALT_BYTES)

    def keys(self, salt: bytes) -> JobKeys:
        """The job's keys, with the server's secret; equal for equal secrets and salts."""
        return JobKeys.of_secrets(self._derived(b"server", salt), self._derived(b"client", salt))

    def tag(self, salt: bytes, address: str) -> bytes:
        """HMAC of the coordinator's address, 32 bytes."""
        return self._derived(b"address " + address.encode(), salt)

    def proven_keys(self, proof: object, address: str) -> JobKeys:
        """Return a client's keys, if `proof` ([salt, tag], not checked yet) shows that the address was published under
        this secret.

        Raises:
            ConfigError: it was published under another secret, or changed since.
        """
        match proof:
            case [bytes(salt), bytes(tag)] if len(salt) == SALT_BYTES:
                if hmac.compare_digest(tag, self.tag(salt, address)):
                    return self.keys(salt).client_side()
        raise ConfigError(
            f"the coordinator's address {address} was not published under this process's job secret: set the same "
            f"{SECRET} or {SECRET_FILE} on all ranks"
        )

    def _derived(self, purpose: bytes, salt: bytes) -> bytes:
        return hmac.digest(self.value, b"rollout job 1 " + salt + purpose, "sha256")


_log = logging.getLogger(__name__)
START_TIMEOUT_S = 120.0
"""Deadline for all ranks to connect: they may load their models one after the other."""


class JobCoordinator:
    """Address and keys of the job's coordinator, and its process on rank 0.

    Args:
        config: the user's options; size, block size and seed are set from the job, and so is a loopback host if the
            ranks are on several hosts. `ConfigError` if an option contradicts the job.
        world: the ranks; None: this process alone.

    Attributes:
        address: of the current coordinator.
        keys: of the job, if the ranks are on several hosts or have the launcher's secret.
        handle: process handle, on rank 0.
    """

    def __init__(self, config: CoordinatorConfig, engine: DynamicInferenceEngine, world: World | None) -> None:
        self.address = ""
        self.keys: JobKeys | None = None
        self.handle: CoordinatorHandle | None = None
        self._world = world
        self._proof: tuple[bytes, JobSecret] | None = None
        """Salt of the keys, and the secret that they were derived from; on rank 0."""
        self._config = _completed(config, engine, world)
        self._incarnation = -1

    @property
    def primary(self) -> bool:
        """Whether this rank launches the coordinator."""
        return self._world is None or self._world.rank == 0

    def launch_or_learn(self) -> None:
        """Launch the first or the next coordinator on rank 0; wait for its address on the others.

        Raises:
            DeadlineError: rank 0 published no address, or the coordinator did not listen in time.
            ConfigError, ConnectionLostError: it cannot listen as configured, or ended immediately; or the launcher's
                secret is malformed, or not that of rank 0. The other ranks raise a `ConfigError` that says so.
        """
        key = self._key(self._incarnation + 1)
        # Let the other ranks fail now instead of at their deadline. Later, this one may try again.
        with nullcontext() if self._world is None or self._incarnation >= 0 else self._world.joining():
            if self.primary:
                self._launch()
                self._publish(key)
            else:
                self._learn(key)
        self._incarnation += 1

    def client(self, name: str, control_timeout_s: float) -> InferenceClient:
        """A client of the current coordinator that is not a member of the job: no barrier waits for it. Not started yet."""
        return InferenceClient(self.address, name=name, keys=self.keys, control_timeout_s=control_timeout_s)

    @property
    def next_is_published(self) -> bool:
        """Whether rank 0 has published a successor."""
        return self._world is not None and self._world.is_published(self._key(self._incarnation + 1))

    def _launch(self) -> None:
        config = self._config
        if self.address:
            if config.schedule_output_path is not None:
                config = config.replace(schedule_output_path=f"{config.schedule_output_path}.{self._incarnation + 1}")
            # The same port: peers that still use the old address are refused and reconnect immediately.
            with suppress(ConfigError):
                port = int(self.address.rpartition(":")[2])
                self.handle = launch_coordinator(config.replace(inference_coordinator_port=port), self.keys)
                return
        else:
            self._make_keys()
        self.handle = launch_coordinator(config, self.keys)
        address = self.handle.address
        self.address = address if self._world is None else self._world.reachable(address)

    def _make_keys(self) -> None:
        if (secret := JobSecret.of_environment()) is not None:
            self._proof = JobSecret.new_salt(), secret
            self.keys = secret.keys(self._proof[0])
        elif not (self._config.insecure or is_loopback(self._config.host)):
            self.keys = JobKeys.generate()
            if self._world is not None and not self._world.one_host:
                _log.warning(
                    "the keys of this job travel through the process group's store, which every process that reaches it "
                    "can read: set %s or %s on all ranks, or use a network you trust", SECRET, SECRET_FILE,
                )  # fmt: skip

    def _publish(self, key: str) -> None:
        if self._world is None:
            return
        keys, proof = None, None
        if self._proof is not None:
            salt, secret = self._proof
            proof = [salt, secret.tag(salt, self.address)]
        elif self.keys is not None:
            keys = self.keys.client_side().serialize()
        self._world.publish(key, msgpack.packb([self.address, keys, proof]))

    def _learn(self, key: str) -> None:
        assert self._world is not None
        published = unpack_msgpack(key, self._world.wait_for(key, START_TIMEOUT_S))
        if type(published) is not list or len(published) != 3 or type(published[0]) is not str:
            refuse(key, published, "[address, keys, proof]")
        address, keys, proof = published
        rank, secret = f"rank {self._world.rank}", JobSecret.of_environment()
        if (proof is None) is not (secret is None):
            has, lacks = ("rank 0", rank) if secret is None else (rank, "rank 0")
            raise ConfigError(
                f"{rank}: {has} has a job secret and {lacks} has none; set the same {SECRET} or {SECRET_FILE} on all ranks"
            )
        if secret is not None:
            self.keys = secret.proven_keys(proof, address)
        else:
            self.keys = None if keys is None else JobKeys.deserialize(keys)
        self.address = address

    def _key(self, incarnation: int) -> str:
        return f"coordinator/{incarnation}"


def _completed(config: CoordinatorConfig, engine: DynamicInferenceEngine, world: World | None) -> CoordinatorConfig:
    """Return the user's options completed from the job: size, block size, seed, host."""
    host = config.host
    if world is not None and world.rank == 0 and not world.one_host and is_loopback(host):
        host = world.address_for_others()
    size, seed = 1 if world is None else world.size, engine.config.seed
    block_size = engine.config.advanced.block_size_tokens
    _refuse_conflict("data_parallel_size", config.data_parallel_size, size, "the number of ranks")
    _refuse_conflict("block_size_tokens", config.block_size_tokens, block_size, "Advanced.block_size_tokens")
    if seed != InferenceConfig.seed:
        _refuse_conflict("seed", config.seed, seed, "InferenceConfig.seed")
    tokenizer = config.tokenizer
    if tokenizer is None and (world is None or world.rank == 0):
        tokenizer = _portable(engine.controller.tokenizer)
    return config.replace(
        tokenizer=tokenizer,
        data_parallel_size=size,
        block_size_tokens=block_size,
        enable_prefix_caching=config.enable_prefix_caching and engine.config.enable_prefix_caching,
        seed=config.seed if seed == InferenceConfig.seed else seed,
        host=host,
    )


def _portable(tokenizer: Any) -> str | None:
    """A tokenizer as the content of a `tokenizer.json`; None if code of its own, in Python, takes part in its work."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    ours = type(tokenizer).__module__.startswith("transformers.")
    return str(backend.to_str()) if ours and hasattr(backend, "to_str") else None


def _refuse_conflict(name: str, said: int, known: int, where: str) -> None:
    """Refuse a value set by the user (it differs from its default) that differs from the job's."""
    if said not in (known, getattr(CoordinatorConfig, name)):
        raise ConfigError(f"CoordinatorConfig.{name}={said}: {where} is {known}; leave it out, or give the same")
