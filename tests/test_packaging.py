"""Tests of what is published: the wheel holds all that runs, the sdist builds it, the version is that of the tag."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

import rollout

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, FALLBACK = PYPROJECT["project"], PYPROJECT["tool"]["setuptools_scm"]["fallback_version"]
PACKAGES = ("rollout", "trainer_hooks")
BUILD = """
import sys
from setuptools import build_meta
kind, folder = sys.argv[1:]
print(getattr(build_meta, f"build_{kind}")(folder))
"""


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a source tree by the build backend, as `python -m build --no-isolation` does."""
    made = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(folder)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return folder / made.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist of a copy of this tree, wheel built from the unpacked sdist)."""
    pytest.importorskip("setuptools", "77")
    pytest.importorskip("setuptools_scm")
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    sdist = build("sdist", tree, folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return sdist, build("wheel", unpacked, folder)


def test_the_wheel_holds_every_module_and_every_source_of_the_kernels_and_nothing_else(built):
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".cpp", ".h", ".typed")
    }
    assert "rollout/engine/kernels/cpu_kernels.cpp" in wanted
    with zipfile.ZipFile(built[1]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == wanted
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "rollout/engine/kernels/cpu_lanes.h"} <= names


def test_the_wheel_says_what_the_project_says(built):
    with zipfile.ZipFile(built[1]) as wheel:
        (about,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        (scripts,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
        said = Parser().parsestr(wheel.read(about).decode())
        assert "rollout = rollout.__main__:main" in wheel.read(scripts).decode()
        assert any(name.endswith("/licenses/LICENSE") for name in wheel.namelist())
    # The wheel is built of a tree without git, by way of an sdist.
    assert said["Version"] == FALLBACK
    assert built[1].name == f"rollout_engine-{FALLBACK}-py3-none-any.whl"
    assert built[0].name == f"rollout_engine-{FALLBACK}.tar.gz"
    assert said["Requires-Python"] == PROJECT["requires-python"]
    assert {re.match(r"[\w-]+", each)[0] for each in said.get_all("Requires-Dist") if "extra" not in each} == {
        re.match(r"[\w-]+", each)[0] for each in PROJECT["dependencies"]
    }


def test_out_of_the_wheel_the_kernels_compile_also_in_the_program_for_other_processors(built, tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(tmp_path)
    # Syntax alone, in a fraction of a second: every header is found beside the source.
    source = tmp_path / "tests" / "machines" / "decode_alone.cpp"
    source.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "machines" / source.name, source)
    subprocess.run(["g++", "-std=c++17", "-Wno-psabi", "-fsyntax-only", str(source)], check=True, timeout=300)


def test_every_module_parses_as_the_oldest_supported_python():
    oldest = tuple(map(int, re.findall(r"\d+", PROJECT["requires-python"])))
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=oldest)


def test_a_release_is_in_the_changelog():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {FALLBACK}\n" in changelog
    assert rollout.__version__ == metadata.version("rollout-engine")
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("no repository")
    asked = [git, "tag", "--points-at", "HEAD", "--list", "v*"]
    tags = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True).stdout.split()
    for tag in tags:
        assert re.search(rf"^## \[?{re.escape(tag.removeprefix('v'))}\b", changelog, re.MULTILINE)
