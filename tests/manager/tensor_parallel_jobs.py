"""Jobs of `tests.manager.test_tensor_parallel`: each runs on every rank, over gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.distributed import DistributedConfig

from rollout.config import Advanced, InferenceConfig
from rollout.errors import RolloutError
from rollout.journal import Journal
from rollout.llm.llm import LLM
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from tests.models import VOCAB, make_model, scale_weights
from tests.ranks import assert_nothing_is_left
from tests.rollouts import logprob_error, make_rollout, value_error
from tests.vision_models import NO_MARKS, picture_prompt
from trainer_hooks.optimizer import attach
from trainer_hooks.peft import adapter

VOCABULARY = VOCAB if Version(transformers.__version__) >= Version("5.21") else VOCAB + 1
"""Before 5.21 transformers splits no vocabulary into unequal parts."""
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13, 14]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(n=3, max_tokens=9, ignore_eos=True, seed=4)


def load(folder: str, kind: Any = AutoModelForCausalLM, **sizes: int) -> PreTrainedModel:
    """The model of a folder, split over the ranks as transformers does it; two at a time where no sizes are given."""
    os.environ |= {name: str(dist.get_rank()) for name in ("RANK", "LOCAL_RANK")}
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    config = DistributedConfig(**(sizes or {"tp_size": 2}))
    return kind.from_pretrained(folder, distributed_config=config).train()


def shown(batch: RolloutBatch) -> dict[str, Any]:
    """Return the results that two runs of the same calls must agree on, and log-probs, which differ by rounding."""
    return {
        "tokens": batch.input_ids.tolist(),
        "versions": batch.policy_versions.tolist(),
        "kv_versions": batch.kv_versions.tolist(),
        "reasons": batch.finish_reasons,
        "logprobs": batch.logprobs.tolist(),
    }


def lives(model: PreTrainedModel, of_first: Callable[[Any], Any] = lambda state: state) -> list[dict[str, Any]]:
    """A manager's life: in flight over updates, suspended in every mode, aborted, saved and loaded.

    Args:
        of_first: the first rank's value of a value of every rank.
    """
    told = []
    options = {"kv_cache_blocks": 24, "max_requests": 6, "verify_model": True}
    # The first group ends while the second one runs.
    unequal = [DRAWN.replace(max_tokens=length) for length in (5, 12, 12)]
    with make_rollout(model, **options) as rollout:
        told.append(shown(rollout.generate(PROMPTS, [GREEDY, DRAWN, GREEDY])))
        for mode in ("offload", "recompute", "persist"):
            told.append(shown(rollout.generate(PROMPTS, unequal, min_groups=1)))
            with rollout.suspended(mode):
                scale_weights(model, 1.03)
                rollout.weights_updated()
        told += [shown(each) for each in rollout.as_completed()]
        rollout.suspend()
        rollout.resume()
        rollout.abort(rollout.submit([[3, 4, 5]], DRAWN))
        rollout.generate(PROMPTS, DRAWN, min_groups=1)
        state = of_first(rollout.state_dict())
        rollout.abort(range(100))
    with make_rollout(model, **options) as rollout:
        rollout.load_state_dict(state)
        told.append(shown(rollout.generate([], min_groups=rollout.groups_in_flight)))
    return told


def of_first_rank(value: Any) -> Any:
    """The first rank's value, on every rank."""
    told = [value]
    dist.broadcast_object_list(told)
    return told[0]


def lives_in_a_group(rank: int, folder: str) -> dict[str, Any]:
    """`lives` of a split model."""
    model = load(folder)
    told = lives(model, of_first_rank)
    with make_rollout(model) as rollout:
        batch = rollout.generate(PROMPTS, DRAWN)
        heads = rollout.engine.cache.layer(0)[0].shape[2]
        explained = str(rollout.explain())
    error = logprob_error(model, batch)
    return {"told": told, "heads": heads, "error": error, "explained": explained}


