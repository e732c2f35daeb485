"""The CUDA kernel behind `adamw.update_`: one pass over memory."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def adamw_kernel(
    weights,
    grads,
    firsts,
    seconds,
    remainders,
    scalars,
    numel,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    MASTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program. With MASTER a weight is BF16 rounded half up, and the 16 bits below it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < numel) & (tl.load(scalars + 1) != 0)
    w = tl.load(weights + at, mask=inside, other=0.0)
    if MASTER:
        low = tl.load(remainders + at, mask=inside, other=0).to(tl.int32)
        high = w.to(tl.int16, bitcast=True).to(tl.int32) - (low < 0).to(tl.int32)
        master = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        master = w.to(tl.float32)
    g = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars)
    m = beta1 * tl.load(firsts + at, mask=inside, other=0.0).to(tl.float32) + (1 - beta1) * g
    v = beta2 * tl.load(seconds + at, mask=inside, other=0.0).to(tl.float32) + (1 - beta2) * g * g
    step = (m / tl.load(scalars + 2)) / (tl.sqrt(v / tl.load(scalars + 3)) + eps)
    master = master - lr * (step + weight_decay * master)
    tl.store(firsts + at, m.to(firsts.dtype.element_ty), mask=inside)
    tl.store(seconds + at, v.to(seconds.dtype.element_ty), mask=inside)
    if MASTER:
        bits = master.to(tl.int32, bitcast=True)
        low = bits.to(tl.int16)
        high = ((bits >> 16) + (low < 0).to(tl.int32)).to(tl.int16)
        tl.store(weights + at, high.to(weights.dtype.element_ty, bitcast=True), mask=inside)
        tl.store(remainders + at, low, mask=inside)
    else:
        tl.store(weights + at, master.to(weights.dtype.element_ty), mask=inside)


def adamw_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    remainder: Tensor | None,
    *,
    scalars: Tensor,
    hyper: Any,
) -> None:
    """See `adamw.update_`."""
    if weight.numel() == 0:
        return  # more ranks than rows
    grad = grad.contiguous()
    for tensor in (weight, exp_avg, exp_avg_sq):
        assert tensor.is_contiguous(), "one flat pass over all of them"
    adamw_kernel[(triton.cdiv(weight.numel(), BLOCK),)](
        weight,
        grad,
        exp_avg,
        exp_avg_sq,
        weight if remainder is None else remainder,  # not read without MASTER
        scalars,
        weight.numel(),
        *hyper,
        MASTER=remainder is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
