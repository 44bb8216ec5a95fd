"""The conversion of verifiers 0.4 traces, whose completions were sampled over HTTP, to an `EpisodeBatch` for training.

traces = [trace for episode in episodes for trace in episode.traces]  # from environments that sample with `rollout serve`
batch = trace_batch(traces, policy_version=version, pad_token_id=tokenizer.pad_token_id, n=8)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from rollout import EpisodeBatch, SamplingParams
from rollout.errors import InvalidRequestError
from rollout.manager.episodes.episode import Episode
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.state import FinishReason, Status


def trace_batch(
    traces: Sequence[Any],
    *,
    policy_version: int,
    pad_token_id: int,
    n: int = 1,
    sampling_params: SamplingParams | None = None,
    **options: Any,
) -> EpisodeBatch:
    """Return a batch with one row per branch of every trace. A token that branches share is trained once.

    Args:
        traces: traces of `verifiers.v1` from its training client. The n traces of a task are next to each other.
        policy_version: policy version of all sampled tokens, which traces do not record. If tokens have several versions,
            pass the oldest.
        pad_token_id: token id of padding in the batch.
        n: number of traces per task.
        sampling_params: parameters that the tokens were sampled with. If None, the defaults.
        options: further arguments of `EpisodeBatch.from_episodes`.

    Raises:
        InvalidRequestError: a sampled token has no log-prob, as in a trace of the evaluation client.
    """
    params = sampling_params or SamplingParams()
    episodes = []
    for index, trace in enumerate(traces):
        turns = _turns(trace, index, params, policy_version)
        reward, error = (float(trace.reward), None) if trace.ok else (None, _error(trace))
        episodes.append(Episode.from_turns(trace.task.data, index // n, index % n, turns, reward, error))
    return EpisodeBatch.from_episodes(episodes, policy_version=policy_version, pad_token_id=pad_token_id, **options)


def _error(trace: Any) -> str:
    last = trace.last_error
    return "the trace did not end" if last is None else f"{last.type}: {last.message}"


def _turns(trace: Any, index: int, params: SamplingParams, version: int) -> Iterator[DynamicInferenceRequest]:
    """Yield each run of sampled tokens in the trace's message graph once, as a request. Its prompt is all earlier tokens."""
    seen: set[int] = set()
    for branch in trace.branches:
        tokens: list[int] = []
        for node in branch.nodes if branch.trainable else ():
            at = len(tokens)
            tokens = [*tokens, *node.token_ids]
            if id(node) in seen:
                continue
            seen.add(id(node))
            recorded = sum(node.mask) == len(node.logprobs) and len(node.mask) == len(node.token_ids)
            if not recorded or (node.sampled and not node.token_ids):
                raise InvalidRequestError(
                    f"traces[{index}]: a message of {len(node.token_ids)} tokens has {len(node.mask)} mask entries "
                    f"({sum(node.mask)} sampled) and {len(node.logprobs)} logprobs: record it with the training client"
                )
            logprobs = iter(node.logprobs)
            for sampled, run in groupby(node.mask):
                end = at + len(list(run))
                if sampled:
                    yield _turn(tokens[:at], tokens[at:end], list(islice(logprobs, end - at)), params, version)
                at = end


def _turn(
    prompt: list[int], completion: list[int], logprobs: list[float], params: SamplingParams, version: int
) -> DynamicInferenceRequest:
    return DynamicInferenceRequest(
        request_id=0,
        prompt_tokens=prompt,
        generated_tokens=completion,
        generated_log_probs=logprobs,
        sampling_params=params,
        policy_version=version,
        policy_spans=VersionSpans.of_run(version, len(prompt) + len(completion)),
        status=Status.COMPLETED,
        finish_reason=FinishReason.STOP,
    )
