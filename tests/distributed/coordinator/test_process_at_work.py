"""Tests of the coordinator's process at work: text, the schedule file, outgoing frames, methods for people."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.dispatch import ScheduleRecord
from rollout.distributed.coordinator.process import DataParallelInferenceCoordinator
from rollout.distributed.coordinator.schedule_file import ScheduleFile
from rollout.distributed.coordinator.tokenizer_threads import TextCodec
from rollout.distributed.protocol import messages as wire
from rollout.errors import ConfigError, InvalidRequestError
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.state import PrefixCachingCoordinatorPolicy
from tests.distributed.coordinator.processes import (
    in_a_thread,
    launched,
    lowercase_tokenizer,
    never_started,
    starts_processes,
)
from tests.distributed.raw_peers import (
    BLOCK_SIZE,
    RawPeer,
    answer,
    connect,
    echo_rank,
    finished,
    register,
    status,
    submit,
)

# --- text ---------------------------------------------------------------------------------------------------------------


def test_completions_become_text_without_special_tokens_where_the_engine_gave_none():
    with in_a_thread(tokenizer=lowercase_tokenizer()) as address:
        client, rank = connect(address), register(address, "rank")
        client.say(submit(0, n=2))
        rank.say(finished(rank.hear(wire.Assign), [2, 3, 28, 4, 1]))
        (stretch,) = answer(client, 0, n=2)
        assert stretch.columns["text"] == ["ab c", "ab c"]


@pytest.mark.parametrize("tokenizer", ['{"no": "tokenizer"}', "/no/such/tokenizer.json"])
def test_a_tokenizer_that_is_none_fails_text_by_name_and_nothing_else(tokenizer):
    with in_a_thread(tokenizer=tokenizer) as address, echo_rank(address):
        client = connect(address)
        client.say(submit(0, "text"), submit(1))
        assert answer(client, 1)[0].columns["text"] == [None]
        failure = client.hear(wire.RequestFailed)
        assert (failure.request_id, failure.error) == (0, "InvalidRequestError")


def test_tokens_that_are_no_text_leave_a_warning(caplog):
    assert TextCodec("{}").detokenize([np.array([1, 2], "<i4").tobytes()]) == [None]
    assert "2 tokens comes without text" in caplog.text


def test_a_text_that_takes_long_to_read_does_not_hold_up_the_others():
    """The long text is still being read when others, who came later, have long been served."""
    text = " ".join("".join(random.choices(string.ascii_lowercase, k=6)) for _ in range(500_000))
    with in_a_thread(tokenizer=lowercase_tokenizer()) as address, echo_rank(address):
        client, reader = connect(address, "client"), connect(address, "reader")
        reader.say(submit(0, text), submit(1, "short"))
        answer(reader, 1)
        for request_id in range(50):
            client.say(submit(request_id))
            assert "text" in answer(client, request_id)[0].columns
        assert reader.hear(wire.Accepted).request_id == 1
        assert not any(isinstance(message, wire.Accepted) for message in reader.heard)
        reader.say(wire.Abort(0))
        assert reader.hear(wire.RequestFailed).error == "RequestAbortedError"


# --- schedule file ------------------------------------------------------------------------------------------------------


@starts_processes
def test_the_schedule_file_is_valid_and_complete_after_a_kill(tmp_path):
    path = tmp_path / "schedule.json"
    with launched(schedule_output_path=str(path), data_parallel_size=2) as handle:
        assert json.loads(path.read_text())["num_requests"] == 0
        client = connect(handle.address)
        with echo_rank(handle.address, "a"), echo_rank(handle.address, "b"):
            for request_id in range(300):
                client.say(submit(request_id, list(range(40))))
                answer(client, request_id)
        status(client)
        handle.kill()
    schedule = json.loads(path.read_text())
    assert {name: schedule[name] for name in ("policy", "data_parallel_size", "num_requests")} == {
        "policy": "longest_prefix", "data_parallel_size": 2, "num_requests": 300,
    }  # fmt: skip
    assert [record["request_id"] for record in schedule["records"]] == list(range(300))
    assert all(record["rank_index"] in (0, 1) for record in schedule["records"])
    assert set(schedule["records"][0]) == {"request_id", "rank_index", "rank", "num_hashes", "num_matched"}
    assert {(record["rank_index"], record["rank"]) for record in schedule["records"]} <= {(0, "a"), (1, "b")}


def test_the_schedule_file_is_valid_after_every_record(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text("something older " * 100)
    file = ScheduleFile(str(path), PrefixCachingCoordinatorPolicy.ROUND_ROBIN, 4)
    written = 0
    for count in (0, 1, 2, 0, 100, 1):
        file.append([ScheduleRecord(written + i, i % 4, 3, 2) for i in range(count)])
        written += count
        schedule = json.loads(path.read_text())
        assert schedule["num_requests"] == len(schedule["records"]) == written
    file.close()
    file.append([ScheduleRecord(1000, 0, 0, 0)])
    assert json.loads(path.read_text())["num_requests"] == written


def test_the_schedule_names_the_policy_that_is_in_effect(tmp_path):
    path = tmp_path / "schedule.json"
    with never_started(enable_prefix_caching=False, schedule_output_path=str(path)) as coordinator:
        coordinator.bind()
        assert json.loads(path.read_text())["policy"] == "load_balanced"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_the_schedule_and_no_request(caplog):
    with in_a_thread(schedule_output_path="/dev/full") as address, echo_rank(address):
        client = connect(address)
        for request_id in range(3):
            client.say(submit(request_id))
            answer(client, request_id)
    (warning,) = caplog.messages
    assert "'/dev/full' ends after 0 requests" in warning


def test_a_schedule_that_cannot_be_written_is_refused_before_anything_is_served(tmp_path):
    coordinator = DataParallelInferenceCoordinator(CoordinatorConfig(schedule_output_path=str(tmp_path / "no" / "x")))
    with pytest.raises(ConfigError, match="schedule_output_path"):
        coordinator.start()
    coordinator.close()


# --- methods for people -------------------------------------------------------------------------------------------------


def test_hashes_of_a_prompt_are_those_of_the_engines():
    tokens = [random.randrange(1000) for _ in range(50)]
    with never_started() as coordinator:
        assert coordinator.compute_request_hashes(tokens) == compute_block_hashes_batched(tokens, BLOCK_SIZE)
        assert coordinator.compute_request_hashes(tokens[:10]) == []
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            coordinator.compute_request_hashes("text")
    with never_started(enable_prefix_caching=False) as coordinator:
        assert coordinator.compute_request_hashes(tokens) == []


@pytest.mark.parametrize("from_path", [False, True])
def test_a_text_has_the_hashes_of_its_tokens(tmp_path, from_path):
    text, tokenizer = "abc def ghi jkl mno pqr stu", lowercase_tokenizer()
    if from_path:
        (tmp_path / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        tokenizer = str(tmp_path / "tokenizer.json")
    with never_started(tokenizer=tokenizer, block_size_tokens=4) as coordinator:
        tokens = [2 + (string.ascii_lowercase + " ").index(letter) for letter in text]
        assert coordinator.compute_request_hashes(text) == coordinator.compute_request_hashes(tokens) != []
        assert coordinator.detokenize([*tokens, 1]) == text


@contextmanager
def turning(**options: Any) -> Iterator[tuple[DataParallelInferenceCoordinator, str, Callable[[], None]]]:
    """A coordinator whose turns the test takes itself."""
    with never_started(heartbeat_timeout_s=600.0, **options) as coordinator:
        yield coordinator, coordinator.bind(), coordinator._turn


def joined(names: list[str], address: str, turn: Callable[[], None]) -> list[RawPeer]:
    """Ranks that have registered with a coordinator that has no thread."""
    ranks = []
    for name in names:
        rank = RawPeer(address)
        rank.say(
            wire.Register(wire.PROTOCOL_VERSION, name, 4, BLOCK_SIZE, "running", 0), wire.EngineMoved("running", 0)
        )
        while not any(isinstance(message, wire.RegisterAck) for message in rank.heard):
            turn()
            rank.listen(0)
        ranks.append(rank)
    return ranks


def test_the_next_rank_is_the_first_of_those_that_are_there_and_the_best_one_holds_the_prefix():
    with turning() as (coordinator, address, turn):
        assert coordinator.get_next_data_parallel_rank() is None
        joined(["a", "b"], address, turn)
        assert coordinator.get_next_data_parallel_rank() == "a"
        hashes = coordinator.compute_request_hashes(list(range(64)))
        coordinator._update_rank_hashes("b", hashes)
        assert coordinator.get_best_data_parallel_rank(hashes) == "b"
        coordinator._remove_engine("b")
        assert coordinator.get_best_data_parallel_rank(hashes) == "a"


def test_a_message_can_be_sent_to_one_engine():
    with turning() as (coordinator, address, turn):
        first, second = joined(["a", "b"], address, turn)
        assert coordinator._send_to_engine("b", wire.Command(9, "pause", None))
        assert not coordinator._send_to_engine("c", wire.Command(9, "pause", None))
        assert second.hear(wire.Command).command_id == 9
        assert not any(isinstance(message, wire.Command) for message in first.heard)
