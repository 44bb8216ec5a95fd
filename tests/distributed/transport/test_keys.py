"""Tests of a job's keys: matching pairs, serialisation, secrets never shown."""

from __future__ import annotations

import logging
import pickle

import msgpack
import pytest
import zmq

from rollout.distributed.transport.keys import JobKeys, is_loopback
from rollout.errors import ConfigError, SerializationError

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="this libzmq was built without CURVE")


@pytest.fixture(scope="module")
def keys() -> JobKeys:
    return JobKeys.generate()


def test_keys_travel_as_plain_bytes_and_come_back_equal(keys):
    assert JobKeys.deserialize(msgpack.unpackb(msgpack.packb(keys.serialize()))) == keys
    assert JobKeys.deserialize(keys.client_side().serialize()) == keys.client_side()
    assert pickle.loads(pickle.dumps(keys)) == keys


def test_the_client_side_lacks_the_secret_of_the_server_and_nothing_else(keys):
    given = keys.client_side().serialize()
    assert given == keys.serialize() | {"server_secret": None}


def test_no_secret_is_ever_shown(keys, caplog):
    with caplog.at_level(logging.INFO):
        logging.getLogger("somebody").info("%s %r %s", keys, keys, [keys])
    shown = f"{keys} {keys!r} {keys.client_side()} {caplog.text}"
    assert keys.client_public.decode() in shown
    assert keys.server_secret is not None
    for secret in (keys.server_secret, keys.client_secret):
        assert secret.decode() not in shown


@pytest.mark.parametrize("name", ["server_public", "server_secret", "client_public", "client_secret"])
@pytest.mark.parametrize("value", [b"", b"x" * 39, "x" * 40, b"\xff" * 40, b"#" * 40, 7, None])
def test_what_is_no_key_is_refused_by_name_and_not_shown(keys, name, value):
    if name == "server_secret" and value is None:
        return
    with pytest.raises(SerializationError, match=f"JobKeys.{name.partition('_')[0]}: must be a pair") as caught:
        JobKeys.deserialize(keys.serialize() | {name: value})
    for secret in (keys.server_secret, keys.client_secret):
        assert secret.decode() not in str(caught.value)


@pytest.mark.parametrize("plain", [None, [], {}, {"server_public": b"x" * 40}])
def test_what_are_no_keys_at_all_is_refused(plain):
    with pytest.raises(SerializationError, match="JobKeys"):
        JobKeys.deserialize(plain)


def test_halves_of_different_pairs_are_refused(keys):
    with pytest.raises(ConfigError, match=r"JobKeys\.client: must be a pair"):
        JobKeys(keys.server_public, keys.server_secret, JobKeys.generate().client_public, keys.client_secret)


def test_the_keys_of_a_client_secure_no_server(keys):
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as socket,
        pytest.raises(ConfigError, match="server_secret"),
    ):
        keys.client_side().secure_server(socket)


def test_only_this_machine_reaches_loopback():
    assert all(map(is_loopback, ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"]))
    outside = ["0.0.0.0", "::", "*", "10.0.0.1", "example.org", "", "127.0.0.1.example.org"]
    assert not any(map(is_loopback, outside))
