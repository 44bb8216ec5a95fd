"""The architecture, guarded by a machine: floors, the torch-free vocabulary, documented options, README = disk."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS = {
    "rollout.errors": 0,
    "rollout.config": 0,
    "rollout.state": 0,
    "rollout.sampling_params": 0,
    "rollout.block_hash": 0,
    "rollout.spans": 0,
    "rollout.codec": 0,
    "rollout.events": 0,
    "rollout.request": 0,
    "rollout.record": 0,
    "rollout.wire_types": 0,
    "rollout.protocol": 0,
    "rollout.frames": 0,
    "rollout.seeds": 0,
    "rollout.outcome": 0,
    "rollout.known": 0,
    "rollout.metrics": 0,
    "rollout.interrupts": 0,
    "rollout.engine.adapters": 0,
    "rollout.groups": 1,
    "rollout.progress": 1,
    "rollout.pacing": 2,
    "rollout.engine.block_allocator": 1,
    "rollout.engine.sequences": 1,
    "rollout.engine.block_tables": 1,
    "rollout.engine.step": 1,
    "rollout.engine.fair_lock": 1,
    "rollout.engine.turns": 1,
    "rollout.engine.plain_tensors": 1,
    "rollout.engine.forward_key": 1,
    "rollout.engine.lifecycle": 1,
    "rollout.engine.random_stream": 1,
    "rollout.engine.scratch": 1,
    "rollout.engine.sampling_table": 1,
    "rollout.engine.detokenizer": 1,
    "rollout.engine.kv_cache": 1,
    "rollout.engine.kv_transfer": 1,
    "rollout.engine.kernels": 1,
    "rollout.engine.scheduler": 2,
    "rollout.engine.originals": 1,
    "rollout.engine.attention": 2,
    "rollout.engine.attention_masks": 2,
    "rollout.engine.sampler": 2,
    "rollout.engine.fingerprints": 1,
    "rollout.engine.copied_weights": 2,
    "rollout.engine.sharded_weights": 2,
    "rollout.engine.partitioned_weights": 2,
    "rollout.engine.weights": 2,
    "rollout.engine.model_support": 3,
    "rollout.engine.fused_forward": 3,
    "rollout.engine.cuda_graphs": 3,
    "rollout.engine.model_runner": 3,
    "rollout.engine.context": 3,
    "rollout.engine.controller": 3,
    "rollout.engine.admission": 3,
    "rollout.engine.engine": 4,
    "rollout.keys": 1,
    "rollout.loop_thread": 1,
    "rollout.dealer": 1,
    "rollout.open_group": 1,
    "rollout.client_session": 1,
    "rollout.replies": 1,
    "rollout.client": 1,
    "rollout.rank_session": 1,
    "rollout.coordinator.routing": 1,
    "rollout.coordinator.prefixes": 1,
    "rollout.coordinator.rank_order": 1,
    "rollout.coordinator": 2,
    "rollout.flags": 1,
    "rollout.algorithms": 1,
    "rollout.folder_lock": 1,
    "rollout.journal_file": 1,
    "rollout.journal_reader": 1,
    "rollout.journal": 1,
    "rollout.earlier_groups": 2,
    "rollout.group_journal": 3,
    "rollout.prompts": 0,
    "rollout.chat_messages": 0,
    "rollout.local_coordinator": 3,
    "rollout.text_stream": 2,
    "rollout.pending": 3,
    "rollout.engine_seam": 5,
    "rollout.worker": 5,
    "rollout.lengths": 1,
    "rollout.backend": 6,
    "rollout.world": 6,
    "rollout.job_coordinator": 6,
    "rollout.own_groups": 6,
    "rollout.gathering": 6,
    "rollout.data_parallel": 6,
    "rollout.engine_service": 6,
    "rollout.model_loading": 6,
    "rollout.llm": 7,
    "rollout.manager": 6,
    "rollout.batch": 6,
    "rollout.telemetry": 6,
    "rollout.suspension": 6,
    "rollout.checkpoint": 6,
    "rollout.server": 7,
    "rollout.__main__": 7,
    "trainer_hooks": 8,
    "examples": 9,
}
"""Module, or package whose files share a floor → floor."""

NEIGHBOURS = [
    {name for name, floor in FLOORS.items() if floor == 0},
    {
        "rollout.engine.block_allocator",
        "rollout.engine.sequences",
        "rollout.engine.block_tables",
        "rollout.engine.step",
    },
    {"rollout.engine.fair_lock", "rollout.engine.lifecycle"},
    {"rollout.engine.scratch", "rollout.engine.sampling_table"},
    {"rollout.engine.attention", "rollout.engine.attention_masks"},
    {
        "rollout.engine.model_support",
        "rollout.engine.fused_forward",
        "rollout.engine.cuda_graphs",
        "rollout.engine.model_runner",
        "rollout.engine.context",
        "rollout.engine.controller",
        "rollout.engine.admission",
    },
    {"rollout.engine.kernels", "rollout.engine.scratch"},
    {
        "rollout.engine.copied_weights",
        "rollout.engine.sharded_weights",
        "rollout.engine.partitioned_weights",
        "rollout.engine.weights",
    },
    {"rollout.engine.kv_cache", "rollout.engine.kv_transfer", "rollout.engine.scratch"},
    {
        "rollout.keys",
        "rollout.loop_thread",
        "rollout.dealer",
        "rollout.open_group",
        "rollout.client_session",
        "rollout.replies",
        "rollout.client",
    },
    {"rollout.coordinator.routing", "rollout.coordinator.prefixes", "rollout.coordinator.rank_order"},
    {"rollout.coordinator"},
    {"rollout.engine_seam", "rollout.worker"},
    {
        "rollout.manager",
        "rollout.batch",
        "rollout.telemetry",
        "rollout.suspension",
        "rollout.checkpoint",
        "rollout.backend",
        "rollout.world",
        "rollout.own_groups",
        "rollout.gathering",
        "rollout.job_coordinator",
        "rollout.data_parallel",
        "rollout.engine_service",
        "rollout.model_loading",
    },
    {"rollout.llm", "rollout.server", "rollout.__main__"},
    {"rollout.algorithms"},
    {"rollout.folder_lock", "rollout.journal_file", "rollout.journal_reader", "rollout.journal"},
    {"trainer_hooks"},
]
"""Rooms: files that may import each other although they share a floor, but never in a circle."""

TORCH_FREE = [
    *(name for name, floor in FLOORS.items() if floor == 0),
    "rollout.engine.block_allocator",
    "rollout.engine.sequences",
    "rollout.engine.block_tables",
    "rollout.engine.step",
    "rollout.engine.fair_lock",
    "rollout.engine.lifecycle",
    "rollout.engine.scheduler",
    "rollout.engine.detokenizer",
    "rollout.coordinator.routing",
    "rollout.coordinator.core",
    "rollout.coordinator.process",
    "rollout.coordinator.launch",
    "rollout.keys",
    "rollout.loop_thread",
    "rollout.dealer",
    "rollout.open_group",
    "rollout.client_session",
    "rollout.replies",
    "rollout.client",
    "rollout.rank_session",
    "rollout.journal_file",
    "rollout.journal_reader",
    "rollout.journal",
    "rollout.folder_lock",
    "rollout.flags",
    "rollout.__main__",
]


def module_name(path: Path) -> str:
    """`rollout/engine/__init__.py` → `rollout.engine`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {
    module_name(path): path
    for house in ("rollout", "trainer_hooks", "examples")
    for path in sorted((ROOT / house).rglob("*.py"))
}
PACKAGES = {name for name, path in MODULES.items() if path.name == "__init__.py"}


