"""CUDA kernel of `adamw.update_`: AdamW in one pass over memory."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = tl.constexpr(2048)


@triton.jit
def adamw_kernel(
    weights, grads, exp_avg, exp_avg_sq, remainders, scalars, numel, lr, beta1, beta2, eps, weight_decay
):
    """Step BLOCK elements; with `remainders` the weights are the high halves of FP32 masters.

    `scalars`: gradient scale, apply (0 or 1), 1 - beta1^t, 1 - beta2^t.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < numel) & (tl.load(scalars + 1) != 0)
    w = tl.load(weights + at, mask=inside, other=0.0)
    if remainders is not None:
        low = tl.load(remainders + at, mask=inside, other=0).to(tl.int32)
        high = w.to(tl.int16, bitcast=True).to(tl.int32) - (low < 0).to(tl.int32)
        master = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        master = w.to(tl.float32)
    g = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars)
    m = beta1 * tl.load(exp_avg + at, mask=inside, other=0.0).to(tl.float32) + (1 - beta1) * g
    v = beta2 * tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(tl.float32) + (1 - beta2) * g * g
    step = (m / tl.load(scalars + 2)) / (tl.sqrt(v / tl.load(scalars + 3)) + eps)
    master = master - lr * (step + weight_decay * master)
    tl.store(exp_avg + at, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + at, v.to(exp_avg_sq.dtype.element_ty), mask=inside)
    if remainders is not None:
        bits = master.to(tl.int32, bitcast=True)
        low = bits.to(tl.int16)
        high = ((bits >> 16) + (low < 0).to(tl.int32)).to(tl.int16)
        tl.store(weights + at, high.to(weights.dtype.element_ty, bitcast=True), mask=inside)
        tl.store(remainders + at, low, mask=inside)
    else:
        tl.store(weights + at, master.to(weights.dtype.element_ty), mask=inside)


def adamw_(
    weight: Tensor, grad: Tensor, state: dict[str, Tensor], scalars: Tensor, group: dict[str, Any]
) -> None:
    """Launch the kernel; implements `adamw.update_`."""
    if weight.numel() == 0:
        return  # this rank holds no shard of the parameter
    moments = state["exp_avg"], state["exp_avg_sq"]
    assert all(t.is_contiguous() for t in (weight, *moments)), "the kernel needs contiguous tensors"
    tensors = weight, grad.contiguous(), *moments, state.get("master_param"), scalars
    grid = (triton.cdiv(weight.numel(), BLOCK),)
    settings = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
    adamw_kernel[grid](*tensors, weight.numel(), *settings, num_warps=4)
