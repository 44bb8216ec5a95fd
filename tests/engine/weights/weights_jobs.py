"""Jobs of `tests.engine.weights.test_sharded_weights`: each runs on every rank, over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from rollout.config import Advanced, InferenceConfig
from rollout.errors import (
    ConfigError,
    DeadlineError,
    EngineStateError,
    InvalidRequestError,
    UnsupportedModelError,
    WeightsChangedError,
)
from rollout.llm.llm import LLM
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from tests.configs import coordinator_config, engine_config
from tests.models import greedy, make_model
from trainer_hooks.optimizer import attach

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
NEW = 6


def sharded(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@contextmanager
def a_manager(model: nn.Module, *, coordinator: bool = True, **options: Any) -> Iterator[RolloutManager]:
    config = engine_config(kv_cache_blocks=256, block_size_tokens=4, max_requests=16, max_tokens_per_step=64, **options)
    shared = coordinator_config(heartbeat_timeout_s=10.0)
    with RolloutManager(model, None, config, coordinator=shared if coordinator else False) as rollout:
        yield rollout


def prompts(rank: int, step: int) -> list[list[int]]:
    """None at all on rank 1 in step 3."""
    return [] if (rank, step) == (1, 3) else [[5 + index, 6, 7 + step] for index in range(1 + (rank + step) % 3)]


def tokens(batch: Any) -> list[list[int]]:
    return [request.generated_tokens for request in batch]


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's storage behind the parameters, each counted once."""
    storages = {}
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def is_sharded(model: nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def loss_of(model: nn.Module, rank: int, seed: int = 0) -> torch.Tensor:
    ids = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(10 * seed + rank))
    return model(input_ids=ids, labels=ids, use_cache=False).loss


class Twins:
    """A model that is spread over the ranks, and one process's, which learns from all ranks' data."""

    def __init__(self, spread: Callable[[PreTrainedModel], Any], lr: float, optimizer: Any = torch.optim.SGD) -> None:
        self.model, self.alone = spread(make_model("llama")), make_model("llama")
        self.optimizers = [optimizer(each.parameters(), lr=lr) for each in (self.model, self.alone)]

    def train(self, rank: int, step: int = 0) -> None:
        loss_of(self.model, rank, step).backward()
        torch.stack([loss_of(self.alone, each, step) for each in range(dist.get_world_size())]).mean().backward()
        self.step()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self, rollout: RolloutManager, asked: list[list[int]]) -> None:
        """Both sample the same."""
        found = tokens(rollout.generate(asked, GREEDY, progress=False))
        assert found == [greedy(self.alone, each, NEW) for each in asked]


def trains_five_steps(rank: int) -> dict[str, Any]:
    twins = Twins(sharded, 0.01, torch.optim.AdamW)
    model, before = twins.model, parameter_bytes(twins.model)
    with a_manager(model) as rollout:
        attach(twins.optimizers[0], rollout)
        after = {parameter_bytes(model)}
        for step in range(5):
            twins.check(rollout, prompts(rank, step))
            after.add(parameter_bytes(model))
            twins.train(rank, step)
            after.add(parameter_bytes(model))
        version = rollout.policy_version
    return {"before": before, "after": after, "version": version}


def is_interrupted(rank: int) -> dict[str, Any]:
    """Rank 1's forward raises, once as an error and once as Ctrl-C; then all goes on."""
    twins = Twins(sharded, 0.1)
    model, layer = twins.model, twins.model.model.layers[1]
    before = parameter_bytes(model)
    said = {}
    with a_manager(model, control_timeout_s=3.0) as rollout:
        for error in (ArithmeticError("no such number"), KeyboardInterrupt()):

            def fail(*_: Any, error: BaseException = error) -> None:
                raise error

            hook = layer.register_forward_pre_hook(fail) if rank == 1 else None
            try:
                errors = rollout.generate([[5, 6, 7 + index] for index in range(3)], GREEDY, on_error="mask").errors
                said[type(error).__name__] = str(next(filter(None, errors), ""))
            except (KeyboardInterrupt, DeadlineError) as exc:
                said[type(error).__name__] = type(exc).__name__
            assert parameter_bytes(model) == before
            if hook is not None:
                hook.remove()
            dist.barrier()
        twins.train(rank)
        rollout.weights_updated()
        rollout.generate([], min_groups=rollout.groups_in_flight)
        twins.check(rollout, [[5, 6, 7]])
        assert parameter_bytes(model) == before
    return said


