"""Size and shape of the code base, measured from its source; `test_laws.py` holds each number below a ceiling.

python -m tests.size            all numbers, and the lines of each folder
"""

from __future__ import annotations

import ast
import dataclasses
import io
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
OURS = ("rollout/", "trainer_hooks/")
GRAPHS = ("rollout/", "rollout/engine/", "rollout/manager/", "rollout/server/", "rollout/llm/", "rollout/distributed/")
"""Folders whose import graph is measured."""
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str, tree: ast.AST) -> int:
    """Number of lines that hold code: not blank, no comment, no docstring."""
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    prose = {
        line
        for node in strings
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {n for each in tokens if each.type not in _NO_CODE for n in range(each.start[0], each.end[0] + 1)}
    return len(lines - prose)


class Size(NamedTuple):
    """Size of a class."""

    lines: int
    methods: int
    name: str


class Source:
    """The Python files of a checkout, parsed once."""

    def __init__(self, root: Path = ROOT) -> None:
        listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout
        names = [name for name in listed.split() if name.endswith(".py") and (root / name).exists()]
        self.text = {name: (root / name).read_text(encoding="utf-8") for name in names}
        self.tree = {name: ast.parse(self.text[name]) for name in names if name.startswith(OURS)}
        self.rollout = [name for name in self.tree if name.startswith("rollout/")]

    def lines(self, folder: str) -> int:
        """Lines of all Python files below a folder."""
        return sum(text.count("\n") for name, text in self.text.items() if name.startswith(folder))

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """File → the files of ours that it imports, also inside functions and for type checking."""
        module = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in self.tree}
        found: dict[str, set[str]] = defaultdict(set)
        for name, tree in self.tree.items():
            for node in ast.walk(tree):
                targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    targets = [f"{node.module}.{alias.name}" for alias in node.names]
                for target in targets:
                    while target and target not in module:
                        target = target.rpartition(".")[0]
                    if target and module[target] != name:
                        found[name].add(module[target])
        return found

    def graph(self, folder: str) -> tuple[int, int, int, int]:
        """Import graph of a folder's files and subfolders: nodes, levels (longest chain), edges, edges in cycles."""

        def node(name: str) -> str | None:
            rest = name.removeprefix(folder)
            return rest.split("/")[0] if name.startswith(folder) and rest != "__init__.py" else None

        nodes = {found for name in self.tree if (found := node(name))}
        pairs = ((node(name), node(target)) for name, targets in self.imports.items() for target in targets)
        edges = {(a, b) for a, b in pairs if a and b and a != b}
        below: dict[str, set[str]] = {each: {b for a, b in edges if a == each} for each in nodes}

        def reach(start: str) -> set[str]:
            seen: set[str] = set()
            todo = list(below[start])
            while todo:
                if (each := todo.pop()) not in seen:
                    seen.add(each)
                    todo += below[each]
            return seen

        reachable = {each: reach(each) for each in nodes}
        cyclic = {(a, b) for a, b in edges if a in reachable[b]}
        levels: dict[str, int] = {}
        # A node that reaches fewer others comes first, so that the levels below each are there.
        for each in sorted(nodes, key=lambda name: len(reachable[name])):
            levels[each] = 1 + max((levels.get(b, 0) for b in below[each] if (each, b) not in cyclic), default=0)
        return len(nodes), max(levels.values(), default=0), len(edges), len(cyclic)

    def loaded_by(self, name: str) -> int:
        """Number of our files that importing a file reaches."""
        seen: set[str] = set()
        todo = [name]
        while todo:
            if (each := todo.pop()) not in seen:
                seen.add(each)
                todo += self.imports[each]
        return len(seen)

    def single_importer(self) -> list[str]:
        """Files of `rollout/` that exactly one other file imports."""
        count = Counter(target for targets in self.imports.values() for target in targets)
        return [name for name in self.rollout if count[name] == 1 and not name.endswith("__init__.py")]

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Classes of ours by name; of two with one name, the larger."""
        found: dict[str, ast.ClassDef] = {}
        for tree in self.tree.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef) and _size(node) > _size(found.get(node.name)):
                    found[node.name] = node
        return found

    def with_inherited(self, name: str, spec_names: Mapping[str, Collection[str]] = MappingProxyType({})) -> Size:
        """Size of a class with the classes of ours that it inherits from.

        Args:
            spec_names: class → names that the specification gives it, which do not count.
        """
        todo, seen, lines, methods, granted = [name], set[str](), 0, set[str](), set[str]()
        while todo:
            if (each := todo.pop()) in seen or each not in self.classes:
                continue
            node = self.classes[each]
            seen.add(each)
            granted |= set(spec_names.get(each, ()))
            own = [item for item in node.body if isinstance(item, _FUNCTIONS)]
            lines += _size(node) - sum(_size(item) for item in own if item.name in granted)
            methods |= {item.name for item in own}
            todo += [ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases]
        return Size(lines, len(methods - granted), name)


def _size(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None) -> int:
    return 0 if node is None else (node.end_lineno or node.lineno) - node.lineno + 1


def measure(source: Source, spec_names: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Every number that has a ceiling.

    Args:
        spec_names: class → names that the specification gives it, which do not count.
    """
    import rollout
    from rollout import config

    sizes = [source.with_inherited(name, spec_names) for name in source.classes]
    nodes = [node for name in source.rollout for node in ast.walk(source.tree[name])]
    options = (getattr(config, each) for each in ("InferenceConfig", "CoordinatorConfig", "ServerConfig"))
    numbers = {
        "files of rollout/": len(source.rollout),
        "lines of rollout/": source.lines("rollout/"),
        "code lines of rollout/": sum(code_lines(source.text[name], source.tree[name]) for name in source.rollout),
        "classes of rollout/": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "lines of the largest class": max(each.lines for each in sizes),
        "methods of the largest class": max(each.methods for each in sizes),
        "modules with one importer": len(source.single_importer()),
        "functions named refuse*": sum(
            isinstance(node, _FUNCTIONS) and node.name.lstrip("_").startswith("refuse") for node in nodes
        ),
        "is None and is not None": sum(
            source.text[name].count(" is None") + source.text[name].count(" is not None") for name in source.rollout
        ),
        "plain options": sum(len(dataclasses.fields(each)) for each in options),
        "public names": len(rollout.__all__),
        "files that RolloutManager loads": source.loaded_by("rollout/manager/manager.py"),
        "lines of tests/": source.lines("tests/"),
        "lines of tests/benchmarks/": source.lines("tests/benchmarks/"),
        "lines of trainer_hooks/": source.lines("trainer_hooks/"),
    }
    for folder in GRAPHS:
        for what, number in zip(("nodes", "levels", "edges", "edges in cycles"), source.graph(folder), strict=True):
            numbers[f"{what} of {folder}"] = number
    return numbers


def main() -> None:
    """Print every number beside its ceiling, and the lines of each folder."""
    from tests.test_laws import CEILINGS, SPEC_NAMES

    source = Source()
    for name, number in measure(source, SPEC_NAMES).items():
        ceiling = CEILINGS[name]
        print(f"{name:40} {number:7,}  at most {ceiling:7,}{'  TOO MUCH' if number > ceiling else ''}")
    largest = sorted((source.with_inherited(name, SPEC_NAMES) for name in source.classes), reverse=True)[:8]
    print(
        "largest classes (lines, methods):", "; ".join(f"{each.name} {each.lines}, {each.methods}" for each in largest)
    )
    folders = Counter[str]()
    for name in source.tree:
        folders["/".join(name.split("/")[:-1][:2])] += source.text[name].count("\n")
    for folder, lines in sorted(folders.items()):
        print(f"  {folder:30} {lines:7,}")


if __name__ == "__main__":
    main()
