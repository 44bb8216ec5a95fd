"""A replacement for a GRPOTrainer's log-prob pass that computes log-probs over prefix trees or kept tokens.

TRL computes log-probs and entropies in one method, over the whole vocabulary and padded rows. It calls the method for the
loss and, without gradient, for the old and the reference policy. With prefix trees, a prompt that several rows share is
computed once, including its images. Kept tokens are the ids that each token was drawn from. Log-probs over them follow the
sampling distribution, so that top_k, top_p, min_p and penalties leave the importance ratio at 1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout.engine.training.tree_forward import TreeAttachment
from rollout.errors import ConfigError
from rollout.manager.batch.columns import KeptSets
from rollout.manager.batch.forward import Part, read_scores
from rollout.manager.batch.images import BatchImages, ImageLayout
from rollout.manager.batch.tree import PackedTree, pack_tree
from rollout.requests.images import ImageInputs
from rollout.sampling_params import PENALTIES, SamplingParams
from trainer_hooks.trl_images import images_of_rows
from trainer_hooks.trl_rows import GeneratedRows


def check_tree(trainer: Any) -> None:
    """Reject GRPOConfig options that the log-prob pass over prefix trees does not support.

    Raises:
        ConfigError: an option is not supported; the message names it.
    """
    if getattr(trainer, "aux_loss_enabled", False):
        raise ConfigError(
            f"tree=True with a load-balancing loss (router_aux_loss_coef={trainer.router_aux_loss_coef}): a prompt would "
            "count once in it, and not once per sample; set the model's router_aux_loss_coef to 0.0, or leave tree out"
        )


def attach_trees(trainer: Any, model: nn.Module) -> AbstractContextManager[Any]:
    """Let `model` and the reference model attend over prefix trees, until the returned context manager exits.

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
    """A replacement for `_get_per_token_logps_and_entropies` of the GRPOTrainer `trainer`.

    Args:
        rows: the recorded kept tokens (ids that each token was drawn from) and expert routes of the generated rows.
        kept: sampling parameters of the completions, if log-probs are over their kept tokens, else None.
        trees: whether to compute logits over prefix trees, which requires attached tree attention.
        layout: how the model finds images among its tokens. If None, images are not supported.
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
        """Return (log-probs of the last `logits_to_keep` columns, entropies or None, None instead of an auxiliary loss).

        Raises:
            ValueError: an input is not supported, such as images without prefix trees; the message names it.
        """
        images = images_of_rows(len(input_ids), others)
        if any(images) and (not self._trees or self._layout is None):
            raise ValueError(
                "images: log-probs over kept tokens, or of this model over prefix trees, are of text alone"
            )
        # Process `batch_size` rows at a time, as TRL does without gradient to bound memory. Prompts are shared only
        # among these rows.
        size = batch_size or len(input_ids)
        found = []
        for rows in (slice(start, start + size) for start in range(0, len(input_ids), size)):
            ids, real = input_ids[rows], attention_mask[rows].bool()
            wanted = real.clone()
            wanted[:, :-logits_to_keep] = False
            forward = self._tree if self._trees else self._padded
            part, replayed = forward(model, ids, real, wanted, rows, images[rows])
            shaping, kept = {"temperature": float(self._trainer.temperature)}, None
            if self._kept is not None:
                shaping, kept = self._sets(ids.shape, ids.shape[1] - logits_to_keep, rows)
                part = replace(part, mask=part.mask & (kept.counts > 0))
            with self._trainer.accelerator.autocast(), replayed:
                found.append(read_scores(model, part, shaping, kept, entropy=compute_entropy))
        logprobs = torch.cat([each.logprobs[:, -logits_to_keep:] for each in found])
        entropies = [each.entropies[:, -logits_to_keep:] for each in found if each.entropies is not None]
        return logprobs, torch.cat(entropies) if compute_entropy else None, None

    def _padded(
        self, model: Any, input_ids: Tensor, real: Tensor, wanted: Tensor, rows: slice, _images: list[Any]
    ) -> tuple[Part, AbstractContextManager[None]]:
        """Return padded rows as input of a forward pass, and a context manager in which their expert routes are replayed."""
        inputs = {"input_ids": input_ids, "attention_mask": real.to(torch.int64), "use_cache": False}
        before = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape) - 1
        return Part(inputs, input_ids.masked_fill(~real, -1), wanted, before), self._rows.routed(
            model, input_ids, real, rows
        )

    def _tree(
        self,
        model: Any,
        input_ids: Tensor,
        real: Tensor,
        wanted: Tensor,
        rows: slice,
        images: list[ImageInputs | None],
    ) -> tuple[Part, AbstractContextManager[None]]:
        """Return the rows and images as a prefix tree, and a context manager in which their expert routes are replayed."""
        pack = partial(self._pictured, images=images) if any(images) else pack_tree
        packed = pack(input_ids, real, wanted, routed_experts=self._rows.routes(rows))
        return packed.part(input_ids.masked_fill(~real, -1)), self._rows.routed_tree(model, packed)

    def _pictured(
        self,
        input_ids: Tensor,
        real: Tensor,
        wanted: Tensor,
        *,
        routed_experts: Tensor | None,
        images: list[ImageInputs | None],
    ) -> PackedTree:
        """Pack rows with images as a tree. First move padding to the right, because image positions require it there."""
        left = (~real).to(torch.uint8).argsort(dim=1, stable=True)
        ids, real, wanted = (each.gather(1, left) for each in (input_ids, real, wanted))
        tokens = ids.masked_fill(~real, -1).cpu().numpy()
        # Pass no token as sampled: placeholders among sampled tokens are ignored, but tool results may contain images.
        found = BatchImages.of(self._layout, images, tokens, np.zeros(tokens.shape, np.bool_), ids.device)
        assert found is not None
        packed = found.tree(ids, real, wanted, torch.arange(len(ids), device=ids.device), routed_experts)
        back = left.argsort(dim=1)
        of_rows = {name: getattr(packed, name).gather(1, back) for name in ("nodes", "wanted", "predictors")}
        return replace(packed, **of_rows)

    def _sets(self, shape: torch.Size, prompt: int, rows: slice) -> tuple[dict[str, Any], KeptSets]:
        """Return the sampling arguments for `read_scores`, and the ids left by top-p etc. from column `prompt` on."""
        ids, counts = self._rows.kept(rows)
        sizes = counts.new_zeros(shape)
        width = min(shape[1] - prompt, counts.shape[1])
        sizes[:, prompt : prompt + width] = counts[:, :width]
        used = torch.arange(ids.shape[1], device=ids.device) < counts.sum(1, keepdim=True)
        params = self._kept
        assert params is not None
        return {
            "temperature": params.temperature,
            "logit_bias": params.logit_bias,
            "prompt_lengths": torch.full((len(ids),), prompt, device=ids.device),
            **{name: getattr(params, name) for name in PENALTIES},
        }, KeptSets(ids[used], sizes)
