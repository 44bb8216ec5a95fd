"""Integration with TRL's trainers that call `model.generate`: RLOO, OnlineDPO, GKD, Distillation, SDPO, SDFT, A2PO, GOLD.

`trainer_hooks.trl.attach` calls this module for every trainer except GRPOTrainer. `model.generate` runs on the engine, the
policy version follows the optimizer, and logs and checkpoints include the rollout. RLOO and SDPO compute log-probs of the
completions a second time before they train; in float32 they use the rollout's log-probs instead.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from rollout import ConfigError, RolloutManager
from rollout.state import Mode
from trainer_hooks.generate import Fallback, GenerateHook
from trainer_hooks.generate import attach as attach_generate
from trainer_hooks.trl_follower import Log, follow


class TrlGenerateAttachment:
    """A TRL trainer's hook on `model.generate`, active until `detach()` or the end of the `with` block.

    Attributes:
        trainer: the trainer.
        manager: the manager that samples.
        hook: the hook on `model.generate`, which counts calls that ran on the engine and calls that ran transformers' loop.
    """

    def __init__(
        self, trainer: Any, manager: RolloutManager, mode: Mode, log: Log, checkpoint: bool, fallback: Fallback
    ) -> None:
        self.trainer = trainer
        self.manager = manager
        with ExitStack() as undo:
            self.hook: GenerateHook = undo.enter_context(attach_generate(trainer.model, manager, fallback=fallback))
            self._follower = follow(trainer, manager, mode, log, checkpoint, undo)
            for name, stand_in in (
                ("_get_per_token_logps_and_entropies", self._logprobs_of_rloo),
                ("_compute_rollout_logps", self._logprobs_of_sdpo),
            ):
                if hasattr(trainer, name):
                    setattr(trainer, name, stand_in(getattr(trainer, name)))
                    undo.callback(delattr, trainer, name)
            self._undo = undo.pop_all()

    @property
    def steps(self) -> int:
        """The number of weight updates since training began, or 0 if your own `RolloutCallback` hooks the optimizer."""
        return self._follower.steps

    def detach(self) -> None:
        """Restore the trainer's original state. Idempotent."""
        self._undo.close()

    def __enter__(self) -> TrlGenerateAttachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    # --- log-probs of sampled tokens ----------------------------------------------------------------------------

    def _logprobs_of_rloo(self, compute: Any) -> Any:
        def computed(
            model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **kwargs: Any
        ) -> Any:
            # Use the sampled log-probs in TRL's pass before training, which needs neither gradients nor entropy. TRL runs
            # the pass for the policy first. For the reference model, which follows, `_sampled` then returns None.
            if not torch.is_grad_enabled() and not kwargs.get("compute_entropy"):
                known = self._sampled(input_ids, attention_mask, logits_to_keep)
                if known is not None:
                    return known, None, None
            return compute(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

        return computed

    def _logprobs_of_sdpo(self, compute: Any) -> Any:
        def computed(prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, completion_mask: Tensor) -> Any:
            args = self.trainer.args
            every = args.steps_per_generation * self.trainer.num_iterations
            if args.gradient_accumulation_steps % every:
                ids = torch.cat([prompt_ids, completion_ids], dim=1)
                known = self._sampled(ids, torch.cat([prompt_mask, completion_mask], dim=1), completion_ids.shape[1])
                if known is not None:
                    return known
            return compute(
                prompt_ids=prompt_ids, prompt_mask=prompt_mask, completion_ids=completion_ids,
                completion_mask=completion_mask,
            )  # fmt: skip

        return computed

    def _sampled(self, input_ids: Tensor, attention_mask: Tensor, width: int) -> Tensor | None:
        """Return the last batch's sampled log-probs [N, width], or None if the trainer's log-probs would differ.

        The two are equal in float32 without autocast if the rows contain the sampled tokens, the weights have not changed
        and both use the same temperature. A second call for the same batch returns None.
        """
        last, self.hook.last = self.hook.last, None
        parameters = self.manager.model.parameters()
        if (
            last is None
            or last.version != self.manager.policy_version
            or last.temperature != getattr(self.trainer, "temperature", None)
            or len(last.completions) != len(input_ids)
            or self.trainer.accelerator.mixed_precision != "no"
            or any(parameter.dtype != torch.float32 for parameter in parameters)
        ):
            return None
        split = input_ids.shape[1] - width
        found = torch.zeros(len(input_ids), width, device=input_ids.device)
        for row, (ids, real) in enumerate(zip(input_ids.cpu(), attention_mask.cpu().bool(), strict=True)):
            completion = last.completions[row]
            same = ids[:split][real[:split]].tolist() == last.prompts[row]
            # Compare the token ids, not the mask: TRL may mask a completion that was cut off, but keeps its tokens.
            if not same or ids[split : split + len(completion)].tolist() != completion:
                return None
            found[row, : len(completion)] = torch.tensor(last.logprobs[row])
        return found


def attach_trainer(
    trainer: Any, manager: RolloutManager, mode: Mode, log: Log, checkpoint: bool, fallback: Fallback, **others: Any
) -> TrlGenerateAttachment:
    """Let a trainer other than GRPOTrainer generate with `manager`. See `trainer_hooks.trl.attach`.

    Args:
        others: options of `attach` that are only for a GRPOTrainer, with their values.

    Raises:
        TypeError: `trainer` is not a Trainer.
        ConfigError: one of `others` is set.
        ValueError: the trainer trains another model, or generates with vLLM or continuous batching.
    """
    name = type(trainer).__name__
    if not isinstance(trainer, Trainer):
        raise TypeError(f"{name} is not a Trainer of transformers: use trainer_hooks.generate.attach(model, manager)")
    for option, value in others.items():
        if value:
            raise ConfigError(
                f"{option}={value!r}: {name} generates by model.generate, and only a GRPOTrainer takes it"
            )
    for option in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(trainer, option, False):
            raise ValueError(f"this {name} has {option}=True: set it to False, the rollout takes its place")
    return TrlGenerateAttachment(trainer, manager, mode, log, checkpoint, fallback)
