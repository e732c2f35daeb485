"""Residual gradients of te.TransformerLayer, added in the backward kernels of its norms.

A layer computes h = x + attention(norm(x)) and y = h + mlp(norm(h)). The gradient of x is the gradient of h
plus the gradient through attention and norm. Autograd adds these in a separate pass over memory. TE's kernel
rmsnorm_bwd_add fuses the addition into the norm's backward pass, but TE's layers do not call it. This module
passes the residual's gradient to that kernel instead of to autograd.

Backward visits the branches in sequence, so one gradient is pending at a time. It is matched to its norm by
the data_ptr() of the norm's input. A pending gradient that no norm adds raises an error.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from fp8_suite.core.errors import UserError, first_line
from fp8_suite.te_models.kernels.selection import patched
from torch import Tensor, nn


class Pending(NamedTuple):
    gradient: Tensor
    address: int  # data_ptr() of the residual, which is the norm's input


_pending: list[Pending] = []


def fuse_residual_gradients(layer: nn.Module) -> None:
    """Make the norms of a te.TransformerLayer add its residual gradients; needs `enabled`, no dropout."""
    layer._bias_dropout_add = functools.partial(_add_branch, layer._bias_dropout_add)


def _add_branch(
    unfused: Any, branch: Tensor, bias: Tensor | None, residual: Tensor, drop_path: Any = None
) -> Tensor:
    plain = drop_path is None and (bias is None or not bias.numel())
    if not (plain and residual.requires_grad and branch.requires_grad):
        return unfused(branch, bias, residual, drop_path)
    return _Add.apply(residual, branch)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor) -> Tensor:
        ctx.save_for_backward(residual)  # the norm saves the same tensor, also when it is recomputed
        return residual + branch

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (residual,) = ctx.saved_tensors
        _refuse_leftovers()
        _pending.append(Pending(gradient, residual.data_ptr()))
        torch.autograd.Variable._execution_engine.queue_callback(_refuse_leftovers)
        return None, gradient


def _refuse_leftovers() -> None:
    if _pending:
        _pending.clear()
        raise UserError(
            "--fused_residuals: a residual connection's gradient reached no norm, a bug in the suite; add "
            "--no_fused_residuals, and open an issue with the run's env.json",
            flags=["fused_residuals"],
        )


def _pop_pending(x: Tensor) -> Tensor | None:
    """Return the gradient pending for the norm of `x`, or None."""
    return _pending.pop().gradient if _pending and _pending[0].address == x.data_ptr() else None


@contextmanager
def enabled() -> Iterator[None]:
    """Make the norms of TE's layers add pending gradients."""
    _pending.clear()  # may be left over from a failed backward pass
    plain, with_sum = _tex().rmsnorm_bwd, _tex().rmsnorm_bwd_add

    def rmsnorm_bwd(gradient: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        added = _pop_pending(x)
        if added is None:
            return plain(gradient, x, *args, **kwargs)
        return with_sum(gradient, x, added.contiguous().view(x.shape), *args, **kwargs)

    with patched(_tex(), rmsnorm_bwd=rmsnorm_bwd):
        yield


def self_test(width: int) -> str | None:
    """Compare TE's fused kernel with its unfused kernel and a sum; return the difference, or None."""
    tex = _tex()
    generator = torch.Generator("cuda").manual_seed(0)
    gradient, x, added = (
        torch.randn(48, width, device="cuda", generator=generator).bfloat16() for _ in range(3)
    )
    weight = torch.rand(width, device="cuda", generator=generator).bfloat16()
    scale = x.float().square().mean(-1).add(1e-5).rsqrt()  # [48], 1 / rms
    try:
        plain_dx, plain_dw = tex.rmsnorm_bwd(gradient, x, scale, weight, 0, False)
        dx, dw = tex.rmsnorm_bwd_add(gradient, x, added, scale, weight, 0, False)
    except Exception as error:  # the API differs between TE versions
        return f"it fails ({first_line(error)})"
    expected = plain_dx.float().view_as(x) + added.float()
    # The fused kernel rounds to BF16 once instead of twice.
    if (dx.view_as(x).float() - expected).norm() > 5e-3 * expected.norm():
        return "the gradient of the input differs from the reference"
    if not torch.allclose(dw, plain_dw, rtol=2**-6, atol=1e-2):
        return "the gradient of the weight differs from the reference"
    return None


def _tex() -> Any:
    return importlib.import_module("transformer_engine_torch")
