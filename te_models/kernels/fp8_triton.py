"""What kernels that cast to FP8 in both layouts have in common; CUDA.

FP8 GEMMs on Hopper read both operands along their inner dimension, so a matrix is kept as it is and
transposed. Four rows' bytes are transposed as one 32-bit number: transposing a block of single bytes is slow,
and gave wrong ones (Triton 3.6 on an H200).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block(height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's part of a matrix [height, width]: rows by four, columns, and which of both are there."""
    quads = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    f = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return quads, f, (quads < height // 4)[:, None] & (f < width)[None, :]


@triton.jit
def to_fp8(values, scale, LARGEST: tl.constexpr, E5M2: tl.constexpr):
    """FP8 bits of `values` times `scale`; the largest number where that is too large, NaN where it is NaN."""
    scaled = values * scale
    within = tl.clamp(scaled, -LARGEST, LARGEST)
    low = within.to(tl.float8e5) if E5M2 else within.to(tl.float8e4nv)
    return tl.where(scaled == scaled, low.to(tl.uint8, bitcast=True), 0x7F)


@triton.jit
def store_columns(packed, columns, stride, quads, f, inside):
    """`packed` [quads, f], of four rows each, to `columns` [., stride] of 32-bit numbers, transposed."""
    tl.store(columns + f[:, None] * stride + quads[None, :], tl.trans(packed), mask=tl.trans(inside))
