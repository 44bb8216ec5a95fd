"""What Triton's interpreter lacks or gets wrong: bfloat16 in matrix products and casts, and CUDA's library of functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray


def mend(interpreter: Any) -> None:
    """Replace what is wrong in Triton's module `interpreter`."""
    from triton.language.extra import libdevice

    builder = interpreter.InterpreterBuilder
    cast, convert, product = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def handle(data: NDArray[Any], dtype: Any) -> Any:
        return interpreter.TensorHandle(data, dtype)

    def widened(part: Any) -> Any:
        return handle(_widened(part.data), tl.float32) if part.dtype.scalar == tl.bfloat16 else part

    def casted(self: Any, source: Any, wanted: Any) -> Any:
        if tl.bfloat16 not in (source.dtype.scalar, wanted.scalar) or source.dtype.scalar == wanted.scalar:
            return cast(self, source, wanted)
        whole = widened(source)
        if wanted.scalar != tl.bfloat16:
            return whole if wanted.scalar == tl.float32 else cast(self, whole, wanted)
        return handle(_narrowed(cast(self, whole, tl.float32).data), tl.bfloat16)

    def converted(self: Any, source: Any, wanted: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, wanted.scalar):
            return casted(self, source, wanted)
        return convert(self, source, wanted, rounding)

    def multiplied(self: Any, one: Any, other: Any, *rest: Any) -> Any:
        return product(self, widened(one), widened(other), *rest)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = casted, converted, multiplied
    # Of `tl`'s own, the interpreter replaces what a kernel's module names.
    libdevice.exp = lambda x: tl.tensor(handle(np.exp(x.handle.data), x.handle.dtype), x.type)


def _widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrowed(numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16).reshape(np.shape(numbers))
