"""Integration with TRL's GRPOTrainer: completions and log-probs come from a rollout.

    attach(trainer, rollout)                                in the place of TRL's vLLM: log-probs enter the loss
    GRPOTrainer(..., rollout_func=rollout_func(rollout))    TRL's own seam: log-probs are handed over, TRL corrects nothing

    a generation      the prompts of a group are one request of n samples; the KV cache leaves the device afterwards
    a step            (torch's hooks) the policy version moves, if the optimizer really stepped
    logs              the rollout's metrics join the trainer's
    a checkpoint      carries the policy version and the random streams

Nothing is said twice: how to sample is what GRPOConfig says. A completion is whole, or an error, or masked; never short.
Written against TRL 1.16; TRL itself is not imported.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerState

from rollout.manager.batch import RolloutBatch
from rollout.manager.manager import OnError, RolloutManager
from rollout.state import Mode
from trainer_hooks.optimizer import Attachment
from trainer_hooks.transformers import RolloutCallback
from trainer_hooks.trl_config import (
    check_choices,
    check_trainer,
    correction_mode,
    refuse_tools,
    sampling_params,
    warn_of_shaping,
)

Log = bool | Collection[str]


class TrlAttachment:
    """A GRPOTrainer tied to a rollout, until `detach()` or the end of the `with` block. Built by `attach`.

    It is what TRL calls where it would call its vLLM.

    Attributes:
        trainer: the one given.
        rollout: what samples.
    """

    def __init__(
        self, trainer: Any, rollout: RolloutManager, mode: Mode, on_error: OnError, log: Log, checkpoint: bool
    ) -> None:
        self.trainer = trainer
        self.rollout = rollout
        self._mode = mode
        self._on_error = on_error
        self._batch: RolloutBatch | None = None
        self._failed: list[bool] = []
        self._undo = ExitStack()
        try:
            self._follow(_Follower(rollout, mode, log, checkpoint))
        except BaseException:
            self._undo.close()
            raise
        if on_error == "mask":
            self._put(_calculate_rewards=self._without_failed(trainer._calculate_rewards))

    @property
    def steps(self) -> int:
        """Steps that changed the weights since training began; 0 where another callback follows the optimizer."""
        return self._follower.steps

    def detach(self) -> None:
        """Give the trainer back as it was. Harmless when repeated."""
        self._undo.close()

    def __enter__(self) -> TrlAttachment:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    # --- what TRL asks of its generation object -----------------------------------------------------------------

    def sync_weights(self) -> None:
        """Nothing to do: the rollout samples with the weights that the trainer steps."""

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float | None]]], list[list[list[int]]]]:
        """Complete every prompt once, in this order; equal prompts side by side are one group.

        Args:
            prompts: token ids.
            images: None.
            num_generations: how often TRL has repeated every prompt; nothing hangs on it.
            profiler: runs around it.

        Returns:
            Prompts, completions, log-probs and token ids, the last two with one entry per token.

        Raises:
            ValueError: there are images.
            RolloutFailedError: a completion has failed; nothing comes back then.
        """
        if images is not None:
            raise ValueError("these prompts have images, and this rollout samples text alone: use TRL's own generation")
        with profiler or nullcontext():
            completions, logprobs = self.sample(prompts)
        each = [[[token] for token in completion] for completion in completions]
        return prompts, completions, [[[value] for value in row] for row in logprobs], each

    def sample(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float | None]]]:
        """Completions and their log-probs, of the distribution sampled from; None where there is no number.

        A failed row, where these are masked, is one end-of-sequence token.
        """
        params = sampling_params(self.trainer)
        groups = [(prompt, sum(1 for _ in equal)) for prompt, equal in groupby(prompts)]
        with self.trainer.accelerator.autocast(), _own_forward(self.rollout.model):
            batch = self.rollout.generate(
                [prompt for prompt, _ in groups],
                [params.replace(n=count) for _, count in groups],
                on_error=self._on_error,
                progress=False,
            )
        # What follows is the trainer's, and it may be an update, or an evaluation's forward: the memory is theirs.
        self.rollout.before_optimizer_step(self._mode)
        self._batch, self._failed = batch, [error is not None for error in batch.errors]
        return self._rows(batch)

    def _rows(self, batch: RolloutBatch) -> tuple[list[list[int]], list[list[float | None]]]:
        completions, logprobs = [], []
        for request, failed in zip(batch, self._failed, strict=True):
            known: list[float | None] = [None] if failed else [_finite(v) for v in request.generated_log_probs or ()]
            completions.append([self.trainer.eos_token_ids[0]] if failed else list(request.generated_tokens))
            logprobs.append(known)
        return completions, logprobs

    # --- what TRL asks of a rollout_func ------------------------------------------------------------------------

    def roll_out(self, prompts: list[Any]) -> dict[str, Any]:
        """Complete the dataset's prompts, texts or chats, each once.

        Returns:
            `prompt_ids`, `completion_ids`, `logprobs`; and `env_mask`, which keeps failed rows out of the loss, where
            there are any.

        Raises:
            ValueError: there are images.
            RolloutFailedError: see `generate`.
        """
        prompt_ids, images, _ = self.trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ValueError("these prompts have images, and this rollout samples text alone: use TRL's own generation")
        completions, logprobs = self.sample(prompt_ids)
        output = {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": logprobs}
        if any(self._failed):
            output["env_mask"] = [
                [int(not failed)] * len(row) for failed, row in zip(self._failed, completions, strict=True)
            ]
        return output

    # --- inside -------------------------------------------------------------------------------------------------

    def take_vllms_place(self, correction: str) -> None:
        """From here TRL generates with this object, and corrects the loss by its log-probs, in the mode `correction`."""
        # "server": else TRL looks for the longest sequence in vLLM's own engine.
        self._put(vllm_generation=self, use_vllm=True, vllm_mode="server", _last_loaded_step=-1)
        self._put(vllm_importance_sampling_mode=correction)
        score = self.trainer._generate_and_score_completions
        self._put(_generate_and_score_completions=lambda inputs: self._observed(score(inputs)))
        if self._on_error == "mask":
            self._put(rollout_func=lambda prompts, trainer: self.roll_out(prompts))

    def _put(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            if name in vars(self.trainer):
                self._undo.callback(setattr, self.trainer, name, vars(self.trainer)[name])
            else:
                self._undo.callback(delattr, self.trainer, name)
            setattr(self.trainer, name, value)

    def _follow(self, follower: _Follower) -> None:
        self._follower = follower
        trainer, handler = self.trainer, self.trainer.callback_handler
        # Somebody's own RolloutCallback does all that already.
        if any(getattr(callback, "rollout", None) is self.rollout for callback in handler.callbacks):
            return
        # Reporters come after it, so that they are given the rollout's metrics too. Another list: the handler may be
        # going through this one, when all this happens in a callback.
        handler.callbacks = [follower, *handler.callbacks]
        self._undo.callback(self._unfollow)
        if trainer.optimizer is not None:
            state = trainer.state if trainer.is_in_train else TrainerState()
            follower.on_train_begin(
                trainer.args, state, trainer.control, model=trainer.model, optimizer=trainer.optimizer
            )

    def _unfollow(self) -> None:
        self._follower.detach()
        handler = self.trainer.callback_handler
        handler.callbacks = [each for each in handler.callbacks if each is not self._follower]

    def _observed(self, scored: dict[str, Any]) -> dict[str, Any]:
        """What TRL has made of the last batch: the metric `rollout/logprob_diff` compares its log-probs with ours."""
        trained, batch = scored.get("old_per_token_logps"), self._batch
        self._batch = None
        # Turns of a tool loop are batches of their own.
        if trained is None or batch is None or self.trainer.tools:
            return scored
        used = scored["completion_mask"].bool() & scored.get("tool_mask", scored["completion_mask"]).bool()
        mask = batch.response_mask & used.any(1, keepdim=True)
        logprobs = batch.logprobs.clone()
        logprobs[mask] = trained[used].to(logprobs)
        self.rollout.observe_logprobs(replace(batch, response_mask=mask), logprobs)
        return scored

    def _without_failed(self, rewards_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A failed row has no reward: its group's mean is that of the others, its own advantage is 0."""

        def calculate(*args: Any, **kwargs: Any) -> Tensor:
            rewards = rewards_of(*args, **kwargs)
            failed = torch.tensor(self._failed, device=rewards.device)
            rewards[self.trainer.accelerator.gather(failed)] = torch.nan
            return rewards

        return calculate


