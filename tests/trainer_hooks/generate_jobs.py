"""Jobs of `test_generate_hook` on several ranks: `model.generate` of a wrapped model, under weights that change."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.engine.weights.weights_jobs import a_manager, loss_of, sharded
from tests.models import make_model
from tests.trainer_hooks import deepspeed_jobs
from trainer_hooks.generate import attach

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def generates(rank: int, wrapper: str) -> dict[str, Any]:
    """Greedy rows, other ones on each rank, beside a model of one process; no hook is on the optimizer."""
    model, alone = make_model("llama"), make_model("llama")
    wrapped: Any = sharded(model) if wrapper == "FSDP2" else DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (wrapped, alone)]
    equal = []
    with a_manager(model) as manager, attach(wrapped, manager, fallback="raise") as hook:
        for step in range(3):
            equal.append(_same(rank, step, model, alone))
            loss_of(wrapped, rank, step).backward()
            torch.stack([loss_of(alone, each, step) for each in range(2)]).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {"equal": equal, "version": manager.policy_version, "served": hook.served}


def generates_under_zero_3(rank: int) -> dict[str, Any]:
    """The same with DeepSpeed's engine; the other model gets its weights."""
    from deepspeed import zero

    alone, engine = make_model("llama"), deepspeed_jobs.engine(rank, stage=3, gradient_accumulation_steps=1)
    equal = []
    with a_manager(engine) as manager, attach(engine, manager, fallback="raise") as hook:
        for step in range(3):
            equal.append(_same(rank, step, engine.module, alone))
            engine.backward(loss_of(engine, rank, step))
            engine.step()
            with zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
                for ours, theirs in zip(alone.parameters(), engine.module.parameters(), strict=True):
                    ours.copy_(theirs)
    return {"equal": equal, "version": manager.policy_version, "served": hook.served}


def _same(rank: int, step: int, model: Any, alone: Any) -> bool:
    prompts = torch.tensor([[5 + rank, 6, 7 + step], [9, 8, 7]][: 1 + rank])
    return torch.equal(model.generate(prompts, **OPTIONS), alone.generate(prompts, **OPTIONS))
