"""Queries, keys and values out of TE's joint projection, rotated, in one pass over memory, and back; CUDA."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # of both halves of a head each: 16 bytes a thread and load


@triton.jit
def rotation_kernel(
    joint,
    queries,
    keys,
    values,
    table,
    positions,
    tokens,
    groups,
    PER_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BACK: tl.constexpr,
):
    """One program: all heads of one group for `TOKENS` tokens, half a head a load; `BACK` for gradients."""
    HALF: tl.constexpr = SIZE // 2
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    group = tl.program_id(1)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (t < tokens)[:, None] & (column < HALF)
    angle = table + tl.load(positions + t, mask=t < tokens, other=0)[:, None] * SIZE + column
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + HALF, mask=inside, other=0.0)
    if BACK:
        sin = -sin
    t = t[:, None]
    together = joint + (t * groups + group) * (PER_GROUP + 2) * SIZE + column
    for head in tl.static_range(PER_GROUP + 2):
        if head < PER_GROUP:
            apart = queries + ((t * groups + group) * PER_GROUP + head) * SIZE + column
        elif head == PER_GROUP:
            apart = keys + (t * groups + group) * SIZE + column
        else:
            apart = values + (t * groups + group) * SIZE + column
        source, target = (apart, together) if BACK else (together, apart)
        first = tl.load(source, mask=inside)
        second = tl.load(source + HALF, mask=inside)
        if head <= PER_GROUP:
            x, y = first.to(tl.float32), second.to(tl.float32)
            first = (x * cos - y * sin).to(first.dtype)
            second = (y * cos + x * sin).to(second.dtype)
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
        together += SIZE


def split(joint: Tensor, table: Tensor, positions: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """[..., G * (R + 2) * K] -> [..., G * R, K] rotated, [..., G, K] rotated, [..., G, K]."""
    size, lead = table.shape[1], joint.shape[:-1]
    per_group = joint.shape[-1] // size // groups - 2
    queries, keys, values = (
        joint.new_empty(*lead, heads, size) for heads in (groups * per_group, groups, groups)
    )
    _launch(joint, queries, keys, values, table, positions, back=False)
    return queries, keys, values


def join(queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """The gradient of `split`'s input from those of its results."""
    heads = queries.shape[-2] + keys.shape[-2] + values.shape[-2]
    joint = queries.new_empty(*queries.shape[:-2], heads * queries.shape[-1])
    parts = (t.contiguous() for t in (queries, keys, values))
    _launch(joint, *parts, table, positions, back=True)
    return joint


def _launch(*tensors: Tensor, back: bool) -> None:
    """`tensors` in the kernel's order."""
    _, queries, keys, _, _, positions = tensors
    (heads, size), groups = queries.shape[-2:], keys.shape[-2]
    columns = triton.next_power_of_2(size // 2)
    tokens, block = positions.numel(), max(1, BLOCK // columns)
    rotation_kernel[(triton.cdiv(tokens, block), groups)](
        *tensors,
        tokens,
        groups,
        PER_GROUP=heads // groups,
        SIZE=size,
        TOKENS=block,
        COLUMNS=columns,
        BACK=back,
        num_warps=4,
    )
