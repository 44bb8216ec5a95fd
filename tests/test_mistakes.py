"""A table of natural mistakes: what is said about each, and the cures that are code, executed.

A cure is a piece of the message itself, so that a message whose cure does not run fails here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import rollout
from rollout import LLM, Advanced, InferenceConfig, RolloutManager, SamplingParams
from tests.models import make_model, make_tokenizer
from tests.rollouts import make_rollout, update
from trainer_hooks import accelerate as accelerate_hook
from trainer_hooks import optimizer as optimizer_hook
from trainer_hooks import tree as tree_hook

ROOT = Path(__file__).parent.parent
PROMPTS = [[5, 6, 7], [8, 9]]
BRIEF = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """What a script has at hand: the names that mistakes and cures use."""
    model, tokenizer = make_model("qwen3"), make_tokenizer()
    manager = make_rollout(model, tokenizer)
    yield {
        "rollout": rollout, "model": model, "tokenizer": tokenizer, "manager": manager, "P": PROMPTS, "brief": BRIEF,
        "batch": manager.generate(PROMPTS, BRIEF), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "RolloutManager": RolloutManager, "InferenceConfig": InferenceConfig, "Advanced": Advanced,
        "SamplingParams": SamplingParams, "LLM": LLM,
        "GenerationConfig": GenerationConfig, "AutoModelForCausalLM": AutoModelForCausalLM, "AutoTokenizer": AutoTokenizer,
        "config": InferenceConfig(kv_cache_blocks=64), "settings": {"kv_cache_blocks": 64}, "attach": optimizer_hook.attach,
        "attach_tree": tree_hook.attach,
        "accelerate_attach": accelerate_hook.attach, "torch": torch, "folder": tmp_path_factory.mktemp("empty") / "nowhere",
        "update": update,
        "message": {"role": "user", "content": "abc"},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.close()


TABLE = [
    # (mistake, error, words, cure: a pattern of code in the message, and how it is completed to be run)
    ("SamplingParams(num_generations=4)", ValueError, "did you mean n?", None),
    ("SamplingParams(max_new_tokens=4)", ValueError, "did you mean max_tokens?", None),
    ("SamplingParams(stop_strings=['a'])", ValueError, "did you mean stop?", None),
    ("InferenceConfig(gpu_memory_utilization=0.5)", ValueError, "did you mean kv_cache_memory_fraction?", None),
    ("InferenceConfig(max_model_len=64)", ValueError, "did you mean max_sequence_length?", None),
    ("InferenceConfig(max_num_seqs=64)", ValueError, "did you mean max_requests?", None),
    ("InferenceConfig(kv_cache_memory=1)", ValueError, "did you mean kv_cache_memory_gb?", None),
    ("InferenceConfig(verify_model=False)", ValueError, "an advanced option",
     (r"InferenceConfig\(.*\)", "{}")),
    ("config.replace(verify_modl=False)", ValueError, "there is no such option; did you mean",
     (r"InferenceConfig\(.*\)", "{}")),
    ("InferenceConfig(page_size=8)", ValueError, "InferenceConfig(advanced=Advanced(block_size_tokens=8))?", None),
    ("InferenceConfig(advanced={'verify_model': False})", ValueError, "must be Advanced(...)", None),
    ("manager.generate(P, max_new_tokens=4)", TypeError, "did you mean max_tokens?", None),
    ("manager.generate(P, time_out_s=4)", TypeError, "did you mean timeout_s?", None),
    ("manager.submit(P, temprature=0.5)", TypeError, "did you mean temperature?", None),
    ("manager.generate(P, SamplingParams(n=2), max_tokens=4)", TypeError, "got sampling_params and max_tokens=4",
     (r"SamplingParams\(.*?\)", "manager.generate(P, {})")),
    ("manager.generate(P, {'n': 2, 'max_new_tokens': 3})", TypeError, "SamplingParams(n=2, max_tokens=3)",
     (r"SamplingParams\(.*\)", "manager.generate(P, {})")),
    ("manager.generate(P, GenerationConfig(max_new_tokens=3))", TypeError, "SamplingParams(max_tokens=3, temperature=0)",
     (r"SamplingParams\(.*\)", "manager.generate(P, {})")),
    ("manager.generate(P, GenerationConfig(do_sample=True, temperature=0.5, num_return_sequences=2))", TypeError,
     "temperature=0.5", (r"SamplingParams\(.*\)", "manager.generate(P, {})")),
    ("manager.generate(P, 16)", TypeError, "sampling_params=16: must be a SamplingParams",
     (r"SamplingParams\(.*\)", "manager.generate(P, {})")),
    ("manager.generate(P, [16, 16])", TypeError, "sampling_params[0]=16: must be a SamplingParams", None),
    ("manager.run([1], None, {'n': 2})", TypeError, "must be a SamplingParams", None),
    ("manager.generate([message], brief)", TypeError, "prompts is one list of chat messages: pass a list of prompts", None),
    ("manager.generate([[message]], brief)", ValueError, "prompts[0]: chat messages need a chat template", None),
    ("manager.generate([[5] * 9999], brief)", ValueError, "prompts[0]: a prompt of 9999 tokens", None),
    ("manager.generate(P, SamplingParams(n=99))", ValueError, "prompts[0]: n=99 samples exceed max_requests=16", None),
    ("RolloutManager(model, InferenceConfig())", TypeError, "the third argument",
     (r"RolloutManager\(.*\)", "{}.close()")),
    ("RolloutManager(model, tokenizer, settings)", TypeError, "config is a dict",
     (r"InferenceConfig\(.*\)", "(lambda config: RolloutManager(model, tokenizer, {}).close())(settings)")),
    ("RolloutManager('Qwen/Qwen3-0.6B')", TypeError, "AutoModelForCausalLM.from_pretrained('Qwen/Qwen3-0.6B')", None),
    ("RolloutManager(model, 'Qwen/Qwen3-0.6B')", TypeError, "AutoTokenizer.from_pretrained('Qwen/Qwen3-0.6B')", None),
    ("LLM(str(folder))", ValueError, "is not a folder; a model of the Hub comes by `hf download", None),
    ("RolloutManager(model, None, InferenceConfig(inference_device='gpu'))", ValueError, "inference_device='gpu': must be",
     None),
    ("RolloutManager(model, None, InferenceConfig(inference_device='cuda:7'))", ValueError, "'cuda:7': must be a device",
     None),
    ("RolloutManager(model, None, InferenceConfig(kv_cache_memory_gb=1e-9))", ValueError, "a KV pool of 1 B does not hold",
     None),
    ("(update(model), manager.generate(P, brief))", RuntimeError, "attach(optimizer, manager)",
     (r"manager\.weights_updated\(\)", "{}, manager.generate(P, brief)")),
    ("(attach(manager, optimizer))", TypeError, "swap the arguments",
     (r"attach\(optimizer, manager\)", "{}")),
    ("accelerate_attach(model, manager)", TypeError, "accelerator of type Qwen3ForCausalLM: must be", None),
    ("(manager.suspend(), manager.generate(P, brief))", RuntimeError, "while suspended",
     (r"manager\.resume\(\)", "{}, manager.generate(P, brief)")),
    ("(manager.pause(), manager.generate(P, brief))", RuntimeError, "while paused",
     (r"manager\.unpause\(\)", "{}, manager.generate(P, brief)")),
    ("model(**batch.tree().inputs)", RuntimeError, "tree attention, which no model of this process has",
     (r"attach_tree\(model\)", "{}, model(**batch.tree().inputs)")),
    ("batch.log_probs", AttributeError, "did you mean logprobs?", None),
    ("batch.responses", AttributeError, "did you mean texts?", None),
    ("batch.completion_mask", AttributeError, "did you mean response_mask?", None),
    ("rollout.RolloutEngine", AttributeError, "did you mean RolloutManager?", None),
    ("exec('from rollout import RolloutEngine')", ImportError, "did you mean RolloutManager?", None),
    ("exec('from rollout import SamplingParam')", ImportError, "did you mean SamplingParams?", None),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "error", "words", "cure"), TABLE, ids=[row[0] for row in TABLE])
def test_a_mistake_is_answered_by_its_rule_and_a_cure_that_runs(world, mistake, error, words, cure):
    with pytest.raises(error) as caught:
        eval(mistake, world)
    said = str(caught.value)
    assert words in said
    assert len(said) < 700
    if cure is not None:
        pattern, completed = cure
        found = re.search(pattern, said)
        assert found is not None
        eval(completed.format(found[0]), world)


def test_the_end_of_a_text_that_tokenizer_and_model_do_not_share_is_logged(caplog):
    model, tokenizer = make_model("qwen3"), make_tokenizer()
    make_rollout(model, tokenizer).close()
    assert not caplog.records
    tokenizer.eos_token = "a"
    make_rollout(model, tokenizer).close()
    (record,) = caplog.records
    assert "the tokenizer's end-of-sequence token 'a' (68) is not among the model's [2]" in record.message


def test_a_manager_shows_its_state_and_max_tokens_that_do_not_fit_are_warned_of():
    manager = make_rollout(make_model("qwen3"), make_tokenizer())
    assert repr(manager).startswith("RolloutManager(Qwen3ForCausalLM on cpu, running, policy version 0, 0 groups and 0")
    with pytest.warns(
        UserWarning, match=r"max_tokens=9999 is clamped to 509: .*SamplingParams\(max_tokens=509\)"
    ) as caught:
        manager.submit([[5, 6, 7]], SamplingParams(max_tokens=9999))
    assert caught[0].filename == __file__
    assert "1 groups and 0 groups of episodes in flight" in repr(manager)
    manager.suspend()
    assert "suspended" in repr(manager)
    with pytest.warns(UserWarning, match="1 groups in flight"):
        manager.close()
    assert "closed" in repr(manager)


@pytest.mark.parametrize(("blocks", "advised"), [(64, False), (32, True)])
def test_the_doctor_compares_the_pool_with_the_longest_sequence(blocks, advised):
    """A pool for every request at the model's maximum length was called too small."""
    model = make_model("qwen3", max_position_embeddings=16)
    with make_rollout(model, kv_cache_blocks=blocks, block_size_tokens=4) as manager:
        said = [each for each in manager.explain().advice if "the pool holds" in each]
    assert bool(said) == advised


def test_the_doctor_runs_without_the_extra_serve(tmp_path):
    make_model("qwen3").save_pretrained(tmp_path)
    hidden = "fastapi uvicorn prometheus_client jinja2 httptools starlette"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden.split()!r})); from rollout.__main__ import main; "
        f"sys.exit(main(['doctor', {str(tmp_path)!r}, '--device', 'cpu', '--no-measure', '--kv-cache-blocks', '64']))"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "KV cache" in ended.stdout


def test_no_message_names_a_method_of_the_manager_as_one_of_the_package():
    """`rollout` is the package: `rollout.resume()` raised an AttributeError."""
    methods = {name for name in dir(RolloutManager) if not name.startswith("_")} - set(rollout.__all__)
    wrong = re.compile(rf"\brollout\.({'|'.join(sorted(methods))})\(")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {named[0]}"
        for house in ("rollout", "trainer_hooks")
        for path in (ROOT / house).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (named := wrong.search(node.value))
    ]
    assert not found
