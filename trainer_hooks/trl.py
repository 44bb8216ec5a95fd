"""Integration with TRL's trainers: completions and log-probs come from a rollout.

    attach(trainer, manager)                                replaces TRL's vLLM: log-probs correct the loss
    attach(trainer, manager, tree=True)                     ... and the log-prob pass trains each prompt once
    attach(trainer, manager, keep=rewards_differ)           ... and groups of equal rewards are replaced (DAPO)
    attach(trainer, manager, replay=False)                  ... and truncated sampling is trained on as if not truncated
    attach(another_trainer, manager)                        its model.generate runs on the engine (`trl_generate`)

    a generation      a prompt's group is one request of n samples; KV memory is released afterwards
    a step            (torch's hooks) raises the policy version if the weights were updated
    logs              include the rollout's metrics
    a checkpoint      contains the policy version and the random streams

Sampling options come from GRPOConfig. A failed completion raises an error or becomes a masked row; it is never returned
truncated. The module is written for TRL 1.16, but does not import TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.manager import RolloutManager
from rollout.manager.rounds import OnError
from rollout.state import Mode
from trainer_hooks.generate import Fallback
from trainer_hooks.trl_config import (
    check_choices,
    check_rewards,
    check_trainer,
    correction_mode,
    sampling_params,
    warn_of_shaping,
)
from trainer_hooks.trl_follower import Log, follow
from trainer_hooks.trl_forward import own_forward
from trainer_hooks.trl_generate import TrlGenerateAttachment, attach_trainer
from trainer_hooks.trl_images import prompt_groups
from trainer_hooks.trl_keep import FullBatches, Keep, check_keep
from trainer_hooks.trl_logprobs import LogprobPass, attach_trees, check_tree
from trainer_hooks.trl_replay import replayed
from trainer_hooks.trl_rows import GeneratedRows


class TrlAttachment:
    """A GRPOTrainer's generation backend, active until `detach()` or the end of the `with` block. Created by `attach`.

    It implements the interface of TRL's vLLM generation object.

    Attributes:
        trainer: the GRPOTrainer.
        manager: the manager that samples.
    """

    def __init__(
        self, trainer: Any, manager: RolloutManager, mode: Mode, on_error: OnError, log: Log, checkpoint: bool
    ) -> None:
        self.trainer = trainer
        self.manager = manager
        self._mode = mode
        self._on_error = on_error
        self._batch: RolloutBatch | None = None
        self._failed: list[bool] = []
        self._replays_kept = False
        self._generated: GeneratedRows | None = None
        self._full: FullBatches | None = None
        with ExitStack() as undo:
            self._follower = follow(trainer, manager, mode, log, checkpoint, undo)
            self._undo = undo.pop_all()
        if on_error == "mask":
            self._put(_calculate_rewards=self._without_failed(trainer._calculate_rewards))

    @property
    def discarded(self) -> int:
        """The number of this rank's groups that `keep` has rejected and that other prompts have replaced."""
        return 0 if self._full is None else self._full.discarded

    @property
    def steps(self) -> int:
        """The number of weight updates since training began, or 0 if your own `RolloutCallback` hooks the optimizer."""
        return self._follower.steps

    def detach(self) -> None:
        """Restore the trainer's original state. Idempotent."""
        self._undo.close()

    def __enter__(self) -> TrlAttachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    # --- methods that TRL calls on its generation object --------------------------------------------------------

    def sync_weights(self) -> None:
        """Do nothing: the rollout samples with the weights that the trainer steps."""

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float | None]]], list[list[list[int]]]]:
        """Complete every prompt once, in order; adjacent equal prompts form one group.

        TRL has already repeated every prompt `num_generations` times.

        Returns:
            (prompts, completions, log-probs, token ids). For each token, the last two contain a list with one entry.
        """
        with profiler or nullcontext():
            completions, logprobs = self.sample(prompts, images)
        each = [[[token] for token in completion] for completion in completions]
        return prompts, completions, [[[value] for value in row] for row in logprobs], each

    def sample(
        self, prompts: list[list[int]], images: list[Any] | None = None
    ) -> tuple[list[list[int]], list[list[float | None]]]:
        """Return the completions and their tokens' log-probs. None replaces a log-prob that is not finite.

        With `on_error="mask"`, the completion of a failed row is a single end-of-sequence token.
        """
        params = sampling_params(self.trainer, replay=self._replays_kept)
        groups = prompt_groups(self.trainer, prompts, images)
        with self.trainer.accelerator.autocast(), own_forward(self.manager.model):
            batch = self.manager.generate(
                [prompt for prompt, _ in groups],
                [params.replace(n=count) for _, count in groups],
                on_error=self._on_error,
                progress=False,
            )
        # Free the KV cache: the trainer continues with an update or an evaluation forward pass and needs the memory.
        self.manager.before_optimizer_step(self._mode)
        self._batch, self._failed = batch, [error is not None for error in batch.errors]
        completions, logprobs = self._rows(batch)
        if self._generated is not None:
            self._generated.take(batch, completions, self._failed)
        return completions, logprobs

    def _rows(self, batch: RolloutBatch) -> tuple[list[list[int]], list[list[float | None]]]:
        completions, logprobs = [], []
        for request, failed in zip(batch, self._failed, strict=True):
            known: list[float | None] = [None]
            if not failed:
                known = [each if math.isfinite(each) else None for each in request.generated_log_probs or ()]
            completions.append([self.trainer.eos_token_ids[0]] if failed else list(request.generated_tokens))
            logprobs.append(known)
        return completions, logprobs

    # --- the rollout_func that TRL calls ------------------------------------------------------------------------

    def roll_out(self, prompts: list[Any]) -> dict[str, Any]:
        """Complete each prompt (text or chat) once. In the returned dict, `env_mask` excludes failed rows from the loss.

        Raises:
            ValueError: the prompts contain images.
        """
        prompt_ids, images, _ = self.trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ValueError("on_error='mask': TRL takes no images back from a rollout_func; use on_error='raise'")
        completions, logprobs = self.sample(prompt_ids)
        output = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}
        if any(self._failed):
            output["env_mask"] = [
                [int(not failed)] * len(row) for failed, row in zip(self._failed, completions, strict=True)
            ]
        return output

    # --- internals ----------------------------------------------------------------------------------------------

    def take_vllms_place(self, correction: str) -> None:
        """Make TRL generate with this object and correct the loss by the sampling log-probs, in TRL's mode `correction`."""
        # Set mode "server", because in mode "colocate" TRL would read the maximum sequence length from vLLM's engine.
        self._put(vllm_generation=self, use_vllm=True, vllm_mode="server", _last_loaded_step=-1)
        self._put(vllm_importance_sampling_mode=correction)
        score = self.trainer._generate_and_score_completions
        self._put(_generate_and_score_completions=lambda inputs: self._observed(score(inputs)))
        if self._on_error == "mask":
            self._put(rollout_func=lambda prompts, trainer: self.roll_out(prompts))

    def fill_batches(self, keep: Keep) -> None:
        """Make TRL replace the groups that `keep` rejects with groups of other prompts."""
        full = FullBatches(self.trainer, keep, self.trainer._generate_and_score_completions)
        self._put(
            _generate_and_score_completions=full, _calculate_rewards=full.rewards(self.trainer._calculate_rewards)
        )
        self._full = full

    def replace_logprobs(self, *, trees: bool, kept: bool) -> None:
        """Make TRL compute log-probs over prefix trees, over kept tokens or both, and replay expert routes if recorded.

        Args:
            trees: whether log-probs are computed over prefix trees.
            kept: whether log-probs are over the kept tokens: at each position, the ids that the token was drawn from.
        """
        trainer, routes = self.trainer, self.manager.config.record_routes
        self._replays_kept = kept
        rows = GeneratedRows(trainer, kept=kept, routes=routes)
        if trees:
            self._undo.push(attach_trees(trainer, self.manager.model))
        if trees or kept:
            params = sampling_params(trainer, replay=True) if kept else None
            compute = LogprobPass(trainer, rows, kept=params, trees=trees, layout=self.manager.image_layout)
            self._put(_get_per_token_logps_and_entropies=compute)
        elif routes:
            around = rows.pass_over_rows(trainer._get_per_token_logps_and_entropies)
            self._put(_get_per_token_logps_and_entropies=around)
        if kept or routes:
            self._generated = rows
            score = trainer._generate_and_score_completions
            self._put(
                _generate_and_score_completions=lambda inputs: rows.scored(score(inputs)),
                _compute_loss=rows.loss(trainer._compute_loss),
            )
        if routes:
            self._put(training_step=rows.training_step(trainer.training_step))

    def _put(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            if name in vars(self.trainer):
                self._undo.callback(setattr, self.trainer, name, vars(self.trainer)[name])
            else:
                self._undo.callback(delattr, self.trainer, name)
            setattr(self.trainer, name, value)

    def _observed(self, scored: dict[str, Any]) -> dict[str, Any]:
        """Record the metric `rollout/logprob_diff` from TRL's log-probs for the last batch. Return `scored`."""
        trained, batch = scored.get("old_per_token_logps"), self._batch
        self._batch = None
        # Skip tool loops, in which `batch` covers only one turn.
        if trained is None or batch is None or self.trainer.tools:
            return scored
        used = scored["completion_mask"].bool() & scored.get("tool_mask", scored["completion_mask"]).bool()
        mask = batch.response_mask & used.any(1, keepdim=True)
        logprobs = batch.logprobs.clone()
        logprobs[mask] = trained[used].to(logprobs)
        self.manager.observe_logprobs(replace(batch, response_mask=mask), logprobs)
        return scored

    def _without_failed(self, rewards_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Let `rewards_of` return NaN for failed rows, which then have advantage 0 and do not affect the group's mean."""

        def calculate(*args: Any, **kwargs: Any) -> Tensor:
            rewards = rewards_of(*args, **kwargs)
            failed = torch.tensor(self._failed, device=rewards.device)
            rewards[self.trainer.accelerator.gather(failed)] = torch.nan
            return rewards

        return calculate


def attach(
    trainer: Any,
    manager: RolloutManager,
    *,
    mode: Mode = None,
    on_error: OnError = "raise",
    log: Log = True,
    checkpoint: bool = True,
    tree: bool = False,
    replay: bool | None = None,
    keep: Keep | None = None,
    fallback: Fallback = "warn",
) -> TrlAttachment | TrlGenerateAttachment:
    """Make `trainer` generate with `manager`, and correct a GRPOTrainer's loss by the rollout's log-probs.

    Other trainers (RLOO, OnlineDPO, GKD, Distillation, SDPO, SDFT, A2PO, GOLD) call `model.generate`, which then runs on
    the engine (`trainer_hooks.generate`). Their optimizer steps raise the policy version, and their logs and checkpoints
    include the rollout. RLOO and SDPO use the rollout's log-probs as old log-probs if these are exact (in float32, without
    autocast). The rest of this docstring is about GRPOTrainer.

    Requires: a GRPOTrainer of TRL 1.16 with `use_vllm=False`, and a manager of its model: `RolloutManager(trainer.model,
    tokenizer, ...)`. Call `attach` before `train()`, or in a callback's `on_train_begin`; on several ranks, on every rank.

    Changes: `manager` takes the place of the trainer's vLLM, so GRPOConfig's `vllm_importance_sampling_*` options apply (the
    correction is on by default) and the metrics `sampling/*` are logged. TRL's tool loop and `evaluate()` also generate with
    `manager`. A callback attaches the optimizer when training begins, detaches it afterwards, and adds `rollout/*` to every
    training log. If the trainer already has a `RolloutCallback(manager, ...)`, that callback is used.

    Sampling follows GRPOConfig and stops at the trainer's `eos_token_ids`. Random streams derive from
    `InferenceConfig.seed`. If the sampling distribution differs from the trained distribution and is not replayed, a warning
    is issued, and the log-probs are over the trained distribution (see `sampling_params`).

    With `checkpoint`, the trainer's checkpoints contain the policy version and the random streams. A manager with policy
    version 0 restores them when `train(resume_from_checkpoint=...)` finds them. Otherwise a warning is issued and the
    version continues from the trainer's step.

    Args:
        trainer: a GRPOTrainer, before training, or another of the trainers above.
        manager: the manager that samples with the module that the trainer trains.
        mode: handling of the KV cache while the trainer trains. If None, the manager's configured mode.
        on_error: with "raise", a failed completion raises `RolloutFailedError` in `train()`. With "mask", its row becomes
            one token outside the loss, without a reward, and does not affect the group's advantages.
        log: whether metrics are added to the trainer's logs, or the names of the metrics to add.
        checkpoint: whether the trainer's checkpoints contain the rollout's state.
        tree: whether the trainer's log-probs (for the loss, the old and the reference policy) are computed over prefix trees
            (`trainer_hooks.tree`). This saves most when a micro-batch holds the whole generation batch.
        replay: whether the trainer's log-probs are over the distribution after `top_k`, `top_p`, `min_p` and penalties.
            Every completion then records its kept tokens, i.e. the ids that each token was drawn from. If None, replay if
            `top_k`, `top_p` or `min_p` truncates, except (with a warning) with tools, a load-balancing loss or a Liger loss.
            Expert routes are replayed too if the rollout records them.
        keep: function that returns whether a group of completions is worth training on, such as `rollout.rewards_differ`.
            Rejected groups are replaced with other prompts from the training set, as in DAPO, until four times the batch has
            been discarded. If None, every group counts.
        fallback: as in `trainer_hooks.generate.attach`; only for trainers other than GRPOTrainer.

    Returns:
        The attachment; `detach()` restores the trainer's original state.

    Raises:
        TypeError: `trainer` is not a trainer, or lacks attributes of TRL 1.16's GRPOTrainer; or a reward function does not
            accept the arguments that TRL passes.
        ConfigError: `mode`, `on_error` or a GRPOConfig option is unknown or unsupported; or an option that is only for
            GRPOTrainer is set for another trainer.
        UnsupportedModelError: `tree` is set, but a layer needs more than causal attention (full or with a sliding window).
        KeyError: `log` contains an unknown metric.
        ValueError: the trainer trains another model; already generates with vLLM, continuous batching or a
            `rollout_func`; or has tools with `on_error="mask"`. Nothing is attached then.
    """
    if all(each.__name__ != "GRPOTrainer" for each in type(trainer).__mro__):
        others = {"on_error": on_error if on_error != "raise" else "", "tree": tree, "replay": replay, "keep": keep}
        return attach_trainer(trainer, manager, mode, log, checkpoint, fallback, **others)
    if getattr(trainer, "rollout_func", None) is not None:
        raise ValueError("this trainer has a rollout_func already: build it without, and attach(trainer, manager)")
    if isinstance(getattr(trainer, "vllm_generation", None), TrlAttachment):
        raise ValueError("this trainer is attached to a rollout already: keep that attachment, or detach() it first")
    check_trainer(trainer, manager.model)
    check_choices(trainer, mode, on_error)
    check_rewards(trainer)
    if tree:
        check_tree(trainer)
    if keep is not None:
        check_keep(trainer)
    why_not = replayed(trainer, replay, manager.config.record_routes)
    attachment = TrlAttachment(trainer, manager, mode, on_error, log, checkpoint)
    try:
        attachment.replace_logprobs(trees=tree, kept=why_not is None)
        attachment.take_vllms_place(correction_mode(trainer, stacklevel=2))
        if keep is not None:
            attachment.fill_batches(keep)
    except BaseException:
        attachment.detach()
        raise
    if why_not is not None:
        warn_of_shaping(trainer, stacklevel=2, why_not_replayed=why_not)
    return attachment
