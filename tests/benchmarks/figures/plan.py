"""Which benchmark measures each figure, with which arguments."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.figures import tables


@dataclass(frozen=True)
class Figure:
    """One benchmark whose result is stored.

    Attributes:
        module: of the benchmark; run with `arguments` and `--json FILE`.
        fragments: name of each table in the pages, and what renders it from the JSON.
        peers: whether it takes `--vllm-python` (`vllm`) and `--llama-python` (`llama`).
    """

    module: str
    arguments: str
    fragments: dict[str, Callable[[Any], str]]
    peers: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """As a user types it."""
        return " ".join(["python -m", self.module, *shlex.split(self.arguments)])


FIGURES: dict[str, Figure] = {
    "race": Figure(
        "tests.benchmarks.race",
        "--sizes 100m --dtypes bfloat16 --workloads steady grpo prefix multiturn startup "
        "--peers ours generate vllm llama.cpp --rounds 2 --limit 60",
        {"readme": tables.readme, "race": tables.race, "bookkeeping": tables.bookkeeping}, ("vllm", "llama"),
    ),
    "race-float32": Figure(
        "tests.benchmarks.race", "--sizes 100m --dtypes float32 --workloads steady --peers ours vllm --rounds 2",
        {"race-float32": tables.race}, ("vllm",),
    ),
    "race-10m": Figure(
        "tests.benchmarks.race", "--sizes 10m --dtypes bfloat16 --workloads steady --peers ours generate vllm --rounds 2",
        {"race-10m": tables.race}, ("vllm",),
    ),
    "families": Figure(
        "tests.benchmarks.families", "--scale 0.25 --rounds 3", {"families": tables.families}, ("vllm",),
    ),
    "families-100m": Figure(
        "tests.benchmarks.families", "--size 100m --scale 0.25 --rounds 1", {"families-100m": tables.families}, ("vllm",),
    ),
    "coordinator": Figure(
        "tests.benchmarks.coordinator", "latency throughput core long_tail",
        {"coordinator": tables.coordinator, "long-tail": tables.long_tail},
    ),
    "hostile": Figure("tests.benchmarks.coordinator", "hostile --attack-seconds 2", {"hostile": tables.hostile}),
    "serving": Figure("tests.benchmarks.serving", "--rounds 10", {"serving": tables.serving}),
    "fair-share": Figure("tests.benchmarks.fair_share", "--rounds 2", {"fair-share": tables.fair_share}),
    "busy": Figure("tests.benchmarks.busy", "", {"busy": tables.busy}, ("vllm",)),
    "tree": Figure("tests.benchmarks.tree", "", {"tree": tables.tree}),
    "speculation": Figure("tests.benchmarks.speculation", "--rounds 2", {"speculation": tables.speculation}),
    "suspend": Figure("tests.benchmarks.suspend", "", {"suspend": tables.suspend}),
    "trl-step": Figure("tests.benchmarks.trl_step", "", {"trl-step": tables.trl_step}),
    "score": Figure("tests.benchmarks.score", "--rounds 2", {"score": tables.score}),
    "exact": Figure("tests.benchmarks.exact", "--dtype bfloat16", {"exact": tables.exact}),
    "episodes": Figure("tests.benchmarks.episodes", "--longest 24", {"episodes": tables.episodes}),
    "kept-tokens": Figure("tests.benchmarks.kept_tokens", "", {"kept-tokens": tables.kept_tokens}),
    "weights": Figure("tests.benchmarks.weights", "", {"weights": tables.weights}),
    "tracing": Figure("tests.benchmarks.tracing", "", {"tracing": tables.tracing}),
    "journal": Figure("tests.benchmarks.journal", "", {"journal": tables.journal}),
}  # fmt: skip
"""By name, in the order in which they are measured."""
