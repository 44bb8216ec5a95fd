"""Tests of prompt arguments: accepted forms and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout.requests.prompt import normalized

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("given", "prompts", "single"),
    [
        ("hello", ["hello"], True),
        ("", [""], True),
        ([1, 2], [[1, 2]], True),
        ((1, 2), [[1, 2]], True),
        (np.array([1, 2]), [[1, 2]], True),
        (torch.tensor([1, 2]), [[1, 2]], True),
        ([np.int64(1), torch.tensor(2)], [[1, 2]], True),
        (HELLO, [HELLO], True),
        ([], [], False),
        (["a"], ["a"], False),
        (["a", "b"], ["a", "b"], False),
        ([[1, 2], [3]], [[1, 2], [3]], False),
        ([[1, 2], []], [[1, 2], []], False),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]], False),
        ([HELLO, HELLO], [HELLO, HELLO], False),
    ],
)
def test_every_form_of_prompts_is_understood(given: Any, prompts: Any, single: bool) -> None:
    assert normalized(given) == (prompts, single)


@pytest.mark.parametrize(
    ("given", "position"),
    [
        (3, "prompts of type int"),
        (None, "prompts of type NoneType"),
        (b"abc", "prompts of type bytes"),
        ({"role": "user"}, "prompts of type dict"),
        ([1, "a"], "prompts[1]"),
        (["a", [1]], "prompts[1]"),
        ([[1], "a"], "prompts[1]"),
        ([True], "prompts[0]"),
        ([1.5], "prompts[0]"),
        ([[1, None]], "prompts[0][1]"),
        ([["a"]], "prompts[0]"),
        ([None], "prompts[0]"),
    ],
)
def test_anything_else_is_a_type_error_that_names_the_position(given: Any, position: str) -> None:
    with pytest.raises(TypeError) as caught:
        normalized(given)
    assert str(caught.value).startswith(position)
    assert "must be a text, a list of token ids" in str(caught.value)
