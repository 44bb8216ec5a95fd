"""Tests of model verification: unsupported features are refused at construction, naming layer and feature."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import cache_utils
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput

import rollout
from rollout.config import Advanced, InferenceConfig
from rollout.engine.build import step_tokens
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.models import recurrent_layers
from rollout.engine.models.recurrent_layers import RecurrentLayers
from rollout.errors import ConfigError, UnsupportedModelError
from tests.benchmarks.rates import Weights
from tests.configs import engine_config
from tests.engines import assert_greedy, finish, greedily, logprob_error, make_engine, token_ids
from tests.models import RECURRENT_CACHE, SMALL, VOCAB, make_model, spread_logits
from tests.vision_models import POOLED
from tests.zoo.small_models import build as small

TINY: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = TINY | {"intermediate_size": 64}


def build(model: nn.Module, **options: Any) -> DynamicInferenceEngine:
    return DynamicInferenceEngine(model, None, engine_config(kv_cache_blocks=32, block_size_tokens=4, **options))


def longrope() -> hf.PreTrainedModel:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [2.0] * 6, "short_factor": [1.0] * 6,
            "original_max_position_embeddings": 64}  # fmt: skip
    return hf.Phi3ForCausalLM(
        hf.Phi3Config(**DENSE, pad_token_id=0, max_position_embeddings=512, original_max_position_embeddings=64,
                      rope_parameters=rope)
    )  # fmt: skip


def sinks_of_each_key() -> hf.PreTrainedModel:
    model = make_model("gpt_oss")
    for layer in model.model.layers:
        layer.self_attn.sinks = nn.Parameter(torch.zeros(4, 2))
    return model


def diffusion() -> hf.PreTrainedModel:
    text = SMALL | {"head_dim": 16, "global_head_dim": 16, "pad_token_id": 0, "num_experts": 2, "top_k_experts": 1,
                    "moe_intermediate_size": 16}  # fmt: skip
    return hf.DiffusionGemmaForBlockDiffusion(hf.DiffusionGemmaConfig(text_config=text, vision_config=POOLED))


def dynamic_rope() -> hf.PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DENSE, max_position_embeddings=64, rope_parameters=rope))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hf.FalconForCausalLM(hf.FalconConfig(**TINY)), "Falcon.*0 of 2 layers.*attention interface"),
        (lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=4)),
         "Bloom.*0 of 2 layers go through transformers' attention interface"),
        (lambda: hf.MptForCausalLM(hf.MptConfig(vocab_size=VOCAB, d_model=48, n_layers=2, n_heads=4)),
         "Mpt.*0 of 2 layers"),
        (lambda: small("recurrent_gemma"), "1 of 4 layers go through transformers' attention interface"),
        (diffusion, "DiffusionGemmaForBlockDiffusion makes whole blocks of tokens by denoising"),
        (lambda: small("xlstm"), "honours logits_to_keep"),
        (lambda: hf.Llama4ForCausalLM(hf.Llama4TextConfig(**SMALL, head_dim=16, attention_chunk_size=8)),
         r"layer \d+ is 'chunked_attention': the engine serves full_attention, sliding_attention layers"),
        (sinks_of_each_key, r"'model\.layers\.0\.self_attn' passes s_aux of shape \(4, 2\); .* per query head, \[4\]"),
        (lambda: hf.DogeForCausalLM(hf.DogeConfig(**DENSE, num_key_value_heads=2)),
         r"'model\.layers\.0\.self_attn' passes attention_mask=a tensor"),
        (lambda: hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=VOCAB, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4)), "encoder-decoder"),
        (lambda: hf.BertLMHeadModel(hf.BertConfig(**DENSE)),
         r"'bert\.encoder\.layer\.0\.attention\.self' is bidirectional"),
        (longrope, r"'longrope'.*passes 64 tokens.*max_sequence_length=512.*max_sequence_length <= 64"),
        (lambda: hf.Qwen3Model(hf.Qwen3Config(**SMALL, head_dim=16)), "Qwen3Model gives no logits"),
        (lambda: hf.Qwen3ForSequenceClassification(hf.Qwen3Config(**SMALL, head_dim=16)), r"logits of shape \(1, 2\)"),
        (lambda: nn.Linear(2, 2), "Linear is no Hugging Face PreTrainedModel.*pass the model itself"),
        (lambda: nn.Sequential(make_model("qwen3")), "Sequential is no Hugging Face PreTrainedModel"),
    ],
    ids=["falcon", "bloom", "mpt", "recurrent-gemma", "diffusion", "xlstm", "llama-4", "sinks", "doge",
         "t5", "bert", "longrope", "no head", "classifier", "plain module", "wrapper"],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused_by_name(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        # What is refused is refused by looking, before any number is compared.
        build(make(), verify_model=False)


def biased(value: Any) -> Callable[[Any], object]:
    """The layer passes an argument that the engine does not support."""
    return lambda layers: layers[1].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"position_bias": value}), with_kwargs=True
    )


class Shifted(nn.Module):
    """A feed-forward layer that also looks at the token before: state that no attention layer tells of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        out: torch.Tensor = self.inner(hidden + 0.5 * before)
        return out


