"""Peers that run in this process: one class each, with the methods `generate`, `forget` and `close`.

`generate` runs a batch of prompts (token ids) to forced lengths at temperature 1 with the log-prob of every sampled token,
and says how long that took; `forget` empties whatever cache earlier calls filled; `close` ends it. A peer is opened once per
model and kept over all workloads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import ContinuousBatchingConfig

from rollout import Advanced, DeadlineError, InferenceConfig, RolloutManager, SamplingParams
from rollout.engine.build import CUDA_STEP_TOKENS
from tests.benchmarks.child import Late, PeerFailed
from tests.benchmarks.common import settle
from tests.benchmarks.subject import Subject
from tests.benchmarks.workloads import Room, Tokens


@dataclass(frozen=True)
class Reply:
    """The results of a peer's work."""

    seconds: float
    completions: list[Tokens]
    logprobs: int
    """How many log-probs came with them."""
    notes: dict[str, float] = field(default_factory=dict)


class Peer(Protocol):
    """One participant, with a model in it."""

    versions: dict[str, str]

    def generate(self, prompts: Sequence[Tokens], lengths: Sequence[int], deadline_s: float) -> Reply:
        """Complete every prompt by its forced length.

        Raises:
            Late: not within `deadline_s` seconds.
            PeerFailed: it cannot.
        """

    def forget(self) -> None:
        """Drop cached keys and values of earlier calls."""

    def close(self) -> None:
        """End it."""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


class Ours:
    """`RolloutManager.generate`, one request per sample."""

    def __init__(self, subject: Subject, room: Room) -> None:
        self.versions = {name: _version(name) for name in ("rollout-engine", "torch", "transformers")}
        blocks = -(-room.kv_tokens // Advanced.block_size_tokens) + 2 * room.sequences
        self._rollout = RolloutManager(
            subject.model, None, InferenceConfig(kv_cache_blocks=blocks, max_requests=max(64, room.sequences))
        )

    def generate(self, prompts: Sequence[Tokens], lengths: Sequence[int], deadline_s: float) -> Reply:
        """Also notes how many prompt tokens were computed."""
        params = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0) for n in lengths]
        before = self._rollout.engine.stats()["prefill_tokens_computed"]
        start = time.perf_counter()
        try:
            batch = self._rollout.generate(prompts, params, progress=False, timeout_s=deadline_s)
        except DeadlineError as exc:
            self._rollout.abort(range(self._rollout.engine.parts.intake.next_request_id))
            raise Late(f"not done after {deadline_s:g} s") from exc
        seconds = time.perf_counter() - start
        computed = self._rollout.engine.stats()["prefill_tokens_computed"] - before
        completions = [ids[mask].tolist() for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True)]
        logprobs = int(batch.logprobs[batch.response_mask].isfinite().sum())
        return Reply(seconds, completions, logprobs, {"prompt_tokens_computed": computed})

    def forget(self) -> None:
        """Drop the prefix cache."""
        self._rollout.engine.flush_prefix_cache()

    def close(self) -> None:
        """Give the KV pool back."""
        self._rollout.close()


class _SampledLogprobs(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Log-probs of the sampled tokens without keeping the scores of all steps: those of a step are read in the next."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.take(input_ids[:, -1])
        self._scores = scores
        return scores

    def take(self, tokens: torch.Tensor) -> None:
        """`tokens` [B] were drawn from the scores seen last."""
        if self._scores is not None:
            self.values.append(self._scores.gather(1, tokens[:, None])[:, 0] - self._scores.logsumexp(1))
        self._scores = None


class Generate:
    """`model.generate` on a left-padded batch, which runs until its longest sample is done."""

    def __init__(self, subject: Subject) -> None:
        self.versions = {name: version(name) for name in ("transformers", "torch")}
        self._model = subject.model

    def generate(self, prompts: Sequence[Tokens], lengths: Sequence[int], deadline_s: float) -> Reply:
        """Tokens beyond a sample's own length are thrown away."""
        start = time.perf_counter()
        width = max(map(len, prompts))
        device = self._model.device
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        recorder = _SampledLogprobs()
        options = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=max(lengths), pad_token_id=0, max_time=deadline_s
        )
        with torch.no_grad():
            output = self._model.generate(
                ids, attention_mask=mask, generation_config=options, logits_processor=LogitsProcessorList([recorder])
            )
        recorder.take(output[:, -1])
        settle(device)
        seconds = time.perf_counter() - start
        if output.shape[1] - width < max(lengths):
            raise Late(f"not done after {deadline_s:g} s")
        completions = [row[:length].tolist() for row, length in zip(output[:, width:], lengths, strict=True)]
        finite = torch.stack(recorder.values, 1).isfinite()
        return Reply(seconds, completions, sum(int(row[:n].sum()) for row, n in zip(finite, lengths, strict=True)))

    def forget(self) -> None:
        """Nothing is cached from call to call."""

    def close(self) -> None:
        """Nothing to end."""


class ContinuousBatching:
    """transformers' continuous batching, with a KV cache of the size needed instead of half the memory."""

    def __init__(self, subject: Subject) -> None:
        self.versions = {name: version(name) for name in ("transformers", "torch")}
        self._model = subject.model

    def generate(self, prompts: Sequence[Tokens], lengths: Sequence[int], deadline_s: float) -> Reply:
        """One request per sample with its own `max_new_tokens`; prefix sharing on, as many tokens a step as ours."""
        default = ContinuousBatchingConfig()
        tokens = CUDA_STEP_TOKENS if self._model.device.type == "cuda" else InferenceConfig().step_tokens
        # `page_size` since transformers 5.18.
        page = getattr(default, "page_size", None) or default.block_size
        config = ContinuousBatchingConfig(
            num_blocks=sum(-(-(len(prompt) + n) // page) + 1 for prompt, n in zip(prompts, lengths, strict=True)),
            max_batch_tokens=tokens,
            return_logprobs=True,
        )
        options = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=max(lengths), eos_token_id=-1, pad_token_id=0
        )
        outputs: dict[str, Any] = {}
        start = time.perf_counter()
        with self._model.continuous_batching_context_manager(
            generation_config=options, continuous_batching_config=config, timeout=5
        ) as manager:
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
                manager.add_request(list(prompt), str(index), max_new_tokens=length, eos_token_id=-1)
            while len(outputs) < len(prompts):
                if time.perf_counter() - start > deadline_s:
                    manager.stop(block=True, timeout=60, hard_stop=True)
                    raise Late(f"not done after {deadline_s:g} s")
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise PeerFailed("its generation thread has ended")
                if result is not None and result.is_finished():
                    outputs[result.request_id] = result
            seconds = time.perf_counter() - start
        results = [outputs[str(index)] for index in range(len(prompts))]
        if error := next((result.error for result in results if result.error), None):
            raise PeerFailed(error)
        return Reply(seconds, [list(each.generated_tokens) for each in results], sum(len(r.logprobs) for r in results))

    def forget(self) -> None:
        """The cache lives for one call."""

    def close(self) -> None:
        """Nothing to end."""
