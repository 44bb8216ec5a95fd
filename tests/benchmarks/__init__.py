"""Benchmarks of every speed claim, against named peers in the same run: `python -m tests.benchmarks.NAME --help`."""
