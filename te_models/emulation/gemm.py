"""The emulated layers' arithmetic: norm, SwiGLU and linear, each with the backward pass of TE's kernels.

T tokens, D features in, E features out. Kernels compute in float32 and round where TE's do: results and
gradients have the activation dtype.

GEMMs multiply FP8 values exactly and add in float32. The tensor cores' fast accumulation, which TE uses in
forward GEMMs of per-tensor recipes, keeps fewer bits of a sum and is not emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from te_models.emulation.casts import Quantized, largest, widen
from te_models.emulation.recipes import Slot
from te_models.emulation.scaling import Gemms


@contextmanager
def bfloat16_units() -> Iterator[None]:
    """Let a CPU multiply float32 operands in BF16 units, which add in float32: several times faster.

    Exact for BF16 and FP8 values, also scaled by powers of two.
    """
    settings = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def multiply(a: Tensor, b: Tensor, *, fits_bfloat16: bool) -> Tensor:
    """[M, K] x [K, N] in float32, whatever torch.autocast says."""
    units = bfloat16_units() if fits_bfloat16 and a.device.type == "cpu" else nullcontext()
    with torch.autocast(a.device.type, enabled=False), units:
        if fits_bfloat16 and a.is_cuda:  # on tensor cores, which add in float32
            return torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
        return a.float() @ b.float()


def multiply_fp8(
    a: Quantized, b: Quantized, *, transpose_a: bool = False, transpose_b: bool = False
) -> Tensor:
    """[M, K] x [K, N] in float32, of which either may be given transposed."""
    if a.block is None:
        left, right = widen(a.data), widen(b.data)
    else:
        left, right = a.dequantize(), b.dequantize()
    left, right = left.T if transpose_a else left, right.T if transpose_b else right
    product = multiply(left, right, fits_bfloat16=a.fits_bfloat16 and b.fits_bfloat16)
    return product * (a.scale_inv * b.scale_inv) if a.block is None else product


class RMSNormFunction(torch.autograd.Function):
    """x [..., D] / rms(x) * weight [D]; `dtype` is that of activations, `out_dtype` that of the result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, out_dtype: torch.dtype
    ) -> Tensor:
        x, gamma = x.to(dtype), weight.to(dtype).float()
        inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)  # [..., 1]
        ctx.save_for_backward(x, weight, inverse)
        return (gamma * (inverse * x.float())).to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        grad, normed = grad.float(), inverse * x.float()
        grad_normed = weight.to(x.dtype).float() * grad
        shared = (grad_normed * normed).mean(-1, keepdim=True)
        grad_x = (inverse * (grad_normed - shared * normed)).to(x.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(x.dtype)
        return grad_x, grad_weight, None, None, None


class SwiGLUFunction(torch.autograd.Function):
    """silu(x[:, :F]) * x[:, F:] of x [T, 2F], and its amax [] before rounding if `with_amax`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out_dtype: torch.dtype, with_amax: bool) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x)
        gate, up = x.float().chunk(2, dim=-1)
        product = gate * torch.sigmoid(gate) * up  # [T, F]
        if not with_amax:
            return product.to(out_dtype), None
        ctx.mark_non_differentiable(amax := largest(product))
        return product.to(out_dtype), amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gate, up = x.float().chunk(2, dim=-1)
        grad, sigmoid = grad.float(), torch.sigmoid(gate)
        slope = gate * sigmoid * (1 - sigmoid) + sigmoid
        return torch.cat([slope * grad * up, grad * (gate * sigmoid)], dim=-1).to(x.dtype), None, None


class LinearFunction(torch.autograd.Function):
    """x [T, D] times weight [E, D] transposed, plus bias [E], in `dtype`; in FP8 as `gemms` say, if they do.

    A weight in float32 is rounded to `dtype` before FP8: what is cast is what a run on a GPU, which keeps
    weights in BF16, casts.
    `amax` []: of x, if it is known beforehand.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        gemms: Gemms | None,
        amax: Tensor | None,
    ) -> Tensor:
        ctx.gemms, ctx.dtype, ctx.has_bias, ctx.kept_as = gemms, dtype, bias is not None, ()
        keeps_x = ctx.needs_input_grad[1]  # for the weight's gradient
        if gemms is None:
            x = x.to(dtype)
            y = multiply(x, weight.to(dtype).T, fits_bfloat16=dtype == torch.bfloat16)
            ctx.save_for_backward(weight, x if keeps_x else None, None, None)
        else:
            inputs = gemms.recipe.quantize(x, "input", gemms.input, amax)
            weights = gemms.recipe.quantize(weight.to(dtype), "weight", gemms.weight)
            y = multiply_fp8(inputs(1), weights(1), transpose_b=True)
            scale = gemms.weight.scale.clone() if gemms.weight else None
            kept = inputs(0) if keeps_x else None
            ctx.kept_as = (kept.block, kept.fits_bfloat16) if kept else ()
            ctx.save_for_backward(weight, kept and kept.data, kept and kept.scale_inv, scale)
        return (y if bias is None else y + bias.to(dtype).float()).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, scale_inv, weight_scale = ctx.saved_tensors
        gemms, dtype = ctx.gemms, ctx.dtype
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        if gemms is None:
            exact = dtype == torch.bfloat16
            if needs_x:
                grad_x = multiply(grad, weight.to(dtype), fits_bfloat16=exact)
            if needs_weight:
                grad_weight = multiply(grad.T, x, fits_bfloat16=exact)
        else:
            grads = gemms.recipe.quantize(grad, "grad", gemms.grad)
            if needs_x:
                slot = gemms.requantize or (Slot(weight_scale) if weight_scale is not None else None)
                weights = gemms.recipe.quantize(weight.to(dtype), "weight", slot)
                grad_x = multiply_fp8(grads(1), weights(0))
            if needs_weight:
                kept = Quantized(x, scale_inv, *ctx.kept_as)
                grad_weight = multiply_fp8(grads(0), kept, transpose_a=True)
            if gemms.finish:
                gemms.finish()
        grad_bias = grad.float().sum(0) if ctx.has_bias and needs_bias else None
        rounded = [g if g is None else g.to(dtype) for g in (grad_x, grad_weight, grad_bias)]
        return *rounded, None, None, None
