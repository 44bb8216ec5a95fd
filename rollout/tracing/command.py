"""`rollout trace FILE...`: print the summary of a trace, and merge the files of several ranks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rollout.tracing.reading import load, parse
from rollout.tracing.summary import summary
from rollout.tracing.timeline import write


def main(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: a file cannot be read, or written.
        SystemExit: --help, or arguments that cannot be parsed.
    """
    parser = argparse.ArgumentParser("rollout trace", description="Summarise a timeline that rollout.trace() wrote.")
    parser.add_argument("file", nargs="+", help="a trace, or those of all ranks of a job")
    parser.add_argument("--slowest", type=int, default=5, metavar="N", help="samples whose lives are told (default: 5)")
    parser.add_argument("--merge", metavar="OUT", help="also write the files as one timeline, their clocks aligned")
    options = parser.parse_args(arguments)
    if options.slowest < 0:
        parser.error(f"--slowest {options.slowest}: must be at least 0")
    trace = load(options.file)
    if options.merge:
        write(trace, options.merge)
    print(summary(parse(trace, options.file[0]), options.slowest), end="")
