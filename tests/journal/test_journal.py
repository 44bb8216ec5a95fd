"""Tests of the journal: what is appended comes back, also to a reader beside it and from a checkpoint."""

from __future__ import annotations

import errno
import os
import tracemalloc

import msgpack
import pytest

from rollout.errors import ConfigError, JournalError, SerializationError
from rollout.journal import segment as journal_file
from rollout.journal.journal import FolderLock, Journal
from rollout.journal.segment import SegmentName, SegmentWriter, read_groups, segments
from tests.journal.journals import failing, fill, flip, group, ids_in, newest

# --- what is appended comes back ------------------------------------------------------------------------------------


def test_a_group_comes_back_with_every_field_and_its_key(tmp_path):
    given_groups = [group(7, samples=3, metadata={"answer": [1, b"x", {2: None}]}, text="né"), [], group(8)]
    with Journal(tmp_path) as journal:
        for number, samples in enumerate(given_groups):
            journal.append(samples, key=bytes([number]))
    read = list(read_groups(tmp_path))
    assert [each.key for each in read] == [b"\x00", b"\x01", b"\x02"]
    for ours, theirs in zip(read, given_groups, strict=True):
        assert [each.serialize() for each in ours.samples] == [each.serialize() for each in theirs]


def test_a_journal_is_continued_where_it_ended(tmp_path):
    for start in (0, 3, 6):
        with Journal(tmp_path) as journal:
            fill(journal, range(start, start + 3))
            assert journal.damage == []
    reader = read_groups(tmp_path)
    assert [each.samples[0].request_id for each in reader] == list(range(9))
    assert reader.damage == []
    assert len(segments(tmp_path)) == 1


def test_a_group_can_be_read_again_by_its_place(tmp_path):
    with Journal(tmp_path) as journal:
        place = journal.append(group(4), b"key")
        fill(journal, range(5, 8))
        (found,) = [each for each in read_groups(tmp_path) if each.key]
        assert found.place == place
        again = journal.read(place)
        assert again is not None
        assert (again.key, again.samples[0].request_id) == (b"key", 4)
        flip(place.path, place.record.end - 3)
        assert journal.read(place) is None
        place.path.unlink()
        assert journal.read(place) is None


def test_reading_gigabytes_needs_the_memory_of_one_group(tmp_path):
    size = 400_000
    with Journal(tmp_path) as journal:
        places = [journal.append(group(group_id, metadata=bytes(size))) for group_id in range(24)]
    # The damaged head makes the reader look for the next marker, also piece by piece.
    flip(newest(tmp_path), places[0].record.start + 20)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_groups(tmp_path)) == 23
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * size


# --- what lies in the folder ------------------------------------------------------------------------------------------


def test_a_file_that_is_removed_before_it_is_read_is_named(tmp_path):
    with Journal(tmp_path) as journal:
        fill(journal, range(1))
    reader = read_groups(tmp_path)
    newest(tmp_path).unlink()
    with pytest.raises(JournalError, match=r"\.journal cannot be read"):
        list(reader)


