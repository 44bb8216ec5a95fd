"""Tests of rank state files: a rank loads only its own complete file, from a job of the same size."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.errors import SerializationError
from trainer_hooks.rank_state import RankFile


def rollout_with(data: object, version: int) -> Any:
    return SimpleNamespace(policy_version=version, state_dict=lambda: {"format": 1, "data": data})


def save(folder: Path, rank: int, size: int, version: int = 1) -> RankFile:
    file = RankFile(folder, "rollout", rank, size)
    file.write(rollout_with(f"{rank} of {size}".encode(), version))
    return file


def load(file: RankFile, version: int | None = None) -> dict[str, Any]:
    loaded: list[dict[str, Any]] = []
    file.load(SimpleNamespace(policy_version=0, load_state_dict=loaded.append), version)
    return loaded[0]


def test_every_rank_gets_its_own_back_and_no_other_file_is_left(tmp_path):
    for rank in range(3):
        save(tmp_path / "new" / "folder", rank, 3)
    files = [save(tmp_path / "new" / "folder", rank, 2) for rank in range(2)]
    assert [load(file, 1)["data"] for file in files] == [b"0 of 2", b"1 of 2"]
    assert sorted(path.name for path in files[0].folder.iterdir()) == [
        "rollout_rank_0_of_2.msgpack",
        "rollout_rank_1_of_2.msgpack",
    ]


@pytest.mark.parametrize(
    ("saved", "wanted", "there"),
    [
        ([], (0, 1), "no state of a rollout"),
        ([(0, 2)], (0, 3), r"\['rollout_rank_0_of_2"),
        ([(0, 2)], (1, 2), r"\['rollout_"),
    ],
)
def test_what_is_missing_is_said_with_the_cure(tmp_path, saved, wanted, there):
    for rank, size in saved:
        save(tmp_path, rank, size)
    name = "rollout_rank_{}_of_{}".format(*wanted)
    with pytest.raises(
        FileNotFoundError, match=rf"has no {name}\.msgpack; it holds {there}.*as many ranks.*checkpoint=False"
    ):
        load(RankFile(tmp_path, "rollout", *wanted))


def test_a_file_of_another_moment_than_the_checkpoint_is_refused(tmp_path):
    file = save(tmp_path, 0, 1, version=4)
    with pytest.raises(SerializationError, match=r"policy_version: 4 arrived where 3, as in the rest.*must be"):
        load(file, 3)


@pytest.mark.parametrize("damage", [lambda raw: raw[:-3], lambda raw: b"\x01" + raw, lambda raw: b"\x80"])
def test_a_damaged_file_is_refused_by_name(tmp_path, damage):
    file = save(tmp_path, 0, 1)
    file.path.write_bytes(damage(file.path.read_bytes()))
    with pytest.raises(SerializationError, match=r"rollout_rank_0_of_1\.msgpack"):
        load(file)


def test_a_save_that_fails_leaves_the_earlier_one(tmp_path):
    file = save(tmp_path, 0, 1)
    with pytest.raises(TypeError):
        file.write(rollout_with(object(), 2))
    assert load(file, 1)["data"] == b"0 of 1"