def attach(
    trainer: Any,
    rollout: RolloutManager,
    *,
    mode: Mode = None,
    on_error: OnError = "raise",
    log: Log = True,
    checkpoint: bool = True,
) -> TrlAttachment:
    """Let `trainer` generate with `rollout`, and correct its loss by the rollout's log-probs.

    Needs: a GRPOTrainer of TRL 1.16, `use_vllm=False`, and a rollout of its model: `RolloutManager(trainer.model,
    tokenizer, ...)`. Call it before `train()`, or in a callback's `on_train_begin`. On several ranks, call it on all of
    them. The trainer may spread the weights over them by DDP or FSDP2 when it begins.

    Changes: the trainer believes that it has a vLLM, which is `rollout`, from then on. So the options of GRPOConfig
    named `vllm_importance_sampling_*` hold (the correction is on unless switched off), the metrics `sampling/*` are
    logged, `off_policy_mask_threshold` compares with the sampling log-probs; TRL's tool loop and `evaluate()` generate
    here too, and `rollout/logprob_diff` is measured. A callback attaches the optimizer when training begins, detaches it
    at the end, and adds `rollout/*` to every training log (reporters may put a prefix before it, as before all of the
    Trainer's names). With `on_error="mask"` the trainer's `rollout_func` and `_calculate_rewards` are replaced too.

    Sampling follows `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty`, `max_completion_length` and
    `generation_kwargs` of GRPOConfig. Where these draw from another distribution than the trained one, a warning says
    so, and the log-probs handed over are those of the trained one (see `sampling_params`); `loss_type="vespo"` is
    corrected by token, which is said too where GRPOConfig says otherwise. Random streams come from
    `InferenceConfig.seed`. Completions end with the trainer's `eos_token_ids`.

    With `checkpoint`, the trainer's checkpoints carry the policy version and the random streams, in
    `rollout_rank_<r>_of_<n>.msgpack`, and a rollout that has sampled for no training yet goes on with those of the
    checkpoint that `train(resume_from_checkpoint=...)` takes from `args.output_dir`. Where it has none, a warning says
    so, and the version goes on at the trainer's step. All of this callback's work is left to a `RolloutCallback(rollout,
    ...)` of `trainer_hooks.transformers` that the trainer has already.

    Args:
        trainer: not training yet.
        rollout: samples with the module that the trainer trains.
        mode: what becomes of the KV cache while the trainer trains. None: what the rollout is configured to do.
        on_error: `raise`: a failed completion is a `RolloutFailedError` in `train()`. `mask`: its row becomes one token
            outside the loss, without reward, so that its group's advantages are those of the others.
        log: whether metrics join the trainer's logs; or the names of those that do.
        checkpoint: whether the trainer's checkpoints carry the rollout's state.

    Returns:
        The attachment; `detach()` gives the trainer back as it was.

    Raises:
        TypeError: `trainer` has not the seams of TRL 1.16's GRPOTrainer.
        ConfigError: `mode`, `on_error` or GRPOConfig asks for something unknown.
        KeyError: `log` names a metric that is none.
        ValueError: the trainer trains another model, generates with vLLM, continuous batching or a `rollout_func`
            already, or has tools where failed rows are to be masked. Nothing is attached then.
    """
    if getattr(trainer, "rollout_func", None) is not None:
        raise ValueError(
            "this trainer has a rollout_func already: build it without, and attach(trainer, rollout); or keep "
            "rollout_func=rollout_func(rollout), and do not attach"
        )
    if isinstance(getattr(trainer, "vllm_generation", None), TrlAttachment):
        raise ValueError("this trainer is attached to a rollout already: keep that attachment, or detach() it first")
    check_trainer(trainer, rollout.model)
    check_choices(trainer, mode, on_error)
    if on_error == "mask":
        refuse_tools(trainer)
    attachment = TrlAttachment(trainer, rollout, mode, on_error, log, checkpoint)
    attachment.take_vllms_place(correction_mode(trainer, stacklevel=2))
    warn_of_shaping(trainer, stacklevel=2)
    return attachment