def does_not_come(rank: int, coordinator: bool) -> dict[str, str]:
    """One rank raises before the gathering, and the other hears of it; the next generate is everybody's."""
    said = {}
    model = sharded(make_model("llama"))
    with a_manager(model, control_timeout_s=2.0, coordinator=coordinator) as rollout:
        try:
            rollout.generate([[5, 6, 7 if rank == 0 else 1000]], GREEDY)
        except (InvalidRequestError, DeadlineError) as exc:
            said["first"] = f"{type(exc).__name__}: {exc}"
        assert is_sharded(model)
        dist.barrier()
        again = rollout.generate([], min_groups=rollout.groups_in_flight)
        assert len(again) == (rank == 0)
        dist.barrier()
        if rank == 0:
            rollout.engine.add_request([5, 6], GREEDY)
            with pytest.raises(EngineStateError) as scattered:
                rollout.engine.step()
            said["step"] = str(scattered.value)
    return said


def trains_inside_a_loop(rank: int) -> None:
    """Two micro-batches and a step between the groups of one loop: what comes after it is of the new weights."""
    twins = Twins(sharded, 0.1)
    model, alone = twins.model, twins.alone
    with a_manager(model, coordinator=False) as rollout:
        attach(twins.optimizers[0], rollout, mode="recompute")
        rollout.submit([[5 + index, 6, 7] for index in range(3 + rank)], GREEDY)
        for number, batch in enumerate(rollout.as_completed()):
            if number == 0:
                assert not is_sharded(model)
                for seed in (1, 2):
                    loss_of(model, rank, seed).backward()
                    assert is_sharded(model)
            elif number == 1:
                losses = [loss_of(alone, each, seed) for each in range(2) for seed in (1, 2)]
                (torch.stack(losses).sum() / 2).backward()
                twins.step()
                rollout.submit([[40, 41 + rank]], GREEDY)
            last = batch
        assert rollout.policy_version == 1
        assert tokens(last) == [greedy(alone, [40, 41 + rank], NEW)]
    assert is_sharded(model)


def accumulates(rank: int) -> None:
    """Gradients of two micro-batches with a rollout between them, interrupted or not, are those without one."""

    def gradients(rolls: str) -> list[torch.Tensor]:
        model = sharded(make_model("llama"))
        with a_manager(model, coordinator=False, verify_model=False) as rollout:
            model.set_requires_gradient_sync(False)
            loss_of(model, rank, 1).backward()
            if rolls:
                if rolls == "raises" and rank == 0:
                    model.model.layers[1].register_forward_pre_hook(_raise_once())
                rollout.generate(prompts(rank, 1), GREEDY, on_error="mask")
            model.set_requires_gradient_sync(True)
            loss_of(model, rank, 2).backward()
            return [parameter.grad.full_tensor() for parameter in model.parameters()]

    expected = gradients("")
    for rolls in ("generates", "raises"):
        assert all(map(torch.equal, gradients(rolls), expected)), rolls


def _raise_once() -> Any:
    left = [ArithmeticError("once")]

    def hook(*_: Any) -> None:
        if left:
            raise left.pop()

    return hook


