"""The manager's `generate`, `submit` and `as_completed`, which sample one group per prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgpack

from rollout.engine.parts.controller import TextGenerationController
from rollout.errors import ConfigError, EngineStateError, InvalidRequestError, RolloutFailedError
from rollout.journal import FinishedGroup
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.rounds import OnError, Rounds, check_count, check_on_error
from rollout.manager.run_loop import GroupGoal
from rollout.requests.prompt import Prompt, has_images
from rollout.sampling_params import SamplingParams, one_each, takes_options, warn_of_equal_samples
from rollout.threads.interrupts import uninterrupted


def _check_portable(name: str, value: Any) -> None:
    """Raise `TypeError` about `name` if `value` is metadata that a checkpoint cannot store."""
    try:
        msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as exc:
        raise TypeError(
            f"{name}={repr(value)[:80]}: must be made of None, bool, int, float, str, bytes, list and dict, so that it "
            f"survives a checkpoint ({exc})"
        ) from exc


def prompts_of(controller: TextGenerationController, prompts: Any, name: str = "prompts") -> list[Any]:
    """Return the argument `prompts` of a call as a list without padding; `name` is the argument's name, for messages.

    Raises:
        TypeError: `prompts` is a single prompt instead of a list of prompts.
        InvalidRequestError: the padding cannot be removed, see `unpadded`.
    """
    prompts = controller.unpadded(prompts, name)
    if isinstance(prompts, str | bytes | Mapping):
        kind = f"one {type(prompts).__name__}"
    elif getattr(prompts, "ndim", 2) == 1:
        kind = "one sequence of token ids"
    elif isinstance(prompts, list | tuple) and prompts and isinstance(prompts[0], Mapping) and "role" in prompts[0]:
        kind = "one list of chat messages"
    else:
        return list(prompts)
    raise TypeError(f"{name} is {kind}: pass a list of prompts, [prompt] for one")


def submit(rounds: Rounds, prompts: list[Prompt], params: list[SamplingParams], extras: list[Any]) -> list[int]:
    """Queue one group per prompt, longest expected completions first; take groups from the journal if it contains them.

    The caller holds the engine's lock. `extras` has one metadata object per prompt.

    Returns:
        Group ids, in the order of the prompts.

    Raises:
        InvalidRequestError, TypeError, ConfigError: a prompt can never be served; the message names it. Nothing was queued.
    """
    loop, backend = rounds.loop, rounds.backend
    if len(extras) != len(prompts):
        raise ConfigError(f"metadata has {len(extras)} entries for {len(prompts)} prompts: pass one each")
    for index, extra in enumerate(extras):
        _check_portable(f"metadata[{index}]", extra)
    for each in params:
        warn_of_equal_samples(each, each.n)
    first = backend.next_group_id
    added: list[int] = []
    finished: dict[int, FinishedGroup] = {}
    where = "prompts"
    try:
        prompts = list(prompts)
        for position, prompt in enumerate(prompts):
            if has_images(prompt):
                where = f"prompts[{position}]"
                # Tokenize prompts with images first, because the keys below must depend on the content of the images.
                prompts[position] = rounds.engine.controller.tokenize(prompt)
        # Equal keys are harmless: str() abbreviates long arrays, but the keys only decide which prompts start first.
        keys = [hash(str(prompt)) for prompt in prompts]
        journal_keys = [loop.journal.key(*each) for each in zip(prompts, params, extras, strict=True)]
        for position in loop.lengths.longest_first(keys):
            where = f"prompts[{position}]"
            with uninterrupted():
                if group := loop.journal.submitted(journal_keys[position], first + position):
                    finished[position] = group
                    continue
                added.append(first + position)
                backend.submit(added[-1], prompts[position], params[position], extras[position])
        with uninterrupted():
            for position, key in enumerate(keys):
                loop.groups.add(first + position, params[position].n, key, journal_keys[position])
            for group in finished.values():
                loop.book(group.samples)
            backend.reserve_group_ids(first + len(prompts))
            loop.submitted(first, prompts, params)
    except BaseException as exc:
        loop.journal.put_back(finished.values())
        loop.abort(added)
        if isinstance(exc, InvalidRequestError):
            raise exc.at(f"{where}: ") from exc
        if isinstance(exc, TypeError | ConfigError):
            raise type(exc)(f"{where}: {exc}") from exc
        raise
    return list(range(first, first + len(prompts)))


class Generation:
    """The manager's `generate`, `submit` and `as_completed`."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

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
        """Sample completions; block until they have finished.

        On several ranks every rank calls `generate`, with its own prompts or with `[]`, and all ranks return together: a
        rank that finishes early computes for the others. If `generate` raises on one rank, the other ranks wait until that
        rank calls it again or exits. After `control_timeout_s` they raise a `DeadlineError` that names the rank. Sharded
        weights are gathered once all ranks have called `generate`. Calls from several threads run one after another.

        Args:
            prompts: a list of strings, token id sequences, lists of chat messages, or processor results (one prompt with
                images each). The output of one tokenizer call also works: its padding is removed by `attention_mask`.
            sampling_params: parameters for all prompts, or one `SamplingParams` per prompt; `n` samples per prompt.
            min_groups: number of groups (a prompt with its samples) that must have finished, including groups of earlier
                calls. Unfinished groups stay in flight and continue in the next call, under the new weights. With
                `max_staleness`, `generate` also waits for groups that would be too old after the next updates. If None, it
                returns exactly the groups of these prompts.
            metadata: one object per prompt that msgpack can serialise, returned in `batch.metadata`.
            on_error: with `raise`, a failed sample raises `RolloutFailedError`, which has the whole batch. With `mask`, a
                failed sample's row is masked, and `batch.errors` has the error.
            progress: whether to show a progress bar. None shows it only on a terminal, after two seconds.
            timeout_s: seconds after which `DeadlineError` is raised; unfinished groups stay in flight. None means no limit.
            fields: `SamplingParams` fields for all prompts, in place of `sampling_params`: `generate(prompts, n=8)`.

        Returns:
            The samples, prompts in order of submission, samples of the same prompt next to each other.

        Raises:
            InvalidRequestError: a prompt can never be served; no prompt of this call was queued.
            EngineStateError: the manager is paused, suspended or closed; or the ranks have different policy versions or make
                different calls (raised on every rank).
            WeightsChangedError: weights have changed without an optimizer step; the message names them. Nothing was queued.
            EngineDeadError: too many steps in a row have failed.
            DeadlineError: `timeout_s` has passed, or another rank is missing; the message names the rank.
            ConnectionLostError: the coordinator was lost and was not replaced within `control_timeout_s`.
            JournalError: a finished group cannot be written to the journal. It stays in flight; the next call tries again.
            RolloutFailedError: see `on_error`.
            KeyboardInterrupt: Ctrl-C was pressed. It is raised after the current step, and this call's prompts are aborted.
        """
        check_on_error(on_error)
        check_count("min_groups", min_groups, 0)
        rounds, loop, groups = self._rounds, self._rounds.loop, self._rounds.groups
        with rounds.round("generate", timeout_s):
            mine = self.submit(prompts, sampling_params, metadata=metadata)
            try:
                if min_groups is None:
                    goal = GroupGoal(groups.unfinished, set(mine), len(mine), set)
                else:
                    number = min(min_groups, len(groups))
                    goal = GroupGoal(groups.unfinished, set(groups), number, self.begin_round())
                loop.run(goal, progress=progress, timeout_s=timeout_s)
                return self._hand_out(mine if min_groups is None else groups.complete(), on_error)
            except (KeyboardInterrupt, SystemExit):
                loop.abort(mine)
                raise

    def begin_round(self) -> Callable[[], set[int] | None]:
        """Start a `generate` call that may return while groups are still unfinished.

        Returns:
            A function that returns the ids of the groups that must finish in this call, or None if they are not known yet.
        """
        self._rounds.pacer.begin_round(self._rounds.engine.policy_version)
        return lambda: self._rounds.too_old(self._rounds.pacer, self._rounds.groups)

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
        """Queue prompts for the next `generate` or `as_completed`; return their group ids.

        Prompts whose completions were long in earlier calls start first, because a batch takes as long as its longest
        sample. The arguments are as in `generate`.

        Raises:
            InvalidRequestError, TypeError: a prompt can never be served; the message has its index. No prompt was queued.
        """
        rounds = self._rounds
        prompts = prompts_of(rounds.engine.controller, prompts)
        params = one_each(sampling_params, len(prompts))
        extras = [None] * len(prompts) if metadata is None else list(metadata)
        added: list[int] = []
        try:
            with rounds.engine.locked():
                added = submit(rounds, prompts, params, extras)
        except (KeyboardInterrupt, SystemExit):
            # Abort the added groups: a Ctrl-C that was deferred takes effect only now, and the caller never gets their ids.
            rounds.loop.abort(added)
            raise
        return added

    def as_completed(
        self, group_ids: Iterable[int] | None = None, *, on_error: OnError = "raise"
    ) -> Iterator[RolloutBatch]:
        """Generate, and yield each group as it finishes.

        If you leave the loop early, the other groups stay in flight. On several ranks, every rank must run such a loop
        or call `generate`, and waits for the other ranks at the end. Sharded weights stay gathered until then.

        Args:
            group_ids: ids of the groups to yield. None means all groups, including groups submitted during the loop.
            on_error: as in `generate`.

        Raises:
            EngineStateError: see `generate`; also raised in an expert-parallel group.
            WeightsChangedError: raised at the start of the loop, see `generate`.
            KeyError: a group id is unknown, or its group was already returned.
            RolloutFailedError: the current group failed, see `generate`; the others stay in flight.
        """
        check_on_error(on_error)
        if (lockstep := self._rounds.engine.peers.lockstep) is not None:
            raise EngineStateError(
                f"as_completed() in the {lockstep.group.name}, whose ranks end each call together: call generate([], "
                "min_groups=1) on every rank"
            )
        chosen = None if group_ids is None else set(group_ids)
        if chosen is not None and (unknown := chosen.difference(self._rounds.groups)):
            raise KeyError(f"groups {sorted(unknown)} are not in flight: returned already, or never submitted")
        return self._each_completed(chosen, on_error)

    def _each_completed(self, chosen: set[int] | None, on_error: OnError) -> Iterator[RolloutBatch]:
        self._rounds.follow_model()
        self._rounds.engine.check_weights()
        with self._rounds.loop.gathering.held():
            try:
                while (batch := self._next_completed(chosen, on_error)) is not None:
                    yield batch
            except (GeneratorExit, RolloutFailedError):
                self._end_together()
                raise
            self._end_together()

    def _next_completed(self, chosen: set[int] | None, on_error: OnError) -> RolloutBatch | None:
        rounds, groups = self._rounds, self._rounds.groups
        with rounds.turn("as_completed"):
            mine = [each for each in groups if chosen is None or each in chosen]
            if not mine:
                return None
            rounds.ensure_running()
            rounds.loop.run(GroupGoal(groups.unfinished, set(mine), 1, set), alone=True)
            ended = next(each for each in mine if each not in groups.unfinished)
            return self._hand_out([ended], on_error)

    def _end_together(self) -> None:
        rounds = self._rounds
        # Do nothing while the interpreter shuts down: the threads that talk to the other ranks have already stopped.
        if not rounds.closed and not sys.is_finalizing() and (rounds.loop.attended or not rounds.backend.try_finish()):
            with rounds.turn("as_completed"):
                rounds.ensure_running()
                rounds.follow_model()
                rounds.loop.run(GroupGoal(rounds.groups.unfinished, set(), 0, set))

    def _hand_out(self, group_ids: Sequence[int], on_error: OnError) -> RolloutBatch:
        rounds = self._rounds
        with rounds.engine.locked():
            batch = RolloutBatch.from_requests(rounds.groups.results(group_ids), **rounds.batch_options())
            rounds.groups.drop(group_ids)
        return rounds.handed_out(batch, on_error)
