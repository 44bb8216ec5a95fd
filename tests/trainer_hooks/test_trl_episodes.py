"""Tests of TRL's `rollout_func` from an environment: GRPOTrainer trains on the sampled tokens of all turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.manager.episodes.environment import StepResult
from tests.models import make_model, make_tokenizer
from tests.rollouts import make_rollout, tokens
from trainer_hooks.transformers import RolloutCallback
from trainer_hooks.trl_episodes import episode_reward, episode_rollout_func

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from tests.trainer_hooks.trl_jobs import OPTIONS, logged  # noqa: E402


class Tool:
    """Two turns with a tool's answer of two tokens between them; the reward is of the first sampled token."""

    async def reset(self, task: str) -> str:
        self.turns = 0
        if task == "broken":
            raise OSError("no such environment")
        return task

    async def step(self, turn: Any) -> StepResult:
        self.turns += 1
        return StepResult("xy", float(turn.generated_tokens[0] % 5), done=self.turns == 2)


def test_the_trainer_gets_masks_log_probs_and_rewards_of_all_turns_and_of_a_failure() -> None:
    tokenizer = make_tokenizer()
    with make_rollout(make_model("qwen3", num_hidden_layers=1), tokenizer) as manager:
        output = episode_rollout_func(manager, Tool, tokens(3))(["abc", "broken", "abc"], None)
    assert output["env_mask"] == [[1, 1, 1, 0, 0, 1, 1, 1], [0], [1, 1, 1, 0, 0, 1, 1, 1]]
    assert [len(each) for each in output["completion_ids"]] == [8, 1, 8]
    assert [len(each) for each in output["logprobs"]] == [8, 1, 8]
    assert output["prompt_ids"][0] == tokenizer("abc")["input_ids"]
    rewards = episode_reward(**output)
    assert rewards[1] is None
    assert rewards[0] == sum(output["completion_ids"][0][at] % 5 for at in (0, 5))


def test_an_edited_history_is_refused_since_trl_takes_one_row_per_prompt() -> None:
    async def play(episode: Any) -> float:
        await episode.sample("ab")
        await episode.sample("cd")
        return 0.0

    with (
        make_rollout(make_model("qwen3", num_hidden_layers=1), make_tokenizer()) as manager,
        pytest.raises(ValueError, match="2 rows of 1 episodes"),
    ):
        episode_rollout_func(manager, play, tokens(3))(["ab"], None)


def test_grpo_trainer_trains_on_episodes_of_the_newest_policy(tmp_path: Path) -> None:
    model, tokenizer = make_model("qwen3", num_hidden_layers=1), make_tokenizer()
    config = trl.GRPOConfig(
        **OPTIONS, output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=16
    )
    with make_rollout(model, tokenizer) as manager:
        seen: list[int] = []

        def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            seen.append(manager.policy_version)
            return episode_rollout_func(manager, Tool, tokens(3))(prompts, trainer)

        data = datasets.Dataset.from_list([{"prompt": "abc"}, {"prompt": "de"}])
        trainer = trl.GRPOTrainer(
            model, episode_reward, args=config, train_dataset=data, processing_class=tokenizer, rollout_func=play
        )
        trainer.add_callback(RolloutCallback(manager))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        trainer.train()
        assert seen == [0, 1]
        assert any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        assert logged(trainer, "completions/mean_length") == [6.0, 6.0]
