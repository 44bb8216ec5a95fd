"""Log-prob pass of a GRPOTrainer over kept tokens, where `trainer_hooks.trl.attach` finds truncated sampling.

TRL computes log-probs of the whole vocabulary. Here those of the loss, the old and the reference policy are of the
distribution that was sampled from, so that top_k, top_p, min_p and penalties leave the ratio between them at 1. The sets of
a generation travel with TRL's own tensors, which it shuffles and splits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rollout.algorithms import replay_logprobs
from rollout.errors import ConfigError
from rollout.manager.batch import RolloutBatch
from rollout.manager.token_logprobs import token_entropies
from rollout.manager.tree import pack_tree
from rollout.sampling_params import MAX_KEPT_TOKENS, SamplingParams
from trainer_hooks.trl_config import sampling_params
from trainer_hooks.trl_images import is_vision

_IDS, _COUNTS = "rollout_kept_ids", "rollout_kept_counts"


def replayed(trainer: Any, asked: bool | None) -> str | None:
    """Whether a trainer's log-probs are replayed: None if they are, else why not ("" if there is nothing to replay).

    Args:
        asked: `replay` of `attach`. None: wherever it is possible.

    Raises:
        ConfigError: it is asked for, and the reason is not "".
    """
    params = sampling_params(trainer)
    # The only token of a set has the log-prob 0 and no gradient.
    why = _why_not(trainer, params) if params.truncated and params.top_k != 1 else ""
    if asked and why is not None:
        raise ConfigError(
            f"replay=True {why or 'without top_k (above 1), top_p or min_p: log-probs need no replay of kept tokens'}; "
            "leave replay out, or set it to False"
        )
    return "replay=False" if asked is False and why is None else why


def _why_not(trainer: Any, params: SamplingParams) -> str | None:
    """What the log-prob pass over kept tokens does not follow, with the cure; None: nothing."""
    if trainer.tools:
        return (
            "with tools: what they return was not sampled, and sets of earlier turns are not kept; train without tools"
        )
    if is_vision(trainer):
        return "with a processor: kept tokens are replayed for text alone; set top_k=0, top_p=1.0 and min_p=None"
    if params.top_k > MAX_KEPT_TOKENS:
        return f"with top_k={params.top_k}: sets hold at most {MAX_KEPT_TOKENS} tokens; lower it"
    if trainer.args.use_liger_kernel and hasattr(trainer, "compute_liger_loss"):
        return "with use_liger_kernel=True: this trainer's Liger loss computes its own log-probs; set it to False"
    if getattr(trainer, "aux_loss_enabled", False):
        return (
            f"with a load-balancing loss (router_aux_loss_coef={trainer.router_aux_loss_coef}): set the model's "
            "router_aux_loss_coef to 0.0"
        )
    return None


class ReplayLogprobs:
    """Stands for a trainer's `_get_per_token_logps_and_entropies`.

    Args:
        trainer: the GRPOTrainer.
        trees: compute logits over prefix trees, for which tree attention is attached.
    """

    def __init__(self, trainer: Any, *, trees: bool) -> None:
        self._trainer = trainer
        self._params = sampling_params(trainer, replay=True)
        self._trees = trees
        self._ids: Tensor | None = None
        self._counts: Tensor | None = None

    def take(self, batch: RolloutBatch, completions: list[list[int]], failed: list[bool]) -> None:
        """The sets of a generation, for the scoring that follows; a failed row's only token has itself as its set."""
        sets = [
            (list(row), [1] * len(row)) if lost or request.generated_kept_tokens is None
            else (request.generated_kept_tokens.ids.tolist(), request.generated_kept_tokens.counts.tolist())
            for request, row, lost in zip(batch, completions, failed, strict=True)
        ]  # fmt: skip
        device = self._trainer.accelerator.device
        self._ids, self._counts = (_padded([each[part] for each in sets], device) for part in (0, 1))

    def scored(self, outputs: dict[str, Any]) -> dict[str, Any]:
        """Add the sets to what TRL keeps of a generation."""
        ids, counts = self._ids, self._counts
        self._ids = self._counts = None
        return outputs if ids is None else outputs | {_IDS: ids, _COUNTS: counts}

    def loss(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `_compute_loss`, so that the log-probs inside it are those of its rows."""

        def computed(model: Any, inputs: dict[str, Any]) -> Any:
            self._ids, self._counts = inputs[_IDS], inputs[_COUNTS]
            try:
                return compute(model, inputs)
            finally:
                self._ids = self._counts = None

        return computed

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Log-probs of the last `logits_to_keep` columns, the model's entropies if asked for, no load-balancing loss.

        Raises:
            ValueError: an input has images.
        """
        given = sorted(name for name, value in others.items() if value is not None and value is not False)
        if given:
            raise ValueError(f"{', '.join(given)}: kept tokens are replayed for text alone; attach without replay")
        assert self._ids is not None
        assert self._counts is not None
        size = batch_size or len(input_ids)
        logprobs, entropies = [], []
        for rows in (slice(start, start + size) for start in range(0, len(input_ids), size)):
            ids, real = input_ids[rows], attention_mask[rows].bool()
            wanted = torch.zeros_like(real)
            wanted[:, -logits_to_keep:] = True
            logits, predictors = (self._of_tree if self._trees else self._of_rows)(model, ids, real, wanted)
            if compute_entropy:
                entropies.append(token_entropies(logits, self._params.temperature)[predictors[:, -logits_to_keep:]])
            kept = self._ids[rows], self._counts[rows]
            logprobs.append(self._replayed(logits, predictors, ids, real, wanted, kept)[:, -logits_to_keep:])
        return torch.cat(logprobs), torch.cat(entropies) if compute_entropy else None, None

    def _of_rows(self, model: Any, input_ids: Tensor, real: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [K, V] of padded rows, and the one that predicts each wanted token, int64 [N, T]; any elsewhere."""
        window = int(wanted[0].sum()) + 1
        with self._trainer.accelerator.autocast():
            logits = model(
                input_ids=input_ids, attention_mask=real.to(torch.int64), use_cache=False, logits_to_keep=window
            ).logits
        row = torch.arange(len(input_ids), device=logits.device)[:, None]
        column = torch.arange(input_ids.shape[1], device=logits.device) - (input_ids.shape[1] - window + 1)
        return logits.flatten(0, 1), (row * window + column).clamp(min=0)

    def _of_tree(self, model: Any, input_ids: Tensor, real: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """The same of the prefix tree of the rows."""
        packed = pack_tree(input_ids, real, wanted & real)
        with self._trainer.accelerator.autocast():
            logits = model(**packed.inputs).logits
        return packed.predicting(logits), packed.predictors_of_rows()

    def _replayed(
        self, logits: Tensor, predictors: Tensor, input_ids: Tensor, real: Tensor, wanted: Tensor,
        kept: tuple[Tensor, Tensor],
    ) -> Tensor:  # fmt: skip
        """[N, T] log-probs of the wanted tokens over their sets."""
        ids, counts = kept
        count, columns = input_ids.shape
        prompt = columns - int(wanted[0].sum())
        sizes = torch.zeros_like(input_ids)
        width = min(columns - prompt, counts.shape[1])
        sizes[:, prompt : prompt + width] = counts[:, :width]
        used = torch.arange(ids.shape[1], device=ids.device) < counts.sum(1, keepdim=True)
        mask = sizes > 0
        params = self._params
        return replay_logprobs(
            logits,
            (ids[used], sizes),
            # The id of no token: padding must not count as said.
            input_ids.masked_fill(~real & ~mask, logits.shape[-1]),
            mask,
            temperature=params.temperature,
            logit_bias=params.logit_bias,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            prompt_lengths=torch.full((count,), prompt, device=ids.device),
            predictors=predictors,
        )


def _padded(rows: list[list[int]], device: Any) -> Tensor:
    """int32 [N, longest], padded with 0."""
    padded = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return padded.to(device)
