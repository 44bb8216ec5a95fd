"""`EpisodeBatch`: a `RolloutBatch` whose rows are multi-turn histories.

A turn extends a row if its prompt starts with all tokens of that row and its temperature and truncation are the same. Any
other turn, for example after the history was edited, starts a new row. Always true: every sampled token is marked in exactly
one row, in which it follows the same tokens as when it was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.episodes.episode import Episode
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import KeptTokens
from rollout.sampling_params import FILTERS
from rollout.state import FinishReason, Status

EpisodeRow = tuple[DynamicInferenceRequest, NDArray[np.bool_]]
"""One row of the batch: (request, sampled). The request has all turns of the row, with everything after the first prompt as
its completion of G tokens. sampled, bool [G], marks the completion tokens that were sampled in this row."""


def rows_of(episode: Episode) -> list[EpisodeRow]:
    """Return the rows of an episode. An episode that sampled nothing has one row without tokens."""
    chains: list[list[DynamicInferenceRequest]] = []
    for turn in episode.turns:
        extended = [chain for chain in chains if _continues(turn, chain[-1])]
        if extended:
            max(extended, key=lambda chain: chain[-1].total_length).append(turn)
        else:
            chains.append([turn])
    return [_row(episode, chain) for chain in chains] or [_empty(episode)]


def _continues(turn: DynamicInferenceRequest, last: DynamicInferenceRequest) -> bool:
    prompt, known = turn.prompt_tokens, len(last.prompt_tokens)
    return (
        _distribution(turn) == _distribution(last)
        and len(prompt) >= last.total_length
        and prompt[known : last.total_length] == last.generated_tokens
        and prompt[:known] == last.prompt_tokens
        and (last.images is None or (turn.images is not None and turn.images.begins_with(last.images)))
    )


def _distribution(turn: DynamicInferenceRequest) -> tuple[float | None, ...]:
    params = turn.sampling_params
    return params.temperature, *(getattr(params, name) for name in FILTERS)


def _row(episode: Episode, turns: Sequence[DynamicInferenceRequest]) -> EpisodeRow:
    first, last = turns[0], turns[-1]
    start, total = len(first.prompt_tokens), last.total_length
    sampled = np.zeros(total, dtype=np.bool_)
    logprobs = np.zeros(total)
    versions = np.empty(total, dtype=np.int64)
    done = 0
    for turn in turns:
        known, end = len(turn.prompt_tokens), turn.total_length
        versions[done:end] = turn.policy_versions[done:]
        sampled[known:end] = True
        # Use NaN for a turn without log-probs, as `RolloutBatch.logprobs` does, so that a loss over it is NaN.
        logprobs[known:end] = turn.generated_log_probs or np.nan
        done = end
    tokens = [*last.prompt_tokens, *last.generated_tokens]
    request = replace(
        last,
        request_id=episode.group_id,
        sample_index=episode.index,
        prompt=first.prompt,
        prompt_tokens=first.prompt_tokens,
        original_prompt_length=start,
        finished_chunk_token_count=min(last.finished_chunk_token_count, start),
        num_cached_tokens=first.num_cached_tokens,
        precomputed_block_hashes=[],
        enable_prefix_caching=False,
        prompt_log_probs=first.prompt_log_probs,
        prompt_top_n_logprobs=first.prompt_top_n_logprobs,
        generated_tokens=tokens[start:],
        generated_log_probs=logprobs[start:].tolist(),
        generated_top_n_logprobs=[],
        generated_text=None,
        policy_spans=_spans(versions),
        # Take the KV spans from the last turn. `replace` also takes `routing_indices` from there, and both must describe
        # the KV from which the row's last token was sampled.
        kv_spans=last.kv_spans.copy(),
        generated_kept_tokens=_kept_tokens(turns, tokens[start:]),
        generated_values=_values(turns),
        metadata=episode.task,
        status=last.status if episode.error is None else Status.FAILED,
        finish_reason=last.finish_reason if episode.error is None else FinishReason.ERROR,
        error=episode.error,
    )
    return request, sampled[start:]


def _kept_tokens(turns: Sequence[DynamicInferenceRequest], completion: list[int]) -> KeptTokens | None:
    """Return, for each completion token, the ids it was drawn from ({itself} if unsampled); None if a turn lacks them."""
    parts, done = [], 0
    for turn in turns:
        if turn.generated_kept_tokens is None:
            return None
        known = len(turn.prompt_tokens) - len(turns[0].prompt_tokens)
        parts += [KeptTokens.of([token] for token in completion[done:known]), turn.generated_kept_tokens]
        done = known + turn.generated_length
    return KeptTokens.join(parts)


def _values(turns: Sequence[DynamicInferenceRequest]) -> NDArray[np.float32] | None:
    """Return the token values of a row's completion, with 0 for unsampled tokens; None if no values were recorded."""
    if turns[0].generated_values is None:
        return None
    start, end = len(turns[0].prompt_tokens), turns[-1].total_length
    values = np.zeros((end - start, turns[0].generated_values.shape[1]), np.float32)
    for turn in turns:
        known = len(turn.prompt_tokens) - start
        values[known : known + turn.generated_length] = turn.generated_values
    return values


