"""Control of a manager: suspend around the optimizer, weight updates, metrics, and the end."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeVar

from torch import Tensor

from rollout.diagnosis import watch
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.gathering import Gathering
from rollout.distributed.job.world import World
from rollout.distributed.transport.keys import JobKeys
from rollout.engine.context import MemoryMove
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.explain.explanation import Explanation
from rollout.errors import ConfigError, EngineStateError, JournalError, RolloutFailedError
from rollout.journal.journal import Journal
from rollout.manager.backend import Backend
from rollout.manager.batch import RolloutBatch
from rollout.manager.episodes.player import EpisodePlayer
from rollout.manager.groups import GroupLedger
from rollout.manager.images import ImageLayout
from rollout.manager.recovery import GroupJournal
from rollout.manager.suspension import Suspension
from rollout.manager.telemetry import RolloutMetrics
from rollout.manager.tensor_parallel import loop_of
from rollout.manager.traces import traced
from rollout.state import EngineState, Mode
from rollout.threads.interrupts import interrupt_deferred
from rollout.tracing.recorder import Span, active

OnError = Literal["raise", "mask"]
Batch = TypeVar("Batch", bound=RolloutBatch)


class ManagerControl:
    """What a training loop calls between two `generate`, and the parts it acts on."""

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        backend: Backend,
        world: World | None,
        journal: Journal | None,
        clock: Callable[[], float],
    ) -> None:
        self.engine = engine
        self.tokenizer = engine.controller.tokenizer
        self.model = engine.model
        self.config = engine.config
        self._metrics = RolloutMetrics(engine, clock)
        self._backend = backend
        gathering = Gathering(engine, backend.barrier, World.of_torch() if engine.weights.collective else None)
        follows = engine.peers.group is not None and not engine.peers.group.leads
        self._loop = loop_of(
            engine, world, engine, backend, self._metrics, GroupJournal(None if follows else journal), gathering,
            self._ensure_running, clock,
        )  # fmt: skip
        self._suspension = Suspension(engine, self._metrics)
        self._step_began: float | None = None
        """Seconds since the epoch at the last `before_optimizer_step` without a `weights_updated` after it."""
        self._player = EpisodePlayer(self._loop.samples, engine.check_request, self.config.seed, clock, engine.tap)
        self._closed = False
        watch(self)

    def describe_state(self) -> Iterator[str]:
        """Lines for `rollout.diagnosis`."""
        groups = sorted(self._groups.unfinished)
        yield (
            f"manager: {len(self._groups)} groups not handed out, {len(groups)} of them unfinished {groups[:8]}"
            f"{', closed' if self._closed else ''}"
        )

    @property
    def groups_in_flight(self) -> int:
        """Groups submitted and not yet handed out."""
        return len(self._groups)

    # --- around the optimizer -----------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.engine.policy_version

    def weights_updated(self) -> int:
        """The weights have changed: version + 1. The optimizer hook calls this; call it yourself without one.

        Returns:
            The policy version. A manager that is closed, or whose engine is dead, counts no more.
        """
        self._player.refuse_inside("weights_updated")
        began, self._step_began = self._step_began, None
        if began is not None and (recorder := active()) is not None:
            recorder.add(Span("trainer", "optimizer.step", max(began, recorder.started), recorder.clock(), {}))
        if self.engine.state is not EngineState.STOPPED:
            with self.engine.locked():
                self.engine.weights_updated()
                # The weights have moved, whatever becomes of a group: what cannot be written is tried again later.
                with suppress(JournalError):
                    self._loop.take_ended()
            self._loop.sync_metrics()
        return self.policy_version

    def pause(self) -> None:
        """Stop generating; `generate` refuses until `unpause`."""
        self._player.refuse_inside("pause")
        self._suspension.pause()
        self._backend.barrier("pause")

    def unpause(self) -> None:
        """Allow generating again.

        Raises:
            EngineStateError: stopped by an explicit `suspend`: call `resume`.
        """
        self._player.refuse_inside("unpause")
        self._suspension.unpause()
        self._backend.barrier("unpause")

    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Take the KV cache off the device; `generate` refuses until `resume`.

        Args:
            mode: `persist`, `offload` or `recompute`; None: the configuration's.
            keep_prefix_cache: keep cached blocks that no request holds, too; False before the weights change.
        """
        self._player.refuse_inside("suspend")
        move = self._suspension.suspend(mode, keep_prefix_cache=keep_prefix_cache)
        self._backend.barrier("suspend")
        return move

    def resume(self) -> MemoryMove:
        """Bring the KV cache back and allow generating again, also after `pause`. Harmless when running."""
        self._player.refuse_inside("resume")
        move = self._suspension.resume()
        self._backend.barrier("resume")
        return move

    def suspended(self, mode: Mode = None) -> AbstractContextManager[None]:
        """A `with` block in which the KV cache is off the device; the first `generate` afterwards brings it back.

        Cached blocks that no request holds are dropped: the weights are about to change. An exception inside changes
        nothing: the next `generate` goes on.
        """
        self._player.refuse_inside("suspended")
        return self._suspension.suspended(mode)

    def before_optimizer_step(self, mode: Mode = None) -> None:
        """Suspend the KV cache before the weights change; the next `generate` resumes. The optimizer hook calls it.

        Waits until a `generate` of another thread has ended.

        Args:
            mode: `persist`, `offload` or `recompute`; None: the configured mode.
        """
        with self._turn("before_optimizer_step"):
            self._suspension.make_way(mode)
        self._step_began = time.time()

    @contextmanager
    def adapter_switch(self, what: str | None = None) -> Iterator[None]:
        """A block that changes which adapters of the model act; `trainer_hooks.peft.adapter` is the way to do so.

        Args:
            what: its name, equal on all ranks; the block's end waits for theirs. None: no other rank is waited for.

        Raises:
            DeadlineError: some ranks have not done the same; names them.
            EngineStateError: some have done something else; names them.
        """
        self._player.refuse_inside("adapter_switch")
        with self.engine.parts.control.adapter_switch():
            yield
        if what is not None:
            self._backend.barrier(what)

    # --- metrics -------------------------------------------------------------------------------------------------

    def metrics(self, reset: bool = True) -> dict[str, float]:
        """Metrics since the last call as a flat dict for `wandb.log`; names and meaning in `rollout.metrics`."""
        self._loop.sync_metrics()
        return self._metrics.snapshot(reset)

    def explain(self) -> Explanation:
        """What the engine does with this model on this machine, and why: layers, fused forward or the reason against it,
        kernels, KV cache, threads, advice. `print` it.
        """
        return self.engine.explain()

    def observe_logprobs(self, batch: RolloutBatch, logprobs: Tensor) -> None:
        """Record how far the trainer's log-probs are from the rollout's (metric `rollout/logprob_diff`).

        Args:
            batch: from `generate`.
            logprobs: [N, T] of the trainer, aligned like `batch.logprobs`, on any device.

        Raises:
            ValueError: another shape.
        """
        if logprobs.shape != batch.logprobs.shape:
            raise ValueError(
                f"logprobs of shape {tuple(logprobs.shape)}: the batch's are {tuple(batch.logprobs.shape)}"
            )
        self._metrics.logprob_diff(batch, logprobs)

    @property
    def coordinator_address(self) -> str | None:
        """`tcp://host:port` of the job's coordinator, for `client` elsewhere and `rollout top`; None on one rank."""
        coordinator = self._backend.coordinator
        return None if coordinator is None else coordinator.address

    @property
    def coordinator_keys(self) -> JobKeys | None:
        """Keys that the coordinator asks for, without its own secret; None on one rank, and
        where it listens on loopback and the launcher gave no secret.

        They are what admits a process to the job: hand them on by a file that only its user can read (`JobKeys.serialize`).
        """
        coordinator = self._backend.coordinator
        return None if coordinator is None or coordinator.keys is None else coordinator.keys.client_side()

    def client(self, name: str = "agent") -> InferenceClient:
        """A client of the running job, for agents and evaluation beside it: `async with manager.client() as client`.

        Its requests are computed by all ranks, each while it is in `generate`, `as_completed` or `run`; between two of
        these they wait, and a weight update happens to them as to any request in flight. No rank waits for them.
        In another process: `InferenceClient(manager.coordinator_address, keys=manager.coordinator_keys)`.

        Args:
            name: shown in logs and in `rollout top`.

        Raises:
            EngineStateError: closed; or there is no coordinator: one rank, `coordinator=False`, or a member of a
                tensor-parallel group that follows.
        """
        coordinator = self._backend.coordinator
        if self._closed or coordinator is None:
            why = "the manager was closed" if self._closed else "this manager has no coordinator"
            raise EngineStateError(
                f"client(): {why}; it needs a job of several ranks, without coordinator=False (on one rank build "
                "LLM(model): its submit() takes requests from any thread)"
            )
        return coordinator.client(name, self.config.control_timeout_s)

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[Path]:
        """A block whose timeline is written to `path` when it ends, for Perfetto, Chrome and `rollout trace`.

        On several ranks every rank enters and leaves it with the same path; rank 0 writes one file of all. After an
        exception in the block, or where a rank does not come, each rank writes its own, with `.rank<number>` before the
        suffix.

        Args:
            path: `.json`, or `.json.gz`; an existing file is replaced.

        Raises:
            EngineStateError: a trace is being recorded already.
            ConfigError: the file cannot be written.
            DeadlineError: another rank does not come to the end of its block; names it.
        """
        return traced(path, self._backend)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give up the groups in flight (with a warning) and free the engine's memory. Harmless when repeated.

        The model trains on as before; an attached optimizer hook has nothing more to do.
        """
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._player.refuse_inside("close")
        with interrupt_deferred():
            episodes = len(self._player)
            self._player.close()
            with self.engine.locked():
                self._loop.samples.fail(EngineStateError("the manager was closed"), self._backend)
            self._backend.close()
            if self.engine.state is not EngineState.STOPPED:
                self.engine.pause()
                self.engine.stop()
            if self.engine.peers.everyone is not None:
                self.engine.peers.everyone.close()
            self._closed = True
        self._metrics.enter_phase(None)
        given_up = len(self._groups)
        self._loop.groups = GroupLedger()
        if given_up:
            warnings.warn(
                f"close() gives up {given_up} groups in flight; save state_dict() first to continue them later",
                stacklevel=3,
            )
        if episodes:
            warnings.warn(f"close() gives up {episodes} groups of episodes in play", stacklevel=3)

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.engine.state.value
        return (
            f"RolloutManager({type(self.model).__name__} on {self.engine.guard.training_device}, {state}, policy version "
            f"{self.policy_version}, {len(self._groups)} groups and {len(self._player)} groups of episodes in flight)"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a RolloutManager cannot be pickled or copied: it holds the KV cache beside the very model that is trained; "
            "build one where it is to sample (state_dict() carries what is in flight)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._close()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _ensure_running(self) -> None:
        if self._closed:
            raise EngineStateError("generating after close(): build another RolloutManager")
        self._suspension.ensure_running()

    @contextmanager
    def _turn(self, call: str, timeout_s: float | None = None) -> Iterator[None]:
        """The turn of this thread at the engine, for a blocking method of this name."""
        self._player.refuse_inside(call)
        with self.engine.turns.taken(timeout_s):
            yield

    def _refuse_in_group(self, call: str) -> None:
        if (group := self.engine.peers.everyone) is not None:
            raise EngineStateError(
                f"{call}() in the {group.name}: it asks environments or rewards on one rank while tokens are sampled, and "
                "the other members would not hear of it; generate() serves groups"
            )

    @property
    def _groups(self) -> GroupLedger:
        return self._loop.groups

    @property
    def _journal(self) -> GroupJournal:
        return self._loop.journal

    def _batch_options(self) -> dict[str, Any]:
        return {
            "policy_version": self.policy_version,
            "pad_token_id": _pad_token_id(self.tokenizer, getattr(self.model, "config", None)),
            "max_staleness": self.config.max_staleness,
            "device": self.engine.guard.training_device,
            "image_layout": self.image_layout,
        }

    @property
    def image_layout(self) -> ImageLayout | None:
        """How the model finds images among its tokens; None: it is of no family that is served images."""
        vision = self.engine.controller.runner.vision
        if vision.family is None or vision.image_token is None:
            return None
        family = vision.family
        return ImageLayout(
            vision.image_token,
            family.token_types,
            tiled=family.tiled,
            video=vision.video_token if family.serves_video else None,
            bidirectional=family.bidirectional,
            recurrent=bool(self.engine.controller.layout.states),
            rotary=family.positions,
        )

    def _handed_out(self, batch: Batch, on_error: OnError) -> Batch:
        self._metrics.batch(batch)
        failed = [(index, error) for index, error in enumerate(batch.errors) if error is not None]
        if failed and on_error == "raise":
            index, error = failed[0]
            raise RolloutFailedError(
                f"{len(failed)} of {len(batch)} samples failed, the first in row {index} (group "
                f"{int(batch.group_ids[index])}): {error}; all rows are in this exception's `.batch`",
                batch,
            )
        return batch

    def _follow_model(self) -> None:
        """Build the engine again if the trainer has sharded the weights by FSDP2, resized the vocabulary or changed masks;
        every rank comes here."""
        inspection = self.engine.inspection
        sharded = self.engine.guard.sharded_since()
        rebuild = sharded or inspection.resized
        if not rebuild and not inspection.changed_settings():
            return
        self._ensure_running()
        if sharded and not self._loop.gathering.collective:
            self._loop.gathering = Gathering(self.engine, self._backend.barrier, World.of_torch())
        with self._loop.gathering.held():
            self._loop.gathering.ensure()
            self.engine.rebuild() if rebuild else self.engine.follow_model()


def check_on_error(on_error: str) -> None:
    """Raises: ConfigError: none of the values of `OnError`."""
    if on_error not in ("raise", "mask"):
        raise ConfigError(f"on_error={on_error!r}: must be 'raise' or 'mask'")


def _pad_token_id(*owners: Any) -> int:
    for owner in owners:
        for name in ("pad_token_id", "eos_token_id"):
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return 0
