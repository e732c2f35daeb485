"""Emulated layers that sum gradients of weights as TE's do."""

from functools import partialmethod

from fp8_suite.te_models.emulation import gemm, layers
from fp8_suite.training.optim.accumulation import GEMM_WEIGHTS


class SumsInGemm(gemm.LinearFunction):
    """A linear layer that adds its weight's gradient to `main_grad` if `weight.fuses`, as TE's do."""

    @staticmethod
    def forward(ctx, x, weight, *rest):
        ctx.weight, ctx.fuses = weight, weight.fuses
        ctx.overwrites = getattr(weight, "overwrite_main_grad", False)
        return gemm.LinearFunction.forward(ctx, x, weight, *rest)

    @staticmethod
    def backward(ctx, grad):
        grad_x, gradient, *rest = gemm.LinearFunction.backward(ctx, grad)
        if not ctx.fuses:
            return grad_x, gradient, *rest
        ctx.weight.main_grad = total = ctx.weight.get_main_grad()
        if ctx.overwrites:
            total.copy_(gradient)
        else:
            total += gradient
        return grad_x, None, *rest


def sum_in_gemms(rank: int) -> None:
    """Let emulated layers of a sharded model sum gradients as TE's with `fuse_wgrad_accumulation`."""

    def mark_and_run(module, x, *, run):
        for name in GEMM_WEIGHTS:
            if hasattr(module, name):
                getattr(module, name).fuses = module.fuse_wgrad_accumulation
        return run(module, x)

    layers.LinearFunction = SumsInGemm
    for kind in (layers.Linear, layers.LayerNormLinear, layers.LayerNormMLP):
        kind.fuse_wgrad_accumulation = True
        kind.forward = partialmethod(mark_and_run, run=kind.forward)
