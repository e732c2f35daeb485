"""The CUDA kernels of the loss: cross entropy in two passes over a row, not a dozen, and scaled copies."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from training.fp8_triton import block, store_columns, to_fp8

BLOCK_ROWS, BLOCK_COLUMNS = 128, 64  # of casts in both layouts


@triton.jit
def cross_entropy_kernel(
    logits,
    labels,
    loss,
    correct,
    log_sums,
    stride,
    vocab,
    ignore,
    WRITE_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: an online softmax, then (for the gradient) a second pass that overwrites the row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    valid = label != ignore
    top = -float("inf")
    best = tl.zeros([], tl.int32)  # where the first of the largest logits stands
    total = 0.0
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        largest = tl.max(x)
        best = tl.where(largest > top, tl.min(tl.where(x == largest, columns, vocab)), best)
        new_top = tl.maximum(top, largest)
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top))
        top = new_top
    log_sum = top + tl.log(total)
    picked = tl.load(logits + tl.where(valid, label, 0)).to(tl.float32)
    tl.store(loss + row, tl.where(valid, log_sum - picked, 0.0))
    tl.store(correct + row, (valid & (label == best)).to(tl.int32))
    tl.store(log_sums + row, log_sum)
    if WRITE_GRAD:
        tl.debug_barrier()  # every thread has read the label's logit before it is overwritten
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + columns, mask=columns < vocab, other=0.0).to(tl.float32)
            grad = tl.exp(x - log_sum) - tl.where(columns == label, 1.0, 0.0)
            grad = tl.where(valid, grad, 0.0)
            tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < vocab)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore: int, write_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss (float32), correct predictions (int64) and rows' logs of summed exponentials (float32).

    `logits` are row-contiguous [rows, V], and overwritten by their gradient if asked.
    """
    rows, vocab = logits.shape
    loss, log_sum = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(2))
    correct = torch.empty(rows, device=logits.device, dtype=torch.int32)
    cross_entropy_kernel[(rows,)](
        *(logits, labels, loss, correct, log_sum),
        *(logits.stride(0), vocab, ignore, write_grad),
        BLOCK=8192,
        num_warps=16,
    )
    return loss.sum(), correct.sum(), log_sum


@triton.jit
def cast_kernel(
    matrix,
    rows,
    columns,
    scale,
    height,
    width,
    WITH_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`matrix` [height, width] times `scale` to E4M3, as it is and transposed."""
    quads, f, inside = block(height, width, ROWS, COLUMNS)
    factor = tl.load(scale)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.uint32)
    for i in tl.static_range(4):
        at = (quads * 4 + i)[:, None] * width + f[None, :]
        bits = to_fp8(tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32), factor, 448.0, False)
        tl.store(rows + at, bits, mask=inside)
        packed |= bits.to(tl.uint32) << (8 * i)
    if WITH_COLUMNS:
        store_columns(packed, columns, height // 4, quads, f, inside)


def cast_both(matrix: Tensor, scale: Tensor, *, columns: bool) -> tuple[Tensor, Tensor | None]:
    """`matrix` [M, N] times the float32 scalar `scale` in E4M3, [M, N], and [N, M] if `columns`.

    M must be a multiple of 4.
    """
    matrix, (height, width) = matrix.contiguous(), matrix.shape
    rows = matrix.new_empty(height, width, dtype=torch.uint8)
    turned = matrix.new_empty(width, height, dtype=torch.uint8) if columns else None
    cast_kernel[_blocks(height, width)](
        *(matrix, rows, turned.view(torch.int32) if columns else scale, scale, height, width, columns),
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS,
        num_warps=8,
    )
    return rows.view(torch.float8_e4m3fn), turned.view(torch.float8_e4m3fn) if columns else None


@triton.jit
def gradient_kernel(
    logits,
    labels,
    log_sums,
    rows,
    columns,
    height,
    vocab,
    stride,
    ignore,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """softmax(logits) less one at the label, times `scale`, to E5M2, as it is and transposed."""
    quads, f, inside = block(height, vocab, ROWS, COLUMNS)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.uint32)
    for i in tl.static_range(4):
        t = quads * 4 + i
        label = tl.load(labels + t, mask=t < height, other=ignore)[:, None]
        log_sum = tl.load(log_sums + t, mask=t < height, other=0.0)[:, None]
        at = t[:, None] * vocab + f[None, :]
        x = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.exp(x - log_sum) - tl.where(f[None, :] == label, 1.0, 0.0)
        bits = to_fp8(tl.where(label != ignore, grad, 0.0), scale, 57344.0, True)
        tl.store(rows + at, bits, mask=inside)
        packed |= bits.to(tl.uint32) << (8 * i)
    store_columns(packed, columns, stride, quads, f, inside)


def gradient_both(
    logits: Tensor, labels: Tensor, log_sum: Tensor, columns: Tensor, at: int, *, ignore: int, scale: float
) -> Tensor:
    """See `loss_fp8.cast_gradient`; rows, `at` and the width of `columns` multiples of 4."""
    height, vocab = logits.shape
    rows = logits.new_empty(height, vocab, dtype=torch.uint8)
    quads = columns.view(torch.int32)  # [V, width / 4]
    gradient_kernel[_blocks(height, vocab)](
        *(logits, labels, log_sum, rows, quads[:, at // 4 :]),
        *(height, vocab, quads.stride(0), ignore, scale),
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS,
        num_warps=8,
    )
    return rows.view(torch.float8_e5m2)


def _blocks(height: int, width: int) -> tuple[int, int]:
    return triton.cdiv(height, BLOCK_ROWS), triton.cdiv(width, BLOCK_COLUMNS)


@triton.jit
def scaled_kernel(source, factor, target, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < numel, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(target + at, x.to(target.dtype.element_ty), mask=at < numel)


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """See `loss.scaled`. torch multiplies by a scalar on the device at a quarter of this speed."""
    target = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    scaled_kernel[(triton.cdiv(tensor.numel(), 4096),)](
        tensor.contiguous(), factor, target, tensor.numel(), BLOCK=4096
    )
    return target
