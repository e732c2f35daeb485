"""Recipes of the emulated layers: the casts of a GEMM's operands, with names and defaults of TE's recipes.

A linear layer runs three GEMMs: y = x W^T, dx = dy W, dW = dy^T x. The second and third contract the other
side of an operand than the first, so recipes whose scales follow rows quantize an operand along both.

TE fuses norm and SwiGLU with what follows. Delayed scaling casts their float32 results; the other recipes
cast results rounded to BF16, of which current scaling knows SwiGLU's amax from before the rounding (TE 2.20:
rmsnorm_fwd, activation_helper and their kernels).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from te_models.emulation.casts import (
    BLOCK,
    Quantized,
    cast_blocks,
    cast_mx,
    cast_tensor,
    cast_with_scale,
    largest,
)

Kind = Literal["input", "weight", "grad"]


class Format(Enum):
    """FP8 formats forward and backward."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    def dtype(self, kind: Kind) -> torch.dtype:
        return self.value[kind == "grad"]


# An operand [M, N] in FP8 for a GEMM that contracts side 0 or 1 of it.
Operand = Callable[[int], Quantized]


@dataclass
class Slot:
    """Delayed scaling of one tensor: its scale [], and where its amax is noted [1]; None where it is not."""

    scale: Tensor
    amax: Tensor | None = None

    @torch.no_grad()
    def note(self, amax: Tensor) -> None:
        if self.amax is not None:
            self.amax.copy_(torch.maximum(self.amax, amax))


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """What all recipes share."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False  # True is refused before: attention is in BF16

    casts_float32 = False  # whether the fused casts of norm and SwiGLU read float32
    scales_float32 = (
        False  # whether the scale of SwiGLU's result comes from float32, even if its cast reads BF16
    )

    @abstractmethod
    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        """x [M, N] in FP8. `slot`: of delayed scaling; `amax` []: x's own, where it is known beforehand."""


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """A scale a tensor, from the amaxes of `amax_history_len` steps: of the largest, or of the last."""

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    casts_float32 = True

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        assert slot is not None
        slot.note(largest(x))
        quantized = cast_with_scale(x, slot.scale, self.fp8_format.dtype(kind))
        return lambda side: quantized


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """A scale a tensor, from its own amax."""

    scales_float32 = True

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        quantized = cast_tensor(x, self.fp8_format.dtype(kind), amax=amax)
        return lambda side: quantized


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """A scale for 128 neighbours along the contracted side, 128x128 in weights: powers of two, or any."""

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        dtype = self.fp8_format.dtype(kind)
        lines = ((BLOCK, BLOCK), (BLOCK, BLOCK)) if kind == "weight" else ((BLOCK, 1), (1, BLOCK))
        power_of_two = not self.use_f32_scales
        return lambda side: cast_blocks(x, dtype, lines[side], power_of_two=power_of_two)


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """A power-of-two scale for 32 neighbours along the contracted side."""

    fp8_format: Format = Format.E4M3

    def quantize(self, x: Tensor, kind: Kind, slot: Slot | None, amax: Tensor | None = None) -> Operand:
        return lambda side: cast_mx(x, self.fp8_format.dtype(kind), dim=side)


Availability = bool | tuple[bool, str]


def _runs(return_reason: bool = False) -> Availability:
    return (True, "") if return_reason else True


is_fp8_available = is_fp8_block_scaling_available = is_mxfp8_available = _runs


def is_nvfp4_available(return_reason: bool = False) -> Availability:
    """NVFP4 rounds gradients at random on the GPU, which no other machine can repeat."""
    reason = "NVFP4 rounds gradients with the GPU's own random numbers, so the emulation leaves it out"
    return (False, reason) if return_reason else False
