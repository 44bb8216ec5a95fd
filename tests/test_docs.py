"""README and docs: every Python snippet runs, links lead somewhere, generated pages equal the code."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from pydoc import locate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from PIL import Image

import rollout
from rollout import DynamicInferenceEngine, InferenceConfig, RolloutManager, SamplingParams
from tests.models import make_model, make_tokenizer
from tests.reference import pages
from tests.vision_models import FramesProcessor, make_processor, make_qwen_processor, make_vision_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]
SNIPPET = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def snippets(page: Path) -> Iterator[tuple[str, str | None]]:
    """Each block of Python, and the output printed below it where there is one."""
    for found in SNIPPET.finditer(page.read_text(encoding="utf-8")):
        yield found[1], found[2]


def small_model() -> Any:
    return make_model("qwen2", num_hidden_layers=1)


def world(page: Path, folder: Path, close: ExitStack) -> dict[str, Any]:
    """Names that the snippets of a page use without making them, with small models."""
    model, tokenizer = small_model(), make_tokenizer()
    given: dict[str, Any] = {
        "torch": torch,
        "model": model,
        "tokenizer": tokenizer,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "prompts": ["one", "two", "three"],
        "folder": folder,
        "RolloutManager": RolloutManager,
        "InferenceConfig": InferenceConfig,
        "SamplingParams": SamplingParams,
        "loss": lambda batch: model(batch.input_ids, attention_mask=batch.attention_mask).logits.sum(),
    }
    close.callback(rollout.close)
    text = page.read_text(encoding="utf-8")
    if "processor" in text:
        given |= {
            "vlm": make_vision_model("gemma3"),
            "processor": make_processor(),
            "picture": Image.new("RGB", (9, 9)),
        }
    if "video_processor" in text:
        given |= {
            "video_vlm": make_vision_model("qwen2_5_vl"),
            "video_processor": make_qwen_processor(FramesProcessor()),
            "frames": [torch.full((16, 16, 3), shade, dtype=torch.uint8) for shade in (0, 99, 255)],
        }
    if "tp_size" in text:
        given["tp_size"] = 1
    if "manager" in text:
        given["manager"] = RolloutManager(model, tokenizer, InferenceConfig(kv_cache_memory_gb=0.01))
        close.callback(given["manager"].close)
    if "EngineWorker(engine" in text:
        given["engine"] = DynamicInferenceEngine(model, tokenizer, InferenceConfig(kv_cache_memory_gb=0.01))
    if "lora_manager" in text:
        from peft import LoraConfig, get_peft_model

        lora = get_peft_model(small_model(), LoraConfig(r=2, target_modules=["q_proj"]))
        given["lora_manager"] = RolloutManager(lora, tokenizer, InferenceConfig(kv_cache_memory_gb=0.01))
        close.callback(given["lora_manager"].close)
    if "reference_model" in text:
        given |= {"reference_model": small_model(), "rollout": rollout}
    if "Trainer(" in text:
        given |= trainers(folder)
    if "accelerator" in text:  # after `TrainingArguments`, which reset accelerate's state
        from accelerate import Accelerator

        given["accelerator"] = Accelerator(cpu=True)
    return given


def trainers(folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def grpo_trainer(model: Any, rewards: Any, args: Any, train_dataset: Any) -> Any:
        return GRPOTrainer(model, rewards, args=args, train_dataset=train_dataset, processing_class=make_tokenizer())

    return {
        "Trainer": Trainer,
        "GRPOTrainer": grpo_trainer,
        "args": TrainingArguments(str(folder), use_cpu=True, report_to="none"),
        "config": GRPOConfig(str(folder), use_cpu=True, report_to="none", num_generations=2, bf16=False,
                             per_device_train_batch_size=2, max_completion_length=4),
        "data": Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}]),
        "reward": reward,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_every_snippet_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Snippets of a page run one after the other in one namespace; a model from the hub is a small random one."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    with (
        ExitStack() as close,
        patch("transformers.AutoModelForCausalLM.from_pretrained", lambda name, distributed_config=None: small_model()),
        patch("transformers.AutoTokenizer.from_pretrained", lambda name: make_tokenizer()),
    ):
        namespace = world(page, tmp_path, close)
        for code, output in snippets(page):
            if "rollout.init(" in code:
                rollout.close()  # of an earlier snippet
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile(code, name_of(page), "exec"), namespace)
            if output is not None:
                assert printed.getvalue() == output


def test_the_readme_is_short_and_its_quickstart_stands_alone():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 180
    (short, _), (code, output), *_ = snippets(ROOT / "README.md")
    assert len(short.split("\n\n")[1].splitlines()) == 5
    assert output
    assert code.startswith("import torch\n")
    assert "from_pretrained" in code


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file(page: Path):
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]


def test_every_page_is_reached_from_the_readme():
    reached, queue = set(), [ROOT / "README.md"]
    while queue:
        page = queue.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\((?!https?:)([^)#]+\.md)", page.read_text(encoding="utf-8"))
        queue += [(page.parent / link).resolve() for link in links]
    assert not {page for page in PAGES if page not in reached}


def test_generated_pages_equal_the_code():
    stale = [name_of(path) for path, wanted in pages().items() if path.read_text(encoding="utf-8") != wanted]
    assert not stale, f"run `python -m tests.reference --write`: {stale} differ from the code"


def test_the_api_page_has_the_methods_that_the_manager_takes_from_its_parts():
    """The site finds only the methods that are written in a class."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    taken = [name for name, method in vars(RolloutManager).items() if hasattr(method, "__wrapped__") and name[0] != "_"]
    assert "generate" in taken
    assert not [name for name in taken if f"heading: RolloutManager.{name}," not in page]
    assert not [path for path in re.findall(r"^::: (\S+)", page, re.MULTILINE) if locate(path) is None]


ARCHITECTURE = ROOT / "docs" / "explanation" / "architecture.md"


def test_the_core_is_short_and_every_file_of_it_runs_in_a_step_and_an_update():
    core = re.findall(r"^\d+\. `(rollout/[\w/]+\.py)`: ", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    assert 10 <= len(core) <= 25
    assert sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in core) <= 3500
    called: set[str] = set()
    model = small_model()
    with RolloutManager(model, config=InferenceConfig(kv_cache_memory_gb=0.01)) as manager:
        sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_filename) if event == "call" else None)
        try:
            manager.generate([[5, 6]], max_tokens=2)
            with manager.suspended():
                manager.before_optimizer_step()
                manager.weights_updated()
            manager.generate([[5, 6]], max_tokens=2)
        finally:
            sys.setprofile(None)
    assert not [name for name in core if str(ROOT / name) not in called]


def test_every_folder_of_the_package_is_named_once_in_the_architecture():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    table = text.split("\n## ")[0]
    folders = {path.parent.relative_to(ROOT / "rollout") for path in (ROOT / "rollout").rglob("__init__.py")}
    missing = [str(folder) for folder in folders - {Path(".")} if f"{folder.name}/`" not in table]
    assert not missing
