"""The scoring of given sequences by the engine: log-probs, entropies and most likely tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.algorithms.replay import replay_logprobs
from rollout.config import Advanced, InferenceConfig
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.prefill import Wanted
from rollout.engine.sampling.sampler import token_logprobs
from rollout.engine.scheduling.planner import blocks_for
from rollout.errors import ConfigError
from rollout.manager.batch.batch import RolloutBatch
from rollout.requests.images import ImageInputs
from rollout.requests.prompt import unpadded
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import FILTERS, PENALTIES, SamplingParams

Sequences = Sequence[Sequence[int] | Tensor]

ENTROPY_ROWS = 256
"""The number of logit rows whose entropies are computed at a time, which bounds the memory for them."""


@dataclass(frozen=True, eq=False, repr=False)
class TokenScores:
    """The scores of N sequences, the longest of T tokens, aligned as in `RolloutBatch`: entry t belongs to token t."""

    logprobs: Tensor
    """float32 [N, T]: log-prob of each scored token; 0 outside of `mask`."""

    mask: Tensor
    """bool [N, T]: the tokens that were scored."""

    entropies: Tensor | None
    """float32 [N, T]: entropies in nats of softmax(logits / temperature), over the whole vocabulary; 0 outside of `mask`.
    None if not requested."""

    top_ids: Tensor | None
    """int64 [N, T, k]: ids of the k most likely tokens, most likely first; -1 outside of `mask`. None if not requested."""

    top_logprobs: Tensor | None
    """float32 [N, T, k]: log-probs of `top_ids`, over the whole vocabulary; 0 outside of `mask`. None if not requested."""

    policy_version: int
    """The policy version of the weights that computed the scores."""

    staleness: Tensor | None
    """int32 [N, T]: number of weight updates between the sampling and the scoring of a token; 0 outside of `mask`. None if
    the tokens are not from a batch of this engine."""

    adapters: str
    """The names of the model's active adapters and of the adapters that rows request; "none" without an adapter."""

    def __repr__(self) -> str:
        return (
            f"TokenScores({int(self.mask.sum())} tokens of {len(self.mask)} sequences, policy version "
            f"{self.policy_version}, adapters: {self.adapters})"
        )


def score(
    model: nn.Module,
    rollouts: RolloutBatch | Sequences,
    *,
    prompt_lengths: int | Sequence[int] | None = None,
    temperature: float | None = None,
    top_k: int = 0,
    entropy: bool = False,
    config: InferenceConfig | None = None,
) -> TokenScores:
    """Score sequences under a model without a manager, such as a reference model. The engine exists only during this call.

    Adapters that requests of a batch name are ignored, because they were loaded into another engine.

    Args:
        model: a causal language model in transformers.
        rollouts, prompt_lengths, temperature, top_k, entropy: see `RolloutManager.score`.
        config: the engine's options. None means defaults, with a KV pool for the longest sequence and steps of 2048 tokens.

    Raises:
        UnsupportedModelError: see `DynamicInferenceEngine`.
        InvalidRequestError, ConfigError, ValueError: see `RolloutManager.score`.
    """
    plan = _Plan.of(_sequences(rollouts, model), prompt_lengths, temperature, top_k, entropy)
    engine = DynamicInferenceEngine(model, None, config or _just_enough(plan))
    try:
        return plan.run(engine, of_own=False)
    finally:
        engine.pause()
        engine.stop()


