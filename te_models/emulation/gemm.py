"""Norm, SwiGLU and linear of the emulated layers, forward and backward.

T tokens, D input features, E output features, F feed-forward size. All compute in float32 and round where
TE's kernels do; results and gradients have the activation dtype.

GEMMs multiply FP8 values exactly and accumulate in float32. TE uses the tensor cores' fast accumulation, with
fewer bits, in forward GEMMs of per-tensor recipes; this is not emulated.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from fp8_suite.core.patches import BF16_MATMUL_ON_CPU
from fp8_suite.te_models.emulation.casts import Quantized, amax_of
from fp8_suite.te_models.emulation.scaling import Gemm
from torch import Tensor
from torch.autograd.function import once_differentiable


def multiply(a: Quantized, b: Quantized, *, transpose_a: bool = False, transpose_b: bool = False) -> Tensor:
    """Return a @ b, [M, K] x [K, N], in float32 regardless of torch.autocast; operands may be transposed."""
    left, right = (x.data.float() if x.block is None else x.dequantize() for x in (a, b))
    left, right = left.T if transpose_a else left, right.T if transpose_b else right
    fits_bfloat16, device = a.fits_bfloat16 and b.fits_bfloat16, left.device.type
    # A CPU's BF16 units multiply FP8 and BF16 values exactly, and accumulate in float32.
    on_cpu = fits_bfloat16 and device == "cpu"
    units = BF16_MATMUL_ON_CPU.on(lambda precision: "bf16") if on_cpu else nullcontext()
    with torch.autocast(device, enabled=False), units:
        if fits_bfloat16 and device == "cuda":  # tensor cores accumulate in float32
            product = torch.mm(left.bfloat16(), right.bfloat16(), out_dtype=torch.float32)
        else:
            product = left @ right
    return product * (a.scale_inv * b.scale_inv) if a.block is None and a.scale_inv is not None else product


class RMSNormFunction(torch.autograd.Function):
    """x [..., D] / rms(x) * weight [D] for x and weight rounded to `dtype`; returns `out_dtype`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, out_dtype: torch.dtype
    ) -> Tensor:
        x, weight = x.to(dtype), weight.to(dtype)
        out, inverse = rms_norm(x, weight, eps, out_dtype)
        ctx.save_for_backward(x, inverse, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *rms_norm_backward(grad, *ctx.saved_tensors), None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) * weight for x [..., D] and weight [D], and 1 / rms(x) [..., 1] in float32."""
    inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (weight.float() * (inverse * x.float())).to(out_dtype), inverse


def rms_norm_backward(grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [..., D] and weight [D] from that of `rms_norm`, in the dtype of x."""
    grad, normed = grad.float(), inverse * x.float()
    grad_normed = weight.float() * grad
    shared = (grad_normed * normed).mean(-1, keepdim=True)  # [..., 1]
    grad_x = (inverse * (grad_normed - shared * normed)).to(x.dtype)
    return grad_x, (grad * normed).flatten(0, -2).sum(0).to(x.dtype)


class SwiGLUFunction(torch.autograd.Function):
    """silu(gate) * up for x [..., 2F] = gate, up; with its amax [] before rounding if `with_amax`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out_dtype: torch.dtype, with_amax: bool) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x)
        product = swiglu(x)
        if not with_amax:
            return product.to(out_dtype), None
        ctx.mark_non_differentiable(amax := amax_of(product))
        return product.to(out_dtype), amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return dswiglu(grad, *ctx.saved_tensors), None, None


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up [..., F] in float32 for x [..., 2F] = gate, up."""
    gate, up = x.float().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def dswiglu(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x [..., 2F] from that of `swiglu(x)`, in the dtype of x."""
    gate, up = x.float().chunk(2, dim=-1)
    grad, sigmoid = grad.float(), torch.sigmoid(gate)
    slope = gate * sigmoid * (1 - sigmoid) + sigmoid
    return torch.cat([slope * grad * up, grad * (gate * sigmoid)], dim=-1).to(x.dtype)


class LinearFunction(torch.autograd.Function):
    """x [T, D] @ weight [E, D]^T + bias [E] in `dtype`, with operands quantized by `gemm`.

    A float32 weight is rounded to `dtype` before its FP8 cast, because runs on a GPU cast BF16 weights.
    `amax` [] is the amax of x if it is already known.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        gemm: Gemm,
        amax: Tensor | None,
    ) -> Tensor:
        ctx.gemm, ctx.dtype = gemm, dtype
        inputs = gemm.quantize(x, "input", gemm.input, amax)
        weights = gemm.quantize(weight.to(dtype), "weight", gemm.weight)
        y = multiply(inputs(1), weights(1), transpose_b=True)
        kept = inputs(0) if ctx.needs_input_grad[1] else None
        ctx.kept_as = kept and (kept.block, kept.fits_bfloat16)
        ctx.save_for_backward(weight, kept and kept.data, kept and kept.scale_inv)
        return (y if bias is None else y + bias.to(dtype).float()).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        gemm, dtype = ctx.gemm, ctx.dtype
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = grad_bias = None
        grads = gemm.quantize(grad, "grad", gemm.grad)
        if needs_x:
            weights = gemm.quantize(weight.to(dtype), "weight", gemm.weight_in_backward)
            grad_x = multiply(grads(1), weights(0)).to(dtype)
        if needs_weight:
            grad_weight = multiply(grads(0), Quantized(*kept, *ctx.kept_as), transpose_a=True).to(dtype)
        if needs_bias:
            grad_bias = grad.float().sum(0).to(dtype)
        if gemm.finish:
            gemm.finish()
        return grad_x, grad_weight, grad_bias, None, None, None