def _empty(episode: Episode) -> EpisodeRow:
    request = DynamicInferenceRequest(
        request_id=episode.group_id, sample_index=episode.index, prompt_tokens=[], metadata=episode.task,
        status=Status.COMPLETED if episode.error is None else Status.FAILED,
        finish_reason=FinishReason.STOP if episode.error is None else FinishReason.ERROR, error=episode.error,
    )  # fmt: skip
    return request, np.zeros(0, dtype=np.bool_)


def _spans(versions: NDArray[np.int64]) -> VersionSpans:
    spans = VersionSpans()
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    for start, stop in zip(starts, [*starts[1:], len(versions)], strict=True):
        spans.extend(int(stop - start), int(versions[start]))
    return spans


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class EpisodeBatch(RolloutBatch):
    """A batch of E episodes in N rows. Episodes of a task are next to each other.

    An episode has one row, and one more for every branch: a turn whose prompt does not start with a whole earlier turn.
    `response_mask` marks every sampled token once, in the row in which it was sampled; prompts, tool results and tokens
    marked in another row are only context. A failed episode has no marked token, and its rows have the reason in `errors`.
    """

    episodes: tuple[Episode, ...]
    """The E episodes. The `turns` of an episode are its sampled completions, each as a request with its whole prompt."""

    episode_ids: Tensor
    """int64 [N]: index of the row's episode in `episodes`. `advantages[episode_ids]` expands advantages [E] to rows [N]."""

    rewards: Tensor
    """float32 [E]: the reward of each episode; NaN if the episode failed."""

    @classmethod
    def from_episodes(
        cls,
        episodes: Sequence[Episode],
        *,
        detokenize: Callable[[Sequence[int]], str | None] = lambda tokens: None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> EpisodeBatch:
        """Build a batch from finished episodes.

        Args:
            episodes: finished episodes, with the episodes of a group next to each other.
            detokenize: function that makes a row's entry in `texts` from all tokens after the row's first prompt.
            device, options: see `RolloutBatch.from_requests`.
        """
        rows = [(index, row) for index, episode in enumerate(episodes) for row in rows_of(episode)]
        requests = [replace(row, generated_text=detokenize(row.generated_tokens)) for _, (row, _) in rows]
        rewards = [float("nan") if each.reward is None or each.error is not None else each.reward for each in episodes]
        return cls.from_requests(
            requests,
            device=device,
            sampled=[sampled for _, (_, sampled) in rows],
            episodes=tuple(episodes),
            episode_ids=torch.tensor([index for index, _ in rows], dtype=torch.int64, device=device),
            rewards=torch.tensor(rewards, dtype=torch.float32, device=device),
            **options,
        )
