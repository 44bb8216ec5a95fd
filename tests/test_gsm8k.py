"""Tests of the GSM8K recipe: rewards, the files it reads, and a run with a small model and twenty problems."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from examples.gsm8k import last_number, read_problems, reward
from tests.example_runs import run_example

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(("text", "number"), [
    ("48 / 2 = 24, 48 + 24 = 72\n#### 72", "72"), ("#### 1 then #### 1,250", "1250"), ("#### $18.50", "18.5"),
    ("####-3.0", "-3"), ("the answer is 72", None), ("#### none", None),
])  # fmt: skip
def test_the_answer_is_the_number_behind_the_last_four_hashes(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_the_right_number_earns_ten_times_as_much_as_the_format() -> None:
    assert [reward(text, "72") for text in ("#### 72.0", "#### 71", "72", None)] == pytest.approx([1.1, 0.1, 0.0, 0.0])


@pytest.mark.parametrize("line", ['{"question": "?"}', '{"question": "?", "answer": "72"}', "not JSON", "[]"])
def test_a_line_in_another_format_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(f'{{"question": "1 + 1?", "answer": "#### 2"}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"problems\.jsonl:2: must be .* is '{re.escape(line[:8])}"):
        read_problems(path)


@pytest.mark.slow
def test_the_recipe_trains_a_model_from_a_folder_on_problems_from_a_file(tmp_path: Path) -> None:
    model, data = _small_chat_model(tmp_path / "model"), tmp_path / "problems.jsonl"
    problems = [
        {"question": f"{n} apples and {n} more?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(20)
    ]
    data.write_text("".join(json.dumps(each) + "\n" for each in problems))
    flags = ["--model", str(model), "--data", str(data), "--quick", "--kv-gb", "0.05", "--out", str(tmp_path / "out")]
    out = run_example("gsm8k", tmp_path, *flags)
    assert "18 problems, 2 held out" in out
    steps = re.findall(r"^step (\d): reward \d\.\d{3}, \d+ tokens per sample, gradient \d+\.\d\d", out, re.MULTILINE)
    assert steps == ["1", "2"], out
    assert re.search(r"accuracy \d\.\d{3} after 2 steps", out), out
    assert (tmp_path / "out" / "model.safetensors").is_file()


def _small_chat_model(folder: Path) -> Path:
    """Save a Qwen2 of 20,000 random parameters whose tokens are bytes, with a chat template."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(wrapped), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, eos_token_id=wrapped.eos_token_id, pad_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
