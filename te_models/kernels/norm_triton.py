"""RMSNorm and the cast of its result to FP8, in both layouts; CUDA.

T tokens, H hidden size. TE normalizes and casts in one kernel, and transposes what that wrote in another.
Here one reads the rows for the roots of their mean squares, and another, in blocks of many rows, normalizes,
casts and writes both layouts. It starts with the rows that were read last and may still be in the cache. The
numbers are TE's: computed in float32, scaled and cast without rounding between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.fp8_triton import store_columns, to_fp8

ROOT_TOKENS, ROOT_FEATURES, ROOT_WARPS = 1, 4096, 4
BLOCK_TOKENS, BLOCK_FEATURES, WARPS = 64, 128, 8


@triton.jit
def rmsnorm_root_kernel(
    inputs, reciprocals, tokens, features, eps, TOKENS: tl.constexpr, FEATURES: tl.constexpr
):
    """1 / rms of the rows of `inputs` [T, H] to `reciprocals` [T], float32."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    squares = tl.zeros((TOKENS, FEATURES), tl.float32)
    for start in tl.range(0, features, FEATURES, loop_unroll_factor=4):
        f = start + tl.arange(0, FEATURES)
        inside = (t < tokens)[:, None] & (f < features)[None, :]
        x = tl.load(inputs + t[:, None] * features + f[None, :], mask=inside, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(reciprocals + t, tl.rsqrt(tl.sum(squares, 1) / features + eps), mask=t < tokens)


@triton.jit
def rmsnorm_kernel(
    inputs,
    weight,
    reciprocals,
    rows,
    columns,
    scale,
    scale_inverse,
    amax,
    tokens,
    features,
    LARGEST: tl.constexpr,
    E5M2: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """weight * x / rms(x) of `inputs` [T, H], to FP8 [T, H] and [H, T]; the largest to `amax`."""
    last = tl.num_programs(1) - 1 - tl.program_id(1)
    quads = last.to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    f = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    there = quads < tokens // 4
    inside = there[:, None] & (f < features)[None, :]
    factor = tl.load(scale)
    if (last == 0) & (tl.program_id(0) == 0):
        tl.store(scale_inverse, tl.div_rn(1.0, factor))
    gain = tl.load(weight + f, mask=f < features, other=0.0).to(tl.float32)[None, :]
    packed = tl.zeros((TOKENS // 4, FEATURES), tl.uint32)
    largest = tl.zeros((TOKENS // 4, FEATURES), tl.float32)
    for i in tl.static_range(4):
        t = quads * 4 + i
        at = t[:, None] * features + f[None, :]
        reciprocal = tl.load(reciprocals + t, mask=there, other=0.0)[:, None]
        x = tl.load(inputs + at, mask=inside, other=0.0).to(tl.float32)
        y = gain * (reciprocal * x)
        largest = tl.maximum(largest, tl.abs(y))
        bits = to_fp8(y, factor, LARGEST, E5M2)
        tl.store(rows + at, bits, mask=inside)
        packed |= bits.to(tl.uint32) << (8 * i)
    tl.atomic_max(amax, tl.max(largest))
    if WITH_COLUMNS:
        store_columns(packed, columns, tokens // 4, quads, f, inside)


def launch(
    x: Tensor,
    weight: Tensor,
    eps: float,
    reciprocals: Tensor,
    rows: Tensor,
    columns: Tensor | None,
    *,
    scale: Tensor,
    scale_inverse: Tensor,
    amax: Tensor,
    e5m2: bool,
) -> None:
    """Run both kernels on contiguous BF16 tensors, `x` [T, H] and `weight` [H].

    `reciprocals` is float32 [T]; `rows` and, where they are wanted, `columns` are uint8; `scale`,
    `scale_inverse` and `amax` one float32.
    """
    tokens, features = x.shape
    rmsnorm_root_kernel[(triton.cdiv(tokens, ROOT_TOKENS),)](
        *(x, reciprocals, tokens, features, eps, ROOT_TOKENS, ROOT_FEATURES), num_warps=ROOT_WARPS
    )
    rmsnorm_kernel[(triton.cdiv(features, BLOCK_FEATURES), triton.cdiv(tokens, BLOCK_TOKENS))](
        x,
        weight,
        reciprocals,
        rows,
        scale if columns is None else columns.view(torch.int32),  # not written without WITH_COLUMNS
        scale,
        scale_inverse,
        amax,
        tokens,
        features,
        LARGEST=57344.0 if e5m2 else 448.0,
        E5M2=e5m2,
        WITH_COLUMNS=columns is not None,
        TOKENS=BLOCK_TOKENS,
        FEATURES=BLOCK_FEATURES,
        num_warps=WARPS,
    )