class Scorer:
    """A scorer that scores sequences with a running engine.

    Args:
        ready: function that returns a context manager; inside it, the weights are gathered and nothing is sampled.
    """

    def __init__(self, engine: DynamicInferenceEngine, ready: Callable[[], AbstractContextManager[None]]) -> None:
        self._engine, self._ready = engine, ready

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
        """Return log-probs of given sequences under the current weights and adapters; nothing is sampled.

        A prompt that several sequences share is computed once, or not at all if the prefix cache has it. Logits are computed
        only for the scored tokens, chunk by chunk. Groups in flight are paused during the call. Recorded expert routes are
        not replayed. On several ranks every rank may call `score`; if the weights are sharded, every rank
        must. To score under another adapter of the model, use `with trainer_hooks.peft.adapter(manager, name)`.

        Args:
            rollouts: a batch, of which the tokens in `response_mask` are scored; or the token ids of each sequence, as lists
                or as the output of one tokenizer call, whose padding is dropped.
            prompt_lengths: for token ids, the prompt length of all sequences or of each; tokens after the prompt are scored.
                If None, all tokens but the first are scored.
            temperature: divisor of the logits, for log-probs over the whole vocabulary. None means 1 for token ids. For
                a batch, None means the distributions of `batch.logprobs`: each row's own temperature and sampling filters.
            top_k: number of most likely tokens that are also returned for each scored token.
            entropy: whether to return entropies too.
            adapter: a loaded LoRA adapter for all rows. If None, a row uses its request's, or else the active adapters.

        Raises:
            InvalidRequestError: a sequence is empty or too long, or has an unknown token id or adapter.
            ConfigError: an argument is out of range; or, without `temperature`, a row was sampled with penalties, or with
                truncation and without `return_kept_tokens`.
            EngineStateError, WeightsChangedError, DeadlineError: see `generate`.
        """
        with self._ready():
            plan = _Plan.of(_sequences(rollouts, self._engine.model), prompt_lengths, temperature, top_k, entropy)
            if adapter is not None:
                plan.adapters = [adapter] * len(plan.tokens)
            elif plan.batch is not None:
                plan.adapters = [request.sampling_params.adapter for request in plan.batch]
            return plan.run(self._engine, of_own=True)


def _sequences(rollouts: Any, model: nn.Module) -> Any:
    """Return `rollouts` without padding. Lists stay unchanged, because a last token equal to the padding may be real."""
    owners = [getattr(model, name, None) for name in ("generation_config", "config")]
    return rollouts if isinstance(rollouts, list | tuple) else unpadded(rollouts, *owners, name="rollouts")


def _just_enough(plan: _Plan) -> InferenceConfig:
    default = InferenceConfig()
    size, longest = default.advanced.block_size_tokens, max(map(len, plan.tokens), default=1)
    step = default.step_tokens
    blocks = blocks_for(step + longest, step + longest, size)
    return InferenceConfig(kv_cache_blocks=blocks, max_tokens_per_step=step, advanced=Advanced(verify_model=False))


