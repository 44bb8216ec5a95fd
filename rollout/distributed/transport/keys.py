"""The CURVE keys of a job, and authentication with them.

The server key pair authenticates the coordinator to clients and ranks. Clients and ranks share one client key pair, and the
coordinator admits only connections with the public key of this pair. All processes but the coordinator get `client_side()`.
No secret key appears in a repr, log or traceback.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from struct import error as StructError  # noqa: N812 - a class named like a function
from typing import Any

import zmq
from zmq.utils import z85

from rollout.errors import ConfigError, SerializationError
from rollout.requests.codec import refuse

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
"""The endpoint to which libzmq sends its authentication requests (ZMQ RFC 27)."""
ZAP_DOMAIN = b"rollout"


@dataclass(frozen=True, slots=True)
class JobKeys:
    """The CURVE keys of one job. Each key is a `bytes` object of 40 characters in Z85 encoding.

    Raises:
        ConfigError: a key is malformed, or a public key does not match its secret key.
    """

    server_public: bytes
    server_secret: bytes | None = field(repr=False)
    """The secret key of the server's key pair, which only the coordinator has; None for clients and ranks."""
    client_public: bytes
    client_secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_pair("server", self.server_public, self.server_secret)
        _check_pair("client", self.client_public, self.client_secret or b"")

    @classmethod
    def generate(cls) -> JobKeys:
        """Generate new keys; raise `ConfigError` if libzmq was built without CURVE."""
        if not zmq.has("curve"):
            raise ConfigError(
                f"libzmq {zmq.zmq_version()} was built without CURVE: install a pyzmq wheel, or listen on loopback"
            )
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    def client_side(self) -> JobKeys:
        """Return a copy without the server's secret key, for clients and ranks."""
        return JobKeys(self.server_public, None, self.client_public, self.client_secret)

    def serialize(self) -> dict[str, bytes | None]:
        """Return the keys, including secret keys, as a plain dict for `deserialize`."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def deserialize(cls, plain: Mapping[str, Any]) -> JobKeys:
        """Return the keys from a dict that `serialize` has returned.

        Raises:
            SerializationError: the dict is malformed. The message contains no keys.
        """
        if not isinstance(plain, Mapping) or set(plain) != set(cls.__slots__):
            refuse("JobKeys", type(plain).__name__, f"a dict of {', '.join(cls.__slots__)}")
        try:
            return cls(**plain)
        except ConfigError as exc:
            raise SerializationError(str(exc)) from exc

    def secure_server(self, socket: Socket) -> None:
        """Configure a socket as a CURVE server before it binds. A `Gatekeeper` in its ZMQ context must admit peers."""
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
        """Configure a socket as a CURVE client before it connects."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret


class Gatekeeper:
    """A ZAP handler (ZMQ RFC 27) that admits only connections with the job's client key. A ZMQ context has at most one.

    The owner polls `socket`, and calls `answer` when the socket is readable.
    """

    def __init__(self, context: Context, keys: JobKeys) -> None:
        self._admitted = z85.decode(keys.client_public)
        self.socket: Socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answer all pending authentication requests without blocking."""
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
    """Return whether a host is reachable only from this machine: it is a loopback address, or the name `localhost`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _check_pair(name: str, public: bytes, secret: bytes | None) -> None:
    """Raise `ConfigError` unless both keys are valid and match. Without `secret`, only `public` is checked."""
    try:
        belongs = len(z85.decode(public)) == 32 if secret is None else zmq.curve_public(secret) == public
    except (KeyError, StructError, TypeError, ValueError, zmq.ZMQError):
        belongs = False
    if not belongs or type(public) is not bytes:
        raise ConfigError(f"JobKeys.{name}: must be a pair of CURVE keys; make keys with JobKeys.generate()")
