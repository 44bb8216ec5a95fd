"""Tests of the journal: what is appended comes back, from a checkpoint, after a kill, from a damaged file, on a bad disk."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import journal as module
from rollout.errors import ConfigError, EngineStateError, JournalError, SerializationError
from rollout.journal import Journal
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status

ROOT = Path(__file__).parents[1]


def group(group_id: int, *, samples: int = 1, metadata: Any = None, text: str = "") -> list[DynamicInferenceRequest]:
    """A finished group whose samples have different lengths, the first none at all."""
    params = SamplingParams(n=samples, logprobs=1)
    made = []
    for index in range(samples):
        request = DynamicInferenceRequest(
            request_id=group_id, sample_index=index, prompt="p", prompt_tokens=[5, 6], sampling_params=params,
            generated_tokens=list(range(index)), generated_log_probs=[-0.1] * index, generated_text=text,
            generated_top_n_logprobs=[[(3, -0.5)]] * index, metadata=metadata, policy_version=2,
            policy_spans=VersionSpans([(2, 1)]), status=Status.COMPLETED, finish_reason=FinishReason.LENGTH,
        )  # fmt: skip
        made.append(request)
    return made


def fill(journal: Journal, ids: range) -> None:
    for group_id in ids:
        journal.append(group(group_id))


def since(journal: Journal, mark: str | None = None) -> list[int]:
    return [each.samples[0].request_id for each in journal.since(mark)]


def ids_in(folder: Path) -> list[int]:
    with Journal(folder) as journal:
        return since(journal)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.journal"))


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException | None = None) -> Iterator[None]:
    """A call of `os` that fails; `pwrite` after half of its work."""
    real = getattr(os, name)

    def call(*arguments: Any) -> Any:
        if name == "pwrite" and len(arguments[1]) > 1:
            descriptor, data, offset = arguments
            real(descriptor, data[: len(data) // 2], offset)
        raise error or OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, name, call)
        yield


# --- what is appended comes back ------------------------------------------------------------------------------------


def test_a_group_comes_back_with_every_field_and_its_key(tmp_path):
    given_groups = [group(7, samples=3, metadata={"answer": [1, b"x", {2: None}]}, text="né"), [], group(8)]
    with Journal(tmp_path) as journal:
        for number, samples in enumerate(given_groups):
            journal.append(samples, key=bytes([number]))
        read = list(journal.since(None))
    assert [each.key for each in read] == [b"\x00", b"\x01", b"\x02"]
    for ours, theirs in zip(read, given_groups, strict=True):
        assert [each.serialize() for each in ours.samples] == [each.serialize() for each in theirs]


def test_a_journal_is_continued_by_the_next_process(tmp_path):
    for start in (0, 3, 6):
        with Journal(tmp_path) as journal:
            fill(journal, range(start, start + 3))
    assert ids_in(tmp_path) == list(range(9))


def test_a_group_can_be_read_again_by_its_place(tmp_path):
    with Journal(tmp_path) as journal:
        fill(journal, range(2))
        place = journal.append(group(4), b"key")
        assert [each.place for each in journal.since(None)][-1] == place
        again = journal.read(place)
        assert again is not None
        assert (again.key, again.samples[0].request_id) == (b"key", 4)
        data = place.path.read_bytes()
        place.path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert journal.read(place) is None
        unread = journal.since(None)
        place.path.unlink()
        assert journal.read(place) is None
        with pytest.raises(JournalError, match=r"\.journal cannot be read"):
            list(unread)


# --- checkpoints ----------------------------------------------------------------------------------------------------


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
    with Journal(tmp_path / "more", keep_checkpoints=3) as journal:
        marks = [journal.checkpoint(step) for step in range(4)]
        assert since(journal, marks[1]) == []
        assert len(files(tmp_path / "more")) == 3


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
            assert since(journal, good) == list(range(1, 5 + attempt))
    with Journal(tmp_path) as journal:
        assert since(journal, good) == list(range(1, 7))
        newer = [journal.checkpoint(2), journal.checkpoint(3)]
        assert [path.stem.partition("-")[2] for path in files(tmp_path)] == newer


def test_a_checkpoint_that_cannot_be_made_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    with Journal(tmp_path) as journal:
        fill(journal, range(2))
        with failing(monkeypatch, "pwrite"), pytest.raises(JournalError, match="free space on that disk"):
            journal.checkpoint(1)
        fill(journal, range(2, 4))
        assert len(files(tmp_path)) == 1
        mark = journal.checkpoint(1)
        fill(journal, range(4, 5))
        assert since(journal, mark) == [4]
    assert ids_in(tmp_path) == list(range(5))


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [b"rolljrnl\x00", b'{"rollout_journal": 3}\n', b"[]\n", b"\xff" * 70_000])
def test_a_file_of_another_version_is_refused_by_name_and_not_touched(tmp_path, version):
    path = tmp_path / "000001-0-a.journal"
    path.write_bytes(version)
    with pytest.raises(SerializationError, match=r"000001-0-a\.journal does not begin as a journal of version 5"):
        Journal(tmp_path)
    assert path.read_bytes() == version


@pytest.mark.parametrize("number", [1, 2.0])
def test_fewer_checkpoints_than_two_are_refused(tmp_path, number):
    with pytest.raises(ConfigError, match=r"keep_checkpoints=.*: must be"):
        Journal(tmp_path, keep_checkpoints=number)
    Journal(tmp_path).close()


def test_a_folder_that_cannot_be_one_is_refused_with_the_cure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file cannot hold a journal .*: check that it is writable"):
        Journal(tmp_path / "file")
    (tmp_path / "lock").symlink_to(tmp_path / "file")
    with pytest.raises(JournalError, match="cannot hold a journal"):
        Journal(tmp_path)
    assert (tmp_path / "file").read_text() == ""


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[bytes, list[int]]:
    """A file of five groups, and the offset of each."""
    with Journal(tmp_path_factory.mktemp("whole")) as journal:
        places = [journal.append(group(each)) for each in range(5)]
    return places[0].path.read_bytes(), [place.start for place in places]


def read_bytes(folder: Path, data: bytes) -> list[int]:
    folder.mkdir(exist_ok=True)
    path = folder / "000001-0-a.journal"
    path.write_bytes(data)
    with Journal(folder) as journal:
        ids = since(journal)
        files(folder)[-1].unlink()
    return ids


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_is_done_to_the_groups_of_a_file_only_what_was_appended_is_read(tmp_path_factory, whole, data):
    given_bytes, starts = whole
    mutilated = bytearray(given_bytes)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(starts[0], len(mutilated)))
        end = data.draw(st.integers(start, min(start + 80, len(mutilated))))
        mutilated[start:end] = data.draw(st.binary(max_size=12))
    ids = read_bytes(tmp_path_factory.getbasetemp() / "mutilated", bytes(mutilated))
    assert ids == sorted(ids)
    assert set(ids) <= set(range(5))


def test_a_flipped_bit_in_a_body_costs_that_group_alone_and_is_named(tmp_path, whole, caplog):
    data, starts = whole
    damaged = bytearray(data)
    damaged[starts[1] + 40] ^= 4
    assert read_bytes(tmp_path, bytes(damaged)) == [0, 2, 3, 4]
    assert f"000001-0-a.journal, bytes {starts[1]} to {starts[2]} are left out: the record's checksum" in caplog.text
    damaged[starts[3]] ^= 4
    assert read_bytes(tmp_path, bytes(damaged)) == [0, 2]
    assert f"to {len(data)} are left out: the record is cut off" in caplog.text


def test_a_record_that_is_no_group_is_named_and_passed_over(tmp_path, monkeypatch, caplog):
    with Journal(tmp_path) as journal:
        fill(journal, range(1))
        for body in (b"\xc1", msgpack.packb({"key": b"", "samples": [1]}), msgpack.packb({"key": b""})):
            with monkeypatch.context() as patch:
                patch.setattr(module.msgpack, "packb", lambda _, body=body: body)
                journal.append([])
        assert since(journal) == [0]
    assert caplog.text.count("are left out: group") == 3


# --- the end of a process -------------------------------------------------------------------------------------------


KILLED = """
import os, random, signal, sys
from rollout.journal import Journal
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
    with Journal(folder) as journal:
        ids = [group.samples[0].request_id for group in journal.since(None)]
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
    named = f"is being written by process {os.getpid()} on {socket.gethostname()}: close that journal first"
    with pytest.raises(EngineStateError, match=named):
        Journal(tmp_path)
    assert named in run("import sys; from rollout.journal import Journal; Journal(sys.argv[1])", tmp_path).stderr
    fill(first, range(1))
    first.close()
    first.close()
    assert ids_in(tmp_path) == [0]
    with pytest.raises(JournalError, match=r"is not open in process .*: closed, or opened before a fork"):
        first.append(group(0))


