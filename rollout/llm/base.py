"""Scores and control of an `LLM`, for the async and the blocking class to wrap."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rollout.llm.parts import LLMParts
from rollout.manager.batch import RolloutBatch
from rollout.manager.token_scores import Sequences, TokenScores, score_by
from rollout.state import EngineState

_PAUSE_IS_DIRECT = (
    "direct mode has no coordinator to relay {0}(): use llm.engine.{0}() or llm.suspended(), or build the LLM with "
    "use_coordinator=True"
)


class BaseLLM(LLMParts):
    """What `AsyncLLM` and `LLM` share besides requests: scores and control."""

    def score(
        self,
        rollouts: RolloutBatch | Sequences,
        *,
        prompt_lengths: int | Sequence[int] | None = None,
        temperature: float | None = None,
        top_k: int = 0,
        entropy: bool = False,
        adapter: str | None = None,
    ) -> TokenScores:
        """Log-probs of given sequences; blocks, and requests that run stand still meanwhile. See `RolloutManager.score`.

        With a coordinator, this rank's engine scores.

        Raises:
            InvalidRequestError, ConfigError: see `RolloutManager.score`.
            EngineStateError, EngineDeadError: the engine is paused, suspended or stopped, or dead.
            RuntimeError: called on the loop's own thread.
        """
        self.loop.refuse_inside("score()")
        return score_by(
            self.engine, rollouts, prompt_lengths=prompt_lengths, temperature=temperature, top_k=top_k, entropy=entropy,
            adapter=adapter,
        )  # fmt: skip

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _control(self, what: str, state: EngineState, timeout_s: float | None, ask: Any) -> None:
        if self._job is None:
            raise RuntimeError(_PAUSE_IS_DIRECT.format(what))
        if self.is_primary_rank:
            await asyncio.wrap_future(self._job.control(ask))
        else:
            await asyncio.to_thread(self.engine.wait_until, state, timeout_s)
