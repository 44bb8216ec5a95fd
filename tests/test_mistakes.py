"""A table of natural mistakes: what is said about each, and the cures that are code, executed.

A cure is a piece of the message itself, so that a message whose cure does not run fails here. A new message that contains
code needs a row in `TABLE`, or in `ELSEWHERE` if one small process cannot trigger it; its calls are checked in any case.
"""

# ruff: noqa: F401 (the rows of the table use the imported names)

from __future__ import annotations

import ast
import copy
import inspect
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoProcessor, AutoTokenizer, GenerationConfig, Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import rollout
import trainer_hooks
from rollout import LLM, DynamicInferenceEngine, InferenceConfig, RolloutManager, SamplingParams
from rollout.__main__ import main
from rollout.distributed.transport.keys import JobKeys
from rollout.distributed.worker.worker import EngineWorker
from rollout.flags import parse
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.server.errors import explain
from rollout.server.openai.schema import CompletionRequest
from rollout.server.server import Server
from tests.models import make_model, make_tokenizer
from tests.rollouts import make_rollout, update
from trainer_hooks.accelerate import attach as accelerate_attach
from trainer_hooks.generate import attach as attach_generate
from trainer_hooks.optimizer import attach
from trainer_hooks.peft import adapter
from trainer_hooks.transformers import RolloutCallback
from trainer_hooks.tree import attach as attach_tree

ROOT = Path(__file__).parent.parent
PROMPTS = [[5, 6, 7], [8, 9]]
BRIEF = SamplingParams(max_tokens=2)


async def play(episode: rollout.Episode) -> float:
    await episode.sample(PROMPTS[0])
    return 1.0