class Broken(nn.Module):
    """Raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("sizes differ"), TypeError("an argument"), KeyError("a key")])
def test_whatever_a_module_raises_when_it_is_tried_is_told_with_its_name(error: Exception) -> None:
    model = make_model("qwen3")
    model.model.layers[1].mlp = Broken(error)
    with pytest.raises(
        UnsupportedModelError, match=rf"'model\.layers\.1\.mlp' does not run.*{type(error).__name__}"
    ) as info:
        build(model)
    assert info.value.__cause__ is error
    model.model.layers[1].mlp = Broken(torch.OutOfMemoryError("no room"))
    with pytest.raises(torch.OutOfMemoryError):
        build(model)


def test_positions_beyond_a_table_of_them_are_refused_and_others_named(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("gpt2")
    with pytest.raises(UnsupportedModelError, match=r"max_position_embeddings=512 .*max_sequence_length <= 512"):
        build(model, max_sequence_length=513)
    assert build(model, max_sequence_length=512).parts.max_sequence_length == 512
    with caplog.at_level("WARNING"):
        assert build(make_model("qwen3"), max_sequence_length=512).parts.max_sequence_length == 512
        assert "max_sequence_length" not in caplog.text
        assert build(make_model("qwen3"), max_sequence_length=1024).parts.max_sequence_length == 1024
    assert "max_sequence_length=1024 and Qwen3ForCausalLM has max_position_embeddings=512" in caplog.text


@pytest.mark.parametrize("make", [longrope, dynamic_rope])
def test_rotary_variants_that_grow_are_served_up_to_where_they_grow(make: Callable[[], hf.PreTrainedModel]) -> None:
    model = make().train()
    with pytest.raises(UnsupportedModelError, match="max_sequence_length <= 64"):
        build(model, max_sequence_length=65)
    engine = make_engine(model, max_sequence_length=64, verify_model=True)
    engine.add_request(token_ids(40), greedily(24))
    (request,) = finish(engine).values()
    assert_greedy(model, request)


def mla() -> hf.PreTrainedModel:
    return hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **DENSE, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12,
            n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
            first_k_dense_replace=1,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        mla,
        lambda: hf.Cohere2ForCausalLM(hf.Cohere2Config(**DENSE, num_key_value_heads=2, sliding_window=8)),
        lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**DENSE)),
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(**TINY, ffn_dim=64, max_position_embeddings=128, word_embed_proj_dim=48)
        ),
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, scale_attn_by_inverse_layer_idx=True)
        ),
        lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**DENSE, num_key_value_heads=1, pad_token_id=0, sliding_window=8)),
    ],
    ids=["values narrower than keys", "layers without positions", "gpt-neox", "opt", "a scale per layer", "one kv head"],
)  # fmt: skip
def test_other_shapes_of_attention_are_served_exactly(make: Callable[[], hf.PreTrainedModel]) -> None:
    torch.manual_seed(0)
    model = make()
    spread_logits(model)
    engine = make_engine(model.train(), max_tokens_per_step=13, max_sequence_length=64, verify_model=True)
    for length in (1, 3, 9, 17, 26):
        engine.add_request(token_ids(length, length), greedily(8))
    for request in finish(engine).values():
        assert_greedy(model, request)


def test_the_pool_is_sized_by_blocks_or_by_memory() -> None:
    model = make_model("qwen3")
    block = make_engine(model).cache.block_bytes
    assert block == 4 * 3 * 2 * 2 * 16 * 4
    engine = DynamicInferenceEngine(
        model,
        None,
        InferenceConfig(kv_cache_memory_gb=10 * block / 2**30, max_requests=2, advanced=Advanced(block_size_tokens=4)),
    )
    assert engine.cache.num_blocks == 10
    engine = DynamicInferenceEngine(
        model, None, InferenceConfig(max_requests=2, advanced=Advanced(block_size_tokens=4))
    )
    assert engine.cache.num_blocks == 2 * 512 / 4, "never more than its requests can use"
    with pytest.raises(ValueError, match=r"does not hold one block.*kv_cache_memory_gb="):
        DynamicInferenceEngine(
            model, None, InferenceConfig(kv_cache_memory_gb=1e-9, advanced=Advanced(block_size_tokens=4))
        )


def test_the_token_budget_of_a_step_follows_the_device_unless_it_is_given() -> None:
    model = make_model("qwen3")
    engine = make_engine(model, max_tokens_per_step=None)
    assert engine.config.max_tokens_per_step == engine.context.scheduler.config.step_tokens == 2048
    assert InferenceConfig(max_requests=5000).step_tokens == 5000
    cuda = torch.device("cuda")
    assert step_tokens(InferenceConfig(), cuda) == 8192
    assert step_tokens(InferenceConfig(max_requests=9000), cuda) == 9000
    with pytest.raises(ConfigError, match="max_tokens_per_step=64: must be at least max_requests=256"):
        InferenceConfig(max_tokens_per_step=64)


def test_a_model_of_one_position_at_a_time_is_served() -> None:
    engine = make_engine("qwen3", max_sequence_length=2, verify_model=True)
    (request,) = engine.generate([[5]], greedily(1))
    assert len(request.generated_tokens) == 1
    assert logprob_error("qwen3", request) <= 1e-5


@pytest.mark.parametrize("dummy", ["DummyLayer", "LinearAttentionLayer"])
def test_layers_without_a_state_are_told_apart_in_every_version_of_transformers(
    dummy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(cache_utils, dummy):
        pytest.skip(f"transformers {hf.__version__} has no {dummy}")

    class Cache(hf.DynamicCache):
        def __init__(self, config: Any) -> None:
            names = {"conv": "LinearAttentionLayer", "mlp": dummy, "full_attention": "DynamicLayer"}
            self.layers = [getattr(cache_utils, names[each])() for each in config.layer_types]

    monkeypatch.setattr(recurrent_layers, "DynamicCache", Cache)
    config = SimpleNamespace(layer_types=["mlp", "conv", "full_attention"])
    found = RecurrentLayers.of(make_model("qwen3"), config)
    assert found.stateless == {0}
    assert found.stateful == ({1} if RECURRENT_CACHE else frozenset())


# --- classes of a user's own ------------------------------------------------------------------------------------------


class OwnConfig(hf.PreTrainedConfig):
    """The configuration of a decoder that transformers does not have."""

    model_type = "own"

    def __init__(self, **options: Any) -> None:
        super().__init__(**(SMALL | options))


class OfTorch(hf.PreTrainedModel):
    """A decoder with attention of torch's own modules, and without `get_input_embeddings`."""

    config_class = OwnConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.table, self.head = nn.Embedding(config.vocab_size, width), nn.Linear(width, config.vocab_size)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 32, batch_first=True) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> Any:
        hidden, mask = self.table(input_ids), nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return CausalLMOutput(logits=self.head(hidden))


