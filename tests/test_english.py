"""The style of the prose: docstrings, comments, messages and pages in plain English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

HABITS = re.compile(
    r"^Of |(?<![Tt]here )\bis no (?!longer)[a-z]+|\balso (?:if|where|when)\b|\blikeliest\b|\banew\b|\blest\b"
    r"|\bof (?:now|before)\b(?! [a-z])|\b(?:refused|raised|ends?|ended) by name\b|\bfor want of\b"
)
"""Habits of a careful translation; CONTRIBUTING.md has the rules."""
HEADLESS = re.compile(r"^(?:Of|That|As|For|By|What|Where)\b(?!-)")
"""How a docstring must not begin: the reader looks for a verb or a noun phrase."""
LONGEST = 40
"""Words of a sentence."""

ALLOWED = {
    "rollout/": 4, "trainer_hooks/": 4, "examples/": 0, "tests/": 0, "docs/": 0, "README.md": 0, "CONTRIBUTING.md": 0,
}  # fmt: skip
"""Number of findings in each folder that are not rewritten yet. It only falls."""


def sentences(text: str) -> Iterator[str]:
    """Sentences of a text; blocks of code, tables and lists of arguments end one."""
    text = re.sub(r"```.*?```|^ {4,}\S.*$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*|#]|\d+\. |\w[\w, ]*: )|\|", text):
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`])|:\n", " ".join(paragraph.split()))


def of_python(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, text and whether it is a docstring, of each docstring, comment and message in a file."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, re.sub(r"^ {4,8}(?=\S)", "", node.value.value, flags=re.MULTILINE), True
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            parts = [
                each for each in ast.walk(node.exc) if isinstance(each, ast.Constant) and isinstance(each.value, str)
            ]
            yield node.lineno, " ".join(each.value for each in parts), False
    comments = [
        each for each in tokenize.generate_tokens(io.StringIO(source).readline) if each.type == tokenize.COMMENT
    ]
    for token in comments:
        if not re.match(r"# (?:fmt|type|noqa|mypy|pragma|---)", token.string):
            yield token.start[0], token.string.lstrip("# "), False


def findings(path: Path) -> Iterator[str]:
    """Each finding of one file, with its place."""
    texts = of_python(path) if path.suffix == ".py" else [(1, path.read_text(encoding="utf-8"), False)]
    for line, text, docstring in texts:
        where = f"{path.relative_to(ROOT)}:{line}"
        if docstring and HEADLESS.match(text):
            yield f"{where}: begins with {text.split()[0]!r}: {text[:60]!r}"
        for sentence in sentences(text):
            if habit := HABITS.search(sentence):
                yield f"{where}: {habit[0]!r} in {sentence[:90]!r}"
            if len(sentence.split()) > LONGEST:
                yield f"{where}: {len(sentence.split())} words: {sentence[:90]!r}"


def files() -> Iterator[tuple[str, Path]]:
    for house in ALLOWED:
        found = [ROOT / house] if not house.endswith("/") else sorted((ROOT / house).rglob("*.*"))
        for path in found:
            generated = "do not edit" in path.read_text(encoding="utf-8", errors="ignore")[:200]
            if path.suffix in (".py", ".md") and not generated and path.name != "test_english.py":
                yield house, path


def test_the_prose_is_plain_english():
    every = [(house, found) for house, path in files() for found in findings(path)]
    counts = Counter(house for house, _ in every)
    over = {house: counts[house] for house, most in ALLOWED.items() if counts[house] > most}
    assert not over, f"{over} findings, allowed {ALLOWED}:\n" + "\n".join(
        found for house, found in every if house in over
    )
    high = {house: counts[house] for house, most in ALLOWED.items() if counts[house] < most}
    assert not high, f"lower ALLOWED to what was reached: {high}"
