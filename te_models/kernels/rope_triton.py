"""CUDA kernel of `rope`: split TE's QKV projection and apply RoPE, forward and backward.

T tokens, H query heads, G key/value groups, R = H / G, K head size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements per load: 16 bytes per thread


@triton.jit
def qkv_rope_kernel(
    qkv,
    q,
    k,
    v,
    table,
    positions,
    tokens,
    groups,
    PER_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Process all heads of one group for `TOKENS` tokens per program, half a head per load.

    The halves x, y of a head become x cos a - y sin a and y cos a + x sin a for angle a. BACKWARD reads the
    gradients of q, k and v, rotates by -a and writes the gradient of `qkv`.
    """
    HALF: tl.constexpr = SIZE // 2
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (t < tokens)[:, None] & (column < HALF)
    angle = table + tl.load(positions + t, mask=t < tokens, other=0)[:, None] * SIZE + column
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + HALF, mask=inside, other=0.0)
    if BACKWARD:
        sin = -sin
    t = t[:, None]
    joint = qkv + (t * groups + group) * (PER_GROUP + 2) * SIZE + column
    for head in tl.static_range(PER_GROUP + 2):
        if head < PER_GROUP:
            part = q + ((t * groups + group) * PER_GROUP + head) * SIZE + column
        elif head == PER_GROUP:
            part = k + (t * groups + group) * SIZE + column
        else:
            part = v + (t * groups + group) * SIZE + column
        source, target = (part, joint) if BACKWARD else (joint, part)
        first = tl.load(source, mask=inside)
        second = tl.load(source + HALF, mask=inside)
        if head <= PER_GROUP:
            x, y = first.to(tl.float32), second.to(tl.float32)
            first = (x * cos - y * sin).to(first.dtype)
            second = (y * cos + x * sin).to(second.dtype)
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
        joint += SIZE


class SplitQKVRope(torch.autograd.Function):
    """Split [..., G*(R+2)*K] into q [..., H, K] and k [..., G, K] with RoPE, and v [..., G, K]."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, table: Tensor, positions: Tensor, groups: int) -> tuple:
        ctx.save_for_backward(table, positions)
        size, lead = table.shape[1], qkv.shape[:-1]
        heads = qkv.shape[-1] // size - 2 * groups
        q, k, v = (qkv.new_empty(*lead, number, size) for number in (heads, groups, groups))
        _launch(qkv, q, k, v, table, positions, backward=False)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple:
        width = (q.shape[-2] + 2 * k.shape[-2]) * q.shape[-1]
        qkv = q.new_empty(*q.shape[:-2], width)  # [..., G*(R+2)*K]
        _launch(qkv, q.contiguous(), k.contiguous(), v.contiguous(), *ctx.saved_tensors, backward=True)
        return qkv, None, None, None


def _launch(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Tensor, positions: Tensor, *, backward: bool
) -> None:
    (heads, size), groups = q.shape[-2:], k.shape[-2]
    columns = triton.next_power_of_2(size // 2)
    tokens, block = positions.numel(), max(1, BLOCK // columns)
    sizes = {"PER_GROUP": heads // groups, "SIZE": size, "TOKENS": block, "COLUMNS": columns}
    grid = triton.cdiv(tokens, block), groups
    qkv_rope_kernel[grid](
        qkv, q, k, v, table, positions, tokens, groups, **sizes, BACKWARD=backward, num_warps=4
    )
