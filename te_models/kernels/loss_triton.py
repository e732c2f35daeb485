"""CUDA kernels of `loss` and `loss_fp8`.

T tokens, D hidden size, V vocabulary. A matrix that two FP8 GEMMs read is written in both layouts: `rows` and
`columns` (transposed), see `fp8_triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from fp8_suite.te_models.kernels.fp8_triton import block, store_columns, to_fp8
from torch import Tensor

ROWS, COLUMNS = tl.constexpr(128), tl.constexpr(64)  # block size of casts to both layouts


@triton.jit
def cross_entropy_kernel(
    logits, labels, loss, correct, log_sums, stride, vocab, ignore, GRAD: tl.constexpr, BLOCK: tl.constexpr
):
    """Process one row per program: online softmax, then, if GRAD, a second pass writes the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    valid = label != ignore
    top = -float("inf")
    best = tl.zeros([], tl.int32)  # index of the first maximum
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
    if GRAD:
        tl.debug_barrier()  # wait until all threads have read the label's logit, which is overwritten below
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + columns, mask=columns < vocab, other=0.0).to(tl.float32)
            grad = tl.exp(x - log_sum) - tl.where(columns == label, 1.0, 0.0)
            grad = tl.where(valid, grad, 0.0)
            tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < vocab)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore: int, write_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement `loss.softmax_cross_entropy` on logits [rows, V] with contiguous rows."""
    rows, vocab = logits.shape
    loss, log_sum = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(2))
    correct = torch.empty(rows, device=logits.device, dtype=torch.int32)
    sizes = logits.stride(0), vocab, ignore, write_grad
    cross_entropy_kernel[(rows,)](logits, labels, loss, correct, log_sum, *sizes, BLOCK=8192, num_warps=16)
    return loss.sum(), correct.sum(), log_sum


@triton.jit
def softmax_gradient_kernel(logits, labels, log_sums, stride, vocab, ignore, BLOCK: tl.constexpr):
    """Overwrite one block of a row of logits with its gradient."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label, log_sum = tl.load(labels + row), tl.load(log_sums + row)
    at = logits + row * stride + columns
    x = tl.load(at, mask=columns < vocab, other=0.0).to(tl.float32)
    grad = tl.exp(x - log_sum) - tl.where(columns == label, 1.0, 0.0)
    grad = tl.where(label != ignore, grad, 0.0)
    tl.store(at, grad.to(logits.dtype.element_ty), mask=columns < vocab)


def write_softmax_gradient_(logits: Tensor, labels: Tensor, log_sum: Tensor, *, ignore: int) -> None:
    """Overwrite logits [rows, V] with `loss.softmax_gradient`."""
    rows, vocab = logits.shape
    grid = rows, triton.cdiv(vocab, 4096)
    softmax_gradient_kernel[grid](logits, labels, log_sum, logits.stride(0), vocab, ignore, BLOCK=4096)


@triton.jit
def cast_kernel(matrix, rows, columns, scale, height, width):
    """Cast `matrix` [height, width] times `scale` to E4M3, also transposed unless `columns` is None."""
    quads, f, inside = block(height, width, ROWS, COLUMNS)
    factor = tl.load(scale)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.uint32)
    for i in tl.static_range(4):
        at = (quads * 4 + i)[:, None] * width + f[None, :]
        bits = to_fp8(tl.load(matrix + at, mask=inside, other=0.0).to(tl.float32), factor, False)
        tl.store(rows + at, bits, mask=inside)
        packed |= bits.to(tl.uint32) << (8 * i)
    if columns is not None:
        store_columns(packed, columns, height // 4, quads, f, inside)


def cast_both(matrix: Tensor, scale: Tensor, *, columns: bool) -> tuple[Tensor, Tensor | None]:
    """Cast `matrix` [M, N] times the float32 scalar `scale` to E4M3 [M, N], and [N, M] if `columns`.

    M must be a multiple of 4.
    """
    matrix, (height, width) = matrix.contiguous(), matrix.shape
    rows = matrix.new_empty(height, width, dtype=torch.uint8)
    turned = matrix.new_empty(width, height, dtype=torch.uint8) if columns else None
    quads = turned.view(torch.int32) if columns else None  # [N, M/4]
    cast_kernel[_grid(height, width)](matrix, rows, quads, scale, height, width, num_warps=8)
    return rows.view(torch.float8_e4m3fn), turned.view(torch.float8_e4m3fn) if columns else None


@triton.jit
def gradient_kernel(logits, labels, log_sums, rows, columns, sums, height, vocab, stride, ignore, scale):
    """Cast softmax(logits) * scale, with zeros at labels, to E5M2 in both layouts.

    Write each row's sum of the cast values in this block to `sums` [column blocks, height].
    """
    quads, f, inside = block(height, vocab, ROWS, COLUMNS)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.uint32)
    for i in tl.static_range(4):
        t = quads * 4 + i
        label = tl.load(labels + t, mask=t < height, other=ignore)[:, None]
        log_sum = tl.load(log_sums + t, mask=t < height, other=0.0)[:, None]
        at = t[:, None] * vocab + f[None, :]
        x = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
        grad = tl.where(f[None, :] == label, 0.0, tl.exp(x - log_sum))
        bits = to_fp8(tl.where(label != ignore, grad, 0.0), scale, True)
        tl.store(rows + at, bits, mask=inside)
        packed |= bits.to(tl.uint32) << (8 * i)
        total = tl.sum(bits.to(tl.float8e5, bitcast=True).to(tl.float32), axis=1)
        tl.store(sums + tl.program_id(1).to(tl.int64) * height + t, total, mask=t < height)
    store_columns(packed, columns, stride, quads, f, inside)


