"""Tests of the coordinator's process: its start, its end, its keys."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.launch import launch_coordinator
from rollout.distributed.coordinator.process import DataParallelInferenceCoordinator
from rollout.distributed.protocol.messages import Assign, Disconnect
from rollout.distributed.transport.keys import JobKeys
from rollout.errors import ConfigError, ConnectionLostError, DeadlineError
from tests.distributed.coordinator.processes import (
    ROOT,
    in_a_thread,
    launched,
    lowercase_tokenizer,
    needs_curve,
    starts_processes,
    taken_port,
    wait_for_the_end,
)
from tests.distributed.raw_peers import PATIENCE_S, RawPeer, answer, connect, echo_rank, register, status, submit

# --- start --------------------------------------------------------------------------------------------------------------


@starts_processes
def test_a_launched_coordinator_serves_and_is_stopped_in_order():
    with launched() as handle:
        assert handle.alive
        client = connect(handle.address)
        with echo_rank(handle.address):
            client.say(submit(0, [42], n=3))
            (stretch,) = answer(client, 0, n=3)
            assert np.frombuffer(stretch.token_ids, "<i4").tolist() == [42, 42, 42]
            assert handle.stop(PATIENCE_S) == 0
        assert not handle.alive
        assert "terminated" in client.hear(Disconnect).reason


ENDS_BEFORE_ITS_CHILD = """
import os, sys
from rollout import CoordinatorConfig, launch_coordinator
handle = launch_coordinator(CoordinatorConfig())
forked, here = os.pipe()
if not os.fork():
    os.write(here, b".")
    sys.stdin.read()
    os._exit(0)
os.read(forked, 1)
print(handle.process.pid, flush=True)
os._exit(0)
"""


@starts_processes
def test_it_ends_with_its_launcher_although_a_child_forked_by_that_lives_on():
    launcher = subprocess.Popen(
        [sys.executable, "-c", ENDS_BEFORE_ITS_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert launcher.stdout is not None
        number = int(launcher.stdout.readline())
        with suppress(psutil.NoSuchProcess):
            psutil.Process(number).wait(PATIENCE_S)
    finally:
        launcher.communicate(timeout=PATIENCE_S)


@starts_processes
def test_the_entrypoint_sends_its_address_and_sets_the_event():
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    ours, theirs = context.Pipe()
    process = context.Process(
        target=DataParallelInferenceCoordinator.entrypoint, args=(theirs, ready, CoordinatorConfig())
    )
    process.start()
    try:
        assert ready.wait(PATIENCE_S)
        assert ours.poll(PATIENCE_S)
        client = connect(ours.recv())
        ours.close()
        with echo_rank(client.socket.last_endpoint.decode()):
            client.say(submit(0))
            answer(client, 0)
            process.terminate()
            process.join(PATIENCE_S)
            assert process.exitcode == 0
            client.hear(Disconnect)
    finally:
        process.kill()
        process.join(PATIENCE_S)


@starts_processes
def test_a_port_that_is_taken_is_an_error_and_never_another_port():
    with taken_port() as port:
        config = CoordinatorConfig(inference_coordinator_port=port)
        expected = f"inference_coordinator_port={port}: another process listens there.*choose another port"
        with pytest.raises(ConfigError, match=expected):
            launch_coordinator(config)
        coordinator = DataParallelInferenceCoordinator(config)
        with pytest.raises(ConfigError, match=expected):
            coordinator.start()
        coordinator.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::"])
def test_off_loopback_it_does_not_listen_without_keys(host):
    with pytest.raises(ConfigError, match=r"off loopback keys are needed.*insecure=True"):
        DataParallelInferenceCoordinator(CoordinatorConfig(host=host))


def test_a_host_that_is_not_here_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"host='no.such.host.invalid': no such address"):
        DataParallelInferenceCoordinator(CoordinatorConfig(host="no.such.host.invalid"))
    coordinator = DataParallelInferenceCoordinator(CoordinatorConfig(host="192.0.2.1", insecure=True))
    with pytest.raises(ConfigError, match=r"host='192.0.2.1': cannot listen there"):
        coordinator.start()
    coordinator.close()


def test_off_loopback_it_listens_with_keys_or_when_told_that_this_is_safe():
    with in_a_thread(host="0.0.0.0", insecure=True) as address:
        connect(address.replace("0.0.0.0", "127.0.0.1"))
    keys = JobKeys.generate()
    with in_a_thread(keys, host="0.0.0.0") as address:
        connect(address.replace("0.0.0.0", "127.0.0.1"), keys=keys.client_side())


@pytest.mark.parametrize("host", ["localhost", "::1", "[::1]"])
def test_a_name_and_the_other_kind_of_address_work_too(host):
    if ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as exc:
            pytest.skip(f"no IPv6 here: {exc}")
    with in_a_thread(host=host) as address:
        connect(address)


@starts_processes
def test_a_child_that_does_not_listen_in_time_is_killed_by_name(monkeypatch):
    # The keys never arrive: a child that waits for them is one that hangs.
    monkeypatch.setattr("rollout.distributed.coordinator.launch.pickle.dumps", lambda _: b"")
    with pytest.raises(DeadlineError, match=r"did not listen within timeout_s=0\.5"):
        launch_coordinator(CoordinatorConfig(), timeout_s=0.5)


@starts_processes
def test_a_child_that_dies_before_it_listens_is_an_error_with_its_exit_code(monkeypatch):
    monkeypatch.setattr("rollout.distributed.coordinator.launch.sys.executable", "/bin/false")
    with pytest.raises(ConnectionLostError, match="ended before it listened") as caught:
        launch_coordinator(CoordinatorConfig())
    assert caught.value.__notes__ == ["its exit code: 1"]


@starts_processes
def test_options_and_keys_are_in_neither_arguments_nor_environment():
    keys = JobKeys.generate()
    with launched(keys) as handle:
        child = psutil.Process(handle.process.pid)
        seen = f"{child.cmdline()} {child.environ()}"
        assert "rollout.distributed.coordinator" in seen
        for secret in (keys.server_secret, keys.client_secret):
            assert secret.decode() not in seen


@starts_processes
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_child_never_loads_torch_not_even_to_read_text():
    with launched(tokenizer=lowercase_tokenizer()) as handle:
        client = connect(handle.address)
        with echo_rank(handle.address):
            client.say(submit(0, "some text"))
            answer(client, 0)
        libraries = Path(f"/proc/{handle.process.pid}/maps").read_text(encoding="utf-8")
    assert "tokenizers" in libraries
    assert "torch" not in libraries


# --- end ----------------------------------------------------------------------------------------------------------------


@starts_processes
def test_ctrl_c_belongs_to_the_trainer():
    with launched() as handle:
        client = connect(handle.address)
        os.kill(handle.process.pid, signal.SIGINT)
        assert status(client)["state"] == "running"


LAUNCHER = f"""
import time
from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.launch import launch_coordinator
handle = launch_coordinator(CoordinatorConfig())
print(handle.process.pid, handle.address, flush=True)
time.sleep({PATIENCE_S})
"""


@contextmanager
def doomed_launcher() -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """(launcher, pid of the coordinator, address)."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert launcher.stdout is not None
    pid, address = launcher.stdout.readline().split()
    try:
        yield launcher, int(pid), address
    finally:
        launcher.kill()
        launcher.wait(PATIENCE_S)
        launcher.stdout.close()
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


