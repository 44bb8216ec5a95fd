"""Rollout state in a trainer's checkpoint folder, one file per rank.

A file is there whole or not at all, and nothing in it is ever unpickled. Its name says which rank of how many wrote it,
so that ranks need not speak to each other, and a job of another size cannot take it for its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgpack

from rollout.requests.codec import INT, Codec, decode_fields, refuse, unpack_msgpack
from trainer_hooks.optimizer import Rollout


class SavedRollout(Rollout, Protocol):
    """What the doors need of a rollout that is logged and saved (`RolloutManager` is one)."""

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""

    def metrics(self) -> dict[str, float]:
        """What happened since the last call."""

    def state_dict(self) -> dict[str, Any]:
        """Everything in flight, as plain data."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` saved."""


@dataclass(frozen=True)
class RankFile:
    """Where one rank keeps its part.

    Attributes:
        folder: the checkpoint.
        stem: what the names of all ranks' files begin with.
        rank: of this process, from 0.
        size: how many there are.
        without: how to begin with nothing in flight and policy version 0 instead; for error messages.
    """

    folder: Path
    stem: str
    rank: int
    size: int
    without: str = "pass checkpoint=False"

    @property
    def path(self) -> Path:
        """`<stem>_rank_<rank>_of_<size>.msgpack` in the folder."""
        return self.folder / f"{self.stem}_rank_{self.rank}_of_{self.size}.msgpack"

    @property
    def saved_by_anybody(self) -> bool:
        """Whether a rank, of a job of any size, has saved its part in the folder."""
        return bool(self._all())

    def write(self, rollout: SavedRollout) -> None:
        """Save the rollout; it goes on undisturbed. What a job of another size has left under this stem is removed."""
        fields = {"policy_version": rollout.policy_version, "state": rollout.state_dict()}
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

    def load(self, rollout: SavedRollout, policy_version: int | None = None) -> None:
        """Go on with what `write` saved. The model must hold the weights of that moment already.

        Args:
            rollout: a fresh one.
            policy_version: the one that the rest of the checkpoint is of, where that is known.

        Raises:
            FileNotFoundError: this rank of a job of this size has saved nothing here; the message says what is there.
            SerializationError: the file is damaged, or of another moment than the rest of the checkpoint.
            EngineStateError, ConfigError, InvalidRequestError: see `RolloutManager.load_state_dict`.
        """
        if not self.path.exists():
            raise FileNotFoundError(self._what_is_missing())
        name = str(self.path)
        fields = decode_fields(name, unpack_msgpack(name, self.path.read_bytes()), _FIELDS)
        if policy_version is not None and fields["policy_version"] != policy_version:
            refuse(
                f"{name}: policy_version",
                fields["policy_version"],
                f"{policy_version}, as in the rest of this checkpoint (it was saved over an earlier one, and "
                "interrupted: use another checkpoint),",
            )
        rollout.load_state_dict(fields["state"])

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob(f"{self.stem}_rank_*_of_*.msgpack"))

    def _what_is_missing(self) -> str:
        there = self._all()
        sizes = sorted({int(path.stem.rpartition("_")[2]) for path in there})
        if not there:
            return (
                f"{self.folder} holds no state of a rollout ({self.path.name}): it was saved without this hook, or "
                f"saving was interrupted; take another checkpoint, or {self.without} to begin with nothing in flight and "
                "policy version 0"
            )
        if self.size not in sizes:
            return (
                f"{self.folder} holds what {sizes} ranks had in flight, and this job has {self.size}: start as many "
                f"ranks again, or {self.without} to begin with nothing in flight and policy version 0"
            )
        return (
            f"{self.folder} has no {self.path.name}, only {[path.name for path in there]}: every rank saves its own, so "
            "all of them must save, and find the same folder (or their own copy of it) again"
        )


def _decode_dict(plain: Any) -> dict[str, Any]:
    if not isinstance(plain, dict):
        refuse("state", plain, "what state_dict() has returned")
    return plain


_FIELDS = {"policy_version": INT, "state": Codec(dict, _decode_dict)}