class Gym:
    """An environment whose step returns a tuple, as those of gymnasium."""

    def reset(self, task: object) -> list[int]:
        return PROMPTS[0]

    def step(self, turn: object) -> tuple[list[int], float]:
        return PROMPTS[1], 1.0


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[dict[str, Any]]:
    """Names that mistakes and cures use."""
    model, tokenizer = make_model("qwen3"), make_tokenizer()
    manager = make_rollout(model, tokenizer)
    opened: list[Any] = [manager, LLM(model, tokenizer, InferenceConfig(kv_cache_blocks=64))]

    def fresh() -> RolloutManager:
        """A manager of its own model, which a mistake may damage."""
        opened.append(make_rollout(make_model("qwen3"), tokenizer))
        return opened[-1]

    yield {name: getattr(rollout, name) for name in dir(rollout)} | globals() | {
        "model": model, "tokenizer": tokenizer, "manager": manager, "llm": opened[1], "fresh": fresh, "P": PROMPTS,
        "batch": manager.generate(PROMPTS, BRIEF), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "brief": BRIEF,
        "config": InferenceConfig(kv_cache_blocks=64), "settings": {"kv_cache_blocks": 64}, "servers": [],
        "beams": {"input_ids": torch.tensor([PROMPTS[0]]), "num_beams": 2, "max_length": 9}, "strict": "raise",
        "folder": tmp_path_factory.mktemp("empty") / "nowhere", "texts": ["abc", "a"], "tasks": ["one"],
        "here": rollout.ServerConfig(port=0), "message": {"role": "user", "content": "abc"},
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in opened:
            each.close()


TABLE = [
    # (mistake, error, words, cure: a pattern of code in the message, and how it is completed to be run)
    ("SamplingParams(stop_strings=['a'])", ValueError, "did you mean stop?", None),
    ("InferenceConfig(kv_cache_memory=1)", ValueError, "did you mean kv_cache_memory_gb?", None),
    ("InferenceConfig(verify_model=False)", ValueError, "an advanced option", (r"InferenceConfig\(.*\)", "{}")),
    ("config.replace(verify_modl=False)", ValueError, "there is no such option; did you mean",
     (r"InferenceConfig\(.*\)", "{}")),
    ("InferenceConfig(page_size=8)", ValueError, "InferenceConfig(advanced=Advanced(block_size_tokens=8))?", None),
    ("InferenceConfig(advanced={'verify_model': False})", ValueError, "must be Advanced(...)", None),
    ("manager.generate(P, time_out_s=4)", TypeError, "did you mean timeout_s?", None),
    ("manager.submit(P, temprature=0.5)", TypeError, "did you mean temperature?", None),
    ("manager.generate(P, SamplingParams(n=2), max_tokens=4)", TypeError, "pass one, such as SamplingParams(",
     (r"SamplingParams\(.*?\)", "manager.generate(P, {})")),
    ("manager.generate(P, {'n': 2, 'max_new_tokens': 3})", TypeError, "must be a SamplingParams: SamplingParams(n=2,",
     (r"SamplingParams\(.*\)", "manager.generate(P, {})")),
    ("manager.generate(P, GenerationConfig(max_new_tokens=3))", TypeError, "SamplingParams(max_tokens=3, temperature=0)",
     (r"SamplingParams\(.*\)", "manager.generate(P, {})")),
    ("manager.generate(P, 16)", TypeError, "sampling_params=16: must be a SamplingParams",
     (r"SamplingParams\(.*\)", "manager.generate(P, {})")),
    ("manager.generate(P, [16, 16])", TypeError, "sampling_params[0]=16: must be a SamplingParams", None),
    ("manager.run([1], None, {'n': 2})", TypeError, "must be a SamplingParams", None),
    ("manager.generate([message], brief)", TypeError, "prompts is one list of chat messages: pass a list of prompts", None),
    ("manager.generate([[message]], brief)", ValueError, "prompts[0]: chat messages need a chat template", None),
    ("manager.generate([[5] * 9999], brief)", ValueError, "prompts[0]: a prompt of 9999 tokens", None),
    ("manager.generate(P, SamplingParams(n=99))", ValueError, "prompts[0]: n=99 samples exceed max_requests=16", None),
    ("RolloutManager(model, InferenceConfig())", TypeError, "the third argument", (r"RolloutManager\(.*\)", "{}.close()")),
    ("RolloutManager(model, tokenizer, settings)", TypeError, "config is a dict",
     (r"InferenceConfig\(.*\)", "(lambda config: RolloutManager(model, tokenizer, {}).close())(settings)")),
    ("RolloutManager('Qwen/Qwen3-0.6B')", TypeError, "must be the torch module that is trained: ", None),
    ("RolloutManager(model, 'Qwen/Qwen3-0.6B')", TypeError, "must be loaded: ", None),
    ("LLM(str(folder))", ValueError, "is not a folder; a model of the Hub comes by `hf download", None),
    ("RolloutManager(model, None, InferenceConfig(inference_device='gpu'))", ValueError, "='gpu': must be a device", None),
    ("RolloutManager(model, None, InferenceConfig(inference_device='cuda:7'))", ValueError, "7': must be a device", None),
    ("RolloutManager(model, None, InferenceConfig(kv_cache_memory_gb=1e-9))", ValueError, "does not hold one block of",
     (r"InferenceConfig\(kv_cache_memory_gb=", "RolloutManager(model, None, {}0.01)).close()")),
    ("(update(model), manager.generate(P, brief))", RuntimeError, "attach(optimizer, manager) of",
     (r"manager\.weights_updated\(\)", "{}, manager.generate(P, brief)")),
    ("(update(model), manager.generate(P, brief))", RuntimeError, "without a step of an attached optimizer",
     (r"InferenceConfig\(.*'off'\)\)", "RolloutManager(model, None, {}).close(), manager.weights_updated()")),
    ("(attach(manager, optimizer))", TypeError, "swap the arguments", (r"attach\(optimizer, manager\)", "{}.detach()")),
    ("accelerate_attach(model, manager)", TypeError, "must be an accelerate.Accelerator",
     (r"attach\(optimizer, manager\)", "{}.detach()")),
    ("(manager.suspend(), manager.generate(P, brief))", RuntimeError, "while suspended: call",
     (r"manager\.resume\(\)", "{}, manager.generate(P, brief)")),
    ("(manager.pause(), manager.generate(P, brief))", RuntimeError, "while paused: call",
     (r"manager\.unpause\(\)", "{}, manager.generate(P, brief)")),
    ("model(**batch.tree().inputs)", RuntimeError, "tree attention, which no model of this process has",
     (r"attach_tree\(model\)", "{}, model(**batch.tree().inputs)")),
    ("rollout.generate(P)", RuntimeError, "this process has no manager; call",
     (r"rollout\.init\(.*?\)", "{}, rollout.generate(P, brief), rollout.close()")),
    ("(rollout.init(model, tokenizer), rollout.init(model, tokenizer))", RuntimeError, "this process has a manager already",
     (r"rollout\.close\(\)", "{}, rollout.RolloutManager(model, tokenizer).close()")),
    ("ServerConfig(host='0.0.0.0')", ValueError, "give an api_key, or insecure=True",
     (r"insecure=True", "ServerConfig(host='0.0.0.0', {})")),
    ("rollout.DataParallelInferenceCoordinator(CoordinatorConfig(host='0.0.0.0'))", ValueError, "or set insecure=True",
     (r"insecure=True", "rollout.DataParallelInferenceCoordinator(CoordinatorConfig(host='0.0.0.0', {}))")),
    ("copy.copy(manager.engine)", TypeError, "cannot be pickled or copied", (r"DynamicInferenceEngine\(.*?\)", "{}")),
    ("RolloutManager(model, None, InferenceConfig(record_routes=True))", ValueError, "set record_routes=False",
     (r"record_routes=False", "RolloutManager(model, None, InferenceConfig({})).close()")),
    ("exec('with rollout.exact(model): model(batch.input_ids, use_cache=True)')", ValueError, "for anything else",
     (r"leave `with rollout\.exact\(model\)`", "model(batch.input_ids, use_cache=True)")),
    ("copy.deepcopy(model)(**batch.tree().inputs)", ValueError, "(a copy of one?)",
     (r"attach_tree\(model\)", "(lambda model: ({}, model(**batch.tree().inputs)))(fresh().model)")),
    ("(lambda m: (m.model.double(), m.generate(P)))(fresh())", RuntimeError, "when the rollout was built, and is",
     (r"model\.to\(", "RolloutManager(fresh().{}torch.float64)).close()")),
    ("(lambda m: (m.model.to('meta'), m.generate(P)))(fresh())", RuntimeError, "which move the model, or undo that",
     (r"model\.to\(", "RolloutManager(fresh().{}'cpu')).close()")),
    ("llm.pause()", RuntimeError, "direct mode has no coordinator to relay",
     (r"llm\.engine\.pause\(\)", "{}, llm.engine.unpause()")),
    ("LLM(model, coordinator_port=9)", ValueError, "without a coordinator: set use_coordinator=True", None),
    ("servers.append(llm.serve(here, blocking=False)) or llm.serve(here)", RuntimeError, "this LLM is served already",
     (r"server\.close\(\)", "(lambda server: {})(servers[0])")),
    ("Server(llm, here).url", RuntimeError, "this server has no address yet",
     (r"server\.start\(\)", "(lambda server: ({}.url, server.close()))(Server(llm, here))")),
    ("(lambda server: (server.start(), server.close(), server.start()))(Server(llm, here))", RuntimeError,
     "this server has been stopped", (r"Server\(llm, config\)", "(lambda config: {})(here)")),
    ("manager.score(manager.generate(P, max_tokens=2, top_k=5))", ValueError, "are scored with return_kept_tokens=True",
     (r"return_kept_tokens=True", "manager.score(manager.generate(P, max_tokens=2, top_k=5, {}))")),
    ("manager.client()", RuntimeError, "it needs a job of several ranks", (r"LLM\(model\)", "{}.close()")),
    ("exec('with manager.suspended(): manager.generate(P)')", RuntimeError, "inside `with manager.suspended():`", None),
    ("exec('async def bad(episode): manager.generate(P)') or manager.run(tasks, bad, brief)", rollout.RolloutError,
     "in an environment of run()",
     (r"await episode\.sample\(prompt\)",
      "exec('async def good(episode, prompt=P[0]): {}; return 1.0') or manager.run(tasks, good, brief)")),
    ("manager.run(tasks, lambda: 3, brief)", Exception, "which returns the first prompt, and step(turn)", None),
    ("manager.run(tasks, Gym, brief)", Exception, ": return StepResult(",
     (r"StepResult\(.*?\)", "(lambda observation, reward, done: {})([5], 1.0, True)")),
    ("manager.run(tasks, None, brief)", TypeError, "without environment=: must be an",
     (r"EnvironmentTask\(.*\)", "manager.run([(lambda environment, task: {})(play, 'one')], None, brief)")),
    ("manager.run(iter(tasks), play, brief)", ValueError, "tasks is an iterator, which may have no end",
     (r"list\(tasks\)", "manager.run({}, play, brief)")),
    ("manager.run(tasks, play, brief, max_groups=2)", ValueError, "that are no iterator",
     (r"iter\(tasks\)", "manager.run({}, play, brief, min_groups=1, max_groups=2)")),
    ("manager.generate(tokenizer(texts, padding=True, return_tensors='pt')['input_ids'], brief)", ValueError,
     "or ids without padding: ", (r"tokenizer\(texts\)\['input_ids'\]", "manager.generate({}, brief)")),
    ("DynamicInferenceRequestRecord(segments=[])", ValueError, "must have at least one; ",
     (r"DynamicInferenceRequestRecord.from_request\(request\)", "(lambda request: {})(batch[0])")),
    ("manager.generate([[5] * 500], max_tokens=99)", UserWarning, "is clamped to",
     (r"SamplingParams\(max_tokens=12\)", "manager.generate([[5] * 500], {})")),
    ("JobKeys(b'', b'', b'', b'')", ValueError, "with JobKeys.generate()", (r"JobKeys\.generate\(\)", "{}")),
    ("manager.generate(P, n=2, temperature=0)", UserWarning, "so their advantages are 0; set",
     (r"SamplingParams\(temperature=1.0\)", "manager.generate(P, {}.replace(max_tokens=2))")),
    ("accelerate_attach(Accelerator(cpu=True), manager)", ValueError, "that this Accelerator has prepared steps",
     (r"accelerator\.prepare\(model, optimizer\)",
      "(lambda accelerator: ({}, accelerate_attach(accelerator, manager).detach()))(Accelerator(cpu=True))")),
    ("attach_generate(copy.deepcopy(model), manager)", ValueError, "build the manager of it, ",
     (r"RolloutManager\(model, tokenizer\)", "(lambda m: attach_generate(model, m).detach() or m.close())({})")),
    ("exec('with attach_generate(model, manager): model.generate(**beams)')", UserWarning,
     "this warning is shown once", (r", fallback='raise'", "attach_generate(model, manager{}).detach()")),
    ("exec('with attach_generate(model, manager, fallback=strict): model.generate(**beams)')", ValueError,
     "to run transformers' own loop", (r", fallback='warn'", "attach_generate(model, manager{}).detach()")),
    ("attach(torch.optim.SGD([torch.zeros(1)]), manager)", ValueError, "after each real step",
     (r"manager\.weights_updated\(\)", "{}")),
    ("adapter(manager, 'a').__enter__()", ValueError, "no layer with an adapter that can be switched: wrap it with",
     (r"peft.get_peft_model\(model, LoraConfig\(",
      "RolloutManager((lambda model: {}target_modules=['q_proj'])))(fresh().model)).close()")),
    ("RolloutCallback(manager, log='loss')", KeyError, "lists them", (r"rollout\.observe\.\w+\.describe\(\)", "{}")),
    ("batch.log_probs", AttributeError, "did you mean logprobs?", None),
    ("batch.responses", AttributeError, "did you mean texts?", None),
    ("rollout.RolloutEngine", AttributeError, "did you mean RolloutManager?", None),
    ("exec('from rollout import RolloutEngine')", ImportError, "did you mean RolloutManager?", None),
]  # fmt: skip

ELSEWHERE = {
    "needs several ranks": """MASTER_ADDR=|computes forwards together: undo it|use ep_size=tp_size
        |spread over the ranks, where|Without a coordinator every rank serves""",
    "needs a GPU, or memory that runs out": "instead of a CUDA graph|the KV cache cannot be offloaded",
    "needs a rare model": """differ from the model's own forward|alora_invocation_tokens
        |had a vocabulary of|build the engine with InferenceConfig(record_routes=True)
        |that are not the {} of the tree|tokens that is not in the batch
        |rows have images: train on|needs the model's processor|a placeholder of an image
        |layers that compute attention themselves
        |paths are of text without recorded routes""",
    "needs the network, or an account": "`hf download|`wandb login`",
    "needs DeepSpeed, a checkpoint or a trainer of TRL": """cannot attach to DeepSpeed's|.pkl out of the folder
        |pass checkpoint=False|Trainer resumes at step|rollout_func already|takes no images back|tools, whose later turns
        |vllm_importance_sampling_mode|recorded routes would have no effect|this trainer trains another
        |the trainer is at step|is not a Trainer of transformers|processing_class is a|kept tokens are replayed for text
        |completions are drawn from another distribution""",
    "follows calls in a wrong order inside of a program": """run() before start()|took their samples out of the engine
        |is loaded already|inside a running event loop|is not a trace of this package
        |holds no step""",
    "is not an error": "on: {}, in the trainer's forward|off; InferenceConfig(exact=True)",
}
"""Messages with code that `TABLE` does not trigger, and why."""

OBJECTS = "manager rollout llm server engine episode batch config model worker accelerator packed peft trainer_hooks"
CODE = re.compile(
    rf"(?<=[ `(:])(?:(?:{OBJECTS.replace(' ', '|')})\.[a-z_.]+|attach\w*|[A-Z]\w+(?:\.\w+)?|replay|list|iter|tokenizer)\("
    r"(?:[^()]|\([^()]*\))*\)|(?:set|pass|use|or) \w+=(?:True|False|None|'\w+'|[\d.]+)|`(?:hf|wandb) \w+"
)


def messages() -> Iterator[str]:
    """Every text in the code of the packages that is not a docstring; values as `{}`."""
    for path in [*(ROOT / "rollout").rglob("*.py"), *(ROOT / "trainer_hooks").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                yield node.value


def test_a_message_with_code_has_a_row_and_calls_what_exists(world):
    elsewhere = [words.strip() for group in ELSEWHERE.values() for words in group.split("|")]
    with_code = [text for text in messages() if CODE.search(text)]
    bare = [text for text in with_code if not any(words in text for words in [row[2] for row in TABLE] + elsewhere)]
    assert not bare, "\n".join(bare)
    names = world | {
        "server": Server(world["llm"]), "engine": world["manager"].engine, "episode": rollout.Episode, "peft": peft,
        "accelerator": Accelerator(cpu=True), "worker": EngineWorker,
        "attach": lambda *_, mode=None, checkpoint=None, fallback=None, on_error=None: None,
    }  # fmt: skip
    calls = [found for text in with_code for found in CODE.findall(text) if found.endswith(")")]
    assert len(calls) > 60
    for code in calls:
        call = ast.parse(code.replace("{}", "hole"), mode="eval").body
        called = eval(ast.unparse(call.func), names)
        if inspect.isroutine(called) and not inspect.isbuiltin(called):
            bound, named = (
                [None] * code.startswith(("episode", "worker")),
                {each.arg: each.value for each in call.keywords},
            )
            inspect.signature(called).bind_partial(*bound, *call.args, **named)
    extras = set(re.findall(r"pip install 'rollout-engine\[(\w+)\]'", "\n".join(messages())))
    assert extras <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE))


