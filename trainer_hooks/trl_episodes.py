"""A `rollout_func` for TRL that plays episodes in an environment, so that `GRPOTrainer` trains on multi-turn episodes.

manager = RolloutManager(model, tokenizer)
trainer = GRPOTrainer(model, episode_reward, args=config, train_dataset=data,
                      rollout_func=episode_rollout_func(manager, Calculator, SamplingParams(max_tokens=32)))
trainer.add_callback(RolloutCallback(manager))  # trainer_hooks.transformers: raises the policy version after each update
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollout import ConfigError, SamplingParams
from rollout.manager.episodes.environment import EnvironmentFactory, Play
from rollout.manager.manager import RolloutManager


def episode_rollout_func(
    manager: RolloutManager,
    environment: EnvironmentFactory | Play,
    sampling_params: SamplingParams | None = None,
    **options: Any,
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return a `rollout_func` for `GRPOTrainer` that plays one episode for each of the dataset's prompts.

    A failed episode has the reward None in `episode_rewards`, and no tokens to train on.

    Args:
        manager: the manager that samples with the model that the trainer trains.
        environment, sampling_params, options: as in `RolloutManager.run`.

    Raises:
        ConfigError: the manager records expert routes, which TRL would not replay.
    """
    if manager.config.record_routes:
        raise ConfigError(
            "InferenceConfig.record_routes=True: with a rollout_func TRL routes the tokens of its log-probs live, so that "
            "recorded routes would have no effect; set it to False"
        )

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        batch = manager.run(prompts, environment, sampling_params, **{"on_error": "mask"} | options)
        if len(batch) != len(prompts):
            raise ValueError(
                f"{len(batch)} rows of {len(prompts)} episodes: TRL takes one row per episode; do not edit the history, or "
                "train with a loop of your own (docs/how-to/agents.md)"
            )
        end = manager.tokenizer.eos_token_id
        sampled = [
            mask[request.original_prompt_length :] for mask, request in zip(batch.response_mask, batch, strict=True)
        ]
        return {
            "prompt_ids": [request.prompt_tokens or [end] for request in batch],
            # Return at least one token, because TRL reads the last token of every completion.
            "completion_ids": [request.generated_tokens or [end] for request in batch],
            "logprobs": [request.generated_log_probs or [0.0] for request in batch],
            "env_mask": [mask[: len(request.generated_tokens)].int().tolist() or [0]
                         for mask, request in zip(sampled, batch, strict=True)],
            "episode_rewards": [episode.reward for episode in batch.episodes],
        }  # fmt: skip

    return play


def episode_reward(*, episode_rewards: list[float | None], **_: Any) -> list[float | None]:
    """Return the environments' rewards. Pass this function to `GRPOTrainer` as its reward function."""
    return episode_rewards
