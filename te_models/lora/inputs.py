"""Inputs of frozen GEMMs that adapters read too: a norm's output, SwiGLU's, or a tensor as it is.

Each function returns the input x [..., D] and, with A [R, D], `inner` = x A^T [..., R]. Backward adds the
adapters' gradient of x to the GEMM's in one pass, in the memory that the GEMM has just written: nothing else
reads a gradient of x.

T tokens, D input features, R rank times adapters of a GEMM, F feed-forward size.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fp8_suite.te_models.emulation import gemm
from torch import Tensor


def is_native(te: Any) -> bool:
    """True for TE's module, False for its emulation."""
    return te.__name__.startswith("transformer_engine")


class Kernels(NamedTuple):
    """RMSNorm and SwiGLU of a backend, in the dtype of their input."""

    norm: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]  # x, weight, eps -> output, 1 / rms
    norm_backward: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # gradient, x, 1 / rms, weight
    swiglu: Callable[[Tensor], Tensor]
    swiglu_backward: Callable[[Tensor, Tensor], Tensor]  # gradient, x


@functools.cache
def kernels_of(te: Any) -> Kernels:
    """Return the kernels of TE's module or of its emulation."""
    if not is_native(te):
        return Kernels(
            lambda x, weight, eps: gemm.rms_norm(x, weight, eps, x.dtype),
            lambda *arguments: gemm.rms_norm_backward(*arguments)[0],
            lambda x: gemm.swiglu(x).to(x.dtype),
            gemm.dswiglu,
        )
    tex = importlib.import_module("transformer_engine_torch")
    dtypes = importlib.import_module("transformer_engine.pytorch.constants").TE_DType
    return Kernels(
        lambda x, weight, eps: tex.rmsnorm_fwd(x, weight, eps, None, None, dtypes[x.dtype], 0, False)[::2],
        lambda *arguments: tex.rmsnorm_bwd(*arguments, 0, False)[0],
        lambda x: tex.swiglu(x, None),
        lambda grad, x: tex.dswiglu(grad, x, None),
    )


def _product(x: Tensor, a: Tensor | None) -> Tensor | None:
    return None if a is None else F.linear(x, a)


def _add_gradient(grad: Tensor, grad_inner: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x, in the memory of `grad`, and of A."""
    inner, grad = grad_inner.flatten(0, -2), grad.contiguous()
    grad.view(-1, grad.shape[-1]).addmm_(inner, a)
    return grad, inner.t() @ x.flatten(0, -2)


class Plain(torch.autograd.Function):
    """x [..., D] as it is, and its product with A [R, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, a)
        return x, F.linear(x, a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inner: Tensor) -> tuple[Tensor, Tensor]:
        return _add_gradient(grad, grad_inner, *ctx.saved_tensors)


class Norm(torch.autograd.Function):
    """RMSNorm of x [..., D] with a frozen weight [D], and its product with A [R, D], if that is given."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor | None, eps: float, kernels: Kernels
    ) -> tuple[Tensor, Tensor | None]:
        rows = x.reshape(-1, x.shape[-1])
        normed, inverse = kernels.norm(rows, weight, eps)
        ctx.kernels, normed = kernels, normed.view_as(x)
        ctx.save_for_backward(rows, weight, inverse, *(() if a is None else (normed, a)))
        return normed, _product(normed, a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inner: Tensor | None) -> tuple[Tensor | None, ...]:
        (rows, weight, inverse, *adapted), grad_a = ctx.saved_tensors, None
        if adapted:
            grad, grad_a = _add_gradient(grad, grad_inner, *adapted)
        grad_x = ctx.kernels.norm_backward(grad.reshape(rows.shape), rows, inverse, weight)
        return grad_x.view_as(grad), None, grad_a, None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up of x [..., 2F] = gate, up; and its product with A [R, F], if that is given.

    Backward computes the first result again. An adapter would keep it, F values per token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor | None, kernels: Kernels) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, a)
        ctx.kernels, act = kernels, kernels.swiglu(x)
        return act, _product(act, a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_inner: Tensor | None) -> tuple[Tensor | None, ...]:
        (x, a), grad_a = ctx.saved_tensors, None
        if a is not None:
            grad, grad_a = _add_gradient(grad, grad_inner, ctx.kernels.swiglu(x), a)
        return ctx.kernels.swiglu_backward(grad.contiguous(), x), grad_a, None