@dataclass(eq=False)
class _Plan:
    """The N sequences to score, and the scores that are requested for each of their tokens."""

    tokens: list[list[int]]
    mask: NDArray[np.bool_]
    batch: RolloutBatch | None
    temperature: NDArray[np.float32]
    """[N]: the divisor of each row's logits."""
    replayed: list[SamplingParams | None]
    """[N]: the sampling parameters of rows whose log-probs are over the sampling distribution; None for other rows."""
    top_k: int
    entropy: bool
    images: list[ImageInputs | None]
    """[N]: the images of each sequence; None if the sequence has no images."""
    adapters: list[str | None]
    """[N]: the name of each row's loaded LoRA adapter; None means the model's active adapters."""

    @classmethod
    def of(
        cls,
        rollouts: RolloutBatch | Sequences,
        prompt_lengths: int | Sequence[int] | None,
        temperature: float | None,
        top_k: int,
        entropy: bool,
    ) -> _Plan:
        if temperature is not None and not temperature > 0:
            raise ConfigError(f"temperature={temperature!r}: must be above 0, or None")
        if type(top_k) is not int or top_k < 0:
            raise ConfigError(f"top_k={top_k!r}: must be an integer of at least 0")
        if isinstance(rollouts, RolloutBatch):
            if prompt_lengths is not None:
                raise ConfigError(
                    "prompt_lengths= with a RolloutBatch, whose response_mask is what is scored: leave it out"
                )
            return cls._of_batch(rollouts, temperature, top_k, entropy)
        tokens = [[int(token) for token in each] for each in rollouts]
        starts = _starts(prompt_lengths, len(tokens))
        columns = np.arange(max(map(len, tokens), default=0))
        lengths = np.array([len(each) for each in tokens], np.int64)[:, None]
        mask = (columns < lengths) & (columns >= starts[:, None])
        warm, none = np.full(len(tokens), temperature or 1.0, np.float32), [None] * len(tokens)
        return cls(tokens, mask, None, warm, [*none], top_k, entropy, [*none], [*none])

    @classmethod
    def _of_batch(cls, batch: RolloutBatch, temperature: float | None, top_k: int, entropy: bool) -> _Plan:
        tokens = [[*request.prompt_tokens, *request.generated_tokens] for request in batch]
        mask = batch.response_mask.cpu().numpy().copy()
        mask[:, :1] = False
        if temperature is not None:
            warm = [temperature] * len(tokens)
            replayed: list[SamplingParams | None] = [None] * len(tokens)
        else:
            params = [request.sampling_params for request in batch]
            warm = [1.0 if one.greedy or one.logprobs_mode == "raw" else one.temperature for one in params]
            replayed = [one if _of_set(request) else None for one, request in zip(params, batch, strict=True)]
        images = [each.images for each in batch]
        none: list[str | None] = [None] * len(tokens)
        return cls(tokens, mask, batch, np.array(warm, np.float32), replayed, top_k, entropy, images, none)

    def run(self, engine: DynamicInferenceEngine, *, of_own: bool) -> TokenScores:
        rows, adapters = np.flatnonzero(self.mask.any(1)), self.adapters
        wanted = [
            Wanted(self.tokens[row], np.flatnonzero(self.mask[row]) - 1, self.images[row], adapters[row])
            for row in rows
        ]
        results = _Results(self, engine.controller.runner.exact, min(self.top_k, engine.controller.layout.vocab_size))

        def take(indices: NDArray[np.int64], positions: NDArray[np.int64], logits: Tensor) -> bool:
            return results.take(rows[indices], positions + 1, logits)

        version, own = engine.logits_at(wanted, take)
        named = sorted({repr(adapters[row]) for row in rows if adapters[row] is not None})
        acting = ", ".join(named if named and own == "none" else [own, *named])
        device = engine.guard.training_device if self.batch is None else self.batch.input_ids.device
        return results.scores(version, acting, device, of_own)


