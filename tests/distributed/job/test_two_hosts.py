"""Tests of two network namespaces as hosts: cut and restored links, unauthorised connections."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import zmq

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.transport.keys import JobKeys
from tests.distributed.job.job_ranks import (
    SOON_SILENT,
    Ask,
    Ranks,
    Watched,
    all_of,
    asks,
    assert_same,
    coordinator,
    eventually,
    grown,
    knocks,
    nothing_is_open,
    ready,
    undisturbed,
)
from tests.distributed.job.nursery import PATIENCE_S, Nursery, enter_network
from tests.engines import greedily, token_ids

NEAR, FAR = "10.203.0.1", "10.203.0.2"
KNOCKING_S = 3.0
"""How long a stranger waits for any answer."""


@cache
def why_not() -> str | None:
    """Why there can be no network namespaces here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}"
    try:
        with two_hosts():
            return None
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"this machine makes no network namespaces with a link between them: {exc}"


@dataclass(frozen=True)
class Host:
    """A network namespace; it lives as long as its process."""

    holder: subprocess.Popen[bytes]

    @property
    def network(self) -> str:
        """What `enter_network` takes."""
        return f"/proc/{self.holder.pid}/ns/net"

    def ip(self, *arguments: str) -> None:
        """The command `ip`, run there."""
        command = ["nsenter", f"--net={self.network}", "ip", *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)


@contextmanager
def host() -> Iterator[Host]:
    """A machine without a network; it ends with the test process, whose pipe `cat` reads."""
    shout = ["unshare", "--net", "sh", "-c", "echo here; exec cat"]
    holder = subprocess.Popen(shout, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise OSError("unshare --net failed")
        made = Host(holder)
        made.ip("link", "set", "lo", "up")
        yield made
    finally:
        holder.kill()
        holder.communicate(timeout=PATIENCE_S)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """A near one and a far one, with a link between them."""
    with host() as near, host() as far:
        near.ip("link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns", str(far.holder.pid))
        for each, address in ((near, NEAR), (far, FAR)):
            each.ip("address", "add", f"{address}/24", "dev", "link0")
            each.ip("link", "set", "link0", "up")
        yield near, far


def run_on(where: Host, play: Callable[[], Awaitable[None]]) -> None:
    """Run it in a thread on that host; sockets and processes it makes are on that host too."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter_network(where.network)
            asyncio.run(play())
        except BaseException as exc:  # noqa: BLE001 - raised below
            errors.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE"),
]


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with two_hosts() as both:
        yield both


def test_a_link_is_cut_and_healed_and_nothing_is_lost(nursery: Nursery, hosts: tuple[Host, Host]) -> None:
    near, far = hosts
    asked = [Ask(tuple(token_ids(20, seed)), greedily(2500)) for seed in range(4)]
    few = asks(24, seed=10)
    expected, expected_of_few = undisturbed(asked), undisturbed(few)
    keys = JobKeys.generate()

    async def play() -> None:
        with coordinator(keys, host=NEAR, **SOON_SILENT) as handle, nursery.children() as family:
            ranks = Ranks(nursery, family, handle.address, keys.client_side())
            ranks.begin("near", near.network)
            ranks.begin("far", far.network)
            async with (
                asyncio.timeout(PATIENCE_S),
                InferenceClient(handle.address, keys=keys.client_side()) as client,
            ):
                await ready(client, "near", "far")
                watched = [Watched(client, ask) for ask in asked]
                await grown(watched, 50)
                assert all(seen["requests_running"] == 2 for seen in ranks.look_at_all())

                near.ip("link", "set", "link0", "down")
                for each, others in zip(watched, expected, strict=True):
                    assert_same(await each.result(), others)
                await ready(client, "near")
                # Cut off, it notices by itself and computes no more for nobody.
                await eventually(lambda: bool(ranks.look("far")["losses"]))
                assert ranks.are_idle()

                near.ip("link", "set", "link0", "up")
                await ready(client, "near", "far")
                before = ranks.look("far")["generated_tokens"]
                for group, others in zip(await all_of(client, few), expected_of_few, strict=True):
                    assert_same(group, others)
                assert ranks.look("far")["generated_tokens"] > before
                await nothing_is_open(client, ranks)

    run_on(near, play)


def test_a_stranger_on_the_other_host_gets_no_word(nursery: Nursery, hosts: tuple[Host, Host]) -> None:
    near, far = hosts
    keys = JobKeys.generate()
    # Who knows the server's public half alone, and who knows nothing at all.
    half = JobKeys.generate()
    impostor = JobKeys(keys.server_public, None, half.client_public, half.client_secret)

    async def play() -> None:
        with coordinator(keys, host=NEAR) as handle, nursery.children() as family:
            visitors = {"friend": keys.client_side(), "impostor": impostor, "stranger": None}
            for name, each in visitors.items():
                patience_s = PATIENCE_S if name == "friend" else KNOCKING_S
                options = {"address": handle.address, "network": far.network, "patience_s": patience_s}
                family.append(nursery.child(knocks, keys=each, **options))
            heard = dict(zip(visitors, [child.hear() for child in family], strict=True))
            assert heard == {"friend": True, "impostor": False, "stranger": False}

    run_on(near, play)
