"""Lower bounds of step times on this machine: bytes over measured bandwidth, multiplications over the measured rate.

A decode step reads every weight once and every live key and value once, and multiplies every weight once per sequence. A
key or value that several sequences share (a common prompt) counts once. Attention's own multiplications are left out, so a
floor is never too high.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tests.benchmarks.subject import Subject
from tests.benchmarks.workloads import Workload

BUFFER_BYTES = 2**28
SIDE = 2048


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def settle(device: torch.device) -> None:
    """Wait until a device has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Machine:
    """Measured rates, with as many threads as torch has."""

    bandwidth: float
    """Bytes read per second."""
    matmul: float
    """Floating point operations per second of a large matrix product in the run's dtype."""

    @classmethod
    def measure(cls, dtype: torch.dtype, device: torch.device) -> Machine:
        """Best of five reads of many megabytes, best of three products of large matrices."""
        large = device.type == "cuda"
        count, side = (2**32, 8192) if large else (BUFFER_BYTES, SIDE)
        buffer = torch.ones(count // 4, device=device)
        square = torch.randn(side, side, device=device).to(dtype)

        def timed(work: Callable[[], Any]) -> float:
            def run() -> None:
                work()
                settle(device)

            return seconds(run)

        timed(lambda: square @ square)
        return cls(
            bandwidth=count / min(timed(buffer.sum) for _ in range(5)),
            matmul=2 * side**3 / min(timed(lambda: square @ square) for _ in range(3)),
        )


@dataclass(frozen=True)
class Floor:
    """Floors of one model on one machine, in seconds."""

    machine: Machine
    weights: int
    """Parameters that every token is multiplied by."""
    head: int
    """Of these, the output projection, which only sampled positions need."""
    weight_bytes: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, subject: Subject, machine: Machine) -> Floor:
        """The embedding is tied to the output projection, so every parameter is multiplied."""
        config = subject.model.config
        return cls(
            machine=machine,
            weights=subject.parameters,
            head=config.vocab_size * config.hidden_size,
            weight_bytes=subject.parameters * subject.model.dtype.itemsize,
            kv_bytes_per_token=subject.kv_bytes_per_token,
        )

    def decode_step(self, sequences: int, kv_tokens: int) -> float:
        """Seconds of one token each for `sequences`, which attend to `kv_tokens` different tokens in all."""
        read = self.weight_bytes / self.machine.bandwidth
        multiply = 2 * self.weights * sequences / self.machine.matmul
        return max(read, multiply) + kv_tokens * self.kv_bytes_per_token / self.machine.bandwidth

    def prefill(self, tokens: int, sampled: int) -> float:
        """Seconds to compute `tokens` positions, `sampled` of them up to the logits."""
        multiply = 2 * ((self.weights - self.head) * tokens + self.head * sampled) / self.machine.matmul
        return max(self.weight_bytes / self.machine.bandwidth, multiply)

    def decode(self, workload: Workload) -> float:
        """Seconds of all steps but the one that computes the prompts, over all turns."""
        return sum(sum(steps) for _, steps in self._turns(workload))

    def whole(self, workload: Workload) -> float:
        """Seconds of all turns, prompts included; nothing is computed twice, also not from turn to turn."""
        return sum(prefill + sum(steps) for prefill, steps in self._turns(workload))

    def _turns(self, workload: Workload) -> list[tuple[float, list[float]]]:
        """Per turn: the prefill, and every decode step. A prompt's shared beginning is computed and read once."""
        turns = []
        before = [0] * workload.sequences
        for turn in workload.turns:
            chains = _prefix_chains(turn.prompts)
            fresh = len(set().union(*chains))
            prefill = self.prefill(fresh, workload.sequences)
            steps: list[float] = []
            shared, counted = 0, -1
            for done in range(1, max(turn.lengths)):
                live = [index for index, length in enumerate(turn.lengths) if length > done]
                if len(live) != counted:
                    shared, counted = len(set().union(*(chains[index] for index in live))), len(live)
                own = sum(before[index] for index in live) + done * len(live)
                steps.append(self.decode_step(len(live), shared + own))
            turns.append((prefill, steps))
            before = [
                old + len(prompt) + length
                for old, prompt, length in zip(before, turn.prompts, turn.lengths, strict=True)
            ]
        return turns

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self)


def _prefix_chains(prompts: Sequence[Sequence[int]]) -> list[set[int]]:
    """Per prompt one hash per position, equal between prompts exactly as far as they begin alike."""
    chains = []
    known: dict[tuple[int, ...], set[int]] = {}
    for prompt in prompts:
        key = tuple(prompt)
        if key not in known:
            chain, link = set(), 0
            for token in prompt:
                link = hash((link, token))
                chain.add(link)
            known[key] = chain
        chains.append(known[key])
    return chains