def switches_adapters(rank: int, folder: str) -> dict[str, Any]:
    """Samples of an adapter on a split model, and of the model below it."""
    model = load(folder)
    torch.manual_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with make_rollout(adapted) as rollout:
        batch = rollout.generate(PROMPTS, GREEDY)
        error = logprob_error(adapted, batch)
        with adapter(rollout, None):
            below = rollout.generate(PROMPTS, GREEDY)
    return {"with": shown(batch), "error": error, "below": shown(below)}


def doubled(hidden: torch.Tensor) -> torch.Tensor:
    return 2 * hidden


def samples_of(rank: int, folders: list[str]) -> list[dict[str, Any]]:
    """One batch of each model."""
    told = []
    for folder in folders:
        model = load(folder)
        with make_rollout(model, verify_model=True, token_values=doubled) as rollout:
            batch = rollout.generate(PROMPTS, GREEDY)
            told.append(shown(batch) | {"value error": value_error(model, batch, doubled)})
    return told


def load_vision(folder: str) -> PreTrainedModel:
    """The vision model of a folder, split over two ranks."""
    return load(folder, AutoModelForImageTextToText)


def sees(rollout: RolloutManager, name: str) -> dict[str, Any]:
    """Prompts with images, a video and none, in flight over an update, and the trainer's forward of what came back."""
    last = ["c", 4, "clip", 2] if "qwen" in name else ["c", 4]
    prompts = [picture_prompt(name, [2, "a", 3, "b"]), PROMPTS[0], picture_prompt(name, last)]
    params = SamplingParams(n=2, max_tokens=8, ignore_eos=True, seed=4, logit_bias=NO_MARKS)
    runs: list[int] = []
    tower = next(
        each
        for path, each in rollout.model.named_modules()
        if path.endswith(("visual", "vision_tower", "vision_model"))
    )
    tower.register_forward_hook(lambda *_: runs.append(1))
    told = [shown(rollout.generate(prompts, params, min_groups=1))]
    with rollout.suspended():
        scale_weights(rollout.model, 1.02)
        rollout.weights_updated()
    batch = rollout.generate(prompts[:1], params, min_groups=rollout.groups_in_flight + 1)
    pixels = {key: float(value.sum()) for key, value in batch.model_inputs().items() if "pixel" in key}
    return {"told": [*told, shown(batch)], "pixels": pixels, "runs": len(runs)}


def sees_in_a_group(rank: int, folders: dict[str, str]) -> dict[str, Any]:
    """`sees` of split models, and what a prompt with another image on the second rank is told."""
    answer: dict[str, Any] = {}
    for name, folder in folders.items():
        with make_rollout(load_vision(folder)) as rollout:
            if name == "gemma4":
                answer["split"] = said(partial(rollout.generate, [picture_prompt(name, [2, "a"])], GREEDY))
                continue
            answer[name] = sees(rollout, name)
            bare = picture_prompt(name, [2, "a"])["input_ids"][0].tolist()
            answer["unfit"] = said(partial(rollout.generate, [PROMPTS[0], bare], GREEDY))
            rollout.abort(rollout.submit([picture_prompt(name, [2, "ab"[rank]])], GREEDY))
            answer["other"] = said(partial(rollout.generate, PROMPTS, GREEDY))
    return answer


def whole(model: PreTrainedModel) -> list[float]:
    """All parameters in one list, whatever they are split over."""
    parts = (each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters())
    return torch.cat([each.detach().flatten() for each in parts]).tolist()


