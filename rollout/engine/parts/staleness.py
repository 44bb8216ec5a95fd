"""Staleness of unfinished samples, and what `StalenessPolicy` does with those above `max_staleness`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rollout.config import InferenceConfig
from rollout.engine.parts.admission import Admission
from rollout.engine.parts.failures import FailureContainment
from rollout.engine.parts.ledger import Ledger
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.state import FinishReason, StalenessPolicy


@dataclass(frozen=True, eq=False)
class Staleness:
    """Of the unfinished samples of one engine, in policy versions since their oldest token."""

    _config: InferenceConfig
    _scheduler: Scheduler
    _ledger: Ledger
    _admission: Admission
    _failures: FailureContainment

    def by_request(self) -> dict[int, int]:
        """Request id → the largest staleness of its unfinished samples (0: they have no token)."""
        oldest: dict[int, int] = {}
        for sample in self._scheduler:
            number = sample.record.request_id
            oldest[number] = max(oldest.get(number, 0), self._of(sample))
        return oldest

    def enforce(self) -> None:
        """Apply `staleness_policy` to every sample staler than `max_staleness`. None of them makes this raise."""
        limit, policy = self._config.max_staleness, self._config.staleness_policy
        if limit is None or policy is StalenessPolicy.MASK:
            return
        stale = {sample.key for sample in self._scheduler if self._of(sample) > limit}
        if not stale:
            return
        for sample in self._scheduler.remove(lambda key: key in stale):
            if policy is StalenessPolicy.PARTIAL:
                self._ledger.end(sample, FinishReason.STALE)
                continue
            fresh = partial(self._admission.from_prompt, sample.record, sample.order, self._scheduler.version)
            self._ledger.counters["requests_requeued"] += self._failures.replace(
                sample, "is too stale and cannot start again from its prompt", fresh
            )

    def _of(self, sample: Sample) -> int:
        request = sample.request
        oldest = request.policy_spans.oldest(start=request.original_prompt_length)
        return 0 if oldest is None else self._scheduler.version - oldest