def test_a_forked_copy_writes_nothing_and_does_not_keep_the_folder(tmp_path):
    program = """
import os, sys
from rollout.journal import Journal
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
    with Journal(tmp_path) as journal:
        assert len(list(journal.since(None))) == 1


# --- disks that fail ------------------------------------------------------------------------------------------------


def test_on_a_full_disk_nothing_is_left_behind(tmp_path):
    """A real limit of the system, in the middle of a record."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        with pytest.raises(JournalError, match=r"cannot hold a journal \(.*\): free space on that disk"):
            Journal(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with Journal(tmp_path) as journal:
            fill(journal, range(3))
            size = files(tmp_path)[-1].stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
            with pytest.raises(JournalError, match=r"\.journal cannot be appended to \(.*\): free space on that disk"):
                journal.append(group(3))
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert files(tmp_path)[-1].stat().st_size == size
            fill(journal, range(3, 5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ids_in(tmp_path) == list(range(5))


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
@pytest.mark.parametrize("truncates", [True, False])
def test_half_a_record_is_overwritten_by_the_next(tmp_path, monkeypatch, error, truncates):
    with Journal(tmp_path) as journal:
        fill(journal, range(2))
        with failing(monkeypatch, "pwrite", error), monkeypatch.context() as patch:
            if not truncates:
                patch.setattr(module.os, "ftruncate", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "")))
            with pytest.raises(BaseException, match=None if error else "free space"):
                journal.append(group(2, metadata=bytes(2000)))
        assert since(journal) == [0, 1]
        fill(journal, range(3, 4))
    assert ids_in(tmp_path) == [0, 1, 3]


def test_after_a_failed_synchronisation_the_journal_is_closed(tmp_path, monkeypatch):
    journal = Journal(tmp_path)
    journal.append(group(0))
    with failing(monkeypatch, "fsync"), pytest.raises(JournalError, match="cannot be synchronised"):
        journal.checkpoint(1)
    with pytest.raises(JournalError, match="is not open"):
        journal.append(group(1))
    Journal(tmp_path).close()
