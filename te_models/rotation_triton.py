"""Queries, keys and values out of TE's joint projection, rotated, in one pass over memory, and back; CUDA."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from training.fp8_triton import store_columns, to_fp8

BLOCK = 1024  # of both halves of a head each: 16 bytes a thread and load
CAST_BLOCK = 4096  # 64 tokens or more, which lie side by side in the transposed gradient


@triton.jit
def part_of(queries, keys, values, t, head: tl.constexpr, PER_GROUP: tl.constexpr, SIZE: tl.constexpr):
    """Where a group's `head` of R + 2 lies apart; `t` [., 1] counts tokens times groups, and the group."""
    if head < PER_GROUP:
        return queries + (t * PER_GROUP + head) * SIZE
    elif head == PER_GROUP:
        return keys + t * SIZE
    else:
        return values + t * SIZE


@triton.jit
def rotate(first, second, cos, sin):
    """Both halves of a head, rounded."""
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(second.dtype)


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
        apart = part_of(queries, keys, values, t * groups + group, head, PER_GROUP, SIZE) + column
        source, target = (apart, together) if BACK else (together, apart)
        first = tl.load(source, mask=inside)
        second = tl.load(source + HALF, mask=inside)
        if head <= PER_GROUP:
            first, second = rotate(first, second, cos, sin)
        tl.store(target, first, mask=inside)
        tl.store(target + HALF, second, mask=inside)
        together += SIZE


@triton.jit
def rotation_cast_kernel(
    rows,
    queries,
    keys,
    values,
    table,
    positions,
    columns,
    scale,
    scale_inverse,
    amax,
    tokens,
    groups,
    PER_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    E5M2: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`rotation_kernel` for gradients, to FP8: `rows` [T, N] and `columns` [N, T]; the largest to `amax`.

    The `i`th tokens of all words of four are loaded together; their angles stay for all heads.
    """
    HALF: tl.constexpr = SIZE // 2
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    quads = tl.program_id(0).to(tl.int64) * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
    group = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    inside = (quads < tokens // 4)[:, None] & (column < HALF)[None, :]
    factor = tl.load(scale)
    if (tl.program_id(0) == 0) & (group == 0):
        tl.store(scale_inverse, tl.div_rn(1.0, factor))
    cosines, sines = (), ()
    for i in tl.static_range(4):
        position = tl.load(positions + quads * 4 + i, mask=quads < tokens // 4, other=0)
        angle = table + position[:, None] * SIZE + column[None, :]
        cosines += (tl.load(angle, mask=inside, other=0.0),)
        sines += (-tl.load(angle + HALF, mask=inside, other=0.0),)
    largest = tl.zeros((TOKENS // 4, COLUMNS), tl.float32)
    for head in tl.static_range(PER_GROUP + 2):
        f = (group * (PER_GROUP + 2) + head).to(tl.int64) * SIZE + column
        packed_first = tl.zeros((TOKENS // 4, COLUMNS), tl.uint32)
        packed_second = tl.zeros((TOKENS // 4, COLUMNS), tl.uint32)
        for i in tl.static_range(4):
            t = (quads * 4 + i)[:, None]
            apart = part_of(queries, keys, values, t * groups + group, head, PER_GROUP, SIZE) + column
            first = tl.load(apart, mask=inside, other=0.0)
            second = tl.load(apart + HALF, mask=inside, other=0.0)
            if head <= PER_GROUP:
                first, second = rotate(first, second, cosines[i], sines[i])
            first, second = first.to(tl.float32), second.to(tl.float32)
            largest = tl.maximum(largest, tl.maximum(tl.abs(first), tl.abs(second)))
            bits_first, bits_second = (
                to_fp8(first, factor, LARGEST, E5M2),
                to_fp8(second, factor, LARGEST, E5M2),
            )
            together = rows + t * (groups * (PER_GROUP + 2) * SIZE) + f
            tl.store(together, bits_first, mask=inside)
            tl.store(together + HALF, bits_second, mask=inside)
            packed_first |= bits_first.to(tl.uint32) << (8 * i)
            packed_second |= bits_second.to(tl.uint32) << (8 * i)
        store_columns(packed_first, columns, tokens // 4, quads, f, inside)
        store_columns(packed_second, columns, tokens // 4, quads, f + HALF, inside)
    tl.atomic_max(amax, tl.max(largest))


def split(joint: Tensor, table: Tensor, positions: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """[..., G * (R + 2) * K] -> [..., G * R, K] rotated, [..., G, K] rotated, [..., G, K]."""
    size, lead = table.shape[1], joint.shape[:-1]
    per_group = joint.shape[-1] // size // groups - 2
    queries, keys, values = (
        joint.new_empty(*lead, heads, size) for heads in (groups * per_group, groups, groups)
    )
    tensors = joint, queries, keys, values, table, positions
    _launch(rotation_kernel, *tensors, block=BLOCK, BACK=False, num_warps=4)
    return queries, keys, values


def join(queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """The gradient of `split`'s input from those of its results."""
    joint, parts = _to_join(queries, keys, values, dtype=queries.dtype)
    _launch(rotation_kernel, joint, *parts, table, positions, block=BLOCK, BACK=True, num_warps=4)
    return joint


def join_cast(
    queries: Tensor, keys: Tensor, values: Tensor, table: Tensor, positions: Tensor, quantizer: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`join` of BF16, cast as TE's Float8Quantizer does: uint8 [..., N] and [N, T], and the scale's inverse.

    T is a multiple of 4.
    """
    rows, parts = _to_join(queries, keys, values, dtype=torch.uint8)
    columns, scale_inverse = rows.new_empty(rows.shape[-1], positions.numel()), quantizer.amax.new_empty(1)
    tensors = rows, *parts, table, positions, columns.view(torch.int32)
    tensors += quantizer.scale, scale_inverse, quantizer.amax
    e5m2 = quantizer.dtype.name == "kFloat8E5M2"
    _launch(rotation_cast_kernel, *tensors, block=CAST_BLOCK, E5M2=e5m2, num_warps=8)
    return rows, columns, scale_inverse


def _to_join(*parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """[..., heads, K] each -> what they are to be joined in, [..., N], and themselves, contiguous."""
    width = sum(part.shape[-2:].numel() for part in parts)
    return parts[0].new_empty(*parts[0].shape[:-2], width, dtype=dtype), [t.contiguous() for t in parts]


def _launch(kernel: triton.JITFunction, *tensors: Tensor, block: int, **options: int) -> None:
    """`tensors` in the kernel's order; a program is given about `block` numbers of each half of a head."""
    _, queries, keys, _, _, positions, *_ = tensors
    (heads, size), groups = queries.shape[-2:], keys.shape[-2]
    columns = triton.next_power_of_2(size // 2)
    tokens, block = positions.numel(), max(1, block // columns)
    kernel[(triton.cdiv(tokens, block), groups)](
        *tensors,
        tokens,
        groups,
        PER_GROUP=heads // groups,
        SIZE=size,
        TOKENS=block,
        COLUMNS=columns,
        **options,
    )
