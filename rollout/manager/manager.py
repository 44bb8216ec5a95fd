"""`RolloutManager`: generate, suspend around the optimizer, metrics, checkpoint.

    manager = RolloutManager(model, tokenizer, InferenceConfig(...))
    attach(optimizer, manager)                              trainer_hooks.optimizer: announces every step
    batch = manager.generate(prompts, SamplingParams(n=8, max_tokens=256))
    with manager.suspended():
        loss.backward(); optimizer.step()

Promises: a group that was accepted is handed out exactly once, whole, unless it is given up: by `abort`, by `close`, or
by Ctrl-C in the `generate` that brought it. Whatever else raises, it stays in flight and the next call goes on with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, Self

from torch import nn

from rollout.config import CoordinatorConfig, InferenceConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.world import World
from rollout.distributed.transport.keys import JobKeys
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.sampling.token_values import ValueFunction
from rollout.errors import ConfigError, EngineStateError
from rollout.journal import Journal
from rollout.manager.batch.images import ImageLayout
from rollout.manager.batch.scores import Scorer
from rollout.manager.generation import Generation
from rollout.manager.parallel import choose_backend
from rollout.manager.rounds import Rounds
from rollout.manager.run_loop import RunLoop
from rollout.manager.runs import EpisodeRuns
from rollout.manager.scoring import Scoring
from rollout.manager.telemetry import RolloutMetrics
from rollout.manager.updates import Updates
from rollout.observe.traces import traced
from rollout.threads.blocking import called
from rollout.threads.diagnosis import watch


class RolloutManager:
    """Rollouts from the module the optimizer steps.

    Args:
        model: the Hugging Face causal model being trained, as it is or in its wrapper (DDP, FSDP1, torch.compile). Where
            FSDP has spread its weights over the ranks, every rank builds its manager at the same time. A model that
            FSDP2 shards later (a trainer's own wrapping) is taken as it is then by the next `generate`.
        tokenizer: its tokenizer, or the processor of a vision model; None where prompts are token ids and no text is asked
            for.
        config: see `InferenceConfig`; None: defaults.
        engine: an engine of this model made elsewhere; then without `config`.
        token_values: a function of the hidden states that tokens are drawn from: [rows, hidden], as the output embeddings
            read them → [rows, k] (or [rows]), such as the value head of a critic or a probe. Called without gradients, under
            the weights that sample. Its numbers are stored like log-probs, in `RolloutBatch.token_values`. The same on all
            ranks.
        coordinator: on several ranks (torch.distributed is initialised), how they compute each other's groups: options,
            True: the default ones, False: every rank for itself. Alone it changes nothing: no process, no socket.
        journal: where finished groups survive between two checkpoints; this rank's own. Every group is appended when its
            last sample has ended. `state_dict` begins a new file of it, `load_state_dict` takes from it what ended since:
            groups that were in flight are handed out as finished, and a prompt that is submitted again with the same
            parameters and metadata as a group that has ended is not computed again (an evaluation wants a manager of
            its own for that reason). The caller closes it.
        clock: seconds that never run backwards; a seam for tests.

    Raises:
        UnsupportedModelError: the model does something the engine cannot honour; the message names it.
        ConfigError: `engine` is of another model, or comes with a `config`.
        DeadlineError: the ranks have not found each other.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: InferenceConfig | None = None,
        *,
        engine: DynamicInferenceEngine | None = None,
        token_values: ValueFunction | None = None,
        coordinator: CoordinatorConfig | bool = True,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if engine is not None and not (engine.guard.is_of(model) and config is None and token_values is None):
            raise ConfigError(
                "engine= is of another model, or comes with config= or token_values=: pass its own model, and give those "
                "to the engine"
            )
        known = (None,) if engine is None else (None, engine.controller.tokenizer, engine.controller.processor)
        if engine is not None and tokenizer not in known:
            raise ConfigError("tokenizer= is not the one of engine=, which reads the prompts: pass that one, or none")
        if not isinstance(coordinator, CoordinatorConfig | bool):
            raise ConfigError(f"coordinator={coordinator!r}: must be a CoordinatorConfig, True or False")
        world = World.of_torch() if coordinator is not False else None
        with nullcontext() if world is None else world.joining():
            engine = engine or DynamicInferenceEngine(model, tokenizer, config, token_values=token_values)
            world = World.of_torch() if world is None and engine.peers.everyone is not None else world
            self._rounds = Rounds(engine, choose_backend(engine, coordinator, world), world, journal, clock)
        self.engine, self.model, self.config = engine, engine.model, engine.config
        self.tokenizer = engine.controller.tokenizer
        self._loop, self._metrics = self._rounds.loop, self._rounds.metrics
        self._generation = Generation(self._rounds)
        self._scoring = Scoring(self._rounds, self._generation)
        self._episodes = EpisodeRuns(self._rounds)
        self._updates = Updates(self._rounds)
        self._scorer = Scorer(engine, self._rounds.scoring)
        watch(self)

    def describe_state(self) -> Iterator[str]:
        """Lines for `rollout.threads.diagnosis`."""
        groups = sorted(self._rounds.groups.unfinished)
        yield (
            f"manager: {len(self._rounds.groups)} groups not handed out, {len(groups)} of them unfinished {groups[:8]}"
            f"{', closed' if self._rounds.closed else ''}"
        )

    @property
    def groups_in_flight(self) -> int:
        """Groups submitted and not yet handed out."""
        return len(self._rounds.groups)

    @property
    def episode_groups_in_play(self) -> int:
        """Groups of episodes that were begun and not yet handed out."""
        return len(self._rounds.player)

    @property
    def image_layout(self) -> ImageLayout | None:
        """How the model finds images among its tokens; None: it is of no family that is served images."""
        return self._rounds.image_layout

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.engine.policy_version

    generate = called("_generation", Generation.generate)
    submit = called("_generation", Generation.submit)
    as_completed = called("_generation", Generation.as_completed)

    abort = called("_loop", RunLoop.abort)
    generate_scored = called("_scoring", Scoring.generate_scored)
    sample = called("_episodes", EpisodeRuns.sample)
    run = called("_episodes", EpisodeRuns.run)

    score = called("_scorer", Scorer.score)
    state_dict = called("_generation", Generation.state_dict)
    load_state_dict = called("_generation", Generation.load_state_dict)
    weights_updated = called("_updates", Updates.weights_updated)
    pause = called("_updates", Updates.pause)
    unpause = called("_updates", Updates.unpause)
    suspend = called("_updates", Updates.suspend)
    resume = called("_updates", Updates.resume)
    suspended = called("_updates", Updates.suspended)
    before_optimizer_step = called("_updates", Updates.before_optimizer_step)
    adapter_switch = called("_updates", Updates.adapter_switch)

    def metrics(self, reset: bool = True) -> dict[str, float]:
        """Metrics since the last call as a flat dict for `wandb.log`; see `rollout.observe.metric_table`."""
        self._rounds.loop.sync_metrics()
        return self._rounds.metrics.snapshot(reset)

    explain = called("engine", DynamicInferenceEngine.explain)
    observe_logprobs = called("_metrics", RolloutMetrics.observe_logprobs)

    @property
    def coordinator_address(self) -> str | None:
        """`tcp://host:port` of the job's coordinator, for `client` elsewhere and `rollout top`; None on one rank."""
        coordinator = self._rounds.backend.coordinator
        return None if coordinator is None else coordinator.address

    @property
    def coordinator_keys(self) -> JobKeys | None:
        """Keys that admit a process to the job; None on one rank, and on loopback.

        Hand them on by a file that only its user can read (`JobKeys.serialize`).
        """
        coordinator = self._rounds.backend.coordinator
        return None if coordinator is None or coordinator.keys is None else coordinator.keys.client_side()

    def client(self, name: str = "agent") -> InferenceClient:
        """A client of the running job, for agents and evaluation: `async with manager.client() as client`.

        All ranks compute its requests while they are in `generate`, `as_completed` or `run`; in between, requests wait.
        In another process: `InferenceClient(manager.coordinator_address, keys=manager.coordinator_keys)`.

        Args:
            name: shown in logs and in `rollout top`.

        Raises:
            EngineStateError: closed; or there is no coordinator (one rank, `coordinator=False`, a following rank).
        """
        coordinator = self._rounds.backend.coordinator
        if self._rounds.closed or coordinator is None:
            why = "the manager was closed" if self._rounds.closed else "this manager has no coordinator"
            raise EngineStateError(
                f"client(): {why}; it needs a job of several ranks, without coordinator=False (on one rank build "
                "LLM(model): its submit() takes requests from any thread)"
            )
        return coordinator.client(name, self.config.advanced.control_timeout_s)

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[Path]:
        """A block whose timeline is written to `path` when it ends, for Perfetto and Chrome.

        On several ranks every rank enters and leaves it with the same path; rank 0 writes one file of all. If the block
        raises, or a rank is missing, each rank writes its own file, with `.rank<number>` before the suffix.

        Args:
            path: `.json`, or `.json.gz`; an existing file is replaced.

        Raises:
            EngineStateError: a trace is being recorded already.
            ConfigError: the file cannot be written.
            DeadlineError: another rank does not reach the end of its block; names it.
        """
        return traced(path, self._rounds.backend.gather)

    close = called("_rounds", Rounds.close)

    def __repr__(self) -> str:
        state = "closed" if self._rounds.closed else self.engine.state.value
        return (
            f"RolloutManager({type(self.model).__name__} on {self.engine.guard.training_device}, {state}, policy version "
            f"{self.policy_version}, {self.groups_in_flight} groups and {self.episode_groups_in_play} groups of episodes in "
            "flight)"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a RolloutManager cannot be pickled or copied: it holds the KV cache beside the very model that is trained; "
            "build one where it is to sample (state_dict() carries what is in flight)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._rounds.close()
