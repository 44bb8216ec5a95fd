"""Tests of `import rollout`: every public name exists and is loaded lazily."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rollout

WITH_TORCH = (
    "Rollout", "Packed", "DynamicInferenceEngine", "DynamicInferenceContext", "TextGenerationController", "EngineWorker",
    "LLM", "AsyncLLM", "JobLLM", "exact", "pack_tree", "replay", "trace", "EpisodeBatch", "rewards_differ",
    "TokenScores", "PromptTask", "Scored", *rollout._FIRST,
)  # fmt: skip
NAMES = [*rollout.__all__, *rollout._PARTS]
VOCABULARY = [
    name for name in NAMES if not name.startswith(WITH_TORCH) or name in ("InferenceConfig", "SamplingParams")
]


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves_and_public_ones_are_listed(name):
    assert getattr(rollout, name) is getattr(rollout, name)
    assert (name in dir(rollout)) == (name in rollout.__all__) == (name not in rollout._PARTS)


def test_there_are_few_public_names():
    """Raise the number only for what every trainer needs; other names go into the second block of `rollout`."""
    assert len(rollout.__all__) <= 62


def test_importing_the_package_loads_none_of_its_modules():
    loaded = run("import rollout, sys; print([m for m in sys.modules if m.startswith('rollout.')])")
    assert loaded == "[]"


def test_the_vocabulary_costs_no_torch():
    program = f"import rollout, sys; [getattr(rollout, n) for n in {VOCABULARY!r}]; print('torch' in sys.modules)"
    assert run(program) == "False"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        rollout.no_such_thing  # noqa: B018
    with pytest.raises(ImportError):
        from rollout import no_such_thing  # noqa: F401