def row_of(module: str) -> str | None:
    """The entry of `FLOORS` that a module belongs to: its own or its package's."""
    name = module
    while name:
        if name in FLOORS:
            return name
        name = name.rpartition(".")[0]
    return None


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


def test_every_module_has_a_floor():
    homeless = [module for module in MODULES if row_of(module) is None and module not in PACKAGES]
    assert not homeless, f"give these a floor in FLOORS, and a row in the table of the house: {homeless}"


def test_a_module_imports_only_lower_floors():
    climbs = []
    for module in MODULES:
        own = row_of(module)
        if own is None:
            continue
        for name, line in imports_of(module):
            other = row_of(name)
            if name == "rollout" and FLOORS[own] >= FLOORS["trainer_hooks"]:
                continue
            if other is None:
                climbs.append(f"{where(module, line)} imports {name}: name the file, so that its floor can be seen")
            elif any(own in room and other in room for room in NEIGHBOURS) or FLOORS[other] < FLOORS[own]:
                continue
            else:
                climbs.append(f"{where(module, line)} (floor {FLOORS[own]}) imports {name} (floor {FLOORS[other]})")
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


def test_nothing_in_rollout_imports_the_hooks():
    guilty = [
        where(module, line)
        for module in MODULES
        if module.split(".")[0] == "rollout"
        for name, line in imports_of(module)
        if name.split(".")[0] == "trainer_hooks"
    ]
    assert not guilty


def test_the_vocabulary_the_deciding_parts_and_the_client_import_without_torch():
    """An import that is tried and fails counts too: with torch installed it would have succeeded."""
    present = [module for module in TORCH_FREE if module in MODULES]
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
        ("rollout/config.py", "CoordinatorConfig"),
        ("rollout/config.py", "ServerConfig"),
        ("rollout/sampling_params.py", "SamplingParams"),
        ("rollout/client_session.py", "RequestOptions"),
    ],
)
def test_every_option_has_a_line_of_documentation_under_it(file, name):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    options = [
        (node.target.id, below)
        for node, below in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
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
                bad = [alias.name for alias in node.names if alias.name.split(".")[0] in ("rollout", "trainer_hooks")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rollout":
                bad = [alias.name for alias in node.names if alias.name not in public.get(node.module or "", ())]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trainer_hooks":
                bad = [alias.name for alias in node.names if alias.name.startswith("_")]
            else:
                continue
            guilty += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in bad]
    assert not guilty, guilty


def readme_tree() -> set[str]:
    """Paths in the ```text block under "## Files" of the README.

    One name per line, indented by four columns per level (spaces, or the characters of a drawn tree); a folder ends
    with a slash; after the name, whatever there is to say.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^## Files\n.*?^```text\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, 'README.md has no ```text block under "## Files"'
    paths, folders = set(), [""]
    for line in block[1].splitlines():
        entry = re.match(r"([\s│├└─]*)(\S+)", line)
        if entry is None:
            continue
        level = len(entry[1]) // 4
        assert level < len(folders), f"{line!r} is indented below no folder: four columns per level"
        path = folders[level] + entry[2]
        folders[level + 1 :] = [path] if path.endswith("/") else []
        paths.add(path)
    return paths


def test_the_tree_in_the_readme_is_the_tree_on_disk():
    """Every Python file is listed, but for the `__init__.py` that a folder has anyway, and nothing else is."""
    listed = readme_tree()
    gone = sorted(path for path in listed if not (ROOT / path).exists())
    files = {
        path.relative_to(ROOT).as_posix()
        for house in ("rollout", "trainer_hooks", "examples", "tests")
        for path in (ROOT / house).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert not gone, f"in README.md, not on disk: {gone}"
    assert not files - listed, f"on disk, not in README.md: {sorted(files - listed)}"
