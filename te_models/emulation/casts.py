"""Casts to FP8 as Transformer Engine's kernels make them, in plain PyTorch.

x is multiplied by a scale, clamped to what the format holds (TE's casts saturate, torch's may give NaN) and
rounded to nearest even; `scale_inv` undoes the scale after the GEMM. What differs is what shares a scale: a
tensor, a 1x128 row, a 128x128 tile, or 32 neighbours (MX, whose scales are powers of two alone).

T tokens, D features; matrices are [rows, columns].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK, MX_BLOCK = 128, 32
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Quantized:
    """FP8 `data` [M, N] and its float32 `scale_inv`: [] for the whole, or [M/m, N/n] for blocks of m x n."""

    data: Tensor
    scale_inv: Tensor
    block: tuple[int, int] | None = None
    fits_bfloat16: bool = True  # what `dequantize` gives for blocks, if their scales are powers of two

    def dequantize(self) -> Tensor:
        """[M, N] float32."""
        values = widen(self.data)
        if self.block is None:
            return values * self.scale_inv
        rows, columns = values.shape
        tiles = _tiles(values, self.block)  # [M/m, m, N/n, n]
        return _untiled(tiles * self.scale_inv[:, None, :, None])[:rows, :columns]


def widen(data: Tensor) -> Tensor:
    """FP8 to float32, exact. CPUs look values up: torch converts one after the other, five times slower."""
    if data.device.type != "cpu":
        return data.float()
    return _table(data.dtype).index_select(0, data.view(torch.uint8).int().flatten()).view(data.shape)


@cache
def _table(dtype: torch.dtype) -> Tensor:
    with torch.device("cpu"):
        return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def largest(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """The largest magnitude (amax) in float32, over `dim` or all; NaN is skipped, as by CUDA's fmaxf."""
    magnitude = x.detach().float().abs().nan_to_num_(nan=0.0, posinf=float("inf"))
    return magnitude.amax() if dim is None else magnitude.amax(dim)


def scale_of(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """The scale that takes `amax` to the largest value of `dtype`; 1 where amax is 0 or not finite.

    At most float32's largest value; `power_of_two` rounds it down.
    """
    # Of a number and a tensor torch would take the reciprocal and multiply, which rounds twice.
    scale = (torch.full_like(amax, torch.finfo(dtype).max) / amax).clamp(max=FLOAT32_MAX)
    if power_of_two:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)  # keep sign and exponent
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 to FP8, to nearest even; what is too large, infinities included, becomes the largest value."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def cast_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantized:
    """Per-tensor cast with a scale [] known beforehand (delayed scaling)."""
    return Quantized(saturate(x.float() * scale, dtype), scale.reciprocal())


def cast_tensor(x: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None) -> Quantized:
    """Per-tensor cast with the scale of this very tensor (current scaling), or of `amax` []."""
    amax = largest(x) if amax is None else amax
    return cast_with_scale(x, scale_of(amax, dtype, power_of_two=False), dtype)


def cast_blocks(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int], *, power_of_two: bool = True
) -> Quantized:
    """A scale for each `block` of x [M, N], as (1, 128) or (128, 128), cut off at the ends."""
    tiles = _tiles(x.float(), block)  # [M/m, m, N/n, n]
    scale = scale_of(largest(tiles, (1, 3)), dtype, power_of_two=power_of_two)
    data = saturate(_untiled(tiles * scale[:, None, :, None]), dtype)
    return Quantized(data[: x.shape[0], : x.shape[1]], scale.reciprocal(), block, power_of_two)


def cast_mx(x: Tensor, dtype: torch.dtype, *, dim: int) -> Quantized:
    """A power-of-two scale (E8M0) for every 32 neighbours of x [M, N] along `dim`; MX formats v1.0, 6.3.

    The scale is rounded up, so that nothing saturates. ValueError if `dim` is no multiple of 32.
    """
    if x.shape[dim] % MX_BLOCK:
        raise ValueError(
            f"--fp8_scenario mxfp8: a side of {x.shape[dim]} is no multiple of {MX_BLOCK}, the values that "
            "share a scale; use another recipe"
        )
    block = (MX_BLOCK, 1) if dim == 0 else (1, MX_BLOCK)
    tiles = _tiles(x.float(), block)
    exponent = mx_exponent(largest(tiles, (1, 3)), dtype)
    # A biased exponent of 0 is that of blocks of zeros; TE leaves their values alone.
    scale = _power_of_two(torch.where(exponent > 0, 127 - exponent, 0))
    data = saturate(_untiled(tiles * scale[:, None, :, None]), dtype)
    return Quantized(data, _power_of_two(exponent - 127), block)


def mx_exponent(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest biased E8M0 exponent, int32 in [0, 254], whose scale brings `amax` into `dtype`."""
    wanted = (amax * (1.0 / torch.finfo(dtype).max)).clamp(max=FLOAT32_MAX)
    mantissa, exponent = torch.frexp(wanted)  # mantissa in [0.5, 1)
    rounded_up = torch.where(mantissa > 0.5, exponent, exponent - 1)
    return torch.where(wanted > 0, (rounded_up + 127).clamp(0, 254), 0).int()


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def _tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[M, N] as [M/m, m, N/n, n], filled up with zeros."""
    (m, n), (rows, columns) = block, x.shape
    if rows % m or columns % n:
        x = F.pad(x, (0, -columns % n, 0, -rows % m))
    return x.reshape(x.shape[0] // m, m, x.shape[1] // n, n)


def _untiled(tiles: Tensor) -> Tensor:
    return tiles.flatten(2, 3).flatten(0, 1)
