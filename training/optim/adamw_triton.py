"""CUDA kernel of `adamw.update_`: AdamW in one pass over memory."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from fp8_suite.training.optim import moments
from torch import Tensor

BLOCK = tl.constexpr(moments.BLOCK)  # values that share an exponent
INDEX_FACTOR = tl.constexpr(moments.INDEX_FACTOR)
NEXT_BITS = tl.constexpr(moments.NEXT_BITS)
BLOCKS = tl.constexpr(32)  # blocks of one program


@triton.jit
def adamw_kernel(
    weights,
    grads,
    exp_avg,
    exp_avg_exponents,
    exp_avg_sq,
    exp_avg_sq_exponents,
    remainders,
    scalars,
    seed,
    numel,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
):
    """Step BLOCKS * BLOCK elements; with `remainders` the weights are the high halves of FP32 masters.

    `scalars`: gradient scale, apply (0 or 1), 1 - beta1^t, 1 - beta2^t. `seed` [1] int64. Moments with
    exponents are stored as in `training.optim.moments`.
    """
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    apply = tl.load(scalars + 1) != 0
    inside = (at < numel) & apply
    block_inside = (block * BLOCK < numel) & apply
    w = tl.load(weights + at, mask=inside, other=0.0)
    if remainders is not None:
        low = tl.load(remainders + at, mask=inside, other=0).to(tl.int32)
        high = w.to(tl.int16, bitcast=True).to(tl.int32) - (low < 0).to(tl.int32)
        master = ((high << 16) | (low & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        master = w.to(tl.float32)
    g = tl.load(grads + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scalars)
    # FMAs are explicit: otherwise an element's position decides which product the compiler fuses.
    m = load_moment(exp_avg, exp_avg_exponents, at, block, inside, block_inside, True)
    m = tl.fma(beta1, m, (1 - beta1) * g)
    v = load_moment(exp_avg_sq, exp_avg_sq_exponents, at, block, inside, block_inside, False)
    v = tl.fma(beta2, v, (1 - beta2) * g * g)
    step = (m / tl.load(scalars + 2)) / (tl.sqrt(v / tl.load(scalars + 3)) + eps)
    master = tl.fma(-lr, tl.fma(weight_decay, master, step), master)
    noise = mix((at * INDEX_FACTOR + tl.load(seed)).to(tl.uint32))
    store_moment(exp_avg, exp_avg_exponents, m, noise, at, block, inside, block_inside, True)
    noise = mix(noise + NEXT_BITS)
    store_moment(exp_avg_sq, exp_avg_sq_exponents, v, noise, at, block, inside, block_inside, False)
    if remainders is not None:
        bits = master.to(tl.int32, bitcast=True)
        low = bits.to(tl.int16)
        high = ((bits >> 16) + (low < 0).to(tl.int32)).to(tl.int16)
        tl.store(weights + at, high.to(weights.dtype.element_ty, bitcast=True), mask=inside)
        tl.store(remainders + at, low, mask=inside)
    else:
        tl.store(weights + at, master.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def load_moment(values, exponents, at, block, inside, block_inside, SIGNED: tl.constexpr):
    """Load a moment in FP32; the counterpart of `moments.read`."""
    if exponents is None:
        result = tl.load(values + at, mask=inside, other=0).to(tl.float32)
    else:
        BITS: tl.constexpr = values.dtype.element_ty.primitive_bitwidth
        MANTISSA: tl.constexpr = 3 if BITS == 8 else 10
        LEVELS: tl.constexpr = 1 << (BITS - SIGNED)
        codes = tl.load(values + at, mask=inside, other=0).to(tl.int32) & ((1 << BITS) - 1)
        shared = tl.load(exponents + block, mask=block_inside, other=0).to(tl.int32)
        base = tl.maximum((shared - ((LEVELS >> MANTISSA) - 1)) << MANTISSA, 0)[:, None]
        magnitude = codes & (LEVELS - 1)
        result = ((magnitude + base) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
        if SIGNED:
            result = tl.where(magnitude == 0, 0.0, tl.where(codes >= LEVELS, -result, result))
    return result


@triton.jit
def store_moment(values, exponents, result, noise, at, block, inside, block_inside, SIGNED: tl.constexpr):
    """Store a moment given in FP32; the counterpart of `moments.write_`."""
    if exponents is None:
        tl.store(values + at, result.to(values.dtype.element_ty), mask=inside)
    else:
        BITS: tl.constexpr = values.dtype.element_ty.primitive_bitwidth
        MANTISSA: tl.constexpr = 3 if BITS == 8 else 10
        LEVELS: tl.constexpr = 1 << (BITS - SIGNED)
        CUT: tl.constexpr = 23 - MANTISSA
        low = (noise & ((1 << CUT) - 1)).to(tl.int32)
        bits = result.to(tl.int32, bitcast=True)
        rounded = ((bits & 0x7FFFFFFF) + low) >> CUT
        shared = tl.max(rounded, axis=1) >> MANTISSA
        base = tl.maximum((shared - ((LEVELS >> MANTISSA) - 1)) << MANTISSA, 0)[:, None]
        codes = tl.maximum(rounded - base, 0)
        if SIGNED:
            smallest = (base + 1) << CUT
            least = smallest.to(tl.float32, bitcast=True)
            kept = tl.abs(result) > low.to(tl.float32) * (1.0 / (1 << CUT)) * least
            codes = tl.where((bits & 0x7FFFFFFF) < smallest, kept.to(tl.int32), codes)
            codes = codes | ((bits >> 31) & 1) * LEVELS
        tl.store(values + at, codes.to(values.dtype.element_ty), mask=inside)
        tl.store(exponents + block, shared.to(tl.uint8), mask=block_inside)


@triton.jit
def mix(x):
    """Finalizer of MurmurHash3, on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


def adamw_(
    weight: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    scalars: Tensor,
    seed: Tensor,
    group: dict[str, Any],
) -> None:
    """Launch the kernel; implements `adamw.update_`."""
    if weight.numel() == 0:
        return  # this rank holds no shard of the parameter
    stored = [state.get(name + suffix) for name in moments.MOMENTS for suffix in ("", moments.EXPONENTS)]
    contiguous = all(t.is_contiguous() for t in (weight, *stored) if t is not None)
    assert contiguous, "the kernel needs contiguous tensors"
    tensors = weight, grad.contiguous(), *stored, state.get("master_param"), scalars, seed
    grid = (triton.cdiv(weight.numel(), (BLOCKS * BLOCK).value),)
    settings = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
    adamw_kernel[grid](*tensors, weight.numel(), *settings, num_warps=4)
