"""Engine thread of an `LLM` on a further rank of a tensor-parallel group: computes what the first rank decides."""

from __future__ import annotations

from rollout.llm.engine_loop import EngineLoop
from rollout.state import EngineState

LOOK_S = 1.0
"""Polling interval for Ctrl-C while waiting for the first rank's shutdown."""


class FollowerLoop(EngineLoop):
    """Follows the first rank until that shuts down; takes no requests."""

    def _compute(self) -> None:
        self.engine.parts.member.follow()

    def close(self) -> None:
        """Wait until the first rank has shut down; without this rank it could compute nothing. Harmless when repeated."""
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
        self._closed = True
        if self.engine.state is not EngineState.STOPPED:
            self.engine.pause()
            self.engine.stop()
        self._leave_group()
