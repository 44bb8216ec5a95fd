"""The tests of Triton's kernels, in its interpreter; in one process, as each of its own would import for seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.interpreter import INTERPRETED, assert_holds_interpreted

HERE = Path(__file__).parent
FILES = ("forward/test_triton_steps.py", "kernels/test_triton_paged.py")


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")
@pytest.mark.timeout(1600)
def test_the_kernels_do_in_tritons_interpreter_what_they_do_on_a_device() -> None:
    assert_holds_interpreted(*(str(HERE / file) for file in FILES))
