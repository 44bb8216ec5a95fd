"""Differentiable log-probs and entropies from the trainer's own forward pass, computed without storing all logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout.algorithms.replay import replay_logprobs
from rollout.engine.training.head import LogitReader
from rollout.manager.batch.columns import KeptSets, no_sets
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import FILTERS, PENALTIES


@dataclass(frozen=True, eq=False)
class LogitScores:
    """The differentiable scores of the requested tokens in N rows, the longest of T tokens; 0 for all other tokens."""

    logprobs: Tensor
    """float32 [N, T] (float64 if the hidden states are float64): log-probs of the tokens."""
    entropies: Tensor | None = None
    """[N, T]: entropies in nats of softmax(logits / temperature), over the whole vocabulary. In this field and the fields
    below, None means not requested."""
    top_ids: Tensor | None = None
    """int64 [N, T, k]: ids of the k most likely tokens, most likely first, or of the k requested tokens."""
    top_logprobs: Tensor | None = None
    """[N, T, k]: log-probs of `top_ids`, over the whole vocabulary."""


@dataclass(frozen=True, eq=False)
class Part:
    """A set of N batch rows, the longest of T tokens, as input of a forward pass."""

    inputs: Mapping[str, Any]
    """The keyword arguments of the forward pass."""
    input_ids: Tensor
    """int64 [N, T]: token ids of the rows."""
    mask: Tensor
    """bool [N, T]: the tokens whose scores are requested."""
    predictors: Tensor
    """int64 [N, T]: index of the position, in the flattened output of the forward pass, that predicts each requested token;
    any value elsewhere."""


def read_scores(
    model: nn.Module,
    part: Part,
    shaping: Mapping[str, Any],
    kept: KeptSets | None = None,
    *,
    hidden: Tensor | None = None,
    entropy: bool = False,
    top_k: int | Tensor = 0,
) -> LogitScores:
    """Compute the scores of a part's tokens, running the model unless `hidden` is given.

    Args:
        shaping: keyword arguments for `rollout.algorithms.replay_logprobs`.
        kept: the token sets that sampling was restricted to; None if sampling was not restricted.
        hidden: input of the LM head, [..., hidden size], from a forward pass that has already run. If None, the model runs.
        entropy: whether to compute entropies too.
        top_k: number of most likely tokens whose log-probs are computed too; or other token ids, int64 [N, T, k].
    """

    def run(head: nn.Module) -> Tensor | None:
        if hidden is not None:
            head(hidden)
            return None
        logits: Tensor = model(**part.inputs).logits
        return logits

    mask, wants_top = part.mask, isinstance(top_k, Tensor) or top_k > 0
    places = mask.flatten().nonzero()[:, 0]
    if isinstance(top_k, Tensor):
        top_k = top_k.flatten(0, 1)[places]
        if (top_k < 0).any():
            raise ValueError(
                "top_k holds a token id below 0 at a requested token: score the same rows with both models"
            )
    reader = LogitReader(model, run, entropy=entropy, top_k=top_k)
    logprobs = replay_logprobs(
        reader, kept or no_sets(part.input_ids), part.input_ids, mask, predictors=part.predictors, **shaping
    )

    def placed(values: Tensor) -> Tensor:
        whole = values.new_zeros(mask.numel(), *values.shape[1:])
        return whole.index_copy(0, places, values).view(*mask.shape, *values.shape[1:])

    return LogitScores(
        logprobs,
        placed(reader.entropies) if entropy else None,
        placed(reader.top_ids) if wants_top else None,
        placed(reader.top_logprobs) if wants_top else None,
    )


def distribution(
    requests: Sequence[DynamicInferenceRequest], kept: KeptSets | None, device: torch.device
) -> tuple[dict[str, Any], KeptSets | None]:
    """Return `replay_logprobs` arguments that reproduce the requests' log-probs, and the token sets to pass as `kept`.

    Raises:
        ValueError: a request used top-p or the like without `return_kept_tokens`, so its distribution is unknown.
    """
    params = [request.sampling_params for request in requests]
    # Mark the rows whose log-probs are over the whole vocabulary.
    unshaped = [one.logprobs_mode != "processed" for one in params]
    for request, one, plain in zip(requests, params, unshaped, strict=True):
        if one.truncated and not one.greedy and not plain and request.generated_kept_tokens is None:
            raise ValueError(
                f"request {request.request_id} sample {request.sample_index} was truncated "
                f"({', '.join(one.shaping(FILTERS))}) and has no kept tokens: sample with "
                "SamplingParams.return_kept_tokens=True, or pass temperature= for log-probs over the whole vocabulary"
            )

    def each(name: str, neutral: float, off: Sequence[bool]) -> float | Tensor:
        values = [
            neutral if plain else float(getattr(one, name) or neutral) for one, plain in zip(params, off, strict=True)
        ]
        first = values[0] if values else neutral
        return first if values.count(first) == len(values) else torch.tensor(values, device=device)

    biases = [None if plain else one.logit_bias for one, plain in zip(params, unshaped, strict=True)]
    if kept is not None and any(unshaped):
        kept = kept.without(torch.tensor(unshaped, device=device))
    return {
        "temperature": each("temperature", 1.0, [one.logprobs_mode == "raw" for one in params]),
        "logit_bias": biases if any(biases) else None,
        "prompt_lengths": torch.tensor([len(request.prompt_tokens) for request in requests], device=device),
        **{name: each(name, off, unshaped) for name, off in PENALTIES.items()},
    }, kept
