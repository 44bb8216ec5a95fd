"""Tests of two network namespaces as hosts: cut and restored links, unauthorised connections."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator

import pytest
import zmq

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.world import loopback_identity
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
from tests.distributed.job.network_hosts import NEAR, Host, run_on, two_hosts, why_not
from tests.distributed.job.nursery import PATIENCE_S, Nursery
from tests.engines import greedily, token_ids

KNOCKING_S = 3.0
"""How long a stranger waits for any answer."""

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
            ranks.begin("near", network=near.network)
            ranks.begin("far", network=far.network)
            async with asyncio.timeout(PATIENCE_S), InferenceClient(handle.address, keys=keys.client_side()) as client:
                await ready(client, "near", "far")
                ranks.let_make(400)
                watched = [Watched(client, ask) for ask in asked]
                await grown(watched, 50)
                assert all(seen["requests_running"] == 2 for seen in ranks.look_at_all())

                near.ip("link", "set", "link0", "down")
                ranks.let_make(math.inf)
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


def test_two_networks_of_one_host_name_do_not_share_a_loopback_device(hosts: tuple[Host, Host]) -> None:
    seen = []

    async def look() -> None:
        seen.append(loopback_identity())

    for host in (*hosts, hosts[0]):
        run_on(host, look)
    assert seen[0] == seen[2] != seen[1]
    assert all(each.startswith(socket.gethostname()) for each in seen)


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
