"""DAPO's dynamic sampling in a GRPOTrainer: a generation batch is filled with groups that are worth training on.

TRL generates and scores a batch as usual. Groups that `keep` rejects are replaced with other prompts from the training set,
which TRL completes and scores too, until the batch is full. So TRL computes all rewards, advantages and log-probs, and TRL's
metrics cover all samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout import ConfigError
from rollout.manager.rounds import MOST_DISCARDED


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion's reward, as passed to the function `keep`.

    Attributes:
        reward: weighted sum of the reward functions. None if no function has scored the completion.
        error: reason why there is no reward; None if there is one.
    """

    reward: float | None

    @property
    def error(self) -> str | None:
        return "no reward" if self.reward is None else None


Keep = Callable[[Sequence[ScoredCompletion]], bool]


class FullBatches:
    """A replacement for a GRPOTrainer's `_generate_and_score_completions` that returns only groups that `keep` accepts.

    After discarding `MOST_DISCARDED` groups for each group of the batch, it accepts every group. Prompts are drawn with
    torch's CPU generator, whose state is in the trainer's checkpoint.

    Attributes:
        discarded: number of groups that have been rejected so far, on this rank.
    """

    def __init__(self, trainer: Any, keep: Keep, score: Callable[[Any], dict[str, Any]]) -> None:
        self.discarded = 0
        self._trainer = trainer
        self._keep = keep
        self._score = score
        self._rewards: Tensor | None = None

    def rewards(self, calculate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap the trainer's `_calculate_rewards`, to record the rewards that it returns."""

        def calculated(*args: Any, **kwargs: Any) -> Tensor:
            self._rewards = calculate(*args, **kwargs)
            return self._rewards

        return calculated

    def __call__(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        trainer = self._trainer
        if not trainer.model.training:
            return self._score(inputs)
        size, wanted = trainer.num_generations, len(inputs) // trainer.num_generations
        parts: list[dict[str, Any]] = []
        kept, allowed = 0, MOST_DISCARDED * wanted
        while True:
            scored = self._score(inputs)
            groups = list(self._groups(len(inputs), size))
            good = [number for number, group in enumerate(groups) if self._keep(group)]
            bad = [number for number in range(len(groups)) if number not in good]
            # After discarding `MOST_DISCARDED` groups per wanted group, accept all groups, so that sampling finishes.
            chosen = sorted([*good, *bad[max(0, allowed) :]])[: wanted - kept]
            self.discarded += len(bad[: max(0, allowed)])
            allowed -= len(bad)
            parts.append(_rows(scored, [row for each in chosen for row in range(each * size, (each + 1) * size)]))
            kept += len(chosen)
            # Draw as many prompts on every rank as the rank that lacks the most groups needs: scoring is a collective
            # operation, which all ranks must call with equally many rows.
            missing = int(trainer.accelerator.gather(torch.tensor([wanted - kept], device=self._device)).max())
            if not missing:
                return self._joined(parts)
            inputs = [example for example in self._drawn(missing) for _ in range(size)]

    @property
    def _device(self) -> Any:
        return self._trainer.accelerator.device

    def _groups(self, rows: int, size: int) -> Iterator[list[ScoredCompletion]]:
        """Yield this rank's groups of `size` scored completions. The recorded rewards cover all ranks, `rows` on each."""
        assert self._rewards is not None
        first = self._trainer.accelerator.process_index * rows
        found = self._rewards[first : first + rows]
        weighted = (found * self._trainer.reward_weights.to(found.device)).nansum(1).tolist()
        nothing = found.isnan().all(1).tolist()
        each = [ScoredCompletion(None if lost else value) for value, lost in zip(weighted, nothing, strict=True)]
        for start in range(0, rows, size):
            yield each[start : start + size]

    def _drawn(self, count: int) -> list[dict[str, Any]]:
        """Draw `count` random examples from the training set. Every rank draws its own examples."""
        accelerator, data = self._trainer.accelerator, self._trainer.train_dataset
        numbers = torch.randint(len(data), (count * accelerator.num_processes,)).tolist()
        first = accelerator.process_index * count
        return [data[number] for number in numbers[first : first + count]]

    def _joined(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        token = self._trainer._tokenizer.pad_token_id
        pads = {"prompt_ids": token, "completion_ids": token, "rollout_routed_experts": -1}
        joined: dict[str, Any] = {}
        for name, first in parts[0].items():
            values = [part[name] for part in parts]
            if isinstance(first, Tensor) and first.dim():
                joined[name] = _padded(values, left=name.startswith("prompt"), value=pads.get(name, 0))
            elif isinstance(first, list):
                joined[name] = [each for value in values for each in value]
            else:
                joined[name] = first
        mask = joined["completion_mask"]
        count = (mask * joined["tool_mask"] if "tool_mask" in joined else mask).sum()
        joined["num_items_in_batch"] = self._trainer.accelerator.gather(count).sum()
        return joined


def check_keep(trainer: Any) -> None:
    """Check that a GRPOTrainer's batches can be filled with groups of other prompts.

    Raises:
        ConfigError: an option prevents this; the message names the option.
    """
    if trainer.args.scale_rewards not in ("group", "none", True, False):
        raise ConfigError(
            f"keep= with scale_rewards={trainer.args.scale_rewards!r}: advantages would be scaled by discarded groups; set "
            "it to 'group' or 'none'"
        )
    if trainer.args.multi_objective_aggregation != "sum_then_normalize":
        raise ConfigError(
            "keep= needs multi_objective_aggregation='sum_then_normalize': otherwise discarded groups count"
        )
    if not hasattr(trainer.train_dataset, "__getitem__"):
        raise ConfigError("keep= draws other prompts by their number: train_dataset must have __getitem__ and __len__")
    if hasattr(trainer.processing_class, "image_processor"):
        raise ConfigError("keep= joins batches of text alone: give the trainer a tokenizer, not a processor")
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    if rows % trainer.num_generations:
        raise ConfigError(
            f"keep= needs whole groups on every rank: {rows} rows per generation (per_device_train_batch_size * "
            f"steps_per_generation) must be a multiple of num_generations={trainer.num_generations}"
        )


def _rows(scored: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    index = torch.tensor(rows, dtype=torch.long)
    return {
        name: value[index.to(value.device)] if isinstance(value, Tensor) and value.dim()
        else [value[row] for row in rows] if isinstance(value, list) else value
        for name, value in scored.items()
    }  # fmt: skip


def _padded(values: list[Tensor], *, left: bool, value: int) -> Tensor:
    """Concatenate the rows of tensors. Shorter rows are padded with `value`, on the left if `left`, else on the right."""
    if values[0].dim() == 1:
        return torch.cat(values)
    width = max(each.shape[1] for each in values)
    filled = []
    for each in values:
        lacking, behind = width - each.shape[1], [0] * (2 * (each.dim() - 2))
        filled.append(pad(each, [*behind, *((lacking, 0) if left else (0, lacking))], value=value))
    return torch.cat(filled)
