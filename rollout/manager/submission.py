"""Submits the prompts of one call: all of them or none, the longest expected completions first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rollout.engine.parts.controller import TextGenerationController
from rollout.errors import ConfigError, InvalidRequestError
from rollout.journal.segment import FinishedGroup
from rollout.manager import checkpoint, lengths
from rollout.manager.backend import Backend
from rollout.manager.run_loop import RunLoop
from rollout.requests.prompt import Prompt, has_images
from rollout.sampling_params import SamplingParams, warn_of_equal_samples
from rollout.threads.interrupts import uninterrupted


def prompts_of(controller: TextGenerationController, prompts: Any, name: str = "prompts") -> list[Any]:
    """The prompts of one call, without padding.

    Raises:
        TypeError: it is one prompt instead of a list of prompts.
        InvalidRequestError: see `unpadded`.
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


def submit(
    loop: RunLoop,
    backend: Backend,
    tokenize: Callable[[Prompt], list[int]],
    prompts: list[Prompt],
    params: list[SamplingParams],
    extras: list[Any],
) -> list[int]:
    """Queue a group per prompt, or take it finished from the journal; the caller holds the engine's lock.

    Args:
        tokenize: reads a prompt; asked here for those with images, which are told apart by their content.

    Returns:
        Group ids, in the order of the prompts.

    Raises:
        InvalidRequestError, TypeError, ConfigError: a prompt can never be served; names it. Nothing was queued.
    """
    if len(extras) != len(prompts):
        raise ConfigError(f"metadata has {len(extras)} entries for {len(prompts)} prompts: pass one each")
    for index, extra in enumerate(extras):
        checkpoint.check_portable(f"metadata[{index}]", extra)
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
                prompts[position] = tokenize(prompt)
        keys = [lengths.key(prompt) for prompt in prompts]
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
