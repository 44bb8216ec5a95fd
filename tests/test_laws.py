"""Architecture tests: import layering, torch-free modules, documented options, public names in examples."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.size import Source, measure
from tests.test_spec_names import NAMES

ROOT = Path(__file__).parent.parent

LAYERS = [
    ["rollout.errors"],
    ["rollout.state", "rollout.threads"],
    ["rollout.config", "rollout.sampling_params"],
    ["rollout.flags", "rollout.requests", "rollout.engine.blocks"],
    ["rollout.observe"],
    ["rollout.journal", "rollout.distributed.protocol", "rollout.engine.memory", "rollout.engine.scheduling"],
    ["rollout.engine.kernels", "rollout.distributed.transport"],
    [
        "rollout.engine.sampling",
        "rollout.engine.weights",
        "rollout.engine.multimodal",
        "rollout.distributed.client",
    ],
    ["rollout.engine.models", "rollout.engine.parallel"],
    ["rollout.engine.fused", "rollout.engine.graphs"],
    ["rollout.engine.forward", "rollout.distributed.coordinator.core"],
    ["rollout.engine.training"],
    ["rollout.engine.parts"],
    ["rollout.engine", "rollout.distributed.coordinator"],
    ["rollout.distributed.worker"],
    ["rollout.distributed.job", "rollout.algorithms"],
    ["rollout.manager", "rollout.server"],
    ["rollout.llm"],
    ["rollout.__main__"],
    ["trainer_hooks"],
    ["rollout.current"],
    ["examples"],
]
"""Folders (and single files on top of the package) from the bottom up. A module belongs to the longest name it begins
with, and imports only from its own folder and from folders of lower layers."""

LAYER_OF = {folder: level for level, folders in enumerate(LAYERS) for folder in folders}

TORCH_FREE = [
    "rollout.errors", "rollout.state", "rollout.config", "rollout.sampling_params",
    "rollout.threads", "rollout.flags", "rollout.requests", "rollout.journal",
    "rollout.observe", "rollout.engine.blocks", "rollout.engine.scheduling", "rollout.distributed.protocol",
    "rollout.distributed.transport", "rollout.distributed.client", "rollout.distributed.coordinator", "rollout.__main__",
]  # fmt: skip
"""Folders and files whose every module imports without torch."""

LOADED_BY_EXECUTION = {"rollout.distributed.coordinator.__main__"}
"""Modules that do their work when they are imported."""


def module_name(path: Path) -> str:
    """`rollout/engine/__init__.py` → `rollout.engine`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for house in ("rollout", "trainer_hooks", "examples")
    for path in sorted((ROOT / house).rglob("*.py"))
}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def folder_of(module: str) -> str | None:
    """The entry of `LAYERS` that a module belongs to."""
    name = module
    while name and name not in LAYER_OF:
        name = name.rpartition(".")[0]
    return name or None


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """Modules of ours that `module` imports, at its top or inside a function, each with the line."""
    path = MODULES[module]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".") + [""] * (path.name == "__init__.py")
                base = ".".join(part for part in [*parents[: -node.level], base] if part)
            submodules = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES]
            names = submodules if len(submodules) == len(node.names) else [base, *submodules]
        else:
            continue
        for name in names:
            if name.split(".")[0] in ("rollout", "trainer_hooks", "examples"):
                yield name, node.lineno


def where(module: str, line: int) -> str:
    return f"{MODULES[module].relative_to(ROOT)}:{line}"


def test_every_module_has_a_layer():
    homeless = [module for module in MODULES if folder_of(module) is None and module not in PACKAGES]
    assert not homeless, f"add the folders of these to LAYERS: {homeless}"


