"""FP8 casts with the numerics of Transformer Engine's kernels, in plain PyTorch.

x is multiplied by a scale, clamped to the format's range (TE's casts saturate, torch's may return NaN) and
rounded to nearest even. `scale_inv` undoes the scale after the GEMM. Recipes differ in the granularity of
scales: one per tensor, per 1x128 values, per 128x128 block, or per 32 values (MX, powers of two only).

Matrices are [M, N]; blocks have shape m x n.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK, MX_BLOCK = 128, 32
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Quantized:
    """FP8 `data` [M, N] with float32 `scale_inv`: [] per tensor, or [M/m, N/n] per m x n block.

    An operand without FP8 has BF16 or float32 `data` and `scale_inv` None.
    """

    data: Tensor
    scale_inv: Tensor | None = None
    block: tuple[int, int] | None = None
    fits_bfloat16: bool = True  # True if dequantization to BF16 is exact, as for power-of-two block scales

    def dequantize(self) -> Tensor:
        """Return [M, N] float32."""
        values = self.data.float()
        if self.block is None:
            return values * self.scale_inv
        rows, columns = values.shape
        tiles = tiled(values, self.block)  # [M/m, m, N/n, n]
        return _untiled(tiles * self.scale_inv[:, None, :, None])[:rows, :columns]


def amax_of(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """Return the amax in float32, over `dim` or all; NaN is ignored, as in CUDA's fmaxf."""
    magnitude = x.detach().float().abs().nan_to_num_(nan=0.0, posinf=float("inf"))
    return magnitude.amax() if dim is None else magnitude.amax(dim)


def scale_of(amax: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Return the scale that maps `amax` to the maximum of `dtype`; 1 if amax is 0 or not finite.

    Scales are clamped to float32's maximum; `power_of_two` rounds them down.
    """
    # Not number / tensor: torch would multiply by the reciprocal, which rounds twice.
    scale = (torch.full_like(amax, torch.finfo(dtype).max) / amax).clamp(max=FLOAT32_MAX)
    if power_of_two:
        scale = (scale.view(torch.int32) & ~0x7FFFFF).view(torch.float32)  # drop the mantissa
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to FP8, to nearest even; values out of range and infinities saturate."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def cast_with_scale(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Quantized:
    """Cast with a given scale [] (delayed scaling)."""
    return Quantized(saturate(x.float() * scale, dtype), scale.reciprocal())


def cast_tensor(x: Tensor, dtype: torch.dtype, *, amax: Tensor | None = None) -> Quantized:
    """Cast with a scale from the tensor's amax (current scaling), or from a given `amax` []."""
    amax = amax_of(x) if amax is None else amax
    return cast_with_scale(x, scale_of(amax, dtype, power_of_two=False), dtype)


def cast_blocks(
    x: Tensor, dtype: torch.dtype, block: tuple[int, int], *, power_of_two: bool = True
) -> Quantized:
    """Cast x [M, N] with a scale per `block`, such as (1, 128); blocks at the edges may be partial."""
    tiles = tiled(x.float(), block)  # [M/m, m, N/n, n]
    scale = scale_of(amax_of(tiles, (1, 3)), dtype, power_of_two=power_of_two)  # [M/m, N/n]
    data = saturate(_untiled(tiles * scale[:, None, :, None]), dtype)
    return Quantized(data[: x.shape[0], : x.shape[1]], scale.reciprocal(), block, power_of_two)


def cast_mx(x: Tensor, dtype: torch.dtype, *, dim: int) -> Quantized:
    """Cast x [M, N] with a power-of-two scale (E8M0) per 32 values along `dim`; MX formats v1.0, 6.3.

    The scale is rounded up, so nothing saturates.
    """
    assert x.shape[dim] % MX_BLOCK == 0, x.shape  # `check_sizes` refuses other sizes
    block = (MX_BLOCK, 1) if dim == 0 else (1, MX_BLOCK)
    tiles = tiled(x.float(), block)  # [M/m, m, N/n, n]
    exponent = mx_exponent(amax_of(tiles, (1, 3)), dtype)  # [M/m, N/n]
    scale = _power_of_two(127 - exponent)
    data = saturate(_untiled(tiles * scale[:, None, :, None]), dtype)
    return Quantized(data, _power_of_two(exponent - 127), block)


def mx_exponent(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest biased E8M0 exponent, int32 in [0, 254], that maps `amax` into range."""
    inverse_scale = (amax * (1.0 / torch.finfo(dtype).max)).clamp(max=FLOAT32_MAX)
    mantissa, exponent = torch.frexp(inverse_scale)  # mantissa in [0.5, 1)
    rounded_up = torch.where(mantissa > 0.5, exponent, exponent - 1)
    return torch.where(inverse_scale > 0, (rounded_up + 127).clamp(0, 254), 0).int()


def _power_of_two(exponent: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def tiled(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Reshape [M, N], padded with zeros, to [M/m, m, N/n, n]."""
    (m, n), (rows, columns) = block, x.shape
    if rows % m or columns % n:
        x = F.pad(x, (0, -columns % n, 0, -rows % m))
    return x.reshape(x.shape[0] // m, m, x.shape[1] // n, n)


def _untiled(tiles: Tensor) -> Tensor:
    return tiles.flatten(2, 3).flatten(0, 1)  # [M, N]
