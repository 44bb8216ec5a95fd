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
    """Greedy rows, other ones on each rank, beside one process's model; no hook is on the optimizer."""
    alone = make_model("llama")
    if wrapper == "ZeRO-3":
        wrapped: Any = deepspeed_jobs.engine(rank, stage=3, gradient_accumulation_steps=1)
        model, sampled = wrapped.module, wrapped
    else:
        model = sampled = make_model("llama")
        wrapped = sharded(model) if wrapper == "FSDP2" else DistributedDataParallel(model)
    # As DeepSpeed's.
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (wrapped, alone)]
    equal = []
    with a_manager(sampled) as manager, attach(wrapped, manager, fallback="raise") as hook:
        for step in range(3):
            prompts = torch.tensor([[5 + rank, 6, 7 + step], [9, 8, 7]][: 1 + rank])
            equal.append(torch.equal(model.generate(prompts, **OPTIONS), alone.generate(prompts, **OPTIONS)))
            torch.stack([loss_of(alone, each, step) for each in range(2)]).mean().backward()
            if wrapper == "ZeRO-3":
                wrapped.backward(loss_of(wrapped, rank, step))
                wrapped.step()
            else:
                loss_of(wrapped, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {"equal": equal, "version": manager.policy_version, "served": hook.served}
