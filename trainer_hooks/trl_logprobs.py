"""Log-prob pass of a GRPOTrainer, where `trainer_hooks.trl.attach` replaces it: over prefix trees, or over kept tokens.

TRL computes log-probs and entropies in one method, for the loss and, without gradient, for the old and the reference policy:
of the whole vocabulary, over padded rows. Over prefix trees, prompts that stand in several rows are computed once, their
images too. Over kept tokens, log-probs are of the distribution sampled from, so that top_k, top_p, min_p and penalties leave
the ratio at 1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout.algorithms import replay_logprobs
from rollout.engine.training.tree_forward import TreeAttachment
from rollout.errors import ConfigError
from rollout.manager.batch.columns import selected_logprobs, token_entropies
from rollout.manager.batch.images import BatchImages, ImageLayout
from rollout.manager.batch.tree import PackedTree, pack_tree
from rollout.requests.images import ImageInputs
from rollout.sampling_params import PENALTIES, SamplingParams
from trainer_hooks.trl_images import images_of_rows
from trainer_hooks.trl_rows import GeneratedRows


def check_tree(trainer: Any) -> None:
    """Refuse options of GRPOConfig that the log-prob pass over trees does not follow.

    Raises:
        ConfigError: names the option.
    """
    if getattr(trainer, "aux_loss_enabled", False):
        raise ConfigError(
            f"tree=True with a load-balancing loss (router_aux_loss_coef={trainer.router_aux_loss_coef}): a prompt would "
            "count once in it, and not once per sample; set the model's router_aux_loss_coef to 0.0, or leave tree out"
        )
    if trainer.args.cast_lm_head_to_fp32:
        raise ConfigError(
            "tree=True with cast_lm_head_to_fp32=True: the head runs in the model's dtype; set it to False"
        )


def attach_trees(trainer: Any, model: nn.Module) -> AbstractContextManager[Any]:
    """Let `model`, the module that the trainer trains, and its reference model attend over trees; exiting undoes it.

    Raises:
        UnsupportedModelError, ValueError: see `trainer_hooks.tree.attach`.
    """
    reference = getattr(trainer, "ref_model", None)
    models = [model] if reference is None else [model, trainer.accelerator.unwrap_model(reference)]
    with ExitStack() as stack:
        for each in models:
            stack.callback(TreeAttachment(each).detach)
        return stack.pop_all()


class LogprobPass:
    """Stands for a trainer's `_get_per_token_logps_and_entropies`.

    Args:
        trainer: the GRPOTrainer.
        rows: what a generation knows of the rows.
        kept: sampling parameters of completions whose kept tokens are replayed; None: log-probs of the whole vocabulary.
        trees: compute logits over prefix trees, for which tree attention is attached.
        layout: how the model finds images among its tokens; None: it takes none.
    """

    def __init__(
        self,
        trainer: Any,
        rows: GeneratedRows,
        *,
        kept: SamplingParams | None,
        trees: bool,
        layout: ImageLayout | None = None,
    ) -> None:
        self._trainer = trainer
        self._rows = rows
        self._kept = kept
        self._trees = trees
        self._layout = layout

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
            ValueError: an input is not of those that the pass follows: images over prefix trees; names it.
        """
        images = images_of_rows(len(input_ids), others)
        if any(images) and (not self._trees or self._layout is None):
            raise ValueError(
                "images: log-probs over kept tokens, or of this model over prefix trees, are of text alone"
            )
        # Without gradient TRL bounds memory by `batch_size`. Prompts are shared within as many rows.
        size = batch_size or len(input_ids)
        logprobs, entropies = [], []
        for rows in (slice(start, start + size) for start in range(0, len(input_ids), size)):
            ids, real = input_ids[rows], attention_mask[rows].bool()
            wanted = torch.zeros_like(real)
            wanted[:, -logits_to_keep:] = True
            if self._trees:
                logits, predictors = self._of_tree(model, ids, real, wanted, rows, images[rows])
            else:
                logits, predictors = self._of_rows(model, ids, real, wanted, rows)
            if compute_entropy:
                entropies.append(token_entropies(logits, self._temperature)[predictors[:, -logits_to_keep:]])
            found = (self._whole if self._kept is None else self._replayed)(logits, predictors, ids, real, wanted, rows)
            logprobs.append(found[:, -logits_to_keep:])
        return torch.cat(logprobs), torch.cat(entropies) if compute_entropy else None, None

    @property
    def _temperature(self) -> float:
        return float(self._trainer.temperature)

    def _of_rows(
        self, model: Any, input_ids: Tensor, real: Tensor, wanted: Tensor, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """Logits [K, V] of padded rows, and the one that predicts each wanted token, int64 [N, T]; any elsewhere."""
        window = int(wanted[0].sum()) + 1
        with self._trainer.accelerator.autocast(), self._rows.routed(model, input_ids, real, rows):
            logits = model(
                input_ids=input_ids, attention_mask=real.to(torch.int64), use_cache=False, logits_to_keep=window
            ).logits
        row = torch.arange(len(input_ids), device=logits.device)[:, None]
        column = torch.arange(input_ids.shape[1], device=logits.device) - (input_ids.shape[1] - window + 1)
        return logits.flatten(0, 1), (row * window + column).clamp(min=0)

    def _of_tree(
        self,
        model: Any,
        input_ids: Tensor,
        real: Tensor,
        wanted: Tensor,
        rows: slice,
        images: list[ImageInputs | None],
    ) -> tuple[Tensor, Tensor]:
        """The same of the prefix tree of the rows, with the images of each."""
        if any(images):
            packed = self._pictured(input_ids, real, wanted & real, self._rows.routes(rows), images)
        else:
            packed = pack_tree(input_ids, real, wanted & real, routed_experts=self._rows.routes(rows))
        with self._trainer.accelerator.autocast(), self._rows.routed_tree(model, packed):
            logits = model(**packed.inputs).logits
        return packed.predicting(logits), packed.predictors_of_rows()

    def _pictured(
        self, input_ids: Tensor, real: Tensor, wanted: Tensor, routes: Tensor | None, images: list[ImageInputs | None]
    ) -> PackedTree:
        """`pack_tree` of rows with images, whose places are counted from the first token of a row."""
        left = (~real).to(torch.uint8).argsort(dim=1, stable=True)
        ids, real, wanted = (each.gather(1, left) for each in (input_ids, real, wanted))
        tokens = ids.masked_fill(~real, -1).cpu().numpy()
        # What was not sampled may have images too: what a tool has returned.
        found = BatchImages.of(self._layout, images, tokens, np.zeros(tokens.shape, np.bool_), ids.device)
        assert found is not None
        packed = found.tree(ids, real, wanted, torch.arange(len(ids), device=ids.device), routes)
        back = left.argsort(dim=1)
        return replace(packed, nodes=packed.nodes.gather(1, back), wanted=packed.wanted.gather(1, back))

    def _whole(
        self, logits: Tensor, predictors: Tensor, input_ids: Tensor, real: Tensor, wanted: Tensor, rows: slice
    ) -> Tensor:
        """[N, T] log-probs of the wanted tokens over the whole vocabulary."""
        mask = wanted & real
        chosen = selected_logprobs(logits, predictors[mask], input_ids[mask], self._temperature)
        return chosen.new_zeros(mask.shape).masked_scatter(mask, chosen)

    def _replayed(
        self, logits: Tensor, predictors: Tensor, input_ids: Tensor, real: Tensor, wanted: Tensor, rows: slice
    ) -> Tensor:
        """[N, T] log-probs of the wanted tokens over their sets."""
        ids, counts = self._rows.kept(rows)
        count, columns = input_ids.shape
        prompt = columns - int(wanted[0].sum())
        sizes = torch.zeros_like(input_ids)
        width = min(columns - prompt, counts.shape[1])
        sizes[:, prompt : prompt + width] = counts[:, :width]
        used = torch.arange(ids.shape[1], device=ids.device) < counts.sum(1, keepdim=True)
        mask = sizes > 0
        params = self._kept
        assert params is not None
        return replay_logprobs(
            logits,
            (ids[used], sizes),
            # The id of no token: padding must not count as said.
            input_ids.masked_fill(~real & ~mask, logits.shape[-1]),
            mask,
            temperature=params.temperature,
            logit_bias=params.logit_bias,
            prompt_lengths=torch.full((count,), prompt, device=ids.device),
            predictors=predictors,
            **{name: getattr(params, name) for name in PENALTIES},
        )
