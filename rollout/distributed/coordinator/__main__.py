"""The entry point of the coordinator's process: read the configuration from stdin, write the address to stdout, serve."""

from __future__ import annotations

import json
import os
import pickle
import sys

from rollout.distributed.coordinator.process import DataParallelInferenceCoordinator
from rollout.errors import ConfigError
from rollout.threads.diagnosis import answer_signal

STDIN, STDOUT = 0, 1


def main() -> int:
    """Serve until the job ends.

    Returns:
        The exit code: 0, or 2 if the configuration is invalid.
    """
    answer_signal()
    try:
        DataParallelInferenceCoordinator(*pickle.load(sys.stdin.buffer)).serve(_announce, STDIN)
    except ConfigError as exc:
        os.write(STDOUT, json.dumps([None, str(exc)]).encode())
        return 2
    return 0


def _announce(address: str) -> None:
    os.write(STDOUT, json.dumps([address, None]).encode())
    # Redirect stdout to /dev/null. This closes the pipe, so that the launcher's read returns, and later output cannot
    # block on a pipe that nobody reads.
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, STDOUT)
    os.close(nothing)


if __name__ == "__main__":
    sys.exit(main())
