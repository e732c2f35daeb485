"""FP8 weights of checkpoints: E4M3 values with one scale per block, row or tensor. Pure functions.

A weight [rows, columns] in blocks of R x C has scales [ceil(rows / R), ceil(columns / C)], so the last blocks
may be smaller. Its values are weight x scale, computed in FP32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Block = tuple[int | None, int | None]  # rows and columns that share a scale; None: all of them
TENSOR: Block = (None, None)
ROW: Block = (1, None)
SQUARE: Block = (128, 128)  # DeepSeek's and Qwen3's


def scale_grid(shape: Sequence[int], block: Block) -> list[int]:
    """Return the shape of the scales of a weight with this shape."""
    return [1 if size is None else -(-length // size) for length, size in zip(shape, block, strict=True)]


def describe_block(block: Block) -> str:
    """Return which values share a scale."""
    names = {TENSOR: "tensor", ROW: "row"}
    return names.get(block) or "block of {} x {}".format(*(size or "all" for size in block))


def dequantize(values: Tensor, scales: Tensor, block: Block, *, first_row: int = 0) -> Tensor:
    """Return FP8 values times scales in FP32, on the device of `values`.

    `values` are rows first_row to first_row + n of a weight [rows, columns]; `scales` are all of its scales.
    """
    rows, columns = values.shape
    scales = scales.to(values.device, torch.float32)
    height, width = block[0] or first_row + rows, block[1] or columns
    numbers = torch.arange(first_row, first_row + rows, device=values.device)
    scales = scales[numbers // height]  # [n, ceil(columns / width)]
    result = values.float()
    whole = columns // width  # blocks that are not cut off
    result[:, : whole * width].unflatten(1, (whole, width)).mul_(scales[:, :whole, None])
    if whole * width < columns:
        result[:, whole * width :].mul_(scales[:, whole:])
    return result