def rollout_func(
    rollout: RolloutManager,
    *,
    mode: Mode = None,
    on_error: OnError = "raise",
    log: Log = True,
    checkpoint: bool = True,
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A `rollout_func` for GRPOTrainer that generates with `rollout`.

    Needs and does what `attach` does, at the trainer's first generation, but for one thing: TRL takes the log-probs of a
    `rollout_func` without `use_vllm` for `off_policy_mask_threshold` alone, and corrects nothing. Tools are refused: TRL
    would generate their later turns itself.

    Args:
        rollout: samples with the module given to the trainer (the very object).
        mode, on_error, log, checkpoint: see `attach`.

    Returns:
        What GRPOTrainer takes. It raises what `attach` raises, and at once for prompts with images.
    """
    tied: list[TrlAttachment] = []

    def generate(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if not tied or tied[0].trainer is not trainer:
            check_trainer(trainer, rollout.model)
            check_choices(trainer, mode, on_error)
            refuse_tools(trainer)
            warn_of_shaping(trainer, stacklevel=2)
            attachment = TrlAttachment(trainer, rollout, mode, on_error, log, checkpoint)
            for other in tied:
                other.detach()
            tied[:] = [attachment]
        return tied[0].roll_out(prompts)

    return generate


class _Follower(RolloutCallback):
    """A `RolloutCallback` that comes before the reporters, and does not insist on a checkpoint of the rollout's own."""

    def __init__(self, rollout: RolloutManager, mode: Mode, log: Log, checkpoint: bool) -> None:
        super().__init__(rollout, mode=mode, log=log, checkpoint=checkpoint)
        self._manager = rollout
        self._latest: Attachment | None = None

    @property
    def steps(self) -> int:
        return 0 if self._latest is None else self._latest.steps

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        self._latest = self.attachment

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        # An evaluation's log, or the summary at the end, takes none away from the training's.
        if self._log and logs is not None and "loss" in logs:
            self._join(logs, state)

    def _resume(self, args: Any, state: Any) -> None:
        if self.rollout.policy_version:
            # It counts on from an earlier training.
            return
        file = self._file_to_resume(args, state)
        if file is not None and file.saved_by_anybody:
            file.load(self.rollout)
            return
        self._manager.engine.weights_updated(state.global_step)
        warnings.warn(
            f"the trainer stands at step {state.global_step}, and no state of the rollout is found beside that of the "
            f"trainer in {', '.join(map(str, self._folders(args, state)))}: the policy version goes on from "
            f"{state.global_step}, and random streams begin anew. Where another folder has it, give the trainer "
            "RolloutCallback(rollout, resume_from_checkpoint=FOLDER) before attaching",
            stacklevel=2,
        )


@contextmanager
def _own_forward(model: nn.Module) -> Iterator[None]:
    """Without the forward that TRL puts before the model's own, to train by: it passes generation on unchanged, and keeps
    the engine from its CPU kernels, which take the place of what the class says and of nothing else."""
    replaced = vars(model).get("forward")
    if not _hides_only_the_class(replaced, type(model)):
        yield
        return
    del model.forward
    try:
        yield
    finally:
        model.__dict__["forward"] = replaced


def _hides_only_the_class(forward: Any, model_class: type[nn.Module]) -> bool:
    function = getattr(forward, "__func__", None)
    code = getattr(function, "__code__", None)
    if function is None or code is None or not code.co_qualname.startswith("add_fused_lm_head."):
        return False
    hidden = inspect.getclosurevars(function).nonlocals.get("original_forward")
    return getattr(hidden, "__func__", None) is model_class.forward


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
