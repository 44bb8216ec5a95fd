"""`Rounds`, which starts and finishes every manager call that steps the engine, and has the state that these calls share.

An engine that is held runs no steps. `pause` holds it until `unpause` or `resume`, and `suspend` until `resume`. `suspended`
and the optimizer hook hold it until the next `generate`. The hook does not restart an engine that a caller has stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from rollout.distributed.job.meeting import Gathering
from rollout.distributed.job.world import World
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.context import MemoryMove
from rollout.engine.parts.holds import BLOCK, DIRECT, PAUSE, SUSPEND, UPDATE, HoldLevel
from rollout.errors import ConfigError, EngineStateError, RolloutFailedError, warn_caller
from rollout.journal import Journal
from rollout.manager.backend import Backend
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.images import ImageLayout
from rollout.manager.episodes.player import EpisodePlayer
from rollout.manager.groups import GroupJournal, GroupLedger
from rollout.manager.parallel import loop_of
from rollout.manager.telemetry import RolloutMetrics
from rollout.state import EngineState, KVCacheManagementMode, Mode
from rollout.threads.interrupts import interrupt_deferred

OnError = Literal["raise", "mask"]
MOST_DISCARDED = 4
"""The default of `max_discarded`, as a multiple of the number of groups that a call returns."""
Groups = GroupLedger | EpisodePlayer
Batch = TypeVar("Batch", bound=RolloutBatch)


class StalenessPacer:
    """A pacer that chooses the unfinished groups that `generate` with `min_groups` has to wait for.

    A round is the time between two such calls, and is assumed to have as many weight updates as the last round. A group in
    flight ages by that many versions before it is returned. If it would then exceed `max_staleness`, it must finish first.
    """

    def __init__(self, max_staleness: int | None, updates_per_round: int = 1) -> None:
        self.max_staleness = max_staleness
        self.updates_per_round = updates_per_round
        self._version: int | None = None

    def begin_round(self, version: int) -> None:
        """Start a round at policy version `version`, and compute the number of updates in the previous round."""
        if self._version is not None and version > self._version:
            self.updates_per_round = version - self._version
        self._version = version

    def too_old(self, groups: Groups, staleness: Iterable[tuple[int | None, int]], version: int) -> set[int]:
        """Return the ids of unfinished groups that must finish now, because after one more round they would be too old.

        Args:
            groups: the groups in flight, with the samples received so far.
            staleness: (group id, updates since the group's oldest token) for samples not received yet.
            version: the current policy version.
        """
        if self.max_staleness is None:
            return set()
        oldest = dict.fromkeys(groups.unfinished, 0)
        returned = ((group_id, version - sampled) for group_id, sampled in groups.oldest_versions())
        for group_id, age in (*staleness, *returned):
            if group_id in oldest:
                oldest[group_id] = max(oldest[group_id], age)
        return {each for each, age in oldest.items() if age + self.updates_per_round > self.max_staleness}


class Rounds:
    """The state that the calls of one manager share.

    Attributes:
        loop: the loop that steps the engine until a goal is reached.
        player: the player of the episodes that `run` starts.
        pacer: the pacer that chooses the groups that have to finish before an update.
        closed: whether the manager was closed.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        backend: Backend,
        world: World | None,
        journal: Journal | None,
        clock: Callable[[], float],
    ) -> None:
        self.engine = engine
        self.backend = backend
        self.metrics = RolloutMetrics(engine, clock)
        self.closed = False
        gathering = Gathering(engine, backend.barrier, World.of_torch() if engine.weights.collective else None)
        follows = engine.peers.group is not None and not engine.peers.group.leads
        self.loop = loop_of(
            engine, world, engine, backend, self.metrics, GroupJournal(None if follows else journal), gathering,
            self.ensure_running, clock,
        )  # fmt: skip
        self.player = EpisodePlayer(self.loop.samples, engine.check_request, engine.config.seed, clock)
        self.pacer = self.new_pacer()

    @property
    def groups(self) -> GroupLedger:
        """The groups that were submitted and not returned yet."""
        return self.loop.groups

    def new_pacer(self, updates_per_round: int = 1) -> StalenessPacer:
        """Return a pacer for the configured `max_staleness`. It expects `updates_per_round` updates in the first round."""
        return StalenessPacer(self.engine.config.max_staleness, updates_per_round)

    # --- turns of blocking calls --------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, call: str, timeout_s: float | None = None) -> Iterator[None]:
        """Reserve the engine for this thread and the method `call`; raise `EngineStateError` if an environment calls it."""
        self.player.refuse_inside(call)
        with self.engine.turns.taken(timeout_s), self.loop.call():
            yield

    @contextmanager
    def round(self, call: str, timeout_s: float | None = None) -> Iterator[None]:
        """Enter `turn`, start the engine, adapt it to the model and check that all weight changes were announced."""
        with self.turn(call, timeout_s):
            self.ensure_running()
            self.follow_model()
            self.engine.check_weights()
            yield

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Enter `turn` to score sequences: sharded weights are gathered, and no token is sampled in the `with` block."""
        with self.turn("score"):
            self.ensure_running()
            self.follow_model()
            with self.loop.gathering.held():
                self.loop.gathering.ensure()
                yield

    def follow_model(self) -> None:
        """Adapt the engine if the trainer sharded the weights by FSDP2, resized the vocabulary or changed mask settings.

        Every rank calls this method.
        """
        sharded = self.engine.guard.sharded_since()
        rebuild = sharded or self.engine.inspection.resized
        if not rebuild and not self.engine.parts.watch.changed_settings():
            return
        self.ensure_running()
        if sharded and not self.loop.gathering.collective:
            self.loop.gathering = Gathering(self.engine, self.backend.barrier, World.of_torch())
        with self.loop.gathering.held():
            self.loop.gathering.ensure()
            self.engine.rebuild() if rebuild else self.engine.follow_model()

    def refuse_in_group(self, call: str) -> None:
        """Raise `EngineStateError` about the method `call` if other ranks compute every step together with this rank."""
        if (group := self.engine.peers.everyone) is not None:
            raise EngineStateError(
                f"{call}() in the {group.name}: it runs environments or rewards on one rank while tokens are sampled, and "
                "the other members take no part; call generate() in such a group"
            )

    def too_old(
        self, pacer: StalenessPacer, groups: Groups, owner: Callable[[int], int | None] = lambda number: number
    ) -> set[int] | None:
        """Return the ids of groups that must finish before the next update, or None if their ages are not known yet.

        Args:
            owner: function that maps a group id of the backend to an id in `groups`, or to None if no group has it.
        """
        known = () if pacer.max_staleness is None else self.backend.staleness()
        if known is None:
            return None
        ages = [(owner(number), age) for number, age in known]
        return pacer.too_old(groups, ages, self.engine.policy_version)

    # --- holds --------------------------------------------------------------------------------------------------------

    def ensure_running(self) -> None:
        """Let the engine run again after a weight update or direct call stopped it; the coordinator may still hold it.

        Raises:
            EngineStateError: the manager was paused, suspended or closed by its user.
        """
        holds = self.engine.holds
        if self.closed:
            raise EngineStateError("generating after close(): build another RolloutManager")
        if BLOCK in holds:
            raise EngineStateError("generating inside `with manager.suspended():`: leave the block first")
        if SUSPEND in holds:
            raise EngineStateError("generating while suspended: call manager.resume() first")
        if PAUSE in holds or holds.level(DIRECT) is HoldLevel.PAUSED:
            raise EngineStateError("generating while paused: call manager.unpause() first")
        if self.engine.state is not EngineState.STOPPED:
            self.release(UPDATE, DIRECT)

    def make_way(self, mode: Mode) -> None:
        """Suspend the engine for a weight update, until the next `ensure_running`. `mode` is as in `Updates.suspend`."""
        if self.engine.state is not EngineState.STOPPED:
            self.suspend(UPDATE, mode, keep_prefix_cache=False)

    def release(self, *holders: str) -> MemoryMove:
        """Stop holding the engine for the reasons `holders`. If this resumes the engine, record that in the metrics."""
        if not self._suspended():
            return self.engine.holds.release(*holders)
        with self.metrics.phase("resume"), interrupt_deferred():
            move = self.engine.holds.release(*holders)
        if not self._suspended():
            self.metrics.resumed(move)
        return move

    def suspend(self, holder: str, mode: Mode, *, keep_prefix_cache: bool) -> MemoryMove:
        """Suspend the engine until `release(holder)`, recording this in the metrics. Options are as in `Updates.suspend`."""
        chosen = KVCacheManagementMode.parse(mode)
        self.engine.guard.release()
        if self._suspended():
            return self.engine.holds.hold(holder, HoldLevel.SUSPENDED)
        with self.metrics.phase("suspend"), interrupt_deferred():
            move = self.engine.holds.hold(holder, HoldLevel.SUSPENDED, chosen, keep_prefix_cache=keep_prefix_cache)
        self.metrics.enter_phase("train")
        self.metrics.suspended(move)
        return move

    def _suspended(self) -> bool:
        return self.engine.state is EngineState.SUSPENDED

    # --- batches ------------------------------------------------------------------------------------------------------

    def batch_options(self) -> dict[str, Any]:
        """Return the arguments of `RolloutBatch.from_requests` that are the same for every batch."""
        tokenizer, model = self.engine.controller.tokenizer, self.engine.model
        return {
            "policy_version": self.engine.policy_version,
            "pad_token_id": _pad_token_id(tokenizer, getattr(model, "config", None)),
            "max_staleness": self.engine.config.max_staleness,
            "device": self.engine.guard.training_device,
            "image_layout": self.image_layout,
        }

    @property
    def image_layout(self) -> ImageLayout | None:
        """The way the model finds images among its tokens; None if the engine does not support its images."""
        vision = self.engine.controller.runner.vision
        if vision.family is None or vision.image_token is None:
            return None
        family = vision.family
        return ImageLayout(
            vision.image_token,
            family.token_types,
            tiled=family.tiled,
            video=vision.video_token if family.videos else None,
            bidirectional=family.bidirectional,
            rotary=family.positions,
        )

    def handed_out(self, batch: Batch, on_error: OnError) -> Batch:
        """Record a batch in the metrics; return it. With `on_error` "raise", a failed sample raises `RolloutFailedError`."""
        self.metrics.batch(batch)
        failed = [(index, error) for index, error in enumerate(batch.errors) if error is not None]
        if failed and on_error == "raise":
            index, error = failed[0]
            raise RolloutFailedError(
                f"{len(failed)} of {len(batch)} samples failed, the first in row {index} (group "
                f"{int(batch.group_ids[index])}): {error}; all rows are in this exception's `.batch`",
                batch,
            )
        return batch

    # --- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Abandon the groups in flight (with a warning) and free the engine's memory. Repeated calls have no effect.

        Training can continue. An attached optimizer hook has no effect after this call.
        """
        if self.closed:
            return
        self.player.refuse_inside("close")
        with interrupt_deferred():
            episodes = len(self.player)
            self.player.close()
            self.backend.close()
            if self.engine.state is not EngineState.STOPPED:
                self.engine.pause()
                self.engine.stop()
            if self.engine.peers.everyone is not None:
                self.engine.peers.everyone.close()
            self.closed = True
        self.metrics.enter_phase(None)
        given_up = len(self.groups)
        self.loop.groups = GroupLedger()
        if given_up:
            warn_caller(f"close() drops {given_up} groups in flight; save state_dict() first to continue them later")
        if episodes:
            warn_caller(f"close() drops {episodes} groups of episodes in flight")


def check_on_error(on_error: str) -> None:
    """Raise `ConfigError` unless `on_error` is "raise" or "mask"."""
    if on_error not in ("raise", "mask"):
        raise ConfigError(f"on_error={on_error!r}: must be 'raise' or 'mask'")


def check_count(name: str, value: Any, least: int = 1, *, optional: bool = True) -> None:
    """Raise `ConfigError` unless the value is an integer of at least `least` or, if `optional`, None."""
    if (value is not None or not optional) and (type(value) is not int or value < least):
        raise ConfigError(f"{name}={value!r}: must be {'None or ' * optional}an integer of at least {least}")


def most_discarded(groups: int | None, asked: int | None) -> float:
    """Return the number of groups that a call may discard.

    This is `asked`, or four times `groups` by default. Without either number, there is no limit.
    """
    check_count("max_discarded", asked, 0)
    return (math.inf if groups is None else MOST_DISCARDED * groups) if asked is None else asked


def _pad_token_id(*owners: Any) -> int:
    names = ("pad_token_id", "eos_token_id")
    known = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in known if isinstance(value, int)), 0)
