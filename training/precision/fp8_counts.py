"""What casts to FP8 did to tensors: counted where the tensors are, added up over a step, read at its end.

A step has hundreds of tensors, so nothing here waits for the GPU before `Tally.take`, and temporary copies
are of a part of a tensor (some 100 MB), whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

Stats = dict[str, float]
ROUNDING = 1 + 1e-6  # amax / scale may come out a float32 step above the largest value
PART = 2**24  # elements looked at in one go: float32 counts as many exactly
SHARES, SCALES = {"underflow", "overflow"}, {"scale_min", "scale_max"}


def cast_counts(
    original: Tensor | None,
    data: Tensor,
    scale_inv: Tensor | None,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """What a cast of `original` [M, N] to the FP8 `data` did, as [6] float64, which `merge` adds up.

    Elements, underflows, overflows; amax, largest scale, smallest scale with its sign turned. `scale_inv`,
    the inverse of what `original` was multiplied by, is [M/m, N/n] (rounded up) for blocks of m x n, or one
    number for all. Without `original` the amax is that of `data`; without `scale_inv` nothing overflows.
    """
    data = data.detach().reshape(-1, data.shape[-1])
    original = None if original is None else original.detach().reshape(data.shape)
    if scale_inv is None:
        scale_inv = torch.full((), torch.inf, device=data.device)
    if block is None:  # like blocks of a row each
        block, scale_inv = (1, data.shape[1]), scale_inv.reshape(1, 1).expand(len(data), 1)
    at_once = max(PART // data.shape[1] // block[0], 1)  # rows of blocks
    found, amaxes = [], []
    for start in range(0, len(scale_inv), at_once):
        rows = slice(start * block[0], (start + at_once) * block[0])
        part = None if original is None else original[rows]
        counts, amax = _counts(part, data[rows], scale_inv[start : start + at_once].float(), block)
        found.append(counts)
        amaxes.append(amax)
    values, kept, overflows = torch.stack(found).sum(0, dtype=torch.float64)
    amax, scale = torch.cat(amaxes), scale_inv.float().reciprocal()  # [M/m, N/n]
    # Of a block of zeros a scale says nothing; where there is nothing else, it is all there is.
    silent = (amax == 0) & (amax != 0).any()
    numbers = [
        torch.full_like(values, data.numel()),
        values - kept,
        overflows,
        amax.amax(),
        scale.masked_fill(silent, -torch.inf).amax(),
        -scale.masked_fill(silent, torch.inf).amin(),
    ]
    return torch.stack([number.double() for number in numbers])


def _counts(
    original: Tensor | None, data: Tensor, scale_inv: Tensor, block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Of some rows of blocks: values that are not zero, data that are not, overflows, [3]; each block's amax.

    `scale_inv` (float32) and the amaxes are [M/m, N/n].
    """
    each = scale_inv[:, None, :, None]
    tiles = _tiles(data.float(), block) * each if original is None else _tiles(original, block)
    magnitude = tiles.abs()
    # `each` has dimensions, so that BF16 is compared with it in float32, without a copy of its own.
    overflows = magnitude > torch.finfo(data.dtype).max * each * ROUNDING
    counts = [_not_zero(tensor) for tensor in (tiles, data, overflows)]
    return torch.stack(counts), magnitude.amax((1, 3))


def _not_zero(x: Tensor) -> Tensor:
    """How many elements are not zero, [] float32; a norm, since sums of bools make int64 copies on a GPU."""
    x = x.to(torch.bfloat16) if x.itemsize == 1 else x
    return torch.linalg.vector_norm(x, 0, dtype=torch.float32)


def _tiles(x: Tensor, block: tuple[int, int]) -> Tensor:
    """x [M, N] as blocks of m x n, [M/m, m, N/n, n]; what the last ones lack is zero."""
    (m, n), (rows, columns) = block, x.shape
    if columns % n or rows % m:
        x = pad(x, (0, -columns % n, 0, -rows % m))
    return x.reshape(-1, m, x.shape[1] // n, n)


def merge(one: Tensor, other: Tensor) -> Tensor:
    """The counts [..., 6] of two casts as those of one."""
    return torch.cat([one[..., :3] + other[..., :3], torch.maximum(one[..., 3:], other[..., 3:])], -1)


def shares(counts: Sequence[float]) -> Stats:
    """The statistics of `cast_counts`' six numbers."""
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
        """One more cast, as `cast_counts` takes it; what cannot be told without what is None is left out."""
        name, counts = (module, tensor), cast_counts(original, data, scale_inv, block)
        before = self._counts.get(name)
        self._counts[name] = counts if before is None else merge(before, counts)
        unknown = (SHARES if original is None else set()) | (
            {"overflow", *SCALES} if scale_inv is None else set()
        )
        self._unknown[name] = unknown | self._unknown.get(name, set())

    def take(self, strategy: Any) -> Stats:
        """The statistics over all ranks, which ran the same modules; collective. The tally is empty then."""
        if not self._counts:
            return {}
        names, self._counts, found = sorted(self._counts), {}, self._counts
        self._unknown, unknown = {}, self._unknown
        counts = torch.stack([found[name] for name in names])  # [casts, 6]
        counts = torch.cat([strategy.sum(counts[:, :3]), strategy.max(counts[:, 3:])], -1)
        return {
            f"fp8/{'/'.join(name)}/{statistic}": value
            for name, row in zip(names, counts.tolist(), strict=True)
            for statistic, value in shares(row).items()
            if statistic not in unknown[name]
        }