@starts_processes
def test_without_launcher_it_serves_until_the_last_peer_has_left():
    with doomed_launcher() as (launcher, pid, address):
        client = connect(address)
        launcher.kill()
        launcher.wait(PATIENCE_S)
        with echo_rank(address):
            client.say(submit(0))
            answer(client, 0)
        client.say(Disconnect())
        wait_for_the_end(pid)


def test_a_peer_that_was_killed_is_noticed_at_the_next_heartbeat_and_its_work_goes_elsewhere():
    with in_a_thread(heartbeat_timeout_s=3.0) as address:
        client, rank = connect(address), register(address, "killed")
        client.say(submit(0))
        rank.hear(Assign)
        rank.vanish()
        with echo_rank(address, "other"):
            answer(client, 0)


# --- keys ---------------------------------------------------------------------------------------------------------------


@needs_curve
@starts_processes
def test_with_keys_the_job_is_served_and_strangers_hear_nothing_and_harm_nobody():
    keys, others = JobKeys.generate(), JobKeys.generate()
    forged = JobKeys(keys.server_public, None, others.client_public, others.client_secret)
    with launched(keys) as handle:
        client = connect(handle.address, keys=keys.client_side())
        strangers = [RawPeer(handle.address, each) for each in (None, others.client_side(), forged)]
        with echo_rank(handle.address, keys=keys.client_side()):
            for request_id in range(100):
                for stranger in strangers:
                    with suppress(zmq.Again):
                        stranger.socket.send(os.urandom(100), zmq.NOBLOCK)
                client.say(submit(request_id))
                answer(client, request_id)
        assert not any(stranger.listen(0.1) for stranger in strangers)
        assert [each["name"] for each in status(client)["clients"]] == ["client"]
