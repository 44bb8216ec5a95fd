"""Groups and journals of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout.journal import segment as journal_file
from rollout.journal.journal import Journal
from rollout.journal.segment import read_groups, segments
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status

ROOT = Path(__file__).parents[2]


def group(group_id: int, *, samples: int = 1, metadata: Any = None, text: str = "") -> list[DynamicInferenceRequest]:
    """A finished group whose samples have different lengths, the first none at all."""
    params = SamplingParams(n=samples, logprobs=1)
    made = []
    for index in range(samples):
        request = DynamicInferenceRequest(
            request_id=group_id, sample_index=index, prompt="p", prompt_tokens=[5, 6], sampling_params=params,
            generated_tokens=list(range(index)), generated_log_probs=[-0.1] * index, generated_text=text,
            generated_top_n_logprobs=[[(3, -0.5)]] * index, metadata=metadata, policy_version=2,
            policy_spans=VersionSpans([(2, 1)]), status=Status.COMPLETED, finish_reason=FinishReason.LENGTH,
        )  # fmt: skip
        made.append(request)
    return made


def fill(journal: Journal, ids: range) -> None:
    for group_id in ids:
        journal.append(group(group_id))


def ids_in(folder: Path) -> list[int]:
    return [each.samples[0].request_id for each in read_groups(folder)]


def newest(folder: Path) -> Path:
    return segments(folder)[-1].path(folder)


def flip(path: Path, position: int, bit: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, *, after: int, error: Any = None) -> Iterator[None]:
    """A call of `os` that works so often, does half of it, and then fails."""
    real: Callable[..., Any] = getattr(os, name)
    calls = iter(range(1_000_000))

    def call(*arguments: Any) -> Any:
        count = next(calls)
        if count < after:
            return real(*arguments)
        if count == after and name == "pwrite":
            descriptor, data, offset = arguments
            return real(descriptor, data[: len(data) // 2], offset)
        raise error or OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_file.os, name, call)
        yield
