"""Two network namespaces as hosts, with a link between them that can be cut. Needs root, `ip`, `unshare` and `nsenter`."""

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

from tests.distributed.job.nursery import PATIENCE_S, enter_network

NEAR, FAR = "10.203.0.1", "10.203.0.2"


@cache
def why_not() -> str | None:
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
        return f"/proc/{self.holder.pid}/ns/net"

    def ip(self, *arguments: str) -> None:
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
