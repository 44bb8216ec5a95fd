"""Device code of a mixture's experts, in Triton's language: products of rows that are grouped by expert.

Imported by `triton_experts`, which compiles and launches these functions, and only once Triton is needed. The rows of an
expert are cut into blocks; a program finds out from the begins of all experts which of them its block is of, so that grids
depend on shapes alone. Sums are float32, rounded where the modules of transformers store them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.engine.kernels.triton_layer_kernels import activated


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    begins: tl.tensor, index: tl.tensor, count: tl.constexpr, padded: tl.constexpr, size: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Expert of a block, `count` or more if there is no such block; its first row, and the end of the expert's rows."""
    at = tl.arange(0, padded)
    first = tl.load(begins + at, mask=at < count, other=0)
    end = tl.load(begins + at + 1, mask=at < count, other=0)
    blocks = (end - first + size - 1) // size
    ends = tl.cumsum(blocks, 0)
    expert = tl.sum((ends <= index).to(tl.int32), 0)
    own = at == expert
    row = tl.sum(tl.where(own, first + (index - ends + blocks) * size, 0), 0)
    return expert, row, tl.sum(tl.where(own, end, 0), 0)


def gate_and_up(
    hidden: tl.tensor,
    weight: tl.tensor,
    order: tl.tensor,
    begins: tl.tensor,
    out: tl.tensor,
    chosen: tl.constexpr,
    count: tl.constexpr,
    padded_count: tl.constexpr,
    width: tl.constexpr,
    inner: tl.constexpr,
    gelu: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """activation(gate) * up of each choice of an expert, in the order of the experts. Grid: blocks x inner / columns.

    hidden [P, width]; weight [count, 2 * inner, width], gate before up; order [P * chosen], choice of each row, of position
    choice / chosen; begins [count + 1]; out [P * chosen, inner].
    """
    expert, row, end = _block(begins, tl.program_id(0), count, padded_count, rows)
    if expert >= count:
        return
    line = row + tl.arange(0, rows)
    lines = line < end
    position = tl.load(order + line, mask=lines, other=0).to(tl.int64) // chosen
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < inner
    gate_rows = weight + (expert.to(tl.int64) * 2 * inner + column) * width
    gate = tl.zeros((rows, columns), tl.float32)
    up = tl.zeros((rows, columns), tl.float32)
    for start in range(0, width, depth):
        at = start + tl.arange(0, depth)
        known = at < width
        x = tl.load(hidden + position[:, None] * width + at[None, :], mask=lines[:, None] & known[None, :], other=0.0)
        mask = known[:, None] & inside[None, :]
        places = gate_rows[None, :] + at[:, None]
        gate = tl.dot(x, tl.load(places, mask=mask, other=0.0), gate, input_precision="ieee")
        up = tl.dot(x, tl.load(places + inner * width, mask=mask, other=0.0), up, input_precision="ieee")
    kind = out.dtype.element_ty
    made = activated(gate.to(kind).to(tl.float32), gelu).to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    target = out + line.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(target, made.to(kind), mask=lines[:, None] & inside[None, :])


def shared_down(
    inputs: tl.tensor,
    weight: tl.tensor,
    order: tl.tensor,
    begins: tl.tensor,
    shares: tl.tensor,
    out: tl.tensor,
    count: tl.constexpr,
    padded_count: tl.constexpr,
    width: tl.constexpr,
    inner: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """Output of each choice of an expert times its share, in the order of the choices. Grid: blocks x width / columns.

    inputs [P * chosen, inner], in the order of the experts; weight [count, width, inner]; order and begins as for
    `gate_and_up`; shares [P * chosen]; out [P * chosen, width].
    """
    expert, row, end = _block(begins, tl.program_id(0), count, padded_count, rows)
    if expert >= count:
        return
    line = row + tl.arange(0, rows)
    lines = line < end
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < width
    weight_rows = weight + (expert.to(tl.int64) * width + column) * inner
    total = tl.zeros((rows, columns), tl.float32)
    for start in range(0, inner, depth):
        at = start + tl.arange(0, depth)
        known = at < inner
        places = line.to(tl.int64)[:, None] * inner + at[None, :]
        x = tl.load(inputs + places, mask=lines[:, None] & known[None, :], other=0.0)
        y = tl.load(weight_rows[None, :] + at[:, None], mask=known[:, None] & inside[None, :], other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    choice = tl.load(order + line, mask=lines, other=0).to(tl.int64)
    share = tl.load(shares + choice, mask=lines, other=0.0).to(tl.float32)
    made = total.to(inputs.dtype.element_ty).to(tl.float32) * share[:, None]
    target = out + choice[:, None] * width + column[None, :]
    tl.store(target, made.to(out.dtype.element_ty), mask=lines[:, None] & inside[None, :])
