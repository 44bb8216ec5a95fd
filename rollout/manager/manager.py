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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from rollout.config import CoordinatorConfig, InferenceConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.world import World
from rollout.distributed.transport.keys import JobKeys
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.explain import Explanation
from rollout.engine.parts.context import MemoryMove
from rollout.errors import ConfigError, EngineStateError
from rollout.journal.journal import Journal
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.images import ImageLayout
from rollout.manager.batch.scores import Sequences, TokenScores, score_by
from rollout.manager.episodes.batch import EpisodeBatch
from rollout.manager.episodes.environment import EnvironmentFactory, Play
from rollout.manager.episodes.episode import Episode
from rollout.manager.generation import Generation
from rollout.manager.parallel import choose_backend
from rollout.manager.rounds import OnError, Rounds
from rollout.manager.runs import EpisodeRuns
from rollout.manager.scoring import PromptTask, Reward, ScoredBatch, ScoredSample, Scoring, rewards_differ
from rollout.manager.traces import traced
from rollout.manager.updates import Updates
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams, takes_options
from rollout.state import Mode
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
        coordinator: CoordinatorConfig | bool = True,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if engine is not None and (not engine.guard.is_of(model) or config is not None):
            raise ConfigError("engine= is of another model, or comes with config=: pass its own model, and no config")
        known = (None,) if engine is None else (None, engine.controller.tokenizer, engine.controller.processor)
        if engine is not None and tokenizer not in known:
            raise ConfigError("tokenizer= is not the one of engine=, which reads the prompts: pass that one, or none")
        if not isinstance(coordinator, CoordinatorConfig | bool):
            raise ConfigError(f"coordinator={coordinator!r}: must be a CoordinatorConfig, True or False")
        world = World.of_torch() if coordinator is not False else None
        with nullcontext() if world is None else world.joining():
            engine = engine or DynamicInferenceEngine(model, tokenizer, config)
            world = World.of_torch() if world is None and engine.peers.everyone is not None else world
            self._rounds = Rounds(engine, choose_backend(engine, coordinator, world), world, journal, clock)
        self.engine, self.model, self.config = engine, engine.model, engine.config
        self.tokenizer = engine.controller.tokenizer
        self._generation = Generation(self._rounds)
        self._scoring = Scoring(self._rounds, self._generation)
        self._episodes = EpisodeRuns(self._rounds)
        self._updates = Updates(self._rounds)
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
        return self._rounds.image_layout()

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.engine.policy_version

    @takes_options
    def generate(
        self,
        /,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        min_groups: int | None = None,
        metadata: Sequence[Any] | None = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> RolloutBatch:
        """Sample completions; blocks until they are done.

        On several ranks every rank calls it, with its own prompts or with `[]`, and all ranks return together: a rank that
        finishes early computes for the others. If it raises on one rank, the others wait until that rank calls again or
        ends; after `control_timeout_s` they raise a `DeadlineError` that names it. Sharded weights are gathered when all
        ranks have called it. Threads that call it take turns.

        Args:
            prompts: texts, token id sequences, lists of chat messages, or what a processor returned for one prompt with
                images; or the output of one call of the tokenizer, whose padding is dropped by its `attention_mask`.
            sampling_params: for all prompts, or one per prompt; `n` samples per prompt.
            min_groups: None: return exactly these prompts. A number: return as soon as that many groups (a prompt with its
                samples) have finished, earlier calls' groups included. The rest stays in flight and continues in the next
                call, under the new weights. With `max_staleness`, `generate` also waits for groups that would be too old
                after the next updates.
            metadata: one msgpack-able object per prompt, returned in `batch.metadata`.
            on_error: `raise`: a failed sample raises `RolloutFailedError`, which carries the whole batch. `mask`: its row
                is masked and named in `batch.errors`.
            progress: a progress bar. None: on a terminal, once a call takes more than two seconds.
            timeout_s: raise after this many seconds; what is in flight stays in flight.
            fields: fields of `SamplingParams` for all prompts, in place of `sampling_params`: `generate(prompts, n=8)`.

        Returns:
            Samples of a prompt side by side, prompts in order of submission.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing of this call was queued.
            EngineStateError: paused, suspended or closed; or the ranks differ in version or calls (raised on all).
            WeightsChangedError: weights have changed without an optimizer step; names them. Nothing was queued.
            EngineDeadError: too many steps in a row have failed.
            DeadlineError: `timeout_s` has passed, or another rank is missing; names it.
            ConnectionLostError: the coordinator was lost, and none took its place within `control_timeout_s`.
            JournalError: a finished group cannot be written; it stays in flight, and the next call tries again.
            RolloutFailedError: see `on_error`.
            KeyboardInterrupt: Ctrl-C, at the end of the step; this call's prompts are aborted.
        """
        return self._generation.generate(
            prompts, sampling_params, min_groups=min_groups, metadata=metadata, on_error=on_error, progress=progress,
            timeout_s=timeout_s,
        )  # fmt: skip

    @takes_options
    def submit(
        self,
        /,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        metadata: Sequence[Any] | None = None,
        **fields: Any,
    ) -> list[int]:
        """Queue prompts for the next `generate` or `as_completed`; returns their group ids.

        Prompts whose completions were long in earlier calls start first, because a batch ends with its longest sample.

        Raises:
            InvalidRequestError, TypeError: a prompt can never be served; names it. Nothing of this call was queued.
        """
        return self._generation.submit(prompts, sampling_params, metadata)

    def as_completed(
        self, group_ids: Iterable[int] | None = None, *, on_error: OnError = "raise"
    ) -> Iterator[RolloutBatch]:
        """Run, and yield each group as it finishes (also groups submitted meanwhile, if `group_ids` is None).

        If the loop ends early, the other groups stay in flight. On several ranks every rank runs such a loop (or a
        `generate`), and waits for the others at its end. Sharded weights stay gathered until then.

        Raises:
            WeightsChangedError: at the start of the loop, see `generate`.
            KeyError: a group id that was never given out, or was handed out already.
            RolloutFailedError: the group at hand failed, see `generate`; the others stay in flight.
        """
        return self._generation.as_completed(group_ids, on_error)

    def abort(self, group_ids: Iterable[int]) -> None:
        """End groups now, handing nothing out. Unknown ids are ignored.

        Their KV blocks are free when this returns; those on other ranks, as soon as they have heard of it.
        """
        self._rounds.loop.abort(group_ids)

    @takes_options
    def generate_scored(
        self,
        /,
        tasks: Iterable[Prompt | PromptTask],
        reward: Reward,
        sampling_params: SamplingParams | None = None,
        *,
        groups: int,
        max_groups: int | None = None,
        keep: Callable[[Sequence[ScoredSample]], bool] | None = rewards_differ,
        max_discarded: int | None = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> ScoredBatch:
        """Sample and score groups until `groups` of them are worth training on (DAPO's dynamic sampling); blocks until then.

        A group is scored as soon as its last sample finishes, while others are still sampled. A group that `keep` rejects
        is discarded, and another prompt starts in its place. On several ranks every rank calls it, as `generate`.

        Args:
            tasks: prompts as in `generate`, or `PromptTask`s. What was not drawn stays in an iterator.
            reward: gets the list of a group's samples and returns one finite number each. It runs on the stepping thread,
                or in other processes as a `trainer_hooks.rewards.RewardPool` (anything with `submit(samples)` → future).
            sampling_params: of tasks without their own; `n` samples per prompt.
            groups: size of the batch, unless the tasks run out.
            max_groups: most groups in flight, kept ones included. Above `groups` the call does not wait for the slowest:
                groups in flight at its end continue in the next call, after the weight update. None: `groups`.
            keep: whether a finished group counts. None: each counts. A group with a failed sample always counts.
            max_discarded: after this many discarded groups every one counts. None: four times `groups`.
            on_error, progress, timeout_s, fields: as in `generate`.

        Returns:
            Groups in order of submission. Groups left over when the batch is full begin the next batch.

        Raises:
            ConfigError: an option is out of its range.
            TypeError: `reward` does not take one argument.
            ValueError: `reward` did not return one finite number per sample; the group stays in flight.
            InvalidRequestError, TypeError, ConfigError: a task can never be served, and is dropped; a note shows it.
            KeyboardInterrupt: Ctrl-C, at the end of the step; the groups that this call began are aborted.
            Exception: others as `generate`.
        """
        return self._scoring.generate(
            tasks, reward, sampling_params, groups=groups, max_groups=max_groups, keep=keep, max_discarded=max_discarded,
            on_error=on_error, progress=progress, timeout_s=timeout_s,
        )  # fmt: skip

    async def sample(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, session: Episode | None = None
    ) -> DynamicInferenceRequest:
        """Sample one completion; completions of all callers are computed together. Cancelling aborts the request.

        While `run` or `generate` runs in another thread, that thread computes it. Otherwise the steps are made here, in
        the caller's event loop.

        Args:
            sampling_params: with n = 1.
            session: an episode of `run` that it becomes a turn of; None: it is in no batch.

        Raises:
            InvalidRequestError: the prompt can never be served, or n > 1.
            RequestError: it failed, or was aborted.
            EngineStateError: paused, suspended or closed; or outside of `run` on several ranks.
        """
        return await self._episodes.sample(prompt, sampling_params, session)

    @takes_options
    def run(
        self,
        /,
        tasks: Iterable[Any],
        environment: EnvironmentFactory | Play | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        n: int = 1,
        max_turns: int = 16,
        min_groups: int | None = None,
        max_groups: int | None = None,
        keep: Callable[[Sequence[Episode]], bool] | None = None,
        max_discarded: int | None = None,
        episode_timeout_s: float | None = None,
        environments: Mapping[str, EnvironmentFactory | Play] | None = None,
        on_error: OnError = "mask",
        progress: bool | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> EpisodeBatch:
        """Play episodes of many turns; blocks until they are done. Tools of one overlap with the tokens of others.

        What is in play when it returns, or raises, stays in play: tools keep running, and completions continue in the next
        call, under the weights of that time. On several ranks every rank calls it, as `generate`.

        Args:
            tasks: one group of n episodes each. An iterator is drawn from as groups finish; all of anything else is begun.
            environment: makes an object with `reset` and `step`, one per episode; or a coroutine function of an `Episode`
                that plays all of it and returns the reward. None: tasks are `EnvironmentTask`s, as `mixture` makes them.
            sampling_params: of a turn, with n = 1.
            max_turns: of an environment with `reset` and `step`.
            min_groups: None: until all have finished, also what earlier calls left in play. A number: until so many groups
                have finished, and those that `max_staleness` does not let wait.
            max_groups: most groups in play at once, drawn from an iterator; None: `min_groups`.
            keep: whether a finished group is returned; otherwise it is dropped and does not count. See `rewards_differ`.
            max_discarded: after this many dropped groups every one is kept. None: four times `min_groups`, or all.
            episode_timeout_s: an episode fails after this many seconds within `run`, with the turns that it has.
            environments: without `environment`: `__qualname__` → environment, of episodes from `load_state_dict`.
            on_error: `mask`: rows of a failed episode are masked; `RolloutFailedError` only if every episode failed.
                `raise`: `RolloutFailedError` if one failed.
            progress, timeout_s, fields: as in `generate`.

        Returns:
            Groups in the order in which they were begun, episodes of a group side by side.

        Raises:
            ConfigError: options that contradict each other.
            TypeError: the environment lacks `reset` or `step`, or one of its methods returned a value of another type.
            KeyboardInterrupt: Ctrl-C, at the end of the step. Then, as after TypeError, this call's episodes are dropped.
            RolloutFailedError: see `on_error`.
            Exception: others as `generate`.
        """
        return self._episodes.run(
            tasks, environment, sampling_params, n=n, max_turns=max_turns, min_groups=min_groups, max_groups=max_groups,
            keep=keep, max_discarded=max_discarded, episode_timeout_s=episode_timeout_s, environments=environments,
            on_error=on_error, progress=progress, timeout_s=timeout_s,
        )  # fmt: skip

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
        """Log-probs of given sequences under the present weights and adapters; nothing is sampled.

        A prompt that several sequences share is computed once, or not at all if the prefix cache has it. Logits are
        computed only for the scored tokens, chunk by chunk. Groups in flight are paused meanwhile. For another adapter:
        `with trainer_hooks.peft.adapter(manager, name)`. Recorded routes of a mixture of experts are not replayed.
        On several ranks every rank may call it; if the weights are sharded, every rank has to.

        Args:
            rollouts: a batch, whose `response_mask` is scored; or token ids of each sequence, as lists or as the output of
                one call of the tokenizer, whose padding is dropped.
            prompt_lengths: of token ids, one for all or one each: tokens from there on are scored. None: all but the first.
            temperature: logits are divided by it, and log-probs are of the whole vocabulary. None: 1 for token ids; for a
                batch the distribution of `batch.logprobs`: a row's own temperature, over its kept tokens.
            top_k: also return the k most likely tokens.
            entropy: also return entropies.
            adapter: name of a loaded LoRA adapter for all rows. None: a row's own, or the model as it is.

        Raises:
            InvalidRequestError: a sequence cannot be computed: empty, too long, an unknown id or adapter.
            ConfigError: an argument is out of range; or `temperature` is None and a row was sampled with penalties, or
                truncated without kept tokens.
            EngineStateError, WeightsChangedError, DeadlineError: see `generate`.
        """
        rounds = self._rounds
        with rounds.turn("score"):
            rounds.ensure_running()
            rounds.follow_model()
            with rounds.loop.gathering.held():
                rounds.loop.gathering.ensure()
                return score_by(
                    self.engine, rollouts, prompt_lengths=prompt_lengths, temperature=temperature, top_k=top_k,
                    entropy=entropy, adapter=adapter,
                )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Everything in flight, with versions and random streams, for torch.save (`weights_only`) or msgpack."""
        return self._generation.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue what `state_dict` saved. The model must hold the weights of that moment.

        Episodes continue with the next `run`, in new environments (see docs/how-to/agents.md). If this raises, nothing is in
        flight.

        Raises:
            EngineStateError: requests are in flight here already.
            ConfigError: this manager has a later policy version already, or the state is of another model.
            SerializationError: not a state of this package, another format, or damaged; names the field.
            InvalidRequestError: a request does not fit this engine (for example, its pool is smaller).
        """
        self._generation.load_state_dict(state)
        self._scoring.forget()

    def weights_updated(self) -> int:
        """The weights have changed: version + 1. The optimizer hook calls this; call it yourself without one.

        Returns:
            The policy version. A manager that is closed, or whose engine is dead, counts no more.
        """
        return self._updates.weights_updated()

    def pause(self) -> None:
        """Stop generating; `generate` refuses until `unpause`."""
        self._updates.pause()

    def unpause(self) -> None:
        """Allow generating again.

        Raises:
            EngineStateError: stopped by an explicit `suspend`: call `resume`.
        """
        self._updates.unpause()

    def suspend(self, mode: Mode = None, *, keep_prefix_cache: bool = True) -> MemoryMove:
        """Take the KV cache off the device; `generate` refuses until `resume`.

        Args:
            mode: `persist`, `offload` or `recompute`; None: the configuration's.
            keep_prefix_cache: keep cached blocks that no request holds, too; False before the weights change.
        """
        return self._updates.suspend(mode, keep_prefix_cache=keep_prefix_cache)

    def resume(self) -> MemoryMove:
        """Bring the KV cache back and allow generating again, also after `pause`. Harmless when running."""
        return self._updates.resume()

    def suspended(self, mode: Mode = None) -> AbstractContextManager[None]:
        """A `with` block in which the KV cache is off the device; the first `generate` afterwards brings it back.

        Cached blocks that no request holds are dropped: the weights are about to change. An exception inside changes
        nothing: the next `generate` goes on.
        """
        return self._updates.suspended(mode)

    def before_optimizer_step(self, mode: Mode = None) -> None:
        """Suspend the KV cache before the weights change; the next `generate` resumes. The optimizer hook calls it.

        Waits until a `generate` of another thread has ended.

        Args:
            mode: `persist`, `offload` or `recompute`; None: the configured mode.
        """
        self._updates.before_optimizer_step(mode)

    def adapter_switch(self, what: str | None = None) -> AbstractContextManager[None]:
        """A block that changes which adapters of the model act; `trainer_hooks.peft.adapter` is the way to do so.

        Args:
            what: its name, equal on all ranks; the block's end waits for theirs. None: no other rank is waited for.

        Raises:
            DeadlineError: some ranks have not done the same; names them.
            EngineStateError: some have done something else; names them.
        """
        return self._updates.adapter_switch(what)

    def metrics(self, reset: bool = True) -> dict[str, float]:
        """Metrics since the last call as a flat dict for `wandb.log`; names and meaning in `rollout.metric_table`."""
        self._rounds.loop.sync_metrics()
        return self._rounds.metrics.snapshot(reset)

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
        self._rounds.metrics.logprob_diff(batch, logprobs)

    @property
    def coordinator_address(self) -> str | None:
        """`tcp://host:port` of the job's coordinator, for `client` elsewhere and `rollout top`; None on one rank."""
        coordinator = self._rounds.backend.coordinator
        return None if coordinator is None else coordinator.address

    @property
    def coordinator_keys(self) -> JobKeys | None:
        """Keys that admit a process to the job; None on one rank, and on loopback without a launcher's secret.

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
        """A block whose timeline is written to `path` when it ends, for Perfetto, Chrome and `rollout trace`.

        On several ranks every rank enters and leaves it with the same path; rank 0 writes one file of all. If the block
        raises, or a rank is missing, each rank writes its own file, with `.rank<number>` before the suffix.

        Args:
            path: `.json`, or `.json.gz`; an existing file is replaced.

        Raises:
            EngineStateError: a trace is being recorded already.
            ConfigError: the file cannot be written.
            DeadlineError: another rank does not reach the end of its block; names it.
        """
        return traced(path, self._rounds.backend)

    def close(self) -> None:
        """Give up the groups in flight (with a warning) and free the engine's memory. Harmless when repeated.

        The model trains on as before; an attached optimizer hook has nothing more to do.
        """
        self._rounds.close()

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