@pytest.mark.parametrize(("mistake", "error", "words", "cure"), TABLE, ids=[row[0] for row in TABLE])
def test_a_mistake_is_answered_by_its_rule_and_a_cure_that_runs(world, mistake, error, words, cure):
    with warnings.catch_warnings():
        warnings.simplefilter("error" if error is UserWarning else "default", UserWarning)
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


def http(**fields: Any) -> None:
    try:
        CompletionRequest.model_validate({"model": "m", "prompt": "abc", **fields})
    except ValidationError as exc:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in exc.errors()]
        raise ValueError(explain(errors, CompletionRequest.model_fields)[0]) from exc


def command(**options: Any) -> None:
    parse(["folder", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())], {})


THEIRS = {
    "max_new_tokens": "max_tokens", "num_generations": "n", "max_completion_length": "max_tokens", "top_k": "top_k",
    "gpu_memory_utilization": "kv_cache_memory_fraction", "max_model_len": "max_sequence_length",
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize(
    "place",
    ["manager.generate(P, {})", "rollout.init(model, tokenizer, {})", "InferenceConfig({})", "SamplingParams({})",
     "http({})", "command({})"],
)  # fmt: skip
def test_an_option_of_another_library_suggests_ours(world, place, name):
    if (place, name) == ("http({})", "top_k"):
        pytest.skip("the server takes vLLM's -1")
    with pytest.raises((ValueError, TypeError)) as caught:
        eval(place.format(f"{name}=-1"), world)
    ours = THEIRS[name].replace("_", "[-_]")
    assert re.search(rf"did you mean (--)?{ours}( of \w+)?\?|top_k=-1: .*0 switches it off", str(caught.value))


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


def test_the_doctor_examines_a_machine_without_a_model_and_without_the_extra_serve():
    hidden = "fastapi uvicorn prometheus_client jinja2 httptools starlette"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden.split()!r})); from rollout.__main__ import main; "
        "sys.exit(main(['doctor', '--device', 'cpu', '--kv-cache-blocks', '64']))"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "a tiny random Qwen3 on cpu: 8 greedy tokens equal those of model.generate" in ended.stdout
    assert "a coordinator process listened at tcp://127.0.0.1" in ended.stdout
    assert "%|" not in ended.stderr, "progress bars"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_doctor_says_what_is_missing_and_what_does_not_work(monkeypatch, capsys):
    def refusing(_: object) -> None:
        raise OSError("no sockets")

    def without_trl(name: str) -> str:
        if name == "trl":
            raise metadata.PackageNotFoundError
        return "0.1"

    monkeypatch.setattr(metadata, "version", without_trl)
    monkeypatch.setattr("rollout.distributed.coordinator.launch.launch_coordinator", refusing)
    assert main(["doctor", "--device", "cuda:99", "--json"]) == 1
    found = dict(json.loads(capsys.readouterr().out))
    assert "torch 0.1 (supported: " in found["installed"]
    assert found["trl"] == "trl missing: pip install 'rollout-engine[trl]'"
    assert found["sample"].startswith("FAILED: ConfigError: --device cuda:99: torch sees no CUDA device")
    assert found["sockets"] == "FAILED: OSError: no sockets"
