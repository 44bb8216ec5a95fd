"""CURVE keys of a job and their authentication.

    server pair    the coordinator's; its public half tells clients and ranks that it is no impostor
    client pair    shared by every client and rank of the job; its public half is the only one admitted

The launcher of the job makes them and gives `client_side()` to everybody but the coordinator. No secret is ever shown
in a repr, so none gets into a log or a traceback. Knows sockets, but no messages.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import error as StructError  # noqa: N812 - a class, named like a function
from typing import Any

import zmq
from zmq.utils import z85

from rollout.errors import ConfigError, SerializationError
from rollout.requests.codec import refuse

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""Where libzmq asks about new connections (ZMQ RFC 27)."""

ZAP_DOMAIN = b"rollout"


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The keys of one job, each 40 characters of z85.

    Raises:
        ConfigError: something else, or halves that do not belong together.
    """

    server_public: bytes
    server_secret: bytes | None = field(repr=False)
    """None on the clients' side."""
    client_public: bytes
    client_secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_public("server_public", self.server_public)
        _check_pair("client", self.client_public, self.client_secret)
        if self.server_secret is not None:
            _check_pair("server", self.server_public, self.server_secret)

    @classmethod
    def generate(cls) -> JobKeys:
        """Fresh keys.

        Raises:
            ConfigError: this libzmq was built without CURVE.
        """
        if not zmq.has("curve"):
            raise ConfigError(
                f"libzmq {zmq.zmq_version()} was built without CURVE: install a pyzmq wheel, or listen on loopback"
            )
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def client_side(self) -> JobKeys:
        """What clients and ranks are given: everything but the server's secret."""
        return JobKeys(self.server_public, None, self.client_public, self.client_secret)

    def serialize(self) -> dict[str, bytes | None]:
        """Plain, secrets included; the inverse of `deserialize`."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def deserialize(cls, plain: Mapping[str, Any]) -> JobKeys:
        """The inverse of `serialize`.

        Raises:
            SerializationError: not such a dict, or no such keys. The message shows no value.
        """
        if not isinstance(plain, Mapping) or set(plain) != set(cls.__slots__):
            refuse("JobKeys", type(plain).__name__, f"a dict of {', '.join(cls.__slots__)}")
        try:
            return cls(**plain)
        except ConfigError as exc:
            raise SerializationError(str(exc)) from exc

    def secure_server(self, socket: Socket) -> None:
        """Make a socket the server's end, before it binds. Its context needs a `Gatekeeper`, or nobody is admitted.

        Raises:
            ConfigError: these are the clients' keys.
        """
        if self.server_secret is None:
            raise ConfigError(
                "JobKeys.server_secret=None: a server needs it; give the coordinator the keys as they were "
                "generated, and client_side() to the others"
            )
        socket.curve_secretkey = self.server_secret
        socket.curve_server = True
        socket.zap_domain = ZAP_DOMAIN
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: Socket) -> None:
        """Make a socket the end of a client or rank, before it connects."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret


class Gatekeeper:
    """Tells libzmq whether the key of a new connection is the job's (ZMQ RFC 27, ZAP). One per context.

    Its owner watches `socket` and calls `answer` when there is something to read.
    """

    def __init__(self, context: Context, keys: JobKeys) -> None:
        self._admitted = z85.decode(keys.client_public)
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer whoever asks, without waiting."""
        while True:
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request_id, *_, mechanism, credentials = question
            admitted = mechanism == b"CURVE" and credentials == self._admitted
            verdict = (b"200", b"OK") if admitted else (b"400", b"not the key of this job")
            self.socket.send_multipart([version, request_id, *verdict, b"", b""], zmq.NOBLOCK)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on. A name other than `localhost` counts as outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _check_public(name: str, key: object) -> None:
    try:
        if type(key) is bytes and len(key) == 40 and len(z85.decode(key)) == 32:
            return
    except (KeyError, StructError):
        pass
    raise ConfigError(f"JobKeys.{name}: must be 40 characters of z85 in bytes; make keys with JobKeys.generate()")


def _check_pair(name: str, public: bytes, secret: bytes) -> None:
    _check_public(f"{name}_public", public)
    _check_public(f"{name}_secret", secret)
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"JobKeys.{name}_public: does not belong to {name}_secret; make both with JobKeys.generate()")
