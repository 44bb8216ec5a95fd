"""Measured rates of a machine, and the weights that one token is multiplied by: what a benchmark's floor follows from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from rollout.engine.kernels import cpu_library
from rollout.engine.training import operations
from tests.benchmarks.common import seconds

LARGE_BUFFER_BYTES = 2**32
"""Read on a GPU, whose caches hold no model."""
SIDE, LARGE_SIDE = 2048, 8192
COLUMNS = 1024


@dataclass(frozen=True)
class Rates:
    """Measured rates, with as many threads as torch has."""

    bandwidth: float
    """Bytes read per second."""
    matmul: float
    """Floating point operations per second of large matrix products in the model's dtype, the fastest there is."""

    @classmethod
    def measure(cls, dtype: torch.dtype, device: torch.device, working_set: int) -> Rates:
        """Best of ten reads by each of `reads`, and of the products in `products`; about half a second.

        Args:
            working_set: bytes of the weights. As many are read on a CPU: what stays in its caches is read from there.
        """
        large = device.type == "cuda"
        count, side = (LARGE_BUFFER_BYTES, LARGE_SIDE) if large else (working_set, SIDE)
        with torch.no_grad():
            return cls(
                bandwidth=max(
                    size / min(seconds(run, device) for _ in range(10)) for size, run in reads(dtype, device, count)
                ),
                # The first of the four is for warming up.
                matmul=max(
                    operations / min(seconds(run, device) for _ in range(4))
                    for operations, run in products(dtype, device, side)
                ),
            )


def reads(dtype: torch.dtype, device: torch.device, count: int) -> list[tuple[int, Callable[[], torch.Tensor]]]:
    """Ways to read a matrix of about `count` bytes, with the bytes of each: a sum, and products with a vector."""
    matrix = torch.ones(max(1, count // (COLUMNS * dtype.itemsize)), COLUMNS, dtype=dtype, device=device)
    vector, size = matrix[:1].clone(), matrix.numel() * dtype.itemsize
    made: list[tuple[int, Callable[[], torch.Tensor]]] = [
        (size, matrix.view(torch.float32).sum),
        (size, lambda: linear(vector, matrix)),
    ]
    if _has_kernels(dtype, device):
        made.append((size, lambda: operations.linear(vector, matrix)))
    return made


def _has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and cpu_library.load() is not None


def products(dtype: torch.dtype, device: torch.device, side: int) -> list[tuple[int, Callable[[], torch.Tensor]]]:
    """Matrix products and the floating point operations of each: torch's of two shapes and, on a CPU, our own kernels'.

    On some processors the library that torch multiplies float32 with reaches half of what ours do.
    """
    square = torch.randn(side, side, device=device).to(dtype)
    flat = square[: side // 2].contiguous().view(side, side // 2)
    made: list[tuple[int, Callable[[], torch.Tensor]]] = [
        (2 * side**3, lambda: square @ square),
        (side**3, lambda: linear(flat, flat)),
    ]
    if _has_kernels(dtype, device):
        made.append((side**3, lambda: operations.linear(flat, flat)))
    return made


@dataclass(frozen=True)
class Weights:
    """Weights that one token is multiplied by. A tied parameter counts once; an embedding that is only looked up, not."""

    parameters: int
    """All of the model, tied ones once."""
    multiplied: int
    """The weights that one token is multiplied by: only the chosen experts of a mixture."""
    read_bytes: int
    """The bytes that a step of many tokens reads: all experts of a mixture."""
    head: int
    """The part of the output projection, which only sampled positions need."""

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Count those of a Hugging Face causal model."""
        config = getattr(model, "config", None)
        text: Any = config.get_text_config() if config is not None else None
        experts = next(
            (
                getattr(text, name)
                for name in ("num_experts", "num_local_experts", "n_routed_experts")
                if hasattr(text, name)
            ),
            0,
        )
        chosen = getattr(text, "num_experts_per_tok", None) or experts
        named = dict(model.named_parameters())
        tables, head = [each.weight for each in model.modules() if type(each) is nn.Embedding], None
        # Classes of other people need not have them.
        with suppress(NotImplementedError, AttributeError):
            head = model.get_output_embeddings()  # type: ignore[operator]
            tables.append(model.get_input_embeddings().weight)  # type: ignore[operator]
        looked_up = [each for each in tables if head is None or each is not head.weight]
        multiplied, read_bytes = 0.0, 0
        for name, parameter in named.items():
            if any(parameter is each for each in looked_up):
                continue
            share = chosen / experts if experts and ".experts." in name else 1.0
            multiplied += share * parameter.numel()
            read_bytes += parameter.numel() * parameter.itemsize
        return cls(
            parameters=sum(parameter.numel() for parameter in named.values()),
            multiplied=int(multiplied),
            read_bytes=read_bytes,
            head=0 if head is None else head.weight.numel(),
        )
