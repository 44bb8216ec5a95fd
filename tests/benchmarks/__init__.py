"""Every claim of speed is here, against a named peer in the same run. `python -m tests.benchmarks.NAME --help`."""
