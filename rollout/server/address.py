"""The listening address of a server. This module does not import torch, so a wrong address is reported before loading."""

from __future__ import annotations

import errno
import ipaddress
import socket

from rollout.config import ServerConfig
from rollout.errors import ConfigError


def listen(config: ServerConfig) -> socket.socket:
    """Return a listening socket; raise `ConfigError` if the address is taken or not an address of this machine."""
    try:
        host = config.host.removeprefix("[").removesuffix("]")
        found = socket.getaddrinfo(host, config.port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as exc:
        where = f"ServerConfig.host={config.host!r}, port={config.port}"
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where}: already in use; choose another port, or 0 for a free one") from exc
        raise ConfigError(f"{where}: cannot listen there: {exc}") from exc


def url_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket on this machine, such as `http://127.0.0.1:8000`."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"
