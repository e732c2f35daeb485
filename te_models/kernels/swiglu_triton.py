"""SwiGLU and the cast of its result to FP8, in both layouts, in one pass over memory; CUDA.

T tokens, F feed-forward size. TE computes that in two passes forward and two backward, through BF16; here it
is one each. The numbers are TE's: computed in float32, the gradient rounded to BF16, then scaled and cast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from te_models.kernels.fp8_triton import block, store_columns, to_fp8

BLOCK_TOKENS, BLOCK_FEATURES = 128, 64


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
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """silu(gate) * up of `inputs` [T, 2F], gate first, to FP8 [T, F] and [F, T]; the largest to `amax`."""
    quads, f, inside = block(tokens, features, TOKENS, FEATURES)
    factor = tl.load(scale)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inverse, tl.div_rn(1.0, factor))
    packed = tl.zeros((TOKENS // 4, FEATURES), tl.uint32)
    largest = tl.zeros((TOKENS // 4, FEATURES), tl.float32)
    for i in tl.static_range(4):
        t = (quads * 4 + i)[:, None]
        at = inputs + t * (2 * features) + f[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + features, mask=inside, other=0.0).to(tl.float32)
        product = gate * tl.sigmoid(gate) * up
        largest = tl.maximum(largest, tl.abs(product))
        bits = to_fp8(product, factor, LARGEST, E5M2)
        if WITH_ROWS:
            tl.store(rows + t * features + f[None, :], bits, mask=inside)
        packed |= bits.to(tl.uint32) << (8 * i)
    tl.atomic_max(amax, tl.max(largest))
    if WITH_COLUMNS:
        store_columns(packed, columns, tokens // 4, quads, f, inside)


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
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Gradients of gate and up, from `grads` [T, F], to FP8 [T, 2F] and [2F, T]."""
    quads, f, inside = block(tokens, features, TOKENS, FEATURES)
    factor = tl.load(scale)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_inverse, tl.div_rn(1.0, factor))
    packed_gate = tl.zeros((TOKENS // 4, FEATURES), tl.uint32)
    packed_up = tl.zeros((TOKENS // 4, FEATURES), tl.uint32)
    largest = tl.zeros((TOKENS // 4, FEATURES), tl.float32)
    for i in tl.static_range(4):
        t = (quads * 4 + i)[:, None]
        at = inputs + t * (2 * features) + f[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + features, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grads + t * features + f[None, :], mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        slope = gate * sigmoid * (1 - sigmoid) + sigmoid
        grad_gate = (slope * grad * up).to(tl.bfloat16).to(tl.float32)
        grad_up = (grad * (gate * sigmoid)).to(tl.bfloat16).to(tl.float32)
        largest = tl.maximum(largest, tl.maximum(tl.abs(grad_gate), tl.abs(grad_up)))
        bits_gate = to_fp8(grad_gate, factor, LARGEST, E5M2)
        bits_up = to_fp8(grad_up, factor, LARGEST, E5M2)
        if WITH_ROWS:
            to = rows + t * (2 * features) + f[None, :]
            tl.store(to, bits_gate, mask=inside)
            tl.store(to + features, bits_up, mask=inside)
        packed_gate |= bits_gate.to(tl.uint32) << (8 * i)
        packed_up |= bits_up.to(tl.uint32) << (8 * i)
    tl.atomic_max(amax, tl.max(largest))
    if WITH_COLUMNS:
        store_columns(packed_gate, columns, tokens // 4, quads, f, inside)
        store_columns(packed_up, columns, tokens // 4, quads, f + features, inside)


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
    kernel[(triton.cdiv(tokens, BLOCK_TOKENS), triton.cdiv(features, BLOCK_FEATURES))](
        *read,
        scale if rows is None else rows,  # not written without WITH_ROWS
        scale if columns is None else columns.view(torch.int32),
        scale,
        scale_inverse,
        amax,
        tokens,
        features,
        LARGEST=57344.0 if e5m2 else 448.0,
        E5M2=e5m2,
        WITH_ROWS=rows is not None,
        WITH_COLUMNS=columns is not None,
        TOKENS=BLOCK_TOKENS,
        FEATURES=BLOCK_FEATURES,
        num_warps=8,
    )
