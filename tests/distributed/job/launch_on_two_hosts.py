"""Runs the distributed example under a launcher on two network namespaces, with addresses, rendezvous and a job secret.

    python -m tests.distributed.job.launch_on_two_hosts torchrun --cut 45
    python -m tests.distributed.job.launch_on_two_hosts accelerate
    python -m tests.distributed.job.launch_on_two_hosts torchrun --lose near

`--cut` takes the link down after the first training step, for so many seconds, and the job has to end as if it had not
been; `--lose` kills one host with all its processes, and those of the other one have to end by themselves. Needs root.
Exit status 0: as expected.
"""

from __future__ import annotations

import argparse
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollout.distributed.job.job_secret import SECRET, SECRET_FILE
from tests.distributed.job.network_hosts import NEAR, Host, two_hosts, why_not
from tests.distributed.job.nursery import ROOT

PORT = 29512
LIMIT_S = 1200.0
EXAMPLE = ["examples/data_parallel_grpo.py", "--quick", "--out"]


def launcher(name: str, rank: int) -> list[str]:
    """The command of one host, as its user would type it."""
    python = [sys.executable, "-m"]
    if name == "torchrun":
        place = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}"]
        return [*python, "torch.distributed.run", *place, f"--master-addr={NEAR}", f"--master-port={PORT}"]
    place = ["--multi_gpu", "--num_machines=2", "--num_processes=2", f"--machine_rank={rank}", "--mixed_precision=no"]
    place += ["--dynamo_backend=no", "--num_cpu_threads_per_process=1", "--rdzv_backend=static"]
    return [*python, "accelerate.commands.launch", *place, f"--main_process_ip={NEAR}", f"--main_process_port={PORT}"]


def start(host: Host, rank: int, name: str, secret: Path, folder: Path) -> subprocess.Popen[bytes]:
    """The launcher on one host."""
    environment = {key: value for key, value in os.environ.items() if key != SECRET}
    environment |= {SECRET_FILE: str(secret), "GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"}
    environment |= {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        ["nsenter", f"--net={host.network}", *launcher(name, rank), *EXAMPLE, str(folder)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
    )  # fmt: skip


def say(text: str) -> None:
    """Print with the time of day."""
    print(f"{time.strftime('%X')} {text}", flush=True)


class Job:
    """The two launchers, and what they print."""

    def __init__(self, hosts: Sequence[Host], name: str, secret: Path, folder: Path) -> None:
        self.hosts = hosts
        self.launchers = [start(host, rank, name, secret, folder) for rank, host in enumerate(hosts)]
        self.rows = 0
        """Lines of the example's table of training steps."""

    def listen(self, seconds: float) -> bool:
        """Print what the hosts print, until a line has come or the time is over; whether a host still prints."""
        pipes = {each.stdout: host for host, each in zip(("near", "far"), self.launchers, strict=True) if each.stdout}
        pipes = {pipe: host for pipe, host in pipes.items() if not pipe.closed}
        for pipe in select.select(list(pipes), [], [], seconds)[0]:
            # Unbuffered: a line that was read ahead would not be seen by `select`.
            line = pipe.readline().decode()
            if not line:
                pipe.close()
                continue
            say(f"{pipes[pipe]}: {line.rstrip()}")
            self.rows += line.split(maxsplit=1)[0].isdigit() if line.strip() else 0
        return bool(pipes)

    def kill(self, number: int) -> None:
        """End all processes of a host but the one that keeps its network."""
        host = self.hosts[number]
        network = os.readlink(host.network)
        for process in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if os.readlink(process / "ns/net") == network and int(process.name) != host.holder.pid:
                    os.kill(int(process.name), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher", choices=["torchrun", "accelerate"])
    parser.add_argument("--cut", type=float, default=0.0, metavar="SECONDS", help="take the link down for so long")
    parser.add_argument("--lose", choices=["near", "far"], help="kill this host; rank 0 and coordinator are on `near`")
    options = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        parser.exit(2, f"{reason}\n")
    with tempfile.TemporaryDirectory() as folder, two_hosts() as (near, far):
        secret = Path(folder) / "job-secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        job = Job((near, far), options.launcher, secret, Path(folder))
        try:
            return play(job, near, options)
        finally:
            for number in range(2):
                job.kill(number)


def play(job: Job, near: Host, options: argparse.Namespace) -> int:
    """Cut or kill once the first step is done; returns 0 if the job ends as it should."""
    end = time.monotonic() + LIMIT_S
    done, healed_at = not (options.cut or options.lose), float("inf")
    while job.listen(1.0):
        now = time.monotonic()
        if now > end:
            say(f"not over within {LIMIT_S:g} s")
            return 1
        if job.rows and not done and options.lose:
            say(f"host {options.lose} is lost")
            job.kill(["near", "far"].index(options.lose))
            done = True
        elif job.rows and not done:
            say("the link is cut")
            near.ip("link", "set", "link0", "down")
            done, healed_at = True, now + options.cut
        if now > healed_at:
            say("the link is back")
            near.ip("link", "set", "link0", "up")
            healed_at = float("inf")
    codes = [each.wait() for each in job.launchers]
    say(f"exit statuses {codes}")
    if options.lose:
        survivor = 1 - ["near", "far"].index(options.lose)
        return 0 if done and codes[survivor] > 0 else 1
    return 0 if done and codes == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())
