"""Lower bounds of step times on this machine: bytes over measured bandwidth, multiplications over the measured rate.

A decode step reads every weight once and every live key and value once, and multiplies every weight once per sequence. A
key or value that several sequences share (a common prompt) counts once. Left out, so that a floor is never too high: the
multiplications of attention, activations, norms, sampling, and all Python. Keys and values count as if they were in the same
memory as the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.rates import Rates, Weights
from tests.benchmarks.subject import Subject
from tests.benchmarks.workloads import ALL, DECODE, Workload


@dataclass(frozen=True)
class Floor:
    """Floors of one model on one machine, in seconds."""

    machine: Rates
    weights: int
    """Parameters that one token is multiplied by."""
    head: int
    """The part of the output projection, which only sampled positions need."""
    weight_bytes: int
    kv_bytes_per_token: int

    @classmethod
    def measure(cls, subject: Subject) -> Floor:
        """Measure the floor. All experts of a mixture are read, because a step of many sequences chooses nearly all."""
        weights = Weights.of(subject.model)
        return cls(
            machine=Rates.measure(subject.model.dtype, subject.device, weights.read_bytes),
            weights=weights.multiplied,
            head=weights.head,
            weight_bytes=weights.read_bytes,
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

    def of_workload(self, workload: Workload) -> dict[str, float]:
        """Tokens per second at the floor, by metric."""
        found = {ALL: workload.new_tokens / self.whole(workload)}
        if workload.decode:
            found[DECODE] = (workload.new_tokens - workload.sequences) / self.decode(workload)
        return found


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
