"""Jobs of one rank in the tests of episodes on several ranks."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.distributed.job.rank_jobs import a_manager, the_model
from tests.rollouts import logprob_error, tokens, update


async def play(episode: Any) -> float:
    """Three turns with a tool between them."""
    for _ in range(3):
        await episode.sample([*episode.tokens, 5, episode.task], tokens(4))
        await asyncio.sleep(0.002 * episode.task)
    return 1.0


def plays(rank: int) -> dict[str, Any]:
    """Rank 0 has six tasks, the other none; then both have one, under new weights."""
    model = the_model()
    with a_manager(model) as rollout:
        first = rollout.run(range(3, 9) if rank == 0 else [], play, n=2, timeout_s=100)
        error = logprob_error(model, first) if len(first) else 0.0
        steps = rollout.engine.stats()["steps"]
        update(model, rollout)
        second = rollout.run([3 + rank], play, timeout_s=100)
        return {
            "rewards": first.rewards.tolist(),
            "error": max(error, logprob_error(model, second)),
            "sampled": int(first.response_mask.sum()),
            "steps": steps,
            "versions": second.policy_versions[second.response_mask].unique().tolist(),
        }
