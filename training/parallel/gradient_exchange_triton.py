"""CUDA kernels of `gradient_exchange`: pack and unpack FP8 blocks in one pass over memory each.

A packed row holds the codes of its m blocks, then their exponents. Values are those of the reference, except
that sums of more than 8 rows are added in another order, and means are sums times a rounded 1/N.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fp8_suite.training.parallel import gradient_exchange
from torch import Tensor

BLOCK = tl.constexpr(gradient_exchange.FP8_BLOCK)
EXPONENT = tl.constexpr(gradient_exchange.FP8_EXPONENT)
NOT_FINITE = tl.constexpr(gradient_exchange.NOT_FINITE)
BLOCKS = tl.constexpr(16)  # blocks of one program; m is a multiple, which aligns all rows to 16 bytes


@triton.jit
def pack_kernel(values, packed, width, blocks):
    """Pack BLOCKS blocks of a row of `width` values, followed by zeros."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    # As integers magnitudes keep their order, and NaNs are above infinity.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    exponents = tl.where(largest == 0, 0, tl.maximum((largest >> 23) - 126, -118))  # largest < 2**exponent
    exponents = tl.where(exponents > 127, NOT_FINITE, exponents)
    scales = ((EXPONENT - exponents + 127) << 23).to(tl.float32, bitcast=True)
    codes = (x * scales[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    tl.store(packed + row * blocks * (BLOCK + 1) + at, codes)
    to = packed + (row * (BLOCK + 1) + BLOCK) * blocks + block
    tl.store(to, exponents.to(tl.int8).to(tl.uint8, bitcast=True))


@triton.jit
def unpack_kernel(packed, out, width, blocks, terms, factor):
    """Write to BLOCKS blocks of an output row the sum of `terms` packed rows, in order, times `factor`."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCKS, BLOCK), tl.float32)
    for term in range(terms):
        source = row * terms + term
        codes = tl.load(packed + source * blocks * (BLOCK + 1) + at)
        exponents = tl.load(packed + (source * (BLOCK + 1) + BLOCK) * blocks + block)
        exponents = exponents.to(tl.int8, bitcast=True).to(tl.int32)
        scales = ((exponents - EXPONENT + 127) << 23).to(tl.float32, bitcast=True)
        scales = tl.where(exponents == NOT_FINITE, float("nan"), scales)
        total += codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scales[:, None]
    tl.store(out + row * width + at, (total * factor).to(out.dtype.element_ty), mask=at < width)


def pack_fp8(values: Tensor) -> Tensor:
    """Implement `gradient_exchange.pack_fp8`, with zeros up to a multiple of BLOCKS blocks."""
    values, (rows, width) = values.contiguous(), values.shape
    programs = triton.cdiv(width, BLOCK.value * BLOCKS.value)
    blocks = programs * BLOCKS.value
    packed = values.new_empty(rows, blocks * (BLOCK.value + 1), dtype=torch.uint8)
    pack_kernel[programs, rows](values, packed, width, blocks, num_warps=4)
    return packed


def sum_fp8(packed: Tensor, out: Tensor, *, mean: bool) -> None:
    """Implement `gradient_exchange.sum_fp8`, with the rows of `packed` added in their order."""
    _unpack(packed, out[None], 1 / len(packed) if mean else 1.0)


def decode_fp8(packed: Tensor, out: Tensor) -> None:
    """Implement `gradient_exchange.decode_fp8`."""
    _unpack(packed, out, 1.0)


def _unpack(packed: Tensor, out: Tensor, factor: float) -> None:
    assert packed.is_contiguous() and out.is_contiguous(), "the kernel needs contiguous tensors"
    (rows, width), blocks = out.shape, packed.shape[1] // (BLOCK.value + 1)
    sizes = width, blocks, len(packed) // rows
    unpack_kernel[blocks // BLOCKS.value, rows](packed, out, *sizes, factor, num_warps=4)
