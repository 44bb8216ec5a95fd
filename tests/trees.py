"""A batch with common prefixes, a loss on its rows, and the trainer's padded forward of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout.manager.batch.batch import RolloutBatch
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status


def make_batch(seed: int = 1, rows: int = 8) -> RolloutBatch:
    """Two prompts of 20 and 15 tokens, `rows / 2` samples of 1 to 20 tokens each, two of which begin alike."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 97, (count,), generator=generator).tolist()

    requests = []
    for group, prompt in enumerate((tokens(20), tokens(15))):
        begun = tokens(5)
        for sample in range(rows // 2):
            length = int(torch.randint(1, 15, (), generator=generator))
            completion = (begun if sample < 2 else []) + tokens(length)
            requests.append(
                DynamicInferenceRequest(
                    request_id=group, sample_index=sample, prompt_tokens=prompt, generated_tokens=completion,
                    generated_log_probs=[-4.0] * len(completion), sampling_params=SamplingParams(max_tokens=20),
                    status=Status.COMPLETED, finish_reason=FinishReason.STOP,
                )
            )  # fmt: skip
    return RolloutBatch.from_requests(requests, policy_version=0, pad_token_id=0)


def padded_logprobs(model: nn.Module, batch: RolloutBatch) -> Tensor:
    """[N, T] of the completions, by a forward of the padded rows. Padding on the right changes nothing before it."""
    logits = model(input_ids=batch.input_ids, attention_mask=torch.ones_like(batch.input_ids)).logits[:, :-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    chosen = logits.log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    return nn.functional.pad(chosen, (1, 0)).where(batch.response_mask, 0.0)


def tree_logprobs(model: nn.Module, batch: RolloutBatch) -> Tensor:
    """[N, T] of the completions, by a forward of the tree."""
    return batch.tree().logprobs_of(model)


def loss_of(logprobs: Tensor) -> Tensor:
    """Weights of both signs, a different one for every token of every row."""
    return (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs).to(logprobs)).sum() / len(logprobs)


def gradient(model: nn.Module, batch: RolloutBatch, logprobs_of: Callable[[nn.Module, RolloutBatch], Tensor]) -> Tensor:
    """Gradient of all trained parameters, in one vector of float64."""
    model.zero_grad()
    loss_of(logprobs_of(model, batch)).backward()
    return torch.cat([each.grad.flatten().double() for each in model.parameters() if each.grad is not None])


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """A copy, with its eager attention."""
    return copy.deepcopy(model).double()


def distance(mine: Tensor, right: Tensor) -> float:
    """Relative, in the Euclidean norm."""
    return float((mine.double() - right.double()).norm() / right.double().norm())
