"""Runs the distributed example under a launcher on two network namespaces, with addresses, rendezvous and a job secret.

    python -m tests.distributed.job.launch_on_two_hosts torchrun --cut 45
    python -m tests.distributed.job.launch_on_two_hosts accelerate
    python -m tests.distributed.job.launch_on_two_hosts slurm
    python -m tests.distributed.job.launch_on_two_hosts torchrun --lose near

`slurm` runs the script of docs/how-to/distributed.md, with stand-ins for Slurm's commands. `--cut` takes the link down
after the first training step, for so many seconds, and the job has to end as if it had not been; `--lose` kills one host
with all its processes, and those of the other one have to end by themselves. Needs root. Exit status 0: as expected.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rollout.distributed.job.job_coordinator import SECRET, SECRET_FILE
from tests.distributed.job.network_hosts import NEAR, Host, two_hosts, why_not
from tests.distributed.job.nursery import ROOT

PORT = 29512
LIMIT_S = 1200.0
SCRIPT = "examples/data_parallel_grpo.py"
EXAMPLE = [SCRIPT, "--quick", "--out"]
STAND_INS = {
    "scontrol": "printf '%s\\n' near far",
    # On one host with --nodes=1, else on both, whose network namespaces are arguments of its own.
    "srun": """networks=({near} {far}) codes=0
while [[ $1 == --* ]]; do [[ $1 == --nodes=1 ]] && unset 'networks[1]'; shift; done
for node in "${{!networks[@]}}"; do SLURM_NODEID=$node nsenter --net="${{networks[node]}}" "$@" & started+=($!); done
for each in "${{started[@]}}"; do wait "$each" || codes=$?; done
exit "$codes"
""",
    "torchrun": '{python} -m torch.distributed.run "$@"',
}
"""Commands of the script that there are only on a cluster, or with another Python."""


def launcher(name: str, rank: int) -> list[str]:
    python = [sys.executable, "-m"]
    if name == "torchrun":
        place = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={rank}"]
        return [*python, "torch.distributed.run", *place, f"--master-addr={NEAR}", f"--master-port={PORT}"]
    place = ["--multi_gpu", "--num_machines=2", "--num_processes=2", f"--machine_rank={rank}", "--mixed_precision=no"]
    place += ["--dynamo_backend=no", "--num_cpu_threads_per_process=1", "--rdzv_backend=static"]
    return [*python, "accelerate.commands.launch", *place, f"--main_process_ip={NEAR}", f"--main_process_port={PORT}"]


def slurm_script() -> str:
    """The script of docs/how-to/distributed.md, for two small processes instead of 16 GPUs."""
    found = re.search(
        r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs" / "how-to" / "distributed.md").read_text(), re.DOTALL
    )
    assert found is not None
    return (
        found[1].replace("--nproc-per-node 8", "--nproc-per-node 1").replace(SCRIPT, f'{SCRIPT} --quick --out "$OUT"')
    )


def start_slurm(near: Host, far: Host, folder: Path) -> dict[str, subprocess.Popen[bytes]]:
    for name, text in STAND_INS.items():
        command = folder / name
        command.write_text("#!/bin/bash\n" + text.format(near=near.network, far=far.network, python=sys.executable))
        command.chmod(0o700)
    environment = common_environment() | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OUT": str(folder)}
    environment |= {"HOME": str(folder), "XDG_CACHE_HOME": str(Path.home() / ".cache")}
    environment |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "near,far", "SLURM_NNODES": "2"}
    command_line = ["nsenter", f"--net={near.network}", "bash", "-c", slurm_script()]
    return {"slurm": start(command_line, environment)}


def start_launchers(name: str, hosts: Sequence[Host], folder: Path) -> dict[str, subprocess.Popen[bytes]]:
    secret = folder / "job-secret"
    secret.touch(0o600)
    secret.write_text(secrets.token_hex(32))
    environment = common_environment() | {SECRET_FILE: str(secret)}
    return {
        place: start(["nsenter", f"--net={host.network}", *launcher(name, rank), *EXAMPLE, str(folder)], environment)
        for rank, (place, host) in enumerate(zip(("near", "far"), hosts, strict=True))
    }


def common_environment() -> dict[str, str]:
    """This process's environment, without a secret, and what the example needs on these hosts."""
    environment = {key: value for key, value in os.environ.items() if key not in (SECRET, SECRET_FILE)}
    environment |= {"GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1"}
    return environment | {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}


def start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process whose output is read without a buffer: `select` would not see a line that was read ahead."""
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    )


def say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", flush=True)


class Job:
    """The launchers, by what to call them, and what they print."""

    def __init__(self, hosts: Sequence[Host], launchers: Mapping[str, subprocess.Popen[bytes]]) -> None:
        self.hosts = hosts
        self.launchers = launchers
        self.rows = 0
        """Lines of the example's table of training steps."""

    def listen(self, seconds: float) -> bool:
        """Print what they print, until a line has come or the time is over; whether one still prints."""
        pipes = {each.stdout: name for name, each in self.launchers.items() if each.stdout}
        pipes = {pipe: name for pipe, name in pipes.items() if not pipe.closed}
        for pipe in select.select(list(pipes), [], [], seconds)[0]:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("launcher", choices=["torchrun", "accelerate", "slurm"])
    parser.add_argument("--cut", type=float, default=0.0, metavar="SECONDS", help="take the link down for so long")
    parser.add_argument("--lose", choices=["near", "far"], help="kill this host; rank 0 and coordinator are on `near`")
    options = parser.parse_args(arguments)
    if (reason := why_not()) is not None:
        parser.exit(2, f"{reason}\n")
    if options.launcher == "slurm" and options.lose:
        parser.error("--lose with slurm: its stand-in does not know which host it runs on; take torchrun")
    with tempfile.TemporaryDirectory() as name, two_hosts() as (near, far):
        folder = Path(name)
        slurm = options.launcher == "slurm"
        started = start_slurm(near, far, folder) if slurm else start_launchers(options.launcher, (near, far), folder)
        job = Job((near, far), started)
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
    codes = [each.wait() for each in job.launchers.values()]
    say(f"exit statuses {codes}")
    if options.lose:
        survivor = 1 - ["near", "far"].index(options.lose)
        return 0 if done and codes[survivor] > 0 else 1
    return 0 if done and not any(codes) else 1


if __name__ == "__main__":
    sys.exit(main())
