"""The decision whether a GRPOTrainer's log-probs replay expert routes and the tokens that top-k/top-p sampling kept."""

from __future__ import annotations

from typing import Any

from rollout.errors import ConfigError
from rollout.sampling_params import MAX_KEPT_TOKENS, SamplingParams
from trainer_hooks.trl_config import sampling_params
from trainer_hooks.trl_images import is_vision


def replayed(trainer: Any, asked: bool | None, routes: bool) -> str | None:
    """Return why log-probs are not over the tokens left by top-p and the like: None if they are, "" without truncation.

    Args:
        asked: the argument `replay` of `attach`. If None, replay if possible.
        routes: whether the engine records expert routes. These are replayed even without truncation.

    Raises:
        ConfigError: replay is requested, but an option prevents it or there is nothing to replay. Or expert routes are
            recorded, but cannot be replayed or `asked` is False.
    """
    if routes:
        _check_routes(trainer, asked)
    params = sampling_params(trainer)
    # Do not replay kept tokens with top_k=1: the only kept token would have log-prob 0 and no gradient.
    why = _why_not(trainer, params) if params.truncated and params.top_k != 1 else ""
    if asked and why is not None and (why or not routes):
        raise ConfigError(
            f"replay=True {why or 'without top_k (above 1), top_p or min_p: log-probs need no replay of kept tokens'}; "
            "leave replay out, or set it to False"
        )
    return "replay=False" if asked is False and why is None else why


def _check_routes(trainer: Any, asked: bool | None) -> None:
    if asked is False:
        why = "with replay=False: recorded routes would have no effect; leave replay out"
    elif trainer.tools:
        why = "with tools: what they return was not sampled, and routes of earlier turns are not kept; train without tools"
    elif trainer.args.use_liger_kernel and hasattr(trainer, "compute_liger_loss"):
        why = "with use_liger_kernel=True: this trainer's Liger loss runs its own forward; set it to False"
    else:
        return
    raise ConfigError(f"InferenceConfig.record_routes=True {why}, or set record_routes to False")


def _why_not(trainer: Any, params: SamplingParams) -> str | None:
    """Return the option that prevents log-probs over the tokens left by truncation, and the remedy, or None."""
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
