"""The `RolloutManager`, which generates, frees GPU memory for the optimizer, reports metrics and saves checkpoints.

    manager = RolloutManager(model, tokenizer, InferenceConfig(...))
    attach(optimizer, manager)                              # from trainer_hooks.optimizer; announces every weight update
    batch = manager.generate(prompts, SamplingParams(n=8, max_tokens=256))
    with manager.suspended():
        loss.backward(); optimizer.step()

A group is a prompt with its samples. An accepted group is returned exactly once, with all samples, unless it is abandoned
by `abort`, by `close`, or by Ctrl-C in the `generate` that submitted it. After any other exception it stays in flight.
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
from rollout.manager.checkpoint import Checkpoints
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
    """A rollout engine around the module that the optimizer steps.

    Args:
        model: the Hugging Face causal model being trained, bare or wrapped (DDP, torch.compile). If FSDP shards its
            weights, all ranks build their managers at the same time. FSDP2 may also shard the model later; the next
            `generate` then adapts the engine.
        tokenizer: the model's tokenizer, or the processor of a vision model. If None, prompts must be token ids, and
            completions have no text.
        config: the engine's options. None means the defaults.
        token_values: a function from hidden states [rows, hidden] to values [rows, k] or [rows], such as a critic's value
            head or a probe. The hidden states are the input of the output embeddings. The function runs while tokens are
            sampled, without gradients, and must be the same on all ranks. Its results are in `RolloutBatch.token_values`.
        coordinator: how the ranks of torch.distributed compute each other's groups: a `CoordinatorConfig`, or True for the
            default options. With False, each rank computes only its own groups. Ignored on a single rank.
        journal: this rank's file of groups that have finished since the last checkpoint; the caller closes it. `state_dict`
            starts a new file. After `load_state_dict`, groups in the journal are not computed again. To get one that was
            submitted after the checkpoint, submit the same prompt, parameters and metadata. Evaluate with another manager.
        clock: function that returns monotonic time in seconds; tests replace it.

    Raises:
        UnsupportedModelError: the engine cannot reproduce the model's forward pass. The message names the obstacle.
        ConfigError: an argument has the wrong type.
        DeadlineError: the ranks did not find each other in time.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        config: InferenceConfig | None = None,
        *,
        token_values: ValueFunction | None = None,
        coordinator: CoordinatorConfig | bool = True,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not isinstance(coordinator, CoordinatorConfig | bool):
            raise ConfigError(f"coordinator={coordinator!r}: must be a CoordinatorConfig, True or False")
        world = World.of_torch() if coordinator is not False else None
        with nullcontext() if world is None else world.joining():
            engine = DynamicInferenceEngine(model, tokenizer, config, token_values=token_values)
            world = World.of_torch() if world is None and engine.peers.everyone is not None else world
            self._rounds = Rounds(engine, choose_backend(engine, coordinator, world), world, journal, clock)
        self.engine, self.model, self.config = engine, engine.model, engine.config
        self.tokenizer = engine.controller.tokenizer
        self._loop, self._metrics = self._rounds.loop, self._rounds.metrics
        self._generation = Generation(self._rounds)
        self._scoring = Scoring(self._rounds, self._generation)
        self._checkpoints = Checkpoints(self._rounds)
        self._episodes = EpisodeRuns(self._rounds)
        self._updates = Updates(self._rounds)
        self._scorer = Scorer(engine, self._rounds.scoring)
        watch(self)

    def describe_state(self) -> Iterator[str]:
        """Yield the lines about this manager that `rollout.threads.diagnosis` prints."""
        groups = sorted(self._rounds.groups.unfinished)
        yield (
            f"manager: {len(self._rounds.groups)} groups not returned, {len(groups)} of them unfinished {groups[:8]}"
            f"{', closed' if self._rounds.closed else ''}"
        )

    @property
    def groups_in_flight(self) -> int:
        """The number of groups submitted and not yet returned."""
        return len(self._rounds.groups)

    @property
    def episode_groups_in_play(self) -> int:
        """The number of episode groups that `run` has started and not yet returned."""
        return len(self._rounds.player)

    @property
    def image_layout(self) -> ImageLayout | None:
        """The way the model finds images among its tokens; None if the model's images are not supported."""
        return self._rounds.image_layout

    @property
    def policy_version(self) -> int:
        """The number of weight updates so far."""
        return self.engine.policy_version

    generate = called("_generation", Generation.generate)
    submit = called("_generation", Generation.submit)
    as_completed = called("_generation", Generation.as_completed)

    abort = called("_loop", RunLoop.abort)
    generate_scored = called("_scoring", Scoring.generate_scored)
    sample = called("_episodes", EpisodeRuns.sample)
    run = called("_episodes", EpisodeRuns.run)

    score = called("_scorer", Scorer.score)
    state_dict = called("_checkpoints", Checkpoints.state_dict)
    load_state_dict = called("_checkpoints", Checkpoints.load_state_dict)
    weights_updated = called("_updates", Updates.weights_updated)
    pause = called("_updates", Updates.pause)
    unpause = called("_updates", Updates.unpause)
    suspend = called("_updates", Updates.suspend)
    resume = called("_updates", Updates.resume)
    suspended = called("_updates", Updates.suspended)
    before_optimizer_step = called("_updates", Updates.before_optimizer_step)
    adapter_switch = called("_updates", Updates.adapter_switch)

    def metrics(self, reset: bool = True) -> dict[str, float]:
        """Return the current interval's metrics as a flat dict for `wandb.log`; if `reset`, start a new interval."""
        self._rounds.loop.sync_metrics()
        return self._rounds.metrics.snapshot(reset)

    explain = called("engine", DynamicInferenceEngine.explain)
    observe_logprobs = called("_metrics", RolloutMetrics.observe_logprobs)

    @property
    def coordinator_address(self) -> str | None:
        """The coordinator's `tcp://host:port`, for other processes and `rollout top`; None without a coordinator."""
        coordinator = self._rounds.backend.coordinator
        return None if coordinator is None else coordinator.address

    @property
    def coordinator_keys(self) -> JobKeys | None:
        """The keys for joining the job; None if there is no coordinator or it listens only on loopback.

        Give them to another process in a file that only you can read (`JobKeys.serialize`).
        """
        coordinator = self._rounds.backend.coordinator
        return None if coordinator is None or coordinator.keys is None else coordinator.keys.client_side()

    def client(self, name: str = "agent") -> InferenceClient:
        """Return a client of the running job, for agents and evaluation: `async with manager.client() as client`.

        The ranks compute the client's requests during `generate`, `as_completed` and `run`. Between these calls, requests
        wait. In another process: `InferenceClient(manager.coordinator_address, keys=manager.coordinator_keys)`.

        Args:
            name: the client's name in logs and in `rollout top`.

        Raises:
            EngineStateError: the manager is closed or has no coordinator (a single rank, or `coordinator=False`).
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
        """Record what happens in a `with` block, and write its timeline to `path` for Perfetto or Chrome.

        On several ranks, every rank enters and leaves the block with the same path; rank 0 writes one file for all ranks. If
        the block raises, or a rank is missing, each rank writes its own file, with `.rank<number>` before the suffix.

        Args:
            path: a `.json` or `.json.gz` file; an existing file is replaced.

        Raises:
            EngineStateError: a trace is already being recorded.
            ConfigError: the file cannot be written.
            DeadlineError: another rank does not reach the end of its block; the message names the rank.
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
            "a RolloutManager cannot be pickled or copied: it owns a KV cache and shares the trained model; "
            "build one where it is to sample (state_dict() carries what is in flight)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._rounds.close()
