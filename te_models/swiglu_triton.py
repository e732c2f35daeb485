"""SwiGLU and the cast of its result to FP8, in both layouts, in one pass over memory; CUDA.

T tokens, F feed-forward size. FP8 GEMMs on Hopper read both operands along their inner dimension, so
activations and their gradients are kept as they are and transposed. TE computes that in two passes forward
and two backward, through BF16; here it is one each. The numbers are TE's: computed in float32, the gradient
rounded to BF16, then scaled and cast.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # tokens and features of a program


@triton.jit
def _cast(values, scale, LARGEST: tl.constexpr, E5M2: tl.constexpr):
    """FP8 bits of `values` times `scale`; the largest number where that is too large, NaN where it is NaN."""
    scaled = values * scale
    within = tl.clamp(scaled, -LARGEST, LARGEST)
    low = within.to(tl.float8e5) if E5M2 else within.to(tl.float8e4nv)
    return tl.where(scaled == scaled, low.to(tl.uint8, bitcast=True), 0x7F)


@triton.jit
def _store(
    values,
    scale,
    rows,
    columns,
    tokens,
    t,
    f,
    width,
    inside,
    LARGEST: tl.constexpr,
    E5M2: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
):
    """`values` [t, f], cast, to `rows` [tokens, width], and transposed to `columns` [width, tokens]."""
    if WITH_ROWS:
        bits = _cast(values, scale, LARGEST, E5M2)
        tl.store(rows + t[:, None] * width + f[None, :], bits, mask=inside)
    if WITH_COLUMNS:
        # Transposed before the cast: Triton 3.6 mixes up the bytes of an 8-bit block.
        bits = _cast(tl.trans(values), scale, LARGEST, E5M2)
        tl.store(columns + f[:, None] * tokens + t[None, :], bits, mask=tl.trans(inside))


@triton.jit
def swiglu_kernel(
    inputs,
    rows,
    columns,
    scale,
    scale_inverse,
    amax,
    tokens,
    features,
    LARGEST: tl.constexpr,
    E5M2: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """silu(gate) * up of `inputs` [T, 2F], gate first, to FP8 [T, F] and [F, T]; the largest to `amax`."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (t < tokens)[:, None] & (f < features)[None, :]
    at = inputs + t[:, None] * (2 * features) + f[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + features, mask=inside, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.atomic_max(amax, tl.max(tl.abs(product)))
    factor = tl.load(scale)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inverse, tl.div_rn(1.0, factor))
    # fmt: off
    _store(product, factor, rows, columns, tokens, t, f, features, inside,
           LARGEST, E5M2, WITH_ROWS, WITH_COLUMNS)
    # fmt: on


@triton.jit
def swiglu_backward_kernel(
    grads,
    inputs,
    rows,
    columns,
    scale,
    scale_inverse,
    amax,
    tokens,
    features,
    LARGEST: tl.constexpr,
    E5M2: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    WITH_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of gate and up, from `grads` [T, F], to FP8 [T, 2F] and [2F, T]."""
    t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (t < tokens)[:, None] & (f < features)[None, :]
    at = inputs + t[:, None] * (2 * features) + f[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + features, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grads + t[:, None] * features + f[None, :], mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    slope = gate * sigmoid * (1 - sigmoid) + sigmoid
    grad_gate = (slope * grad * up).to(tl.bfloat16).to(tl.float32)
    grad_up = (grad * (gate * sigmoid)).to(tl.bfloat16).to(tl.float32)
    tl.atomic_max(amax, tl.maximum(tl.max(tl.abs(grad_gate)), tl.max(tl.abs(grad_up))))
    factor = tl.load(scale)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inverse, tl.div_rn(1.0, factor))
    width = 2 * features
    # fmt: off
    _store(grad_gate, factor, rows, columns, tokens, t, f, width, inside,
           LARGEST, E5M2, WITH_ROWS, WITH_COLUMNS)
    _store(grad_up, factor, rows, columns, tokens, t, f + features, width, inside,
           LARGEST, E5M2, WITH_ROWS, WITH_COLUMNS)
    # fmt: on


def launch(
    kernel: triton.JITFunction,
    read: list[Tensor],
    rows: Tensor | None,
    columns: Tensor | None,
    *,
    scale: Tensor,
    scale_inverse: Tensor,
    amax: Tensor,
    e5m2: bool,
) -> None:
    """Run a kernel on contiguous BF16 tensors, the last of them [T, 2F].

    `rows` and `columns`, where they are wanted, are uint8; `scale`, `scale_inverse` and `amax` one float32.
    """
    tokens, features = read[-1].shape[0], read[-1].shape[1] // 2
    kernel[(triton.cdiv(tokens, BLOCK), triton.cdiv(features, BLOCK))](
        *read,
        scale if rows is None else rows,  # not written without WITH_ROWS
        scale if columns is None else columns,
        scale,
        scale_inverse,
        amax,
        tokens,
        features,
        LARGEST=57344.0 if e5m2 else 448.0,
        E5M2=e5m2,
        WITH_ROWS=rows is not None,
        WITH_COLUMNS=columns is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