def gradient_both(
    logits: Tensor, labels: Tensor, log_sum: Tensor, columns: Tensor, at: int, *, ignore: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Implement `loss_fp8.cast_gradient`; rows, `at` and the width of `columns` are multiples of 4."""
    height, vocab = logits.shape
    rows = logits.new_empty(height, vocab, dtype=torch.uint8)
    quads = columns.view(torch.int32)  # [V, width/4]
    grid = _grid(height, vocab)
    sums = logits.new_empty(grid[1], height, dtype=torch.float32)
    tensors = logits, labels, log_sum, rows, quads[:, at // 4 :], sums
    gradient_kernel[grid](*tensors, height, vocab, quads.stride(0), ignore, scale, num_warps=8)
    return rows.view(torch.float8_e5m2), sums.sum(0) / -scale


@triton.jit
def labels_to_hidden_grad_kernel(grad_hidden, weight, labels, at_label, width, BLOCK: tl.constexpr):
    """Add at_label * weight[label] to one token's gradient, one block of columns per program."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    factor = tl.load(at_label + row)
    w = tl.load(weight + label * width + d, mask=(d < width) & (label >= 0), other=0.0).to(tl.float32)
    g = tl.load(grad_hidden + row * width + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(grad_hidden + row * width + d, (g + factor * w).to(tl.bfloat16), mask=d < width)


def add_labels_to_hidden_grad_(grad_hidden: Tensor, weight: Tensor, labels: Tensor, at_label: Tensor) -> None:
    """Implement `loss_fp8.add_labels_to_hidden_grad_` on contiguous BF16 tensors."""
    tokens, width = grad_hidden.shape
    grid = tokens, triton.cdiv(width, 1024)
    labels_to_hidden_grad_kernel[grid](grad_hidden, weight.contiguous(), labels, at_label, width, BLOCK=1024)


@triton.jit
def labels_to_weight_grad_kernel(
    grad_weight, hidden, labels, order, ends, at_label, width, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """Add all tokens of one label to its row of `grad_weight`, in the program of the label's first token.

    `labels` are sorted. `order` holds the index of each in `hidden` and `at_label`, `ends` the end of its run
    of equal labels.
    """
    first = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + first)
    before = tl.load(labels + first - 1, mask=first > 0, other=-1)
    if (label >= 0) & (label != before):
        total = tl.zeros((BLOCK,), tl.float32)
        end = tl.load(ends + first).to(tl.int32)
        for start in range(first, end, TOKENS):
            t = start + tl.arange(0, TOKENS)
            token = tl.load(order + t, mask=t < end, other=0)
            factor = tl.load(at_label + token, mask=t < end, other=0.0)
            inside = (t < end)[:, None] & (d < width)[None, :]
            h = tl.load(hidden + token[:, None] * width + d[None, :], mask=inside, other=0.0).to(tl.float32)
            total += tl.sum(h * factor[:, None], axis=0)
        at = grad_weight + label * width + d
        total += tl.load(at, mask=d < width, other=0.0).to(tl.float32)
        tl.store(at, total.to(grad_weight.dtype.element_ty), mask=d < width)


def add_labels_to_weight_grad_(grad_weight: Tensor, hidden: Tensor, labels: Tensor, at_label: Tensor) -> None:
    """Implement `loss_fp8.add_labels_to_weight_grad_` on contiguous tensors, `hidden` in BF16."""
    tokens, width = hidden.shape
    labels, order = labels.sort(stable=True)
    ends = torch.searchsorted(labels, labels, right=True)
    tensors = grad_weight, hidden.contiguous(), labels, order, ends, at_label
    labels_to_weight_grad_kernel[tokens, triton.cdiv(width, 256)](*tensors, width, TOKENS=16, BLOCK=256)


def _grid(height: int, width: int) -> tuple[int, int]:
    return triton.cdiv(height, ROWS), triton.cdiv(width, COLUMNS)


@triton.jit
def scaled_kernel(source, factor, target, numel, BLOCK: tl.constexpr):
    """Write source * factor to `target`, converted to its dtype."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + at, mask=at < numel, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(target + at, x.to(target.dtype.element_ty), mask=at < numel)


def scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Implement `loss.scaled`, four times as fast as torch's multiplication by a device scalar."""
    target, numel = torch.empty(tensor.shape, dtype=dtype, device=tensor.device), tensor.numel()
    scaled_kernel[(triton.cdiv(numel, 4096),)](tensor.contiguous(), factor, target, numel, BLOCK=4096)
    return target