def test_a_module_imports_only_from_its_own_folder_and_lower_layers():
    climbs = []
    for module in MODULES:
        own = folder_of(module)
        if own is None:
            continue
        for name, line in imports_of(module):
            other = folder_of(name)
            if name == "rollout" and LAYER_OF[own] >= LAYER_OF["trainer_hooks"]:
                continue
            if other is None:
                climbs.append(f"{where(module, line)} imports {name}: name the file, so that its layer can be seen")
            elif other != own and LAYER_OF[other] >= LAYER_OF[own]:
                climbs.append(f"{where(module, line)} ({own}) imports {name} (not a lower layer)")
    assert not climbs, "\n".join(climbs)


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: {name for name, _ in imports_of(module) if name != module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_a_package_imports_nothing_of_ours_when_it_is_imported():
    """A package that pulled in its files would put torch into every import of the vocabulary below it."""
    for module in PACKAGES:
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        guarded = {
            id(node)
            for branch in ast.walk(tree)
            if isinstance(branch, ast.FunctionDef)
            or (isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING"))
            for node in ast.walk(branch)
        }
        eager = [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            and id(node) not in guarded
            and re.search(r"\b(from|import) +(\.|rollout\b|trainer_hooks\b|torch\b|transformers\b)", ast.unparse(node))
        ]
        assert not eager, f"{MODULES[module].relative_to(ROOT)}, lines {eager}: resolve these lazily"


def test_nothing_in_rollout_but_init_imports_the_hooks():
    guilty = [
        where(module, line)
        for module in MODULES
        if module.split(".")[0] == "rollout" and module != "rollout.current"
        for name, line in imports_of(module)
        if name.split(".")[0] == "trainer_hooks"
    ]
    assert not guilty


WHOLE_LOGITS = {
    "rollout.engine.forward.module_forward": "sampled positions",
    "rollout.engine.fused.fused_forward": "sampled positions",
    "rollout.engine.graphs.cuda_graphs": "sampled positions",
    "rollout.manager.batch.forward": "one row: `LogitReader` has replaced the head",
    "trainer_hooks.generate": "a caller of `generate` asked for them",
}
"""Modules that take the `logits` of a forward, and why they are small or wanted."""


def test_nothing_of_ours_holds_the_logits_of_a_training_forward():
    """8,192 tokens of a vocabulary of 151,936 are 5 GB, and their gradient as much: `batch.logprobs_of` and `scores_of`."""
    taking = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "logits" and isinstance(node.ctx, ast.Load)
    }
    assert not taking - WHOLE_LOGITS.keys()


def test_the_vocabulary_the_deciding_parts_and_the_client_import_without_torch():
    """An import that is tried and fails counts too: with torch installed it would have succeeded."""
    present = [
        module
        for module in MODULES
        if any(f"{module}.".startswith(f"{free}.") for free in TORCH_FREE) and module not in LOADED_BY_EXECUTION
    ]
    program = f"""
import importlib, sys, traceback

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "accelerate", "wandb"):
            print(f"{{current}} imports {{name}}:", *traceback.format_stack(limit=12), sep="\\n")
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
for current in {["rollout", *present]!r}:
    try:
        importlib.import_module(current)
    except ImportError:
        traceback.print_exc(file=sys.stdout)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("rollout/config.py", "InferenceConfig"),
        ("rollout/config.py", "Advanced"),
        ("rollout/config.py", "CoordinatorConfig"),
        ("rollout/config.py", "ServerConfig"),
        ("rollout/sampling_params.py", "SamplingParams"),
        ("rollout/distributed/client/session.py", "RequestOptions"),
    ],
)
def test_every_option_has_a_line_of_documentation_under_it(file, name):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    options = [
        (node.target.id, below)
        for node, below in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id != "_rules"
    ]
    bare = [
        option
        for option, below in options
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and below.value.value)
    ]
    assert options
    assert not bare


def examples() -> list[Path]:
    return sorted((ROOT / "examples").rglob("*.py"))


def test_examples_import_public_names_only():
    import rollout
    from rollout import algorithms

    public = {"rollout": rollout.__all__, "rollout.algorithms": algorithms.__all__}
    guilty = []
    for path in examples():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                bad = [alias.name for alias in node.names if alias.name.startswith(("rollout.", "trainer_hooks"))]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rollout":
                bad = [node.attr] if node.attr not in rollout.__all__ else []
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rollout":
                bad = [alias.name for alias in node.names if alias.name not in public.get(node.module or "", ())]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainer_hooks":
                bad = [alias.name for alias in node.names if alias.name.startswith("_")]
            else:
                continue
            guilty += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in bad]
    assert not guilty, guilty


# --- numbers ----------------------------------------------------------------------------------------------------------

SPEC_NAMES = {name: names.split() for name, names in NAMES.items()}
"""Class → names that the specification gives it: they do not count towards the size of a class."""

CEILINGS = {
    "files of rollout/": 260,
    "lines of rollout/": 47_911,
    "code lines of rollout/": 30_686,
    "classes of rollout/": 492,
    "lines of the largest class": 395,
    "methods of the largest class": 29,
    "modules with one importer": 47,
    "functions named refuse*": 37,
    "is None and is not None": 1_250,
    "plain options": 40,
    "public names": 61,
    "files that RolloutManager loads": 173,
    "lines of tests/": 51_909,
    "lines of tests/benchmarks/": 3_813,
    "lines of trainer_hooks/": 3_820,
    "nodes of rollout/": 17,
    "levels of rollout/": 9,
    "edges of rollout/": 74,
    "edges in cycles of rollout/": 0,
    "nodes of rollout/engine/": 16,
    "levels of rollout/engine/": 8,
    "edges of rollout/engine/": 57,
    "edges in cycles of rollout/engine/": 0,
    "nodes of rollout/manager/": 14,
    "levels of rollout/manager/": 8,
    "edges of rollout/manager/": 39,
    "edges in cycles of rollout/manager/": 0,
    "nodes of rollout/server/": 11,
    "levels of rollout/server/": 6,
    "edges of rollout/server/": 24,
    "edges in cycles of rollout/server/": 0,
    "nodes of rollout/llm/": 7,
    "levels of rollout/llm/": 5,
    "edges of rollout/llm/": 11,
    "edges in cycles of rollout/llm/": 0,
    "nodes of rollout/distributed/": 6,
    "levels of rollout/distributed/": 4,
    "edges of rollout/distributed/": 12,
    "edges in cycles of rollout/distributed/": 0,
}
"""Numbers of the code base that only fall (`python -m tests.size` prints them). A change that raises one pays for it
elsewhere; a change that lowers one lowers the ceiling with it."""

SLACK = 0.01
"""Share of a ceiling by which a number may be below it, before the ceiling has to follow."""


@cache
def measured() -> dict[str, int]:
    return measure(Source(), SPEC_NAMES)


def test_no_number_of_the_code_base_rises():
    numbers = measured()
    assert numbers.keys() == CEILINGS.keys()
    risen = [
        f"{name}: {number:,}, at most {CEILINGS[name]:,}" for name, number in numbers.items() if number > CEILINGS[name]
    ]
    assert not risen, "delete or merge something, see CONTRIBUTING.md:\n" + "\n".join(risen)


def test_ceilings_follow_the_numbers_down():
    numbers = measured()
    high = [f'"{name}": {number:_},' for name, number in numbers.items() if number < CEILINGS[name] * (1 - SLACK) - 1]
    assert not high, "lower these ceilings to what was reached:\n" + "\n".join(high)
