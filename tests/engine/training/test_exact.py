"""Exact mode: the rollout's log-probs and the trainer's are the same bits, its gradients those of the function."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from rollout import ConfigError, RequestError, SamplingParams, UnsupportedModelError, exact
from rollout.engine.fused.fused_parts import rotary_tables
from rollout.engine.kernels import cpu_library
from rollout.manager.batch.batch import RolloutBatch
from rollout.requests.request import DynamicInferenceRequest
from tests.configs import engine_config
from tests.engines import at_random, finish, make_engine, pass_suspended, shared_model, steps, token_ids
from tests.models import VOCAB, make_model
from tests.rollouts import make_rollout

pytestmark = pytest.mark.skipif(cpu_library.load() is None, reason="no C++ compiler")

FAMILIES = ["qwen3", "llama", "qwen2", "mistral"]
DTYPES = [torch.float32, torch.bfloat16]
PREFIX = token_ids(37, seed=1)


class Rollout(NamedTuple):
    """A model and what an engine in exact mode sampled from it in an eventful life."""

    model: PreTrainedModel
    requests: list[DynamicInferenceRequest]
    stats: dict[str, float]


@pytest.fixture(scope="module", params=[(name, dtype) for name in FAMILIES for dtype in DTYPES], ids=str)
def rollout(request: pytest.FixtureRequest) -> Rollout:
    """Samples after prefix hits at several offsets, one-token chunks, preemptions and every way of suspending."""
    name, dtype = request.param
    model = make_model(name, dtype=dtype)
    # Mistral's layers all have a window, so that its sequences give blocks back.
    blocks = 16 if name == "mistral" else 30
    engine = make_engine(model, exact=True, kv_cache_blocks=blocks, max_requests=7, max_tokens_per_step=7)
    engine.add_request(PREFIX, at_random(4, prompt_logprobs=0))
    ended = list(finish(engine).values())
    for offset in (3, 4, 22, 37):
        engine.add_request(PREFIX[:offset] + token_ids(5, seed=offset), at_random(20, n=2, temperature=0.7))
    engine.add_request(token_ids(1), at_random(25, temperature=0))
    records = steps(engine, 12)
    for mode in ("persist", "offload", "recompute"):
        pass_suspended(engine, mode)
        records += steps(engine, 5)
    ended += finish(engine, records).values()
    return Rollout(model, ended, engine.stats())


def whole(request: DynamicInferenceRequest) -> list[int]:
    return [*request.prompt_tokens, *request.generated_tokens]


def of_tokens(logits: Tensor, tokens: list[int], request: DynamicInferenceRequest) -> Tensor:
    """Log-probs of a completion from the logits [T, V] of the whole sequence, as a loss computes them."""
    start = len(request.prompt_tokens)
    scores = logits[start - 1 : len(tokens) - 1].float() / (request.sampling_params.temperature or 1.0)
    return scores.log_softmax(-1).gather(-1, torch.tensor(tokens[start:])[:, None])[:, 0]


def padded(rows: list[list[int]], *, left: bool, width: int | None = None) -> tuple[Tensor, Tensor]:
    """Ids and mask [B, T]."""
    width = width or max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, place], mask[index, place] = torch.tensor(row), 1
    return ids, mask


def forward_padded(model: nn.Module, rows: list[list[int]], *, left: bool) -> list[Tensor]:
    ids, mask = padded(rows, left=left)
    logits = model(ids, attention_mask=mask).logits
    assert not logits[mask == 0].any()
    return [logits[index][mask[index].bool()] for index in range(len(rows))]


def forward_alone(model: nn.Module, rows: list[list[int]]) -> list[Tensor]:
    return [model(torch.tensor([row])).logits[0] for row in rows]


LAYOUTS: dict[str, Callable[[nn.Module, list[list[int]]], list[Tensor]]] = {
    "right": functools.partial(forward_padded, left=False),
    "left": functools.partial(forward_padded, left=True),
    "alone": forward_alone,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_ratio_is_one_to_the_bit(rollout: Rollout, layout: str) -> None:
    assert rollout.stats["preemptions"] > 0
    assert rollout.stats["prefill_tokens_saved"] > 0
    rows = [whole(request) for request in rollout.requests]
    with exact(rollout.model):
        logits = LAYOUTS[layout](rollout.model, rows)
        for request, tokens, own in zip(rollout.requests, rows, logits, strict=True):
            sampled = torch.tensor(request.generated_log_probs)
            ratio = (of_tokens(own, tokens, request) - sampled).exp()
            assert torch.equal(ratio, torch.ones_like(ratio))


def test_prompt_logprobs_are_the_trainers_too(rollout: Rollout) -> None:
    request = rollout.requests[0]
    assert request.prompt_log_probs is not None
    with exact(rollout.model):
        logits = rollout.model(torch.tensor([PREFIX])).logits[0]
    own = logits[:-1].float().log_softmax(-1).gather(-1, torch.tensor(PREFIX[1:])[:, None])[:, 0]
    assert torch.equal(own, torch.tensor(request.prompt_log_probs))


def test_neither_threads_nor_neighbours_nor_kept_positions_change_a_bit(rollout: Rollout) -> None:
    model, rows = rollout.model, [whole(request) for request in rollout.requests]
    ids, mask = padded(rows, left=False)
    threads = torch.get_num_threads()
    with exact(model), torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                assert torch.equal(model(ids, attention_mask=mask).logits, expected)
        finally:
            torch.set_num_threads(threads)
        few = torch.tensor([2, 5])
        assert torch.equal(model(ids[few], attention_mask=mask[few]).logits, expected[few])
        for keep, columns in ((9, slice(-9, None)), (torch.tensor([8, 0, 3]), [8, 0, 3])):
            kept = model(ids, attention_mask=mask, logits_to_keep=keep).logits
            assert torch.equal(kept, expected[:, columns])


def test_a_rotary_table_has_the_same_bits_however_it_grew() -> None:
    rotary = shared_model("qwen3").model.rotary_emb
    at_once = [each[:300].clone() for each in rotary_tables(copy.deepcopy(rotary), torch.float32, 1000)]
    grown = copy.deepcopy(rotary)
    for length in (1, 70, 65, 300):
        found = rotary_tables(grown, torch.float32, length)
    assert all(torch.equal(a, b[:300]) for a, b in zip(at_once, found, strict=True))
    grown.inv_freq.data.mul_(2)
    assert not torch.equal(rotary_tables(grown, torch.float32, 300)[0][:300], at_once[0])


# --- gradients --------------------------------------------------------------------------------------------------------

ODD = {"hidden_size": 40, "intermediate_size": 50, "head_dim": 12, "num_key_value_heads": 1, "tie_word_embeddings": True,
       "attention_bias": True}  # fmt: skip


def gradients(model: nn.Module, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a weighted sum of log-probs at the real tokens."""
    model.zero_grad()
    # Exact mode counts positions from the first real token; plain torch has to be told.
    given = {} if "forward" in vars(model) else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    logits = model(ids, attention_mask=mask, **given).logits
    logprobs = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    weights = torch.linspace(-1, 1, ids.shape[1] - 1) * mask[:, 1:] * mask[:, :-1]
    (logprobs.gather(-1, ids[:, 1:, None])[..., 0] * weights).sum().backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters()}


