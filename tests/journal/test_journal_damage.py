"""Tests of the journal: damage, the end of a process, disks that fail."""

from __future__ import annotations

import io
import os
import random
import resource
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import EngineStateError, JournalError
from rollout.journal import segment as journal_file
from rollout.journal.journal import Journal
from rollout.journal.segment import (
    Gap,
    SegmentName,
    SegmentWriter,
    pack_header,
    read_body,
    read_groups,
    walk,
)
from tests.journal.journals import failing, fill, flip, group, ids_in, newest, run

# --- damage ---------------------------------------------------------------------------------------------------------


MARK = "3-0123456789abcdef"
BODIES = [b"", b"one", b"another", bytes(20), b"last"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    """A file of five records."""
    path = SegmentName(1, MARK).path(tmp_path_factory.mktemp("small"))
    writer = SegmentWriter(path, MARK, "job")
    for body in BODIES:
        writer.append(body)
    writer.close()
    return path.read_bytes()


def read_bytes(data: bytes) -> tuple[list[bytes], list[tuple[int, int]]]:
    """Bodies that are believed, and the ranges that are not."""
    file = io.BytesIO(data)
    bodies, damage = [], []
    for found in walk(file, MARK):
        body = None if isinstance(found, Gap) else read_body(file, found)
        if body is None:
            damage.append((found.start, found.end))
        elif found.sequence:
            bodies.append(body)
    return bodies, damage


def is_in_order(part: list[bytes], whole: list[bytes]) -> bool:
    rest = iter(whole)
    return all(each in rest for each in part)


def test_every_cut_costs_what_was_cut_and_no_more(small):
    ends = [28 + len(pack_header("job"))]
    for body in BODIES:
        ends.append(ends[-1] + 28 + len(body))
    assert ends[-1] == len(small)
    for size in range(len(small) + 1):
        bodies, damage = read_bytes(small[:size])
        whole = sum(end <= size for end in ends[1:])
        assert bodies == BODIES[:whole]
        assert damage == ([] if size in (0, *ends) else [(([0, *ends])[sum(end <= size for end in ends)], size)])


@pytest.mark.parametrize("window", [1 << 20, 16])
def test_every_flipped_bit_costs_one_record_at_most_and_is_reported(small, monkeypatch, window):
    monkeypatch.setattr(journal_file, "_WINDOW_BYTES", window)
    header = 28 + len(pack_header("job"))
    for bit in range(8 * len(small)):
        data = bytearray(small)
        data[bit // 8] ^= 1 << bit % 8
        bodies, damage = read_bytes(bytes(data))
        (hurt,) = damage
        assert hurt[0] <= bit // 8 < hurt[1]
        assert len(bodies) == len(BODIES) - (bit // 8 >= header)
        assert is_in_order(bodies, BODIES)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_whatever_is_done_to_a_file_only_what_was_appended_is_read(small, data):
    mutilated = bytearray(small)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(mutilated)))
        end = data.draw(st.integers(start, min(start + 80, len(mutilated))))
        source = data.draw(st.integers(0, len(small)))
        inserted = data.draw(st.binary(max_size=12) | st.just(small[source : source + 70]))
        mutilated[start:end] = inserted
    bodies, damage = read_bytes(bytes(mutilated))
    assert is_in_order(bodies, BODIES)
    assert bodies == BODIES or damage


def test_a_flipped_bit_is_named_with_its_range_and_the_other_groups_are_whole(tmp_path, caplog):
    with Journal(tmp_path) as journal:
        places = [journal.append(group(each, samples=2)) for each in range(4)]
    path = newest(tmp_path)
    whole = path.read_bytes()
    expected = [[sample.serialize() for sample in each.samples] for each in read_groups(tmp_path)]
    for position in random.Random(0).sample(range(len(whole)), 60):
        flip(path, position, position % 8)
        reader = read_groups(tmp_path)
        read = [[sample.serialize() for sample in each.samples] for each in reader]
        (damage,) = reader.damage
        lost = next((n for n, place in enumerate(places) if damage.start == place.record.start), None)
        assert read == [each for number, each in enumerate(expected) if number != lost]
        assert damage.start <= position < damage.end
        assert str(damage) in caplog.text
        path.write_bytes(whole)
    flip(path, places[1].record.start + 17)
    reader = read_groups(tmp_path)
    assert len(list(reader)) == 3
    ours = places[1].record
    assert [str(each) for each in reader.damage] == [
        f"{path}, bytes {ours.start} to {ours.end}: damaged record, 1 group lost"
    ]


def test_records_inside_a_record_are_not_taken_for_records(tmp_path):
    """A group may carry the journal's own bytes; where its head is damaged, the search for the next one passes them."""
    with Journal(tmp_path) as journal:
        fill(journal, range(2))
        outer = journal.append(group(2, metadata=newest(tmp_path).read_bytes()))
        fill(journal, range(3, 5))
    flip(outer.path, outer.record.start)
    assert ids_in(tmp_path) == [0, 1, 3, 4]


def test_a_torn_tail_is_cut_when_the_journal_is_continued_and_said_to_be(tmp_path, caplog):
    with Journal(tmp_path) as journal:
        fill(journal, range(3))
        last = journal.append(group(3)).record
    path = newest(tmp_path)
    with path.open("r+b") as file:
        file.truncate(last.end - 5)
    with Journal(tmp_path) as journal:
        (damage,) = journal.damage
        assert (damage.start, damage.end) == (last.start, last.end - 5)
        assert str(damage) in caplog.text
        assert path.stat().st_size == last.start
        fill(journal, range(4, 6))
    assert ids_in(tmp_path) == [0, 1, 2, 4, 5]


def test_a_last_record_whose_body_never_came_to_the_disk_is_cut_too(tmp_path):
    with Journal(tmp_path) as journal:
        fill(journal, range(2))
        last = journal.append(group(2)).record
    with newest(tmp_path).open("r+b") as file:
        file.seek(last.end - last.length)
        file.write(bytes(last.length))
    with Journal(tmp_path) as journal:
        assert [each.start for each in journal.damage] == [last.start]
        fill(journal, range(3, 4))
    assert ids_in(tmp_path) == [0, 1, 3]


@pytest.mark.parametrize(("size", "at"), [(None, 9), (None, 29), (7, 5)])
def test_a_file_whose_header_is_damaged_or_torn_is_read_as_far_as_it_goes_and_left_alone(tmp_path, size, at):
    with Journal(tmp_path) as journal:
        fill(journal, range(3))
        mark = journal.checkpoint(5)
        fill(journal, range(3, 6))
    damaged = newest(tmp_path)
    flip(damaged, at)
    data = damaged.read_bytes()[:size]
    damaged.write_bytes(data)
    with Journal(tmp_path) as journal:
        fill(journal, range(6, 8))
        reader = journal.since(mark)
        kept = [] if size else [3, 4, 5]
        assert [each.samples[0].request_id for each in reader] == [*kept, 6, 7]
        assert [each.what for each in reader.damage] == ["damaged header"]
    assert damaged.read_bytes() == data


# --- the end of a process -------------------------------------------------------------------------------------------


KILLED = """
import os, random, signal, sys
from rollout.journal.journal import Journal
from rollout.journal.segment import read_groups
from rollout.requests.request import DynamicInferenceRequest

folder = sys.argv[1]
told = 0
chance = random.Random(1)

def append_for_ever(pipe):
    with Journal(folder) as journal:
        number = told
        while True:
            request = DynamicInferenceRequest(request_id=number, prompt_tokens=[1], metadata=bytes(50_000))
            journal.append([request])
            number += 1
            os.write(pipe, b".")

for point in range(20):
    out, into = os.pipe()
    child = os.fork()
    if not child:
        append_for_ever(into)
    os.close(into)
    wanted = chance.randrange(1, 12)
    while wanted > 0:
        got = len(os.read(out, wanted))
        assert got, "the child has failed"
        wanted, told = wanted - got, told + got
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told += len(os.read(out, 1 << 16))
    os.close(out)
    reader = read_groups(folder)
    ids = [group.samples[0].request_id for group in reader]
    assert ids == list(range(len(ids))), (point, ids)
    assert len(ids) - told in (0, 1), (point, told, len(ids))
    # The last may have come to the disk before its writer could tell.
    told = len(ids)
print(told)
"""


def test_kill_9_at_twenty_points_loses_nothing_that_append_has_returned_from(tmp_path):
    done = run(KILLED, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path):
    (tmp_path / "lock").write_text("process 123456789 on a host of a long name, which has ended long ago\n")
    first = Journal(tmp_path)
    with pytest.raises(EngineStateError, match="is open in this process already: close"):
        Journal(tmp_path)
    refused = run("import sys; from rollout.journal.journal import Journal; Journal(sys.argv[1])", tmp_path)
    assert f"is being written by process {os.getpid()} on {socket.gethostname()}: end that one first" in refused.stderr
    # A lock that belongs to a process must not be lost by looking at it.
    assert (
        "is being written by"
        in run("import sys; from rollout.journal.journal import *; Journal(sys.argv[1])", tmp_path).stderr
    )
    fill(first, range(1))
    first.close()
    first.close()
    Journal(tmp_path).close()
    assert ids_in(tmp_path) == [0]


def test_a_forked_copy_writes_nothing_and_does_not_keep_the_folder(tmp_path):
    program = """
import os, sys
from rollout.journal.journal import Journal
journal = Journal(sys.argv[1])
out, into = os.pipe()
if not os.fork():
    try:
        journal.append([])
    except OSError as exc:
        print(exc, flush=True)
    journal.close()
    os.read(out, 1)
    os._exit(0)
journal.close()
Journal(sys.argv[1]).append([])
os.write(into, b".")
os.wait()
"""
    done = run(program, tmp_path)
    assert (done.stderr, "opened before a fork" in done.stdout) == ("", True)
    assert len(list(read_groups(tmp_path))) == 1


def test_a_lock_that_is_a_link_or_a_pipe_is_refused_and_what_it_leads_to_is_not_touched(tmp_path):
    folder, precious = tmp_path / "journal", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("mine")
    (folder / "lock").symlink_to(precious)
    with pytest.raises(EngineStateError, match="not a regular file"):
        Journal(folder)
    assert precious.read_text() == "mine"
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock")
    with pytest.raises(EngineStateError, match="not a regular file"):
        Journal(folder)


def test_a_lock_file_that_was_removed_lets_no_second_writer_in_unnoticed(tmp_path):
    first = Journal(tmp_path)
    fill(first, range(1))
    (tmp_path / "lock").unlink()
    with pytest.raises(EngineStateError, match="is open in this process already"):
        Journal(tmp_path)
    second = run("import sys; from rollout.journal.journal import Journal; Journal(sys.argv[1]).append([])", tmp_path)
    assert second.returncode == 0, second.stderr
    with pytest.raises(JournalError, match="its lock file was removed or replaced"):
        fill(first, range(1, 2))
    first.close()
    assert [len(each.samples) for each in read_groups(tmp_path)] == [1, 0]


# --- disks that fail ------------------------------------------------------------------------------------------------


def test_on_a_full_disk_an_append_is_refused_and_leaves_nothing_behind(tmp_path):
    """A real limit of the system, in the middle of a record."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(tmp_path) as journal:
        fill(journal, range(3))
        size = newest(tmp_path).stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
        try:
            with pytest.raises(JournalError, match=r"\.journal cannot be appended to \(.*\): free space on that disk"):
                journal.append(group(3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert newest(tmp_path).stat().st_size == size
        fill(journal, range(3, 5))
    assert ids_in(tmp_path) == list(range(5))


def test_a_journal_that_met_a_full_disk_can_be_opened_again(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(JournalError, match=r"cannot hold a journal \(.*\): free space on that disk"):
            Journal(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before
    with Journal(tmp_path) as journal:
        fill(journal, range(2))
    assert ids_in(tmp_path) == [0, 1]


def test_ctrl_c_in_the_middle_of_an_append_leaves_nothing_behind(tmp_path, monkeypatch):
    with Journal(tmp_path) as journal:
        fill(journal, range(2))
        with failing(monkeypatch, "pwrite", after=0, error=KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            journal.append(group(2))
        fill(journal, range(3, 4))
    reader = read_groups(tmp_path)
    assert ([each.samples[0].request_id for each in reader], reader.damage) == ([0, 1, 3], [])


def test_half_a_record_that_cannot_be_taken_back_ends_the_journal_until_it_is_opened_anew(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    fill(journal, range(2))
    with failing(monkeypatch, "ftruncate", after=0), failing(monkeypatch, "pwrite", after=0):
        with pytest.raises(JournalError):
            journal.append(group(2))
        with pytest.raises(JournalError, match=r"takes no more records, because half a record .*: reopen the journal"):
            journal.append(group(3))
    journal.close()
    with Journal(tmp_path) as journal:
        assert len(journal.damage) == 1
        fill(journal, range(4, 5))
    assert ids_in(tmp_path) == [0, 1, 4]


def test_after_a_failed_synchronisation_nothing_more_is_believed_to_be_written(tmp_path, monkeypatch):
    journal = Journal(tmp_path, fsync="always")
    with failing(monkeypatch, "fsync", after=0), pytest.raises(JournalError, match="cannot be synchronised"):
        journal.append(group(0))
    with pytest.raises(JournalError, match="because its disk failed"):
        journal.append(group(1))
    journal.close()


@pytest.mark.parametrize(("fsync", "expected"), [("always", [1, 1, 1, 1, 1]), ("interval", [0, 0, 1, 0, 1]),
                                                 ("never", [0, 0, 0, 0, 0])])  # fmt: skip
def test_appended_groups_are_forced_to_the_disk_as_often_as_asked(tmp_path, monkeypatch, fsync, expected):
    times = iter([0.0, 1.0, 9.9, 10.0, 10.0, 19.0, 21.0, 21.0, 22.0, 23.0])
    if fsync != "interval":
        times = iter(range(100))
    journal = Journal(tmp_path, fsync=fsync, fsync_interval_s=10, clock=lambda: next(times))
    calls: list[int] = []
    real = os.fsync
    monkeypatch.setattr(journal_file.os, "fsync", lambda file: (calls.append(file), real(file)))
    counts = []
    for _ in expected:
        calls.clear()
        journal.append(group(0))
        counts.append(len(calls))
    calls.clear()
    written = journal._writer._file
    journal.checkpoint(1)
    assert (written in calls) == (fsync != "never")
    calls.clear()
    journal.close()
    assert (counts, bool(calls)) == (expected, fsync != "never")


def test_a_folder_that_cannot_be_one_is_refused_with_the_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file cannot hold a journal .*choose a folder that is writable"):
        Journal(tmp_path / "file")
    with pytest.raises(JournalError, match="missing is no folder that can be read"):
        read_groups(tmp_path / "missing")
