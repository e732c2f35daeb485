"""Counts of what casts to FP8 did to tensors, added up over a step on the device and read at its end.

A step has hundreds of tensors. So nothing here waits for the GPU before `Tally.collect`, and temporary copies
cover only a part of a tensor (some 100 MB), whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Stats = dict[str, float]
ROUNDING = 1 + 1e-6  # amax / scale may come out a float32 step above the largest value
PART = 2**24  # elements processed at once: float32 counts that many exactly


def cast_counts(
    original: Tensor | None,
    data: Tensor,
    scale_inv: Tensor | None,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """Count what a cast of `original` [M, N] to the FP8 `data` did, as [6] float64 that `merge` adds up.

    Elements, underflows, overflows; amax, largest scale, smallest scale negated. `scale_inv`, the inverse of
    what `original` was multiplied by, is [M/m, N/n] (rounded up) for blocks of m x n, or one number for all.
    Without `original` the amax is that of `data`; without `scale_inv` nothing overflows.
    """
    data = data.detach().reshape(-1, data.shape[-1])  # [M, N]
    original = None if original is None else original.detach().reshape(data.shape)
    if scale_inv is None:
        scale_inv = torch.full((), torch.inf, device=data.device)
    if block is None:  # one block per row
        block, scale_inv = (1, data.shape[1]), scale_inv.reshape(1, 1).expand(len(data), 1)
    at_once = max(PART // data.shape[1] // block[0], 1)  # rows of blocks
    counts, amaxes = [], []
    for start in range(0, len(scale_inv), at_once):
        rows = slice(start * block[0], (start + at_once) * block[0])
        part = None if original is None else original[rows]
        found = _count_part(part, data[rows], scale_inv[start : start + at_once].float(), block)
        counts.append(found[0])
        amaxes.append(found[1])
    values, kept, overflows = torch.stack(counts).sum(0, dtype=torch.float64)
    amax, scale = torch.cat(amaxes), scale_inv.float().reciprocal()  # [M/m, N/n]
    # The scale of a block of zeros means nothing, unless all blocks are zeros.
    zeros = (amax == 0) & (amax != 0).any()
    numbers = [
        torch.full_like(values, data.numel()),
        values - kept,
        overflows,
        amax.amax(),
        scale.masked_fill(zeros, -torch.inf).amax(),
        -scale.masked_fill(zeros, torch.inf).amin(),
    ]
    return torch.stack([number.double() for number in numbers])


def _count_part(
    original: Tensor | None, data: Tensor, scale_inv: Tensor, block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Count nonzero values, nonzero data and overflows [3] of some rows of blocks; and each block's amax.

    `scale_inv` (float32) and the amaxes are [M/m, N/n].
    """
    each = scale_inv[:, None, :, None]  # [M/m, 1, N/n, 1]
    tiles = _tiles(data.float(), block) * each if original is None else _tiles(original, block)
    magnitude = tiles.abs()
    # `each` has dimensions, so that BF16 is compared with it in float32, without a copy.
    overflows = magnitude > torch.finfo(data.dtype).max * each * ROUNDING
    counts = [_count_nonzero(tensor) for tensor in (tiles, data, overflows)]
    return torch.stack(counts), magnitude.amax((1, 3))


def _count_nonzero(x: Tensor) -> Tensor:
    """Count nonzero elements, [] float32; by a norm, since sums of bools make int64 copies on a GPU."""
    x = x.to(torch.bfloat16) if x.itemsize == 1 else x
    return torch.linalg.vector_norm(x, 0, dtype=torch.float32)


def _tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """View x [M, N] as blocks of m x n, [M/m, m, N/n, n], padded with zeros."""
    (m, n), (rows, columns) = block, x.shape
    if columns % n or rows % m:
        x = pad(x, (0, -columns % n, 0, -rows % m))
    return x.reshape(-1, m, x.shape[1] // n, n)


def merge(one: Tensor, other: Tensor) -> Tensor:
    """Add up the counts [..., 6] of two casts."""
    return torch.cat([one[..., :3] + other[..., :3], torch.maximum(one[..., 3:], other[..., 3:])], -1)


def shares(counts: Sequence[float]) -> Stats:
    """Turn the six numbers of `cast_counts` into statistics."""
    elements, underflows, overflows, amax, scale_max, scale_min = counts
    return {
        "underflow": underflows / elements,
        "overflow": overflows / elements,
        "amax": amax,
        "scale_min": -scale_min,
        "scale_max": scale_max,
    }


class Tally:
    """Counts of the casts of one step, by module and tensor."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], Tensor] = {}
        self._unknown: dict[tuple[str, str], set[str]] = {}

    @torch.no_grad()
    def add(
        self,
        module: str,
        tensor: str,
        original: Tensor | None,
        data: Tensor,
        scale_inv: Tensor | None,
        block: tuple[int, int] | None = None,
    ) -> None:
        """Count one more cast, see `cast_counts`. Statistics that need a missing value are omitted."""
        name, counts = (module, tensor), cast_counts(original, data, scale_inv, block)
        if name in self._counts:
            counts = merge(self._counts[name], counts)
        self._counts[name] = counts
        unknown = self._unknown.setdefault(name, set())
        if original is None:
            unknown |= {"underflow", "overflow"}
        if scale_inv is None:
            unknown |= {"overflow", "scale_min", "scale_max"}

    def collect(self, strategy: Any) -> Stats:
        """Return statistics over all ranks, which run the same modules, and empty the tally. Collective."""
        if not self._counts:
            return {}
        names, found, unknown = sorted(self._counts), self._counts, self._unknown
        self._counts, self._unknown = {}, {}
        counts = torch.stack([found[name] for name in names])  # [casts, 6]
        counts = torch.cat([strategy.sum(counts[:, :3]), strategy.max(counts[:, 3:])], -1)
        return {
            f"fp8/{'/'.join(name)}/{statistic}": value
            for name, row in zip(names, counts.tolist(), strict=True)
            for statistic, value in shares(row).items()
            if statistic not in unknown[name]
        }
