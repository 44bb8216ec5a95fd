"""Tests that every Triton kernel compiles for the GPUs that are served, by the installed Triton, within its limits."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kernels_compiled import ATTENTION, LARGEST, Heads, compile_all

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
KERNELS = {"attend_chunks", "attend_parts", "merge", "write"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("architecture", "attention"), [(80, LARGEST), (90, ATTENTION)], ids=["sm_80", "sm_90"])
def test_every_kernel_fits_the_device(
    architecture: int, attention: tuple[Heads, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = list(compile_all(architecture, tmp_path, attention))
    assert {each.name for each in found} == KERNELS
    assert len(found) > 3 * len(attention)
    assert [str(each) for each in found if each.above] == []