class _Results:
    """The scores [N, T] of a plan, which are computed from logits chunk by chunk."""

    def __init__(self, plan: _Plan, exact: bool, top_k: int) -> None:
        shape = plan.mask.shape
        self._plan = plan
        self._exact = exact
        self._k = top_k
        self._logprobs = torch.zeros(shape)
        self._entropies = torch.zeros(shape) if plan.entropy else None
        self._top = (torch.full((*shape, top_k), -1), torch.zeros(*shape, top_k)) if top_k else None
        kept = None if plan.batch is None else plan.batch.kept_tokens
        self._kept = None if kept is None else kept.to("cpu")

    def take(self, rows: NDArray[np.int64], columns: NDArray[np.int64], logits: Tensor) -> bool:
        """Score the K tokens at (`rows`, `columns`), given their logits [K, V]; return False if any log-prob is NaN."""
        if not len(rows):
            return True
        plan, device, at = self._plan, logits.device, (torch.from_numpy(rows), torch.from_numpy(columns))
        targets = torch.tensor(
            [plan.tokens[row][column] for row, column in zip(rows, columns, strict=True)], device=device
        )
        warm = torch.from_numpy(plan.temperature[rows]).to(device)
        logprobs, top_ids, top_logprobs = token_logprobs(logits, targets, self._k, exact=self._exact, temperature=warm)
        if reshaped := [index for index, row in enumerate(rows.tolist()) if plan.replayed[row] is not None]:
            some = torch.tensor(reshaped, device=device)
            logprobs[some] = self._replayed(rows[reshaped], columns[reshaped], logits[some], targets[some], warm[some])
        self._logprobs[at] = logprobs.cpu()
        if self._entropies is not None:
            parts = zip(torch.split(logits, ENTROPY_ROWS), torch.split(warm, ENTROPY_ROWS), strict=True)
            entropies = [
                torch.special.entr((part.float() / divisor[:, None]).softmax(1)).sum(1) for part, divisor in parts
            ]
            self._entropies[at] = torch.cat(entropies).cpu()
        if self._top is not None:
            assert top_ids is not None
            assert top_logprobs is not None
            self._top[0][at], self._top[1][at] = top_ids.cpu(), top_logprobs.cpu()
        return not bool(logprobs.isnan().any())

    def _replayed(
        self, rows: NDArray[np.int64], columns: NDArray[np.int64], logits: Tensor, targets: Tensor, warm: Tensor
    ) -> Tensor:
        """Return the log-probs [K] of token ids `targets` at temperatures `warm`, over the sets they were drawn from."""
        device = logits.device
        counts, ids = torch.zeros(len(rows), 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        if self._kept is not None:
            own = self._kept.of_tokens(torch.from_numpy(rows), torch.from_numpy(columns))
            counts, ids = own.counts[:, None], own.ids
        found = replay_logprobs(
            logits,
            (ids.to(device), counts.to(device)),
            targets[:, None],
            torch.ones(len(rows), 1, dtype=torch.bool, device=device),
            temperature=warm,
            logit_bias=[(self._plan.replayed[row] or SamplingParams()).logit_bias for row in rows.tolist()],
            predictors=torch.arange(len(rows), device=device)[:, None],
        )
        return found[:, 0]

    def scores(self, version: int, adapters: str, device: torch.device, of_own: bool) -> TokenScores:
        plan, mask = self._plan, torch.from_numpy(self._plan.mask)
        staleness = None
        if of_own and plan.batch is not None:
            staleness = torch.where(mask, version - plan.batch.policy_versions.cpu(), 0).to(torch.int32)

        def moved(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device)

        return TokenScores(
            logprobs=self._logprobs.to(device),
            mask=mask.to(device),
            entropies=moved(self._entropies),
            top_ids=moved(None if self._top is None else self._top[0]),
            top_logprobs=moved(None if self._top is None else self._top[1]),
            policy_version=version,
            staleness=moved(staleness),
            adapters=adapters,
        )


def _starts(prompt_lengths: int | Sequence[int] | None, count: int) -> NDArray[np.int64]:
    given = 1 if prompt_lengths is None else prompt_lengths
    each = [given] * count if isinstance(given, int) else [int(one) for one in given]
    if len(each) != count or any(one < 0 for one in each):
        raise ConfigError(
            f"prompt_lengths={prompt_lengths!r}: must be one number of at least 0, or one for each of {count}"
        )
    return np.maximum(np.array(each, np.int64), 1)


def _of_set(request: DynamicInferenceRequest) -> bool:
    """Return whether a request's log-probs are over the recorded sets of token ids from which its tokens were drawn.

    Raises:
        ConfigError: the engine cannot compute log-probs over the distribution that the request was sampled from.
    """
    params = request.sampling_params
    if params.greedy or params.logprobs_mode != "processed":
        return False
    # Check only the penalties if kept tokens were recorded: the kept sets already include the effect of filters, biases
    # and constraints.
    named = PENALTIES if params.return_kept_tokens else [*PENALTIES, *FILTERS, "logit_bias", "structured"]
    if shaped := params.shaping(named):
        raise ConfigError(
            f"request {request.request_id} sample {request.sample_index} was sampled with {', '.join(shaped)}: "
            f"{', '.join(FILTERS)} and structured (logit_bias next to one of them) are scored with return_kept_tokens=True, "
            "penalties by batch.logprobs_of(model) alone; or pass temperature= for log-probs of the whole vocabulary"
        )
    return params.return_kept_tokens
