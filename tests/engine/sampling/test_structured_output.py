"""Tests of structured output: masks against a brute-force oracle, and the state of a constraint through interruptions."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from rollout.errors import ConfigError, InvalidRequestError
from rollout.sampling_params import MAX_CHARACTERS, SamplingParams, StructuredOutput
from rollout.state import FinishReason
from tests.engines import finish, make_engine, pass_suspended, steps
from tests.models import make_model, make_tokenizer
from tests.server.chat_templates import byte_level, sentencepiece

TOKENIZER = byte_level("qwen2.5")
END = TOKENIZER.eos_token_id
SPARE = 9
"""Rows of the model's vocabulary that stand for no token, as padded vocabularies have them."""
MODEL = make_model("qwen3", vocab_size=len(TOKENIZER) + SPARE, num_hidden_layers=1, eos_token_id=END)
PROMPT = TOKENIZER("the weather")["input_ids"]
CHOICES = ["weather in Oslo", "weather in Paris", "we 🙂", 'rain "ü"', "rain"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def engine(**options: Any) -> Any:
    return make_engine(MODEL, TOKENIZER, **({"kv_cache_blocks": 256} | options))


def asked(structured: StructuredOutput, **options: Any) -> SamplingParams:
    return SamplingParams(**({"structured": structured, "max_tokens": 200, "seed": 5} | options))


def allowed_by_hand(text: bytes) -> list[int]:
    """Tokens that some choice continues with behind `text`; the end where a choice is complete."""
    wanted = [choice.encode() for choice in CHOICES]
    alphabet = {char: byte for byte, char in enumerate_bytes().items()}
    found = [END] if text in wanted else []
    for token in range(len(TOKENIZER)):
        name = TOKENIZER.convert_ids_to_tokens(token)
        if token in TOKENIZER.all_special_ids or not name or any(char not in alphabet for char in name):
            continue
        longer = text + bytes(alphabet[char] for char in name)
        if any(each.startswith(longer) for each in wanted):
            found.append(token)
    return sorted(found)


def enumerate_bytes() -> dict[int, str]:
    """GPT-2's alphabet of bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return {byte: chr(byte) if byte in plain else chr(next(others)) for byte in range(256)}


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "top_k": 3, "logprobs": 2}, {"repetition_penalty": 1.5}, {"temperature": 0}],
    ids=["plain", "filtered", "penalised", "greedy"],
)
def test_log_probs_are_of_the_distribution_over_the_tokens_that_may_come(options: dict[str, Any]) -> None:
    made = engine()
    made.add_request(PROMPT, asked(StructuredOutput.of_choices(CHOICES), n=6, **options))
    requests = finish(made).values()
    texts = {request.generated_text for request in requests}
    assert texts <= set(CHOICES)
    assert options.get("temperature") == 0 or len(texts) > 1
    for request in requests:
        assert request.finish_reason is FinishReason.STOP
        check_log_probs(request, options)


def check_log_probs(request: Any, options: dict[str, Any]) -> None:
    tokens, alphabet = request.generated_tokens, {char: byte for byte, char in enumerate_bytes().items()}
    MODEL.eval()
    with torch.no_grad():
        logits = MODEL(torch.tensor([request.prompt_tokens + tokens]), use_cache=False).logits[0].float()
    text = b""
    for place, token in enumerate(tokens):
        scores = logits[len(PROMPT) - 1 + place].clone()
        seen = torch.tensor(request.prompt_tokens + tokens[:place])
        penalty = options.get("repetition_penalty", 1.0)
        scores[seen] = torch.where(scores[seen] < 0, scores[seen] * penalty, scores[seen] / penalty)
        left = allowed_by_hand(text)
        masked = torch.full_like(scores, -torch.inf)
        masked[left] = scores[left] / (options.get("temperature") or 1.0)
        if "top_k" in options:
            masked[masked < masked.topk(min(options["top_k"], len(left))).values[-1]] = -torch.inf
        assert token in left
        expected = float(masked.log_softmax(-1)[token])
        assert request.generated_log_probs[place] == pytest.approx(expected, abs=1e-5)
        text += bytes(alphabet[char] for char in TOKENIZER.convert_ids_to_tokens(token) if token != END)


@pytest.mark.parametrize("constraint", [
    StructuredOutput(json_schema=SCHEMA),
    StructuredOutput(regex=r"[0-9]{2}-(oslo|paris)"),
    StructuredOutput(grammar='start: item+ ";"\nitem: "(" /[a-c]{1,3}/ ")"'),
], ids=["json_schema", "regex", "grammar"])  # fmt: skip
def test_every_complete_text_fits_and_the_others_of_the_batch_are_free(constraint: StructuredOutput) -> None:
    made = engine(max_requests=8)
    made.add_request(PROMPT, asked(constraint, n=6))
    made.add_request(PROMPT, SamplingParams(max_tokens=30, seed=1))
    free = engine()
    free.add_request(PROMPT, SamplingParams(max_tokens=30, seed=1), request_id=1)
    done = finish(made)
    assert done[1, 0].generated_tokens == finish(free)[1, 0].generated_tokens
    complete = [done[0, index] for index in range(6) if done[0, index].finish_reason is FinishReason.STOP]
    assert complete
    for request in complete:
        text = request.generated_text
        if constraint.regex is not None:
            assert re.fullmatch(constraint.regex, text)
        elif constraint.grammar is not None:
            assert re.fullmatch(r"(\([a-c]{1,3}\))+;", text)
        else:
            value = json.loads(text)
            assert set(value) == {"city", "days"}
            assert isinstance(value["city"], str)
            assert len(value["city"]) <= 8
            assert 1 <= value["days"] <= 14


@pytest.mark.parametrize("how", ["evicted", "in chunks", "offload", "recompute", "restart"])
def test_interruptions_change_nothing(how: str) -> None:
    params = asked(StructuredOutput(json_schema=SCHEMA), n=4, max_tokens=60)
    whole = engine()
    whole.add_request(PROMPT, params, request_id=3)
    expected = {key: request.generated_tokens for key, request in finish(whole).items()}
    options = {
        "evicted": {"kv_cache_blocks": 24, "max_requests": 6},
        "in chunks": {"max_tokens_per_step": 4, "max_requests": 4},
    }.get(how, {})
    made = engine(**options)
    if how == "evicted":
        # Older and longer: the constrained samples give up their blocks.
        made.add_request(PROMPT * 2, SamplingParams(max_tokens=80, seed=1, ignore_eos=True), request_id=1)
    made.add_request(PROMPT, params, request_id=3)
    ended = []
    while made.has_unfinished:
        ended += steps(made, 9)
        if how in ("offload", "recompute"):
            pass_suspended(made, how)
        elif how == "restart":
            again = engine()
            for record in made.snapshot():
                again.add_record(record)
            made = again
    done = finish(made, ended)
    assert {key: done[key].generated_tokens for key in expected} == expected
    assert how != "evicted" or made.stats()["preemptions"] > 0


def test_a_complete_text_ends_before_min_tokens_and_stop_strings_still_end_it() -> None:
    made = engine()
    made.add_request(PROMPT, asked(StructuredOutput.of_choices(["rain"]), min_tokens=50))
    made.add_request(PROMPT, asked(StructuredOutput.of_choices(["rain in Oslo"]), stop="in O"))
    done = finish(made)
    assert (done[0, 0].generated_text, done[0, 0].finish_reason) == ("rain", FinishReason.STOP)
    assert (done[1, 0].generated_text, done[1, 0].stop_reason) == ("rain ", "in O")


@pytest.mark.parametrize(("constraint", "why"), [
    ({"regex": "(a"}, "unclosed group"),
    ({"grammar": "start: foo"}, "unknown name"),
    ({"json_schema": {"not": {}}}, "not"),
    ({"json_schema": {"type": "strin"}}, "strin"),
    ({"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "the json_schema allows no first token"),
    ({"grammar": "start: a\na: a"}, "the grammar allows no first token"),
])  # fmt: skip
def test_what_does_not_compile_is_refused_and_harms_nothing(constraint: dict[str, Any], why: str) -> None:
    made = engine()
    with pytest.raises(InvalidRequestError, match=re.escape(why)):
        made.add_request(PROMPT, asked(StructuredOutput(**constraint)))
    with pytest.raises(InvalidRequestError) as refused:
        made.add_request(PROMPT, asked(StructuredOutput(**constraint)))
    assert not any(
        inside in str(refused.value) for inside in ("%llguidance", "x-guidance", "NoExtensionBias", "<state>")
    )
    made.add_request(PROMPT, asked(StructuredOutput.of_choices(["rain"])))
    assert [request.generated_text for request in finish(made).values()] == ["rain"]


ITSELF = {"$ref": "#/$defs/a"}


@pytest.mark.parametrize(("constraint", "why"), [
    (StructuredOutput(regex="((((a{1,500}){1,500}){1,500}){1,500}){1,500}"), "lexer error"),
    (StructuredOutput(json_schema={
        "type": "object", "properties": {"a": ITSELF}, "required": ["a"], "$defs": {"a": ITSELF},
    }), "no text can"),
], ids=["huge", "a schema that leads into itself later"])  # fmt: skip
def test_a_constraint_that_cannot_be_followed_fails_its_sample_alone(constraint: StructuredOutput, why: str) -> None:
    made = engine()
    made.add_request(PROMPT, asked(constraint, min_tokens=40, max_tokens=500), request_id=8)
    made.add_request(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True), request_id=9)
    done = finish(made)
    assert f"request 8 sample 0: its structured output cannot be followed: {why}" in (done[8, 0].error or "")
    assert (done[9, 0].error, len(done[9, 0].generated_tokens)) == (None, 50)


@pytest.mark.parametrize(
    "tokenizer", [sentencepiece("llama3.1"), make_tokenizer()], ids=["sentencepiece", "characters"]
)
def test_other_tokenizers_are_constrained_too(tokenizer: Any) -> None:
    model = make_model("llama", vocab_size=len(tokenizer), num_hidden_layers=1, eos_token_id=tokenizer.eos_token_id)
    made = make_engine(model, tokenizer)
    made.add_request([5, 6], asked(StructuredOutput.of_choices(["Oslo rain", "rain"]), n=4))
    assert {request.generated_text for request in finish(made).values()} <= {"Oslo rain", "rain"}


def test_without_a_tokenizer_there_is_no_text_to_constrain() -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        make_engine("qwen3").add_request([5], asked(StructuredOutput(regex="a")))


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'rollout-engine\[structured\]'"):
        engine().add_request(PROMPT, asked(StructuredOutput(regex="a")))


@pytest.mark.parametrize("given", [
    {}, {"regex": "a", "grammar": "b"}, {"regex": ""}, {"regex": 3}, {"regex": "a" * (MAX_CHARACTERS + 1)},
    {"json_schema": "{"}, {"json_schema": "[]"}, {"json_schema": {"a": np.zeros(1)}},
])  # fmt: skip
def test_a_malformed_constraint_is_refused_when_it_is_made(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="StructuredOutput"):
        StructuredOutput(**given)


@pytest.mark.parametrize("choices", [[], "ab", [""], [3]])
def test_choices_are_texts(choices: Any) -> None:
    with pytest.raises(ConfigError, match="choices"):
        StructuredOutput.of_choices(choices)


def test_a_constraint_travels_as_plain_types_and_not_with_ignore_eos() -> None:
    params = asked(StructuredOutput(json_schema=SCHEMA))
    assert SamplingParams.deserialize(params.serialize()) == params
    assert hash(params) == hash(SamplingParams.deserialize(params.serialize()))
    with pytest.raises(ConfigError, match="ignore_eos"):
        asked(StructuredOutput(regex="a"), ignore_eos=True)