def test_a_pipe_among_the_files_is_passed_over(tmp_path):
    with Journal(tmp_path) as journal:
        fill(journal, range(1))
        os.mkfifo(SegmentName(99, "x").path(tmp_path))
        assert ids_in(tmp_path) == [0]
    with Journal(tmp_path) as journal:
        fill(journal, range(1, 2))
    assert ids_in(tmp_path) == [0, 1]


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EROFS, "writable"),
        (errno.ESPIPE, "regular file"),
        (errno.EIO, "disk fails"),
    ],
)
def test_the_cure_fits_the_error(tmp_path, monkeypatch, number, cure):
    def fails(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with Journal(tmp_path, fsync="never") as journal:
        monkeypatch.setattr(os, "pwrite", fails)
        with pytest.raises(JournalError, match=cure):
            fill(journal, range(1))


# --- checkpoints ----------------------------------------------------------------------------------------------------


def since(journal: Journal, mark: str | None) -> list[int]:
    return [each.samples[0].request_id for each in journal.since(mark)]


def test_since_a_checkpoint_means_after_it_and_what_no_checkpoint_needs_is_removed(tmp_path):
    with Journal(tmp_path) as journal:
        marks = []
        for step in range(4):
            fill(journal, range(10 * step, 10 * step + 2))
            marks.append(journal.checkpoint(step))
        fill(journal, range(40, 42))
        assert since(journal, marks[3]) == [40, 41]
        assert since(journal, marks[2]) == [30, 31, 40, 41]
        assert since(journal, None) == [30, 31, 40, 41]
        with pytest.raises(ConfigError, match=rf"no checkpoint '{marks[1]}', only {marks[2]}, {marks[3]}: .*keep_"):
            journal.since(marks[1])
        assert marks[3].startswith("3-")


def test_more_checkpoints_can_be_kept(tmp_path):
    with Journal(tmp_path, keep_checkpoints=3) as journal:
        marks = [journal.checkpoint(step) for step in range(4)]
        assert since(journal, marks[1]) == []
        assert len(segments(tmp_path)) == 3


def test_a_checkpoint_that_was_gone_on_from_stays_whatever_others_were_begun(tmp_path):
    """The newest mark may be of a checkpoint that was never written: whoever goes on from an earlier one dies again."""
    with Journal(tmp_path) as journal:
        fill(journal, range(1))
        good = journal.checkpoint(1)
        fill(journal, range(1, 3))
        journal.checkpoint(2)
        fill(journal, range(3, 4))
    for attempt in range(3):
        with Journal(tmp_path) as journal:
            assert since(journal, good) == list(range(1, 4 + attempt))
            fill(journal, range(4 + attempt, 5 + attempt))
            journal.checkpoint(2)
    with Journal(tmp_path) as journal:
        assert since(journal, good) == list(range(1, 7))
        newer = [journal.checkpoint(2), journal.checkpoint(3)]
        assert [name.mark for name in segments(tmp_path)] == newer


def test_in_one_process_too_the_line_goes_on_from_where_it_was_taken_up(tmp_path):
    with Journal(tmp_path) as journal:
        first, second = journal.checkpoint(1), journal.checkpoint(2)
        fill(journal, range(1))
        assert since(journal, first) == [0]
        journal.checkpoint(2)
        assert since(journal, first) == [0]
        assert since(journal, second) == [0]


def test_a_checkpoint_that_cannot_be_made_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    with Journal(tmp_path) as journal:
        fill(journal, range(2))
        with failing(monkeypatch, "pwrite", after=0), pytest.raises(JournalError, match="free space on that disk"):
            journal.checkpoint(1)
        fill(journal, range(2, 4))
        assert len(segments(tmp_path)) == 1
        mark = journal.checkpoint(1)
        fill(journal, range(4, 5))
        assert since(journal, mark) == [4]
    assert ids_in(tmp_path) == list(range(5))


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_file_of_another_version_is_refused_by_name_and_not_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_file, "VERSION", 0)
    with Journal(tmp_path) as journal:
        fill(journal, range(1))
    before = newest(tmp_path).read_bytes()
    monkeypatch.undo()
    with pytest.raises(SerializationError, match=r"\.journal: \[0, ''\] arrived where a journal of version 3"):
        Journal(tmp_path)
    with pytest.raises(SerializationError, match="a journal of version 3, which this release reads"):
        list(read_groups(tmp_path))
    assert newest(tmp_path).read_bytes() == before
    newest(tmp_path).write_bytes(b"rolljrnl" + before)
    for open_it in (lambda: Journal(tmp_path), lambda: list(read_groups(tmp_path))):
        with pytest.raises(SerializationError, match="b'rolljrnl' arrived where a journal of version 3"):
            open_it()


def test_the_journal_of_another_job_is_refused_by_name(tmp_path):
    Journal(tmp_path, job="run 1").close()
    with pytest.raises(ConfigError, match="belongs to job='run 1', and this is job='run 2': give each job a folder"):
        Journal(tmp_path, job="run 2")
    Journal(tmp_path, job="run 1").close()
    assert list(read_groups(tmp_path)) == []


def test_a_record_that_is_no_group_is_named_and_passed_over(tmp_path):
    with Journal(tmp_path) as journal:
        fill(journal, range(1))
    name = segments(tmp_path)[-1]
    writer = SegmentWriter(name.path(tmp_path), name.mark, "")
    for body in (b"\xc1", msgpack.packb({"key": b"", "samples": [1]}), msgpack.packb({"key": "", "samples": []})):
        writer.append(body)
    writer.close()
    reader = read_groups(tmp_path)
    assert len(list(reader)) == 1
    assert [each.what[:9] for each in reader.damage] == ["record 2:", "record 3:", "record 4:"]


@pytest.mark.parametrize("options", [{"fsync": "sometimes"}, {"fsync_interval_s": -1}, {"fsync_interval_s": float("nan")},
                                     {"keep_checkpoints": 1}, {"keep_checkpoints": 2.0}])  # fmt: skip
def test_an_option_out_of_range_is_refused(tmp_path, options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*: must be"):
        Journal(tmp_path, **options)
    FolderLock(tmp_path).release()


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.journal").write_text("mine")
    (tmp_path / "7.txt").write_text("mine")
    with Journal(tmp_path) as journal:
        fill(journal, range(1))
    assert ids_in(tmp_path) == [0]


def test_a_closed_journal_says_so(tmp_path):
    journal = Journal(tmp_path)
    journal.close()
    with pytest.raises(JournalError, match=r"is not open in process .*: closed, or opened before a fork"):
        journal.append(group(0))
