"""Underflow, overflow, amax and scale counts of FP8 casts, accumulated on the device over a step.

Every backend reports a cast as the original tensor [M, N] and its `Quantized` form. A step has hundreds of
tensors, so nothing waits for the GPU before `Tally.collect`. Tensors are processed in parts, which limits
temporary copies to some 100 MB.

Matrices are [M, N]; blocks that share a scale have shape m x n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from fp8_suite.te_models.emulation.casts import Quantized, tiled
from torch import Tensor

Stats = dict[str, float]
ROUNDING = 1 + 1e-6  # tolerance for float32 rounding of amax / scale
PART = 2**24  # elements processed at once; float32 counts up to this are exact


def cast_counts(original: Tensor | None, cast: Quantized) -> Tensor:
    """Count elements, underflows and overflows of a cast of `original` [..., N]; `cast.data` is [M, N].

    Return [6] float64 for `merge`: elements, underflows, overflows, amax, largest scale, negated smallest
    scale. Unknown values are NaN: without `original` (the amax is then that of the cast values), or if
    `cast.scale_inv` is None.
    """
    data, block = cast.data.detach(), cast.block
    original = None if original is None else original.detach().reshape(data.shape)
    scales_known = cast.scale_inv is not None
    inverse = cast.scale_inv.float() if scales_known else torch.full((), torch.inf, device=data.device)
    if block is None:  # one block per row
        block, inverse = (1, data.shape[1]), inverse.reshape(1, 1).expand(len(data), 1)
    at_once = max(PART // data.shape[1] // block[0], 1)  # rows of blocks
    counts, amaxes = [], []
    for start in range(0, len(inverse), at_once):
        rows = slice(start * block[0], (start + at_once) * block[0])
        step = inverse[start : start + at_once, None, :, None]  # value of one code unit, [M/m, 1, N/n, 1]
        x = tiled(data[rows].float(), block) * step if original is None else tiled(original[rows], block)
        magnitude = x.abs()
        # `step` is not a scalar tensor, so BF16 is compared in float32 without a copy.
        overflows = magnitude > torch.finfo(data.dtype).max * step * ROUNDING
        counts.append(torch.stack([_count_nonzero(tensor) for tensor in (x, data[rows], overflows)]))
        amaxes.append(magnitude.amax((1, 3)))
    values, kept, overflows = torch.stack(counts).sum(0, dtype=torch.float64)
    amax, scale = torch.cat(amaxes), inverse.reciprocal()  # [M/m, N/n]
    # Ignore the scales of all-zero blocks, unless all blocks are zero.
    zeros = (amax == 0) & (amax != 0).any()
    unknown = torch.full_like(values, math.nan)
    numbers = [
        torch.full_like(values, data.numel()),
        values - kept if original is not None else unknown,
        overflows if original is not None and scales_known else unknown,
        amax.amax(),
        scale.masked_fill(zeros, -torch.inf).amax() if scales_known else unknown,
        -scale.masked_fill(zeros, torch.inf).amin() if scales_known else unknown,
    ]
    return torch.stack([number.double() for number in numbers])


def _count_nonzero(x: Tensor) -> Tensor:
    """Count nonzero elements, [] float32. Uses a norm: summing bools makes int64 copies on a GPU."""
    x = x.to(torch.bfloat16) if x.itemsize == 1 else x
    return torch.linalg.vector_norm(x, 0, dtype=torch.float32)


def merge(a: Tensor, b: Tensor) -> Tensor:
    """Combine the counts [..., 6] of two casts."""
    return torch.cat([a[..., :3] + b[..., :3], torch.maximum(a[..., 3:], b[..., 3:])], -1)


def shares(counts: Sequence[float]) -> Stats:
    """Convert the six numbers of `cast_counts` to statistics; unknown ones are left out."""
    elements, underflows, overflows, amax, scale_max, scale_min = counts
    statistics = {
        "underflow": underflows / elements,
        "overflow": overflows / elements,
        "amax": amax,
        "scale_min": -scale_min,
        "scale_max": scale_max,
    }
    return {name: value for name, value in statistics.items() if name == "amax" or not math.isnan(value)}


class Tally:
    """Counts of the casts of one step, by module and tensor."""

    def __init__(self) -> None:
        self._counts: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, module: str, tensor: str, original: Tensor | None, cast: Quantized) -> None:
        """Add the counts of a cast of `original` (None: unknown)."""
        name, counts = f"{module}/{tensor}", cast_counts(original, cast)
        self._counts[name] = merge(self._counts[name], counts) if name in self._counts else counts

    def collect(self, strategy: Any) -> Stats:
        """Return statistics reduced over all ranks and clear the counts. Collective."""
        names = sorted(self._counts)
        if not names:
            return {}
        counts = torch.stack([self._counts.pop(name) for name in names])  # [casts, 6]
        counts = torch.cat([strategy.sum(counts[:, :3]), strategy.max(counts[:, 3:])], -1)
        return {
            f"fp8/{name}/{statistic}": value
            for name, row in zip(names, counts.tolist(), strict=True)
            for statistic, value in shares(row).items()
        }