def samples_in_the_policys_dtype(rank: int) -> tuple[Any, ...]:
    """bfloat16 forwards of fp32 shards: the engine's KV and log-probs are the trainer's own forward."""
    model = sharded(
        make_model("llama"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    )
    with a_manager(model) as rollout:
        (request,) = rollout.generate([[5, 6, 7]], SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
        with rollout.engine.guard.whole():
            fused = rollout.engine.controller.runner.fused
            assert fused is None or fused.ready(-1), fused._why
    ids = torch.tensor([request.prompt_tokens + request.generated_tokens])
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits[0, 2:-1].float()
    trained = logits.log_softmax(-1).gather(1, ids[0, 3:, None])[:, 0]
    difference = float((trained - torch.tensor(request.generated_log_probs)).abs().max())
    return rollout.engine.controller.layout.kv_dtype, difference


def samples_with_a_copy(rank: int) -> None:
    """Sample with a copy in another dtype, refreshed after each update; the trainer's shards are never gathered."""
    twins = Twins(sharded, 0.5)
    with a_manager(twins.model, inference_dtype="bfloat16") as rollout:
        attach(twins.optimizers[0], rollout)
        for step in range(3):
            copied = dict(rollout.engine.weights.sampled.named_parameters())
            rollout.generate(prompts(rank, step), GREEDY)
            assert is_sharded(twins.model)
            for name, parameter in twins.alone.named_parameters():
                torch.testing.assert_close(copied[name], parameter.bfloat16(), rtol=1e-2, atol=1e-3)
            twins.train(rank, step)


def changes_one_shard(rank: int) -> list[str]:
    """A rank whose own shard has changed says so; the other one does not wait for ever."""
    model = sharded(make_model("llama"))
    with a_manager(model, control_timeout_s=2.0) as rollout:
        rollout.generate([], GREEDY)
        if rank == 1:
            model.model.layers[1].mlp.up_proj.weight.to_local().data.add_(1.0)
        named: list[str] = []
        with suppress(DeadlineError):
            try:
                rollout.generate([[5, 6, 7]], GREEDY)
            except WeightsChangedError as exc:
                named = list(exc.tensors)
        return named


def samples_out_of_ddp(rank: int) -> None:
    """The manager is given the wrapper: the weights are the optimizer's own tensors, and no byte of them is copied."""
    twins = Twins(DistributedDataParallel, 0.1)
    model = twins.model.module
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with a_manager(twins.model) as rollout:
        attach(twins.optimizers[0], rollout)
        assert rollout.model is rollout.engine.weights.sampled is model
        for step in range(2):
            twins.check(rollout, prompts(rank, step))
            twins.train(rank, step)
        assert rollout.policy_version == 2
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def is_sharded_later(rank: int) -> dict[str, Any]:
    """Built of whole weights, with groups in flight when FSDP2 comes; then trained, beside one process's model."""
    twins = Twins(lambda model: model, 0.1)
    model, alone = twins.model, twins.alone
    long = GREEDY.replace(max_tokens=20)
    with a_manager(model) as rollout:
        rollout.generate([[3, 4]], GREEDY)
        rollout.weights_updated()
        rollout.submit([[9, 8 + rank]], long)
        made = tokens(rollout.generate([[5, 6]], GREEDY, min_groups=1, progress=False))
        sharded(model)
        twins.optimizers[0] = torch.optim.SGD(model.parameters(), lr=0.1)
        attach(twins.optimizers[0], rollout)
        twins.check(rollout, prompts(rank, 0))
        made += tokens(rollout.generate([], min_groups=rollout.groups_in_flight, progress=False))
        assert sorted(made) == sorted([greedy(alone, [5, 6], NEW), greedy(alone, [9, 8 + rank], 20)])
        assert is_sharded(model)
        metrics = rollout.metrics()
        twins.train(rank)
        twins.check(rollout, [[5, 6, 7]])
    return {"version": rollout.policy_version, "generated": metrics["rollout/generated_tokens"]}


def is_sharded_later_into_another_dtype(rank: int) -> torch.dtype:
    model = make_model("llama")
    with a_manager(model, coordinator=False) as rollout:
        sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        rollout.generate(prompts(rank, 0), GREEDY)
        return rollout.engine.cache.dtype


def is_sharded_too_late(rank: int) -> str:
    model = make_model("llama")
    with a_manager(model, coordinator=False) as rollout:
        wrapper = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        with pytest.raises(EngineStateError) as refused:
            rollout.generate(prompts(rank, 0))
    with pytest.raises(UnsupportedModelError) as unsupported:
        RolloutManager(wrapper, None)
    return f"{refused.value}; {unsupported.value}"


def is_evaluated(rank: int) -> dict[str, Any]:
    """An LLM of weights that are trained on: gathered while it samples, sharded inside `suspended` and in the end."""
    twins = Twins(sharded, 0.5)
    model = twins.model
    config = InferenceConfig(kv_cache_blocks=64, advanced=Advanced(block_size_tokens=4, verify_model=False))
    same = []
    with LLM(model, None, config) as llm:
        for _ in range(2):
            prompts = [[5, 6, 7 + rank], [9, 8 + rank]][: 2 - rank]
            found = [each.generated_tokens for each in llm.generate(prompts, GREEDY)]
            same.append(found == [greedy(twins.alone, each, NEW) for each in prompts])
            with llm.suspended():
                assert is_sharded(model)
                loss_of(model, 0).backward()
                loss_of(twins.alone, 0).backward()
                twins.step()
                llm.weights_updated()
                assert is_sharded(model)
        with pytest.raises(ConfigError) as refused:
            LLM(model, None, config, use_coordinator=True)
    return {"same": same, "sharded": is_sharded(model), "refused": str(refused.value), "version": llm.policy_version}
