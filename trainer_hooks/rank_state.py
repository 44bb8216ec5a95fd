"""Rollout state in a trainer's checkpoint folder, one file per rank.

Files are written atomically and contain msgpack, no pickle. Their names contain rank and world size, so that ranks need no
communication and a job of another size does not load the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from rollout.requests.codec import INT, Codec, decode_fields, refuse, unpack_msgpack

if TYPE_CHECKING:
    from rollout import RolloutManager


@dataclass(frozen=True)
class RankFile:
    """The state file of one rank.

    Attributes:
        folder: checkpoint folder.
        stem: the common prefix of all ranks' file names.
        rank: rank of this process, from 0.
        size: number of ranks.
        without: text for error messages that says how to start without the file, with no requests and policy version 0.
    """

    folder: Path
    stem: str
    rank: int
    size: int
    without: str = "pass checkpoint=False"

    @property
    def path(self) -> Path:
        """The path of this rank's file: `<folder>/<stem>_rank_<rank>_of_<size>.msgpack`."""
        return self.folder / f"{self.stem}_rank_{self.rank}_of_{self.size}.msgpack"

    @property
    def saved_by_anybody(self) -> bool:
        """Whether the folder contains a state file of any rank of a job of any size."""
        return bool(self._all())

    def write(self, manager: RolloutManager) -> None:
        """Save the rollout's state without changing it. Remove files with this stem from jobs of another size."""
        fields = {"policy_version": manager.policy_version, "state": manager.state_dict()}
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            file.write(msgpack.packb(fields, use_bin_type=True))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)
        for other in self._all():
            if not other.stem.endswith(f"_of_{self.size}"):
                other.unlink(missing_ok=True)

    def load(self, manager: RolloutManager, policy_version: int | None = None) -> None:
        """Restore the state saved by `write`. The model must already hold the weights of the checkpoint.

        Args:
            manager: a new manager, with nothing in flight.
            policy_version: policy version in the rest of the checkpoint. If None, the file's version is not checked.

        Raises:
            FileNotFoundError: there is no file for this rank and job size; the message lists the existing files.
            SerializationError: the file is damaged, or its policy version differs from the rest of the checkpoint.
            EngineStateError, ConfigError, InvalidRequestError: see `RolloutManager.load_state_dict`.
        """
        if not self.path.exists():
            there = [path.name for path in self._all()] or "no state of a rollout"
            raise FileNotFoundError(
                f"{self.folder} has no {self.path.name}; it holds {there}. Every rank saves its own file: start as many "
                f"ranks as saved it, take another checkpoint, or {self.without} to begin with nothing in flight and policy "
                "version 0"
            )
        name = str(self.path)
        fields = decode_fields(name, unpack_msgpack(name, self.path.read_bytes()), _FIELDS)
        if policy_version is not None and fields["policy_version"] != policy_version:
            refuse(
                f"{name}: policy_version",
                fields["policy_version"],
                f"{policy_version}, as in the rest of this checkpoint (it was saved over an earlier one, and "
                "interrupted: use another checkpoint),",
            )
        manager.load_state_dict(fields["state"])

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.stem}_rank_*_of_*.msgpack"))


def _decode_dict(plain: Any) -> dict[str, Any]:
    if not isinstance(plain, dict):
        refuse("state", plain, "what state_dict() has returned")
    return plain


_FIELDS = {"policy_version": INT, "state": Codec(dict, _decode_dict)}
