"""The CUDA kernels of the loss: cross entropy in two passes over a row, not a dozen, and a scaled copy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def cross_entropy_kernel(
    logits, labels, loss, correct, stride, vocab, ignore, WRITE_GRAD: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row: an online softmax, then (for the gradient) a second pass that overwrites the row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    label = tl.load(labels + row)
    valid = label != ignore
    top = -float("inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top))
        top = new_top
    log_sum = top + tl.log(total)
    picked = tl.load(logits + tl.where(valid, label, 0)).to(tl.float32)
    tl.store(loss + row, tl.where(valid, log_sum - picked, 0.0))
    tl.store(correct + row, (valid & (picked >= top)).to(tl.int32))
    if WRITE_GRAD:
        tl.debug_barrier()  # every thread has read the label's logit before it is overwritten
        for start in range(0, vocab, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(logits + columns, mask=columns < vocab, other=0.0).to(tl.float32)
            grad = tl.exp(x - log_sum) - tl.where(columns == label, 1.0, 0.0)
            grad = tl.where(valid, grad, 0.0)
            tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < vocab)


def cross_entropy_(logits: Tensor, labels: Tensor, *, ignore: int, write_grad: bool) -> tuple[Tensor, Tensor]:
    """Summed loss (float32) and correct predictions (int64) of row-contiguous [rows, V] logits."""
    rows, vocab = logits.shape
    loss = torch.empty(rows, device=logits.device, dtype=torch.float32)
    correct = torch.empty(rows, device=logits.device, dtype=torch.int32)
    cross_entropy_kernel[(rows,)](
        logits, labels, loss, correct, logits.stride(0), vocab, ignore, write_grad, BLOCK=8192, num_warps=16
    )
    return loss.sum(), correct.sum()


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
