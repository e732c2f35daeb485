"""Triton functions shared by the kernels that cast to FP8 in both layouts.

FP8 GEMMs on Hopper read both operands along their inner dimension, so a matrix is stored as it is (`rows`)
and transposed (`columns`). The bytes of four rows (a quad) are packed into one 32-bit number and transposed
together: transposing single bytes is slow and gives wrong results (Triton 3.6 on an H200).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block(height, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return this program's block of [height, width]: row quads [ROWS/4], columns [COLUMNS] and a mask."""
    quads = tl.program_id(0).to(tl.int64) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    f = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return quads, f, (quads < height // 4)[:, None] & (f < width)[None, :]


@triton.jit
def to_fp8(values, scale, E5M2: tl.constexpr):
    """Return the FP8 bits of `values * scale`, saturated to the format's maximum; NaN stays NaN."""
    MAX: tl.constexpr = 57344.0 if E5M2 else 448.0
    scaled = values * scale
    clamped = tl.clamp(scaled, -MAX, MAX)
    low = clamped.to(tl.float8e5) if E5M2 else clamped.to(tl.float8e4nv)
    return tl.where(scaled == scaled, low.to(tl.uint8, bitcast=True), 0x7F)


@triton.jit
def store_columns(packed, columns, stride, quads, f, inside):
    """Store `packed` [ROWS/4, COLUMNS], four rows per 32-bit number, transposed in `columns` [., stride]."""
    tl.store(columns + f[:, None] * stride + quads[None, :], tl.trans(packed), mask=tl.trans(inside))
