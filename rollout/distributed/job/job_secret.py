"""Secret that the launcher gives to every process of a job, from which each derives the job's keys.

Nothing secret is published: rank 0 publishes its address with a salt and a tag, an HMAC over both, which only processes
with the secret can make or check. All keys are HMAC-SHA256 of the salt under the secret, so that two managers, and two
jobs of one secret, have different ones.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from rollout.distributed.transport.keys import JobKeys
from rollout.errors import ConfigError

SECRET, SECRET_FILE = "ROLLOUT_JOB_SECRET", "ROLLOUT_JOB_SECRET_FILE"
"""Environment variables with the secret, or with the path of a file that contains it."""
SHORTEST = 32
"""Characters. Captured handshakes allow offline guesses, so that the secret must be random, not a password."""
SALT_BYTES = 16
_MAKE = "make one with `openssl rand -hex 32`"


@dataclass(frozen=True)
class JobSecret:
    """The launcher's secret. Excluded from the repr."""

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
        """Keys of a client, if the address was published under this secret.

        Args:
            proof: [salt, tag] that was published with the address, not checked yet.

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
