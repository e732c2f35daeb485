"""FP8 recipes of the emulated layers, with the names, arguments and defaults of TE's recipes.

A linear layer runs three GEMMs: y = x W^T, dx = dy W (dgrad), dW = dy^T x (wgrad). Two of them read each
operand and contract different dimensions, so recipes with block scales quantize it along each dimension.

NVFP4 is not emulated: it rounds stochastically, with the GPU's random numbers.

TE fuses norm and SwiGLU with the following cast. Delayed scaling casts their float32 results. The other
recipes cast results rounded to BF16, but current scaling computes SwiGLU's amax before the rounding
(TE 2.20: rmsnorm_fwd, activation_helper and their kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from fp8_suite.te_models.emulation.casts import (
    BLOCK,
    Quantized,
    amax_of,
    cast_blocks,
    cast_mx,
    cast_tensor,
    cast_with_scale,
)
from torch import Tensor

Kind = Literal["input", "weight", "grad"]


class Format(Enum):
    """FP8 formats of the forward and the backward pass."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    def dtype(self, kind: Kind) -> torch.dtype:
        return self.value[kind == "grad"]


# An operand [M, N] of GEMMs: call it with the dimension that a GEMM contracts, 0 or 1, to get it quantized.
Operand = Callable[[int], Quantized]


@dataclass
class Slot:
    """Delayed scaling of one tensor: its scale [], and its amax [] in row 0 of the history."""

    scale: Tensor
    amax: Tensor | None = None  # None if the amax is already recorded


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base class of the recipes; an instance of it keeps operands in high precision."""

    fp8_format: Format = Format.HYBRID

    casts_float32 = False  # norm and SwiGLU are cast from float32
    scales_float32 = False  # SwiGLU's scale comes from its float32 result

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        """Return x [M, N] as an operand; `slot` is for delayed scaling, `amax` [] is its amax if known."""
        return lambda dim: Quantized(x, fits_bfloat16=x.dtype == torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the maximum of the amaxes of past steps."""

    amax_history_len: int = 1024

    casts_float32 = True

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        if slot.amax is not None:
            slot.amax.copy_(torch.maximum(slot.amax, amax_of(x)))
        quantized = cast_with_scale(x, slot.scale, self.fp8_format.dtype(kind))
        return lambda dim: quantized


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, from its current amax."""

    scales_float32 = True

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        quantized = cast_tensor(x, self.fp8_format.dtype(kind), amax=amax)
        return lambda dim: quantized


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """One scale per 1x128 values along the contracted dimension; per 128x128 block for weights."""

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False  # float32 scales instead of powers of two

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        square = (BLOCK, BLOCK)
        blocks = (square, square) if kind == "weight" else ((BLOCK, 1), (1, BLOCK))
        options = {"power_of_two": not self.use_f32_scales}
        return lambda dim: cast_blocks(x, self.fp8_format.dtype(kind), blocks[dim], **options)


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale per 32 values along the contracted dimension."""

    fp8_format: Format = Format.E4M3

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        return lambda dim: cast_mx(x, self.fp8_format.dtype(kind), dim=dim)
