"""A whole training step: generate, suspend with half of the requests in flight, train, finish the rest.

Requests come in two lengths. Ours trains as soon as the shorter half has ended, with the rest suspended, and then finishes
the rest under the new weights; `model.generate` runs everything to its end and then trains on as many samples. Both make
the same number of tokens and one optimizer step on a batch of the same shape, so the seconds compare.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedModel

from rollout import Advanced, InferenceConfig, KVCacheManagementMode, RolloutManager, SamplingParams
from tests.benchmarks.common import settle
from tests.benchmarks.peers import Generate
from tests.benchmarks.subject import Subject
from tests.benchmarks.workloads import Scale, Tokens
from trainer_hooks.optimizer import attach

REQUESTS = 32
MODES = ("offload", "recompute", "persist")


@dataclass(frozen=True)
class Trained:
    """Seconds of one step and of its phases."""

    seconds: float
    phases: dict[str, float]


class TrainingStep:
    """A copy of the model with its optimizer, stepped by whoever is measured."""

    def __init__(self, subject: Subject, scale: Scale) -> None:
        self._subject = Subject(subject.size, subject.dtype, copy.deepcopy(subject.model), subject.where)
        self._optimizer = AdamW(self.model.parameters(), lr=1e-6)
        generator = torch.Generator().manual_seed(0)
        self.prompts: list[Tokens] = torch.randint(
            0, subject.vocab, (REQUESTS, scale.tokens(128)), generator=generator
        ).tolist()
        short = scale.tokens(64)
        self.lengths = [short] * (REQUESTS // 2) + [2 * short] * (REQUESTS // 2)
        self._advantages = torch.randn(REQUESTS // 2, generator=generator).to(subject.device)
        # The optimizer makes its state at its first step, which would belong to whoever is measured first.
        ids = torch.tensor(self.prompts[:1], device=subject.device)
        self._train(ids, torch.ones_like(ids), torch.ones_like(ids, dtype=torch.bool))

    @property
    def model(self) -> PreTrainedModel:
        """The copy that is trained."""
        return self._subject.model

    def ours(self, mode: str, deadline_s: float) -> Trained:
        """One step with the rollout, the KV cache kept by `mode`."""
        blocks = sum(-(-(len(prompt) + n) // 16) + 1 for prompt, n in zip(self.prompts, self.lengths, strict=True))
        config = InferenceConfig(
            kv_cache_blocks=blocks,
            kv_cache_management_mode=KVCacheManagementMode(mode),
            advanced=Advanced(verify_model=False),
        )
        params = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0) for n in self.lengths]
        half = REQUESTS // 2
        with RolloutManager(self.model, None, config) as rollout, attach(self._optimizer, rollout):
            marks = [time.perf_counter()]
            batch = rollout.generate(self.prompts, params, min_groups=half, progress=False, timeout_s=deadline_s)
            in_flight = rollout.groups_in_flight
            marks.append(time.perf_counter())
            with rollout.suspended():
                marks.append(time.perf_counter())
                self._train(
                    *(
                        part.to(self.model.device)
                        for part in (batch.input_ids, batch.attention_mask, batch.response_mask)
                    )
                )
                marks.append(time.perf_counter())
            rollout.resume()
            marks.append(time.perf_counter())
            rollout.generate([], min_groups=in_flight, progress=False, timeout_s=deadline_s)
            marks.append(time.perf_counter())
        names = ("generate", "suspend", "train", "resume", "finish")
        phases = {name: end - start for name, start, end in zip(names, marks, marks[1:], strict=False)}
        return Trained(marks[-1] - marks[0], phases | {"requests in flight": in_flight})

    def generate(self, deadline_s: float) -> Trained:
        """One step with `model.generate`."""
        start = time.perf_counter()
        reply = Generate(self._subject).generate(self.prompts, self.lengths, deadline_s)
        generated = time.perf_counter()
        half = REQUESTS // 2
        whole = [p + c for p, c in zip(self.prompts[:half], reply.completions[:half], strict=True)]
        ids = torch.tensor(whole, device=self.model.device)
        response = torch.zeros_like(ids, dtype=torch.bool)
        response[:, len(self.prompts[0]) :] = True
        self._train(ids, torch.ones_like(ids), response)
        end = time.perf_counter()
        return Trained(end - start, {"generate": generated - start, "train": end - generated})

    def _train(self, ids: Tensor, attention: Tensor, response: Tensor) -> None:
        """Forward, backward, AdamW, on a right-padded batch [N, T] with the responses marked."""
        self.model.train()
        logits = self.model(input_ids=ids, attention_mask=attention, use_cache=False).logits[:, :-1].float()
        logprobs = logits.gather(2, ids[:, 1:, None]).squeeze(2) - logits.logsumexp(2)
        weights = self._advantages[: len(ids), None] * response[:, 1:]
        loss = -(weights * logprobs).sum() / response.sum()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        settle(self.model.device)
        self.model.eval()