class OfQwen(OfTorch):
    """The same with attention through transformers' interface."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inner = make_model("qwen3").model
        self.layers, self.rotary = inner.layers, inner.rotary_emb

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, logits_to_keep: Any = 0, **rest: Any) -> Any:
        hidden = self.table(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        given: Any = {"attention_mask": None, "past_key_values": None, "position_ids": position_ids}
        mask = create_causal_mask(config=self.config, inputs_embeds=hidden, **given)
        embedded = self.rotary(hidden, position_ids)
        for layer in self.layers:
            layer.self_attn.config = self.config
            hidden = layer(hidden, attention_mask=mask, position_embeddings=embedded, **rest)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.head(hidden[:, kept]))


UNSEEN = "0 of 3 layers go through transformers' attention interface"


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda: OfTorch(OwnConfig()), ["position_ids: add it", "logits_to_keep: add it", "**kwargs: add it", UNSEEN]),
        (lambda: nn.Linear(2, 2), ["position_ids", "logits_to_keep", "**kwargs", "no Hugging Face PreTrainedModel"]),
        (lambda: changed(biased("alibi"), lambda layers: setattr(layers[2].self_attn, "is_causal", False)),
         ["1.self_attn' passes position_bias='alibi'", "2.self_attn' is bidirectional"]),
        *((lambda value=value: changed(biased(value)), ["'model.layers.1.self_attn' passes position_bias="])
          for value in (torch.zeros(1, 4, 4, 4), 0.5)),
        (lambda: changed(lambda layers: setattr(layers[1], "self_attn", layers[0].self_attn)),
         ["0.self_attn' runs twice", "2 of 3 layers go through transformers' attention interface"]),
        (lambda: changed(lambda layers: setattr(layers[1], "mlp", Shifted(layers[1].mlp))),
         ["keeps state that is not in the KV cache"]),
        (lambda: make_model("qwen3"), []),
    ],
    ids=["torch", "plain module", "two layers", "a tensor", "a number", "twice", "hidden state", "nothing"],
)  # fmt: skip
def test_everything_that_a_model_lacks_is_listed_and_construction_says_the_same(
    make: Callable[[], nn.Module], missing: list[str]
) -> None:
    model = make()
    found = rollout.inspect(model)
    assert bool(found) is (not missing)
    for line, wanted in zip(found.missing, missing, strict=True):
        assert wanted in line
    assert [line.split()[0] for line in str(found).splitlines()] == ["present"] * len(found.present) + [
        "MISSING"
    ] * len(missing)
    if missing:
        with pytest.raises(UnsupportedModelError) as refused:
            build(model)
        assert all(line in str(refused.value) for line in found.missing)
    else:
        assert "numbers: a forward in chunks equals the model's own" in found.present
        assert found.present[-1] == "served by: fused"


def changed(*changes: Callable[[Any], object]) -> hf.PreTrainedModel:
    model = make_model("qwen3")
    for change in changes:
        change(model.model.layers)
    return model


def test_a_model_without_get_input_embeddings_is_served() -> None:
    torch.manual_seed(0)
    model = OfQwen(OwnConfig(head_dim=16))
    engine = make_engine(model, verify_model=True, kv_cache_blocks=256)
    (request,) = engine.generate([token_ids(9)], greedily(6))
    assert logprob_error(model, request) < 1e-4
    assert Weights.of(model).parameters == model.num_parameters()