def trains(rank: int, folder: str, **sizes: int) -> dict[str, Any]:
    """Two steps with samples before each one, and the same steps without."""
    told, after = [], []
    for with_rollouts in (True, False):
        model = load(folder, **sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with make_rollout(model) if with_rollouts else nullcontext() as rollout:
            if rollout is not None:
                attach(optimizer, rollout)
            for step in range(2):
                if rollout is not None:
                    batch = rollout.generate(PROMPTS[:1], DRAWN.replace(seed=step, n=2, max_tokens=4))
                    told.append((shown(batch)["tokens"], logprob_error(model, batch), rollout.policy_version))
                ids = torch.tensor([[5 + step, 6, 7, 8, 9, 10]])
                model(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        after.append(whole(model))
    return {"told": told, "same": after[0] == after[1]}


def said(act: Any) -> str:
    """Type and message of what a call raises."""
    try:
        act()
    except RolloutError as exc:
        return f"{type(exc).__name__}: {exc}"
    return "nothing"


def other_kinds(rank: int, folder: str) -> dict[str, str]:
    """Models that are split in other ways."""
    whole = make_model("llama", vocab_size=VOCABULARY)
    plan = {f"model.layers.{layer}.input_layernorm": SequenceParallel() for layer in range(3)}
    sequence = parallelize_module(whole, init_device_mesh("cpu", (2,)), plan)
    return {
        "pipeline": said(lambda: make_rollout(load(folder, pp_size=2))),
        "sequence": said(lambda: make_rollout(sequence)),
    }


def interrupted(rank: int, rollout: RolloutManager, layer: torch.nn.Module) -> str:
    """Ctrl-C on the first rank alone, in the middle of a forward."""
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def press(*_: Any) -> None:
            hook.remove()
            signal.raise_signal(signal.SIGINT)

        hook = layer.register_forward_pre_hook(press)
    try:
        rollout.generate([[5, 6]], GREEDY)
    except KeyboardInterrupt:
        return f"KeyboardInterrupt, {rollout.groups_in_flight} in flight"
    return "nothing"


def pressed(rank: int, folder: str, where: int | None, times: int) -> list[Any]:
    """Ctrl-C on one member or on all, once or twice within a forward; then what the group does next."""
    told: list[Any] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with make_rollout(load(folder), control_timeout_s=60.0) as rollout:
        rollout.generate(PROMPTS, DRAWN, min_groups=1)
        layer, forwards = rollout.engine.model.model.layers[1], count()

        def press(*_: Any) -> None:
            if next(forwards) == 2 and where in (None, rank):
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)

        hook = layer.register_forward_pre_hook(press)
        try:
            unequal = [GREEDY.replace(max_tokens=length) for length in (4, 6, 40)]
            told.append(shown(rollout.generate(PROMPTS, unequal, min_groups=2))["tokens"])
        except KeyboardInterrupt:
            told.append("KeyboardInterrupt")
        hook.remove()
        told.append(rollout.groups_in_flight)
        told.append(shown(rollout.generate([[5, 6]], DRAWN, min_groups=rollout.groups_in_flight + 1))["tokens"])
    return told


def misuses(rank: int, folder: str) -> dict[str, str]:
    """Return the errors of calls that a group refuses; it continues afterwards."""
    model = load(folder)
    told: dict[str, str] = {}
    told["settings"] = said(lambda: make_rollout(model, seed=rank))
    told["copy"] = said(lambda: make_rollout(model, inference_dtype="bfloat16"))
    told["exact"] = said(lambda: make_rollout(model, exact=True))
    with make_rollout(model, control_timeout_s=60.0) as rollout:
        told["step"] = said(rollout.engine.step)
        told["engine.generate"] = said(lambda: rollout.engine.generate([[1, 2]]))
        told["environment"] = said(lambda: rollout.run([1], environment=None))
        layer = model.model.layers[1]

        def fail(*_: Any) -> None:
            raise ArithmeticError("no such number")

        hook = layer.register_forward_pre_hook(fail)
        told["forward"] = str(rollout.generate([[5, 6]], GREEDY, on_error="mask").errors[0])
        hook.remove()
        rollout.generate([[5, 6]], GREEDY)
        first = next(model.parameters())
        with torch.no_grad():
            first.mul_(2)
        told["changed"] = said(lambda: rollout.generate([[5, 6]], GREEDY))
        rollout.weights_updated()
        told["interrupted"] = interrupted(rank, rollout, layer)
        rollout.generate([[5, 6]], GREEDY)
        with rollout.suspended("recompute" if rank else "offload"):
            pass
        told["kept"] = said(lambda: rollout.generate([[5, 6]], GREEDY))
        with rollout.suspended("recompute"):
            pass
        rollout.generate([], min_groups=rollout.groups_in_flight)
        rollout.submit([[1, 2, 3 + rank]], GREEDY)
        told["prompts"] = said(lambda: rollout.generate([]))
    with make_rollout(model, control_timeout_s=0.5) as rollout:
        told["late"] = said(lambda: rollout.generate([[1, 2]])) if rank == 0 else ""
        dist.barrier()
    return told


def dies(rank: int, folder: str, victim: int, forward: int, **sizes: int) -> str:
    """A member ends without a word in a forward; what the other one is told, then and later."""
    model = load(folder, **sizes)
    seen = [0]

    def end(*_: Any) -> None:
        seen[0] += 1
        if rank == victim and seen[0] == forward:
            os._exit(0)

    rollout = make_rollout(model, control_timeout_s=60.0)
    model.model.layers[1].register_forward_pre_hook(end)
    first = said(lambda: rollout.generate(PROMPTS, GREEDY))
    again = said(lambda: rollout.generate(PROMPTS, GREEDY))
    rollout.close()
    return f"{first}\n{again}"


def split(model: PreTrainedModel) -> PreTrainedModel:
    """A whole model split by torch's own plan over pairs of ranks; every pair has a replica."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {}
    for layer in range(len(model.model.layers)):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh["tp"], plan)
    return model


def of_my_pair(rank: int) -> list[list[int]]:
    """Different prompts for each pair of ranks."""
    return [[5 + rank // 2, 6, 7 + index] for index in range(3 + rank // 2)]


def two_groups_generate(rank: int) -> dict[str, Any]:
    """Two groups under one coordinator; each has its own prompts, and then only the first has any."""
    model = split(make_model("llama", vocab_size=VOCABULARY))
    with make_rollout(model, verify_model=True) as rollout:
        batch = rollout.generate(of_my_pair(rank), GREEDY)
        with rollout.suspended():
            scale_weights(model, 1.02)
            rollout.weights_updated()
        more = rollout.generate(PROMPTS if rank < 2 else [], GREEDY)
        ended = [len(each) for each in rollout.as_completed(rollout.submit(of_my_pair(rank), GREEDY))]
        address = rollout.coordinator_address
    return {"first": shown(batch), "more": shown(more), "ended": ended, "address": address}


def journals(rank: int, folder: str, disk: str) -> dict[str, Any]:
    """A group with a journal on every rank that is asked the same before and after its processes' end."""
    model, told = load(folder), []
    state: dict[str, Any] | None = None
    for _ in range(2):
        journal = Journal(f"{disk}/rank-{rank}")
        with make_rollout(model, journal=journal) as rollout:
            if state is not None:
                rollout.load_state_dict(state)
            else:
                state = of_first_rank(rollout.state_dict())
            batch = rollout.generate(PROMPTS, DRAWN)
            told.append(shown(batch) | {"computed": rollout.metrics()["rollout/generated_tokens"]})
        journal.close()
    return {"told": told, "files": len(os.listdir(f"{disk}/rank-{rank}"))}


def is_asked(rank: int, folder: str) -> dict[str, Any]:
    """An `LLM` of a group: its first rank asks, from several threads' point of view; the other follows to the end."""
    model = load(folder)
    config = InferenceConfig(
        kv_cache_blocks=64, max_requests=4, advanced=Advanced(block_size_tokens=4, control_timeout_s=60.0)
    )
    with LLM(model, None, config) as llm:
        answer: dict[str, Any] = {
            "update": said(llm.weights_updated),
            "coordinator": said(lambda: LLM(model, None, config, use_coordinator=True)),
        }
        if llm.is_primary_rank:
            answer["tokens"] = [each.generated_tokens for each in llm.generate(PROMPTS, GREEDY)]
            future = llm.submit(PROMPTS[0], GREEDY)
            answer["again"] = future.result()[0].generated_tokens
        else:
            with pytest.raises(RuntimeError, match="not primary"):
                llm.generate(PROMPTS, GREEDY)
    answer["state"] = llm.state.value
    assert_nothing_is_left()
    return answer