def distance(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Largest relative error of a parameter's gradient, in the Euclidean norm."""
    assert found.keys() == truth.keys()
    return max(float((found[name] - truth[name]).norm() / truth[name].norm().clamp(min=1e-9)) for name in truth)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("changes", "dtype"),
    [({}, torch.float32), (ODD, torch.float32), ({}, torch.bfloat16)],
    ids=["plain", "odd", "bf16"],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_model_in_float64(
    name: str, changes: dict[str, Any], dtype: torch.dtype, left: bool
) -> None:
    """In bfloat16 as close as plain torch's."""
    model = make_model(name, dtype=dtype, **changes)
    # Lengths far apart: attention's backward takes them in several rectangles.
    ids, mask = padded([token_ids(n, n) for n in (30, 28, 11, 1, 2)], left=left)
    truth = gradients(copy.deepcopy(model).double(), ids, mask)
    most = 2e-4 if dtype == torch.float32 else 1.5 * distance(gradients(model, ids, mask), truth)
    with exact(model):
        assert distance(gradients(model, ids, mask), truth) < most


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
def test_gradient_checkpointing_changes_no_bit(reentrant: bool, inside: bool) -> None:
    model = make_model("qwen3")
    ids, mask = padded([token_ids(n, n) for n in (20, 7)], left=False)
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        with exact(model):
            logits = model(ids, attention_mask=mask).logits
            if inside:
                logits.square().sum().backward()
        if not inside:
            logits.square().sum().backward()
        found.append([logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("mode", "divisor"), [("raw", 1.0), ("tempered", 0.7)])
def test_truncated_sampling_is_exact_where_its_logprobs_are_the_models(mode: str, divisor: float) -> None:
    model = shared_model("qwen3")
    engine = make_engine(model, exact=True)
    shaped = SamplingParams(
        max_tokens=12, temperature=0.7, top_k=8, top_p=0.9, repetition_penalty=1.1, min_tokens=5, logprobs=2,
        logprobs_mode=mode, ignore_eos=True, seed=1,
    )  # fmt: skip
    (request,) = engine.generate([token_ids(9)], shaped)
    with exact(model):
        logits = model(torch.tensor([whole(request)])).logits[0, 8:-1]
    logprobs = (logits / divisor).log_softmax(-1)
    assert (
        logprobs.gather(-1, torch.tensor(request.generated_tokens)[:, None])[:, 0].tolist()
        == request.generated_log_probs
    )
    for row, top in zip(logprobs, request.generated_top_n_logprobs, strict=True):
        assert all(row[token].item() == logprob for token, logprob in top)


# --- a training loop --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ratios_are_one_again_after_every_optimizer_step(dtype: torch.dtype) -> None:
    model = make_model("qwen3", dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with make_rollout(model, exact=True) as manager:
        sampled = []
        for _ in range(3):
            batch = manager.generate([token_ids(9), token_ids(14, 3)], at_random(12, n=3))
            with exact(model):
                ratio = ratio_of(model, batch)
                assert torch.equal(ratio, torch.ones_like(ratio))
                ratio.log().mean().neg().backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.weights_updated()
            sampled.append(batch.logprobs[batch.response_mask][0].item())
    assert len(set(sampled)) == 3, "the weights did not change"


def ratio_of(model: nn.Module, batch: RolloutBatch) -> Tensor:
    """Return the ratio at the response tokens."""
    logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
    logprobs = logits.float().log_softmax(-1).gather(-1, batch.input_ids[:, 1:, None])[..., 0]
    return (logprobs - batch.logprobs[:, 1:]).exp()[batch.response_mask[:, 1:]]


# --- what it leaves behind, and what it refuses -----------------------------------------------------------------------


def test_the_model_is_as_before_after_the_block_and_after_an_exception() -> None:
    model = make_model("qwen3")
    ids = torch.tensor([token_ids(9)])
    before, attributes = model(ids).logits, set(vars(model))
    with exact(model), exact(model):
        inside = model(ids).logits
    with pytest.raises(ZeroDivisionError), exact(model):
        raise ZeroDivisionError
    assert set(vars(model)) == attributes
    assert torch.equal(model(ids).logits, before)
    assert not torch.equal(inside, before)


CHANGES: dict[str, Callable[[Any], object]] = {
    "hooks": lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None),
    "replaced": lambda model: setattr(model.model.norm, "forward", model.model.norm.forward),
    "attention_dropout": lambda model: setattr(model.model.layers[0].self_attn, "attention_dropout", 0.1),
    "Sequential": lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Sequential(nn.Linear(48, 96))),
}


@pytest.mark.parametrize("named", CHANGES)
def test_a_changed_model_is_refused_by_name_at_any_time(named: str) -> None:
    model = make_model("qwen3")
    with exact(model):
        model(torch.tensor([token_ids(3)]))
        CHANGES[named](model)
        with pytest.raises(UnsupportedModelError, match=named):
            model(torch.tensor([token_ids(3)]))


def test_a_replaced_forward_of_the_model_is_refused_and_stays() -> None:
    model = make_model("qwen3")
    model.forward = forward = functools.partial(type(model).forward, model)
    with pytest.raises(UnsupportedModelError, match="forward of Qwen3ForCausalLM was replaced"), exact(model):
        pass
    assert model.forward is forward


def adapted() -> Any:
    return get_peft_model(make_model("qwen3"), LoraConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize(("make", "named"), [
    *((functools.partial(shared_model, name), f"{cls}ForCausalLM") for name, cls in (
        ("gemma3", "Gemma3"), ("gemma2", "Gemma2"), ("qwen3_moe", "Qwen3Moe"), ("qwen3_next", "Qwen3Next"))),
    (functools.partial(shared_model, "gpt2"), "GPT2LMHeadModel"),
    *((lambda place=place: make_model("qwen3").to(place), str(place)) for place in (torch.float16, "meta")),
    (adapted, "LoRA"),
])  # fmt: skip
def test_other_models_are_refused_by_name_on_both_sides(make: Callable[[], Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named), exact(make()):
        pass
    with pytest.raises(UnsupportedModelError, match=named):
        make_engine(make(), exact=True)


def test_autocast_and_adapters_that_are_switched_off_are_refused() -> None:
    model = make_model("qwen3")
    with exact(model), torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModelError, match="autocast"):
        model(torch.tensor([token_ids(3)]))
    with pytest.raises(UnsupportedModelError, match="autocast"), torch.autocast("cpu", torch.bfloat16), exact(model):
        pass
    model = adapted()
    with model.disable_adapter(), pytest.raises(UnsupportedModelError, match="PEFT"), exact(model):
        pass


def test_log_probs_read_off_the_head_are_refused_with_the_way_to_whole_logits(rollout: Rollout) -> None:
    with pytest.raises(UnsupportedModelError, match=r"take model\(batch.input_ids"), exact(rollout.model):
        RolloutBatch.from_requests(rollout.requests, policy_version=0, pad_token_id=0).logprobs_of(rollout.model)


@pytest.mark.parametrize(("given", "named"), [
    ({"use_cache": True}, "use_cache"), ({"output_hidden_states": True}, "output_hidden_states"),
    ({"inputs_embeds": torch.zeros(1, 3, 48)}, "inputs_embeds"), ({"return_dict": False}, "return_dict"),
    ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q"), ({"attention_mask": torch.tensor([[1, 0, 1]])}, "row 0"),
    ({"attention_mask": torch.ones(1, 1, 3)}, "attention_mask is"),
    ({"position_ids": torch.arange(3)[None]}, "position_ids"),
])  # fmt: skip
def test_arguments_that_no_rollout_has_are_refused(given: dict[str, Any], named: str) -> None:
    model = shared_model("qwen3")
    with exact(model), pytest.raises(UnsupportedModelError, match=named):
        model(torch.tensor([token_ids(3)]), **given)


def test_an_empty_batch_and_rows_without_a_token_give_logits_of_zero() -> None:
    model = shared_model("qwen3")
    with exact(model):
        assert model(torch.zeros(0, 5, dtype=torch.int64)).logits.shape == (0, 5, VOCAB)
        logits = model(torch.ones(2, 3, dtype=torch.int64), attention_mask=torch.tensor([[0, 0, 0], [0, 1, 1]])).logits
    assert not logits[0].any()
    assert logits[1, 1:].all()


@pytest.mark.parametrize("conflict", [
    {"fused_forward": False}, {"autocast_dtype": "bfloat16"}, {"inference_dtype": "bfloat16"}, {"inference_device": "cpu"},
    {"exact": 1},
], ids=lambda conflict: next(iter(conflict)))  # fmt: skip
def test_options_that_exclude_it_are_refused(conflict: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(conflict))):
        engine_config(**({"exact": True} | conflict))


def test_a_rollout_that_could_not_be_exact_fails_by_name_and_the_next_one_runs() -> None:
    model = make_model("qwen3")
    engine = make_engine(model, exact=True)
    handle = model.model.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(RequestError, match="exact=True"):
        engine.generate([token_ids(5)], at_random(3))
    handle.remove()
    assert len(engine.generate([token_ids(5)], at_random(3))[0].generated_tokens) == 3


def test_ddp_is_served_and_sharded_weights_are_refused(tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = make_model("qwen3")
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedModelError, match="spread over the ranks"), exact(sharded):
            pass
        with pytest.raises(UnsupportedModelError, match="spread over the ranks"):
            make_engine(sharded, exact=True)
        model = make_model("qwen3")
        ids = torch.tensor([token_ids(9)])
        wrapped = nn.parallel.DistributedDataParallel(model)
        with exact(wrapped):
            logits = wrapped(ids).logits
            logits.sum().backward()
        with exact(model), torch.no_grad():
            assert torch.equal(model(ids).logits, logits)
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
