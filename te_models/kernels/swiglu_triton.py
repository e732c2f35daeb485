"""CUDA kernels of `fused_swiglu`: SwiGLU and the FP8 cast of its result, in both layouts, in one pass.

T tokens, F feed-forward size. The arithmetic matches TE's: SwiGLU is computed in float32, gradients are
rounded to BF16, then scaled and cast. `rows` or `columns` is None if that layout is not needed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fp8_suite.te_models.kernels.fp8_triton import block, store_columns, to_fp8
from torch import Tensor

TOKENS, FEATURES = tl.constexpr(128), tl.constexpr(64)  # block size


@triton.jit
def swiglu_kernel(inputs, rows, columns, scale, scale_inverse, amax, tokens, features, E5M2: tl.constexpr):
    """Cast silu(gate) * up to FP8 [T, F] and [F, T], and update `amax`; `inputs` [T, 2F] hold gate, up."""
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
        bits = to_fp8(product, factor, E5M2)
        if rows is not None:
            tl.store(rows + t * features + f[None, :], bits, mask=inside)
        packed |= bits.to(tl.uint32) << (8 * i)
    tl.atomic_max(amax, tl.max(largest))
    if columns is not None:
        store_columns(packed, columns, tokens // 4, quads, f, inside)


@triton.jit
def swiglu_backward_kernel(
    grads, inputs, rows, columns, scale, scale_inverse, amax, tokens, features, E5M2: tl.constexpr
):
    """Cast the gradients of gate and up, given `grads` [T, F], to FP8 [T, 2F] and [2F, T]; update `amax`.

    d gate = silu'(gate) * grad * up and d up = silu(gate) * grad; silu'(x) = x s (1 - s) + s, s = sigmoid(x).
    """
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
        bits_gate = to_fp8(grad_gate, factor, E5M2)
        bits_up = to_fp8(grad_up, factor, E5M2)
        if rows is not None:
            to = rows + t * (2 * features) + f[None, :]
            tl.store(to, bits_gate, mask=inside)
            tl.store(to + features, bits_up, mask=inside)
        packed_gate |= bits_gate.to(tl.uint32) << (8 * i)
        packed_up |= bits_up.to(tl.uint32) << (8 * i)
    tl.atomic_max(amax, tl.max(largest))
    if columns is not None:
        store_columns(packed_gate, columns, tokens // 4, quads, f, inside)
        store_columns(packed_up, columns, tokens // 4, quads, f + features, inside)


def launch(
    kernel: triton.JITFunction, inputs: list[Tensor], outputs: list[Tensor | None], *, e5m2: bool
) -> None:
    """Run a kernel on contiguous BF16 inputs, the last one [T, 2F], T a multiple of 4.

    `outputs`: rows and columns (uint8 or None), scale, its inverse and amax (one float32 each).
    """
    rows, columns, *scalars = outputs
    quads = None if columns is None else columns.view(torch.int32)  # [F or 2F, T/4]
    tokens, features = inputs[-1].shape[0], inputs[-1].shape[1] // 2
    grid = triton.cdiv(tokens, TOKENS), triton.cdiv(features, FEATURES)
    kernel[grid](*inputs, rows, quads, *scalars, tokens, features, E5M2=e5m2, num_warps=8)
