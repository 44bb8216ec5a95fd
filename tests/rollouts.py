"""Small rollouts on the models of `tests.models`, a weight update, and the trainer's own forward of a batch."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from rollout.engine.scheduling.scheduler import ScheduledStep, StepTokens
from rollout.engine.scheduling.sequences import Sequence
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.manager import RolloutManager
from rollout.requests.delta import DeltaJoin, SampleDelta
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.configs import engine_config
from tests.invariants import check_scheduler

Key = tuple[int, int]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def make_rollout(model: PreTrainedModel, tokenizer: Any = None, **options: Any) -> RolloutManager:
    """A manager with blocks of four tokens and room for 16 samples at once."""
    seams = {name: options.pop(name) for name in ("clock", "journal", "coordinator", "token_values") if name in options}
    defaults: dict[str, Any] = {"kv_cache_blocks": 256, "block_size_tokens": 4, "max_requests": 16,
                                "max_tokens_per_step": 64, "verify_model": False}  # fmt: skip
    return RolloutManager(model, tokenizer, engine_config(**(defaults | options)), **seams)


def closed(manager: RolloutManager) -> None:
    """Close a manager that may have groups in flight."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.close()


def batches_of_cut_requests(
    cut: str,
    make: Callable[[], RolloutManager],
    params: Any,
    short: SamplingParams,
    step: Callable[[RolloutManager], Any],
) -> list[RolloutBatch]:
    """Batches of requests that are in flight over three updates (`step`), and preempted, suspended or restarted.

    Args:
        cut: "none", "preempted" (by the small pool of `make`), "suspended" or "restarted".
    """
    prompts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [12, 13, 14]]
    manager = make()
    batches = [manager.generate(prompts, params, min_groups=None if cut == "none" else 1)]
    assert cut == "none" or manager.groups_in_flight
    for _ in range(3):
        step(manager)
        if cut == "suspended":
            manager.suspend("recompute")
            manager.resume()
        if cut == "restarted":
            state = manager.state_dict()
            closed(manager)
            manager = make()
            manager.load_state_dict(state)
        batches.append(manager.generate(prompts[:1], short, min_groups=1))
    batches.append(manager.generate([], min_groups=manager.groups_in_flight))
    assert cut != "preempted" or manager.metrics()["rollout/preemptions"] > 0
    manager.close()
    return [batch for batch in batches if len(batch)]


def joined_deltas(*parts: SampleDelta) -> SampleDelta:
    """Consecutive deltas of one sample as one."""
    joined = DeltaJoin(parts[0].request_id, parts[0].sample_index)
    for part in parts:
        joined.add_delta(part)
    return joined.delta()


def update(model: PreTrainedModel, rollout: RolloutManager | None = None, seed: int = 0, size: float = 0.02) -> None:
    """Change every weight in place, as an optimizer would; tells the rollout."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    if rollout is not None:
        rollout.weights_updated()


def trainer_logprobs_of(model: PreTrainedModel, batch: RolloutBatch) -> torch.Tensor:
    """[N, T] of each token by the trainer's padded forward, 0 in column 0; differentiable."""
    logits = model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids).logits
    chosen = logits[:, :-1].float().log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(chosen, (1, 0))


def logprob_error(model: PreTrainedModel, batch: RolloutBatch) -> float:
    """Largest difference between the batch's log-probs and the trainer's."""
    with torch.no_grad():
        difference = trainer_logprobs_of(model, batch) - batch.logprobs
    return float(difference[batch.response_mask].abs().max())


def completions(batch: RolloutBatch) -> list[list[int]]:
    """Token ids per row."""
    return [request.generated_tokens for request in batch]


def assert_nothing_leaked(rollout: RolloutManager) -> None:
    """Nobody in flight, no block held, queues and tables empty."""
    engine = rollout.engine
    check_scheduler(engine.context.scheduler)
    assert rollout.groups_in_flight == 0
    assert not engine.has_unfinished
    assert engine.context.allocator.num_used == 0


class DenseLedger:
    """Which version sampled each token and computed each position, written down token by token as steps are made.

    For rollouts without prefix cache whose requests are never evicted nor recomputed.
    """

    def __init__(self, rollout: RolloutManager) -> None:
        self.sampled: dict[Key, list[int]] = defaultdict(list)
        self.computed: dict[Key, dict[int, int]] = defaultdict(dict)
        self._rollout = rollout
        self._scheduler = rollout.engine.context.scheduler
        self._update = self._scheduler.update
        self._scheduler.update = self._noting_update  # type: ignore[method-assign]

    def _noting_update(self, step: ScheduledStep, sampled: StepTokens) -> list[Sequence]:
        key_of = {row: sequence.key for row, sequence in self._scheduler.by_row.items()}
        version = self._rollout.policy_version
        for row, start, count in zip(step.rows.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True):
            for position in range(start, start + count + sampled.steps - 1):
                self.computed[key_of[row]][position] = version
        for entry, row in zip(step.sampled_entries.tolist(), step.sampled_rows.tolist(), strict=True):
            key, leader = key_of[row], key_of[int(step.rows[entry])]
            self.sampled[key] += [version] * sampled.steps
            if key != leader:
                self.computed[key] = dict(self.computed[leader])
        return self._update(step, sampled)

    def policy_versions(self, request: DynamicInferenceRequest) -> NDArray[np.int64]:
        """Return the versions of the completion's tokens, int64 [G]."""
        return np.array(self.sampled[request.request_id, request.sample_index], np.int64)

    def kv_versions(self, request: DynamicInferenceRequest) -> NDArray[np.int64]:
        """Return the KV versions of all positions except the last, whose KV was not needed, int64 [T - 1]."""
        written = self.computed[request.request_id, request.sample_index]
        return np.array([written[position] for position in range(request.total_length - 1)], np.int64)


def group_ids(batches: Iterable[RolloutBatch]) -> list[int]:
    """Return the ids of all groups in these batches, in order."""
    return [group for batch in batches for group, _ in batch.groups()]


def tokens(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **options)


class FailingForward:
    """Raises in chosen forwards of a model, counted from 0."""

    def __init__(self, model: PreTrainedModel, error: Callable[[], BaseException], *, forwards: Any) -> None:
        self.seen = -1
        self._error = error
        self._forwards = forwards
        self._handle = model.register_forward_pre_hook(self._hook)

    def _hook(self, module: Any, args: Any) -> None:
        self.seen += 1
        if self.seen in self._forwards:
            raise self._error()

    def __enter__(self) -> FailingForward:
        return self

    def __exit__(self, *exc: object) -> None:
        self._handle.remove()


class Every:
    def __contains__(self, item: object) -> bool:
        return True


class Clock:
    """Time goes on when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def value_error(
    model: PreTrainedModel,
    batch: RolloutBatch,
    function: Callable[[torch.Tensor], torch.Tensor],
    sampled: torch.Tensor | None = None,
) -> float:
    """Largest difference between the batch's values and those of the trainer's hidden state before each token.

    `sampled`: bool [N, T], tokens with values; None: the completions.
    """
    assert batch.token_values is not None
    with torch.no_grad():
        hidden = model.base_model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state[:, :-1]
        values = torch.nn.functional.pad(
            function(hidden.flatten(0, 1)).float().view(*hidden.shape[:2], -1), (0, 0, 1, 0)
        )
    inside = batch.attention_mask.bool() & (torch.arange(values.shape[1]) >= batch.prompt_lengths[:, None])
    inside = inside if sampled is None else sampled
    assert not batch.token_values[~inside].any()
    assert batch.token_values[inside].any()
    return float((values - batch.token_values)[inside].abs().max())
