"""`RolloutManager`: generate, suspend around the optimizer, metrics, checkpoint.

    rollout = RolloutManager(model, tokenizer, InferenceConfig(...))
    batch = rollout.generate(prompts, SamplingParams(n=8, max_tokens=256))
    with rollout.suspended():
        loss.backward(); optimizer.step()

Promises: a group that was accepted is handed out exactly once, whole, unless it is given up: by `abort`, by `close`, or
by Ctrl-C in the `generate` that brought it. Whatever else raises, it stays in flight and the next call goes on with it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from rollout.config import CoordinatorConfig, InferenceConfig, TraceConfig
from rollout.distributed.job.world import World
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError, EngineStateError, RolloutFailedError
from rollout.journal.journal import Journal
from rollout.manager import checkpoint
from rollout.manager.batch import RolloutBatch
from rollout.manager.choose_backend import choose_backend
from rollout.manager.control import OnError as OnError
from rollout.manager.control import check_on_error
from rollout.manager.pacing import StalenessPacer
from rollout.manager.scoring.manager import ManagerScoring
from rollout.manager.submission import submit
from rollout.manager.token_scores import Sequences, TokenScores, score_by
from rollout.requests.prompt import Prompt
from rollout.sampling_params import SamplingParams, one_each


class RolloutManager(ManagerScoring):
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
        trace: write the timeline of every k-th training step.
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
        trace: TraceConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if engine is not None and (not engine.is_of(model) or config is not None):
            raise ConfigError("engine= is of another model, or comes with config=: pass its own model, and no config")
        if (
            engine is not None
            and tokenizer is not None
            and tokenizer
            not in (
                engine.controller.tokenizer,
                engine.controller.processor,
            )
        ):
            raise ConfigError(
                "tokenizer= is another than that of engine=, which reads the prompts: pass that one, or none"
            )
        if not isinstance(coordinator, CoordinatorConfig | bool):
            raise ConfigError(f"coordinator={coordinator!r}: must be a CoordinatorConfig, True or False")
        world = World.of_torch() if coordinator is not False else None
        with nullcontext() if world is None else world.joining():
            engine = engine or DynamicInferenceEngine(model, tokenizer, config)
            world = World.of_torch() if world is None and engine.peers is not None else world
            super().__init__(engine, choose_backend(engine, coordinator, world), world, journal, trace, clock)
        self._pacer = StalenessPacer(self.config.max_staleness)
        self._rewards = {}

    # --- generating ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        min_groups: int | None = None,
        metadata: Sequence[Any] | None = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
        timeout_s: float | None = None,
    ) -> RolloutBatch:
        """Sample completions; blocks until they are done.

        On several ranks every rank calls it, with its own prompts or with `[]`, and it ends on all of them together: a
        rank that is done early computes for the others. A rank on which it raises before that (a prompt that can never
        be served, `timeout_s`, Ctrl-C) keeps the others waiting until it calls again, or ends; after
        `control_timeout_s` they raise a `DeadlineError` that names it. `on_error="raise"` raises at the common end.

        Weights that are sharded over the ranks are gathered when all have called it, and sharded again when it ends or
        raises; after a raise before the common end every rank has to call it again.

        Several threads may call it: one generates, the others wait until it has ended, in order of their calls.

        Args:
            prompts: texts, token id sequences, lists of chat messages, or what a processor returned for one prompt with
                images; `[]` is allowed.
            sampling_params: for all prompts, or one per prompt; `n` samples per prompt.
            min_groups: None: exactly these prompts are returned, all of them. A number: returns as soon as that many
                groups (a prompt with its samples) have ended, counting what earlier calls left in flight; the rest
                stays in flight and is continued by the next call, after the weight update. With `max_staleness` set it
                also waits for every group that the coming updates (as many as there were since the last such call)
                would make too old, so that none is thrown away.
            metadata: one msgpack-able object per prompt, returned in `batch.metadata`.
            on_error: `raise`: a failed sample raises `RolloutFailedError`, which carries the whole batch. `mask`: its
                row is masked out and named in `batch.errors`.
            progress: a progress bar. None: on a terminal, once a call takes more than two seconds.
            timeout_s: give up after this many seconds; what is in flight stays in flight. Another thread's turn is waited
                for as long, before nothing is queued.

        Returns:
            Samples of a prompt side by side, prompts in order of submission.

        Raises:
            InvalidRequestError: a prompt can never be served; nothing of this call was queued.
            EngineStateError: an explicit `pause` or `suspend` was not undone, or the manager is closed; or the ranks are
                not of the same policy version, or have not made the same calls (raised on all of them).
            WeightsChangedError: weights have changed without an optimizer step; names them. Nothing was queued.
            EngineDeadError: too many steps in a row have failed.
            DeadlineError: `timeout_s` has passed, or another rank does not come; the message names it.
            ConnectionLostError: the coordinator was lost, and none took its place within `control_timeout_s`.
            JournalError: a group that has ended cannot be written; it stays in flight, and the next call tries again.
            RolloutFailedError: see `on_error`.
            KeyboardInterrupt: Ctrl-C, at the end of the step; this call's prompts are given up.
        """
        check_on_error(on_error)
        if min_groups is not None and (type(min_groups) is not int or min_groups < 0):
            raise ConfigError(f"min_groups={min_groups!r}: must be None or an integer of at least 0")
        with self.engine.turns.taken(timeout_s), self._loop.call():
            self._ensure_running()
            self._follow_sharding()
            self.engine.check_weights()
            self._step_traces.rollout_begins(self.policy_version)
            mine = self.submit(prompts, sampling_params, metadata=metadata)
            try:
                if min_groups is None:
                    self._loop.run(mine, len(mine), progress=progress, timeout_s=timeout_s)
                    return self._hand_out(mine, on_error)
                goal = min(min_groups, len(self._groups))
                self._pacer.begin_round(self.policy_version)
                self._loop.run(self._groups, goal, self._too_old, progress=progress, timeout_s=timeout_s)
                return self._hand_out(self._groups.complete(), on_error)
            except (KeyboardInterrupt, SystemExit):
                self.abort(mine)
                raise

    def submit(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        metadata: Sequence[Any] | None = None,
    ) -> list[int]:
        """Queue prompts; they run during the coming `generate` and `as_completed` calls. Returns their group ids.

        Where the completions of some prompts are known to be long, from earlier calls, these start first: a batch ends
        with its longest sample.

        Raises:
            InvalidRequestError: a prompt can never be served; the message names it. Nothing of this call was queued.
            TypeError: a prompt is none of text, token ids, chat messages, or `prompts` is no list of prompts.
        """
        if isinstance(prompts, str | bytes | Mapping):
            raise TypeError(f"prompts is one {type(prompts).__name__}: pass a list of prompts, [prompt] for one")
        prompts = list(prompts)
        params = one_each(sampling_params, len(prompts))
        extras = [None] * len(prompts) if metadata is None else list(metadata)
        added: list[int] = []
        try:
            with self.engine.locked():
                added = submit(self._loop, self._backend, self.engine.controller.tokenize, prompts, params, extras)
        except (KeyboardInterrupt, SystemExit):
            # It came meanwhile, and takes effect only now.
            self.abort(added)
            raise
        return added

    def as_completed(
        self, group_ids: Iterable[int] | None = None, *, on_error: OnError = "raise"
    ) -> Iterator[RolloutBatch]:
        """Run, and yield each group as it ends (those submitted meanwhile too, when `group_ids` is None).

        Groups that are not asked for, because the loop ended early, stay in flight.

        On several ranks every rank runs such a loop (or a `generate`): its end, early or not, is where they wait for each
        other, computing for those that go on. Weights that are sharded over the ranks stay gathered until then, so that a
        checkpoint inside the loop is written in the way of `model.state_dict()`, which gives the shards.

        Raises:
            WeightsChangedError: at the start of the loop, see `generate`.
            KeyError: a group id that was never given out, or was handed out already.
            RolloutFailedError: of the group at hand, see `generate`; the others stay in flight.
        """
        check_on_error(on_error)
        if (lockstep := self.engine.lockstep) is not None:
            raise EngineStateError(
                f"as_completed() in the {lockstep.group.name}, whose ranks end each call together: call generate([], "
                "min_groups=1) on every rank"
            )
        chosen = None if group_ids is None else set(group_ids)
        if chosen is not None and (unknown := chosen.difference(self._groups)):
            raise KeyError(f"groups {sorted(unknown)} are not in flight: handed out already, or never submitted")
        return self._as_completed(chosen, on_error)

    def _as_completed(self, chosen: set[int] | None, on_error: OnError) -> Iterator[RolloutBatch]:
        self._follow_sharding()
        self.engine.check_weights()
        self._step_traces.rollout_begins(self.policy_version)
        with self._loop.gathering.held():
            try:
                while (batch := self._next_completed(chosen, on_error)) is not None:
                    yield batch
            except (GeneratorExit, RolloutFailedError):
                self._end_together()
                raise
            self._end_together()

    def _next_completed(self, chosen: set[int] | None, on_error: OnError) -> RolloutBatch | None:
        with self.engine.turns.taken(), self._loop.call():
            mine = [each for each in self._groups if chosen is None or each in chosen]
            if not mine:
                return None
            self._ensure_running()
            self._loop.run(mine, 1, alone=True)
            ended = next(each for each in mine if each not in self._groups.unfinished)
            return self._hand_out([ended], on_error)

    def _end_together(self) -> None:
        # At the end of the interpreter the threads that talk to the others have ended already.
        if not self._closed and not sys.is_finalizing() and (self._loop.attended or not self._backend.try_finish()):
            with self.engine.turns.taken(), self._loop.call():
                self._ensure_running()
                self._loop.run((), 0)

    def abort(self, group_ids: Iterable[int]) -> None:
        """End groups now, handing nothing out. Unknown ids are ignored.

        Their KV blocks are free when this returns; those on other ranks, as soon as they have heard of it.
        """
        self._loop.abort(group_ids)

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
        """Log-probs of given sequences under the weights and adapters of now; nothing is sampled.

        A prompt that several sequences share is computed once, or not at all if the prefix cache has it, padding never, and
        logits only of the tokens that are scored, chunk by chunk. Groups in flight stand still. Under another adapter:
        `with trainer_hooks.peft.adapter(rollout, name)`, with None for the model without adapters. Routers of a mixture of
        experts choose live, also where the batch has recorded routes: `rollout.replay` is for the trainer's own forward.

        On several ranks every rank may call it with its own sequences; where the weights are sharded, every rank has to.

        Args:
            rollouts: a batch, whose `response_mask` is scored; or token ids of each sequence.
            prompt_lengths: of sequences of token ids, one for all or one each: tokens from there on are scored. None: all
                but the first, which follows nothing.
            temperature: logits are divided by it, and log-probs are of the whole vocabulary. None: 1 for sequences of token
                ids; for a batch, log-probs are of what `batch.logprobs` are of: at the temperature that a row was sampled
                with, and over its kept tokens.
            top_k: also return the k likeliest tokens.
            entropy: also return entropies.
            adapter: name of a LoRA adapter that the engine has loaded (`SamplingParams.adapter`), for all rows. None: for a
                row of a batch that of its request, for sequences of token ids the model as it stands.

        Raises:
            InvalidRequestError: a sequence cannot be computed: empty, too long, an id outside the vocabulary, an adapter
                that is not loaded.
            ConfigError: an argument is out of range; or a row of the batch was sampled with penalties, or truncated without
                kept tokens, and `temperature` is None.
            EngineStateError, WeightsChangedError, DeadlineError: see `generate`.
        """
        with self.engine.turns.taken():
            self._ensure_running()
            self._follow_sharding()
            with self._loop.gathering.held():
                self._loop.gathering.ensure()
                return score_by(
                    self.engine, rollouts, prompt_lengths=prompt_lengths, temperature=temperature, top_k=top_k,
                    entropy=entropy, adapter=adapter,
                )  # fmt: skip

    # --- checkpoints and the end --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything in flight, with versions and random streams, for torch.save (`weights_only`) or msgpack."""
        with self.engine.locked():
            self._loop.take_ended()
            return checkpoint.save(
                self.engine,
                self._backend,
                self._groups,
                self._pacer.updates_per_round,
                self._journal,
                self._player,
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue what `state_dict` saved. The model must hold the weights of that moment.

        Episodes go on with the next `run`, in new environments; turns that had ended are not sampled again. An environment
        with a method `restore` is told its turns and its answers; any other is played again, and a completion stands if it
        is asked for with the same prompt (see docs/episodes.md).

        If it raises, nothing is in flight.

        Raises:
            EngineStateError: requests are in flight here already.
            ConfigError: this manager has a later policy version already, or the state is of another model.
            SerializationError: not a state of this package, of another format, or damaged; the message names the field.
            InvalidRequestError: a request does not fit this engine (a smaller pool than the one that saved it, say).
        """
        with self.engine.turns.taken():
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        self._loop.take_ended()
        if self._groups or self._backend.snapshot() or len(self._player):
            raise EngineStateError(
                f"load_state_dict() with {len(self._groups)} groups in flight and {len(self._player)} groups of episodes in "
                "play: use a fresh manager"
            )
        self._loop.groups, updates_per_round = checkpoint.load(
            state, self.engine, self._backend, self._journal, self._player
        )
        self._pacer = StalenessPacer(self.config.max_staleness, updates_per_round)
        self._rewards = {}
        self._loop.sync_metrics()

    # --- inside -------------------------------------------------------------------------------------------------

    def _hand_out(self, group_ids: Sequence[int], on_error: OnError) -> RolloutBatch:
        with self.engine.locked():
            batch = RolloutBatch.from_requests(self._groups.results(group_ids), **self._batch_options())
            self._groups.drop(group_ids)
        return self._handed_out(batch, on_error)
