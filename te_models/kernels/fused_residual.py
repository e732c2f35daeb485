"""te.TransformerLayer whose residual connections' gradients are added by the norms' backward kernels.

A layer computes h = x + attention(norm(x)) and y = h + mlp(norm(h)). In backward the gradient of x is that of
h and what comes back through attention and norm; autograd adds the two in a pass of its own. TE has a kernel
that ends the norm's backward with this sum, but its layers do not use it: here the addition hands its
gradient to that kernel instead of to autograd.

The chain is strict, one branch after the other, so at most one gradient waits, and the norm that takes it is
told by the input that both share. One that nobody took is an error, never a wrong gradient.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from core.errors import first_line
from te_models.kernels.stand_in import stand_in


class Waiting(NamedTuple):
    gradient: Tensor
    address: int  # of the residual, which is the norm's input


_waiting: list[Waiting] = []


def add_in_norms(layer: nn.Module) -> None:
    """Let a te.TransformerLayer without dropout add as above; parameters and what it computes stay."""
    layer.__class__ = _adding(type(layer))


@functools.cache
def _adding(base: type) -> type:
    class AddingLayer(base):
        def _bias_dropout_add(
            self, branch: Tensor, bias: Tensor | None, residual: Tensor, drop_path: Any = None
        ) -> Tensor:
            plain = drop_path is None and (bias is None or not bias.numel())
            if not (plain and residual.requires_grad and branch.requires_grad):
                return super()._bias_dropout_add(branch, bias, residual, drop_path)
            return _Add.apply(residual, branch)

    return AddingLayer


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, branch: Tensor) -> Tensor:
        ctx.save_for_backward(residual)  # the norm keeps it too, and recomputation makes it anew for both
        return residual + branch

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (residual,) = ctx.saved_tensors
        _refuse_leftovers()
        _waiting.append(Waiting(gradient, residual.data_ptr()))
        torch.autograd.Variable._execution_engine.queue_callback(_refuse_leftovers)
        return None, gradient


def _refuse_leftovers() -> None:
    if _waiting:
        _waiting.clear()
        raise RuntimeError(
            "a residual connection's gradient reached no norm; --no_fused_residuals adds it in a pass of its "
            "own; report it with env.json"
        )


def _take(x: Tensor) -> Tensor | None:
    """The gradient that waits for the norm of `x`, if one does."""
    return _waiting.pop().gradient if _waiting and _waiting[0].address == x.data_ptr() else None


def use(wanted: bool) -> None:
    """From now on the norms of the process's TE layers take gradients that wait for them; or not any more."""
    _waiting.clear()  # of a backward pass that failed
    stand_in(_extension(), "rmsnorm_bwd", _adding_backward, wanted=wanted)


def _adding_backward(plain: Any) -> Any:
    with_sum = _extension().rmsnorm_bwd_add

    def rmsnorm_bwd(gradient: Tensor, x: Tensor, *rest: Any, **named: Any) -> Any:
        added = _take(x)
        if added is None:
            return plain(gradient, x, *rest, **named)
        return with_sum(gradient, x, added.contiguous().view(x.shape), *rest, **named)

    return rmsnorm_bwd


def why_not(width: int) -> str | None:
    """What is wrong with the kernel on this machine for a hidden size of `width`, or None."""
    tex = _extension()
    if not hasattr(tex, "rmsnorm_bwd_add"):
        return "this Transformer Engine has no kernel for it"
    generator = torch.Generator("cuda").manual_seed(0)
    gradient, x, added = (
        torch.randn(48, width, device="cuda", generator=generator).bfloat16() for _ in range(3)
    )
    weight = torch.rand(width, device="cuda", generator=generator).bfloat16()
    scale = x.float().square().mean(-1).add(1e-5).rsqrt()
    plain = getattr(tex.rmsnorm_bwd, "original", tex.rmsnorm_bwd)
    try:
        expected, weights = plain(gradient, x, scale, weight, 0, False)
        found, same_weights = tex.rmsnorm_bwd_add(gradient, x, added, scale, weight, 0, False)
    except Exception as error:
        return f"it fails ({first_line(error)})"
    wanted = expected.float().view_as(x) + added.float()
    if (found.view_as(x).float() - wanted).norm() > 5e-3 * wanted.norm():  # one BF16 rounding for two
        return "it computes another gradient"
    if not torch.allclose(same_weights, weights, rtol=2**-6, atol=1e-2):
        return "it computes another gradient of the weight"
    return None


def _extension() -> Any:
    return importlib.import_module("transformer_engine_torch")
