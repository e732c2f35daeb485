"""TE's MLP under delayed scaling on Hopper with SwiGLU and its casts in one kernel each, see `swiglu_triton`.

TE looks up the functions of an activation in `layernorm_mlp._act_func`, by recipe: forward, backward, and
backward fused with the cast, which it has for other activations alone. What these are is changed here, if
the kernels, compiled for this machine, are found to compute what TE's do.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from core.errors import first_line
from te_models.kernels.fp8_outputs import can_cast, differs, trial_quantizer, write
from te_models.kernels.stand_in import stand_in


def why_not() -> str | None:
    """What is wrong with the kernels on this machine, or None; on others than Hopper TE's own are as good."""
    if torch.cuda.get_device_capability() != (9, 0):
        return None
    module = _module()
    if not hasattr(module, "_act_func"):
        return "this Transformer Engine has no place for it"
    try:
        module._act_func("swiglu", _Delayed)
    except Exception as error:
        return f"this Transformer Engine looks activations up otherwise ({first_line(error)})"
    return _wrong()


def use(wanted: bool) -> None:
    """From now on, for all models of the process, on Hopper; or TE's own kernels again."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    stand_in(_module(), "_act_func", _fused, wanted=wanted)


def _fused(unfused: Any) -> Any:
    def act_func(activation: str, recipe: Any = None) -> tuple:
        functions = unfused(activation, recipe)
        if activation != "swiglu" or recipe is None or not recipe.delayed():
            return functions
        forward, backward, _ = functions
        return _Forward(forward), backward, _Backward(backward)

    return act_func


def _module() -> Any:
    return importlib.import_module("transformer_engine.pytorch.module.layernorm_mlp")


class _Delayed:
    """A recipe as far as TE's lookup asks."""

    @staticmethod
    def delayed() -> bool:
        return True


class _Forward:
    """`tex.swiglu`, fused with the cast where there is one: [T, 2F] and a quantizer -> [T, F]."""

    def __init__(self, unfused: Any):
        self.unfused = unfused

    def __call__(self, x: Tensor, quantizer: Any, **settings: Any) -> Any:
        if settings or not can_cast(quantizer, x):
            return self.unfused(x, quantizer, **settings)
        from te_models.kernels.swiglu_triton import swiglu_kernel

        return _run(swiglu_kernel, [x], (x.shape[0], x.shape[1] // 2), quantizer)


class _Backward:
    """`tex.dswiglu` and the cast: [T, F], [T, 2F] and a quantizer -> no bias gradient, [T, 2F].

    For layers without biases, as all of the suite's are.
    """

    def __init__(self, unfused: Any):
        self.unfused = unfused

    def __call__(self, grad: Tensor, x: Tensor, quantizer: Any, **settings: Any) -> tuple[None, Any]:
        if settings or not can_cast(quantizer, x, grad):
            return None, quantizer(self.unfused(grad, x, None, **settings))
        from te_models.kernels.swiglu_triton import swiglu_backward_kernel

        return None, _run(swiglu_backward_kernel, [grad, x], x.shape, quantizer)


def _run(kernel: Any, read: list[Tensor], shape: tuple[int, ...], quantizer: Any) -> Any:
    from te_models.kernels.swiglu_triton import launch

    return write(functools.partial(launch, kernel, read), shape, quantizer, read[0].device)


def _wrong() -> str | None:
    """What the kernels do that TE's do not, on blocks that are full and not, or None."""
    tex = importlib.import_module("transformer_engine_torch")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(208, 2 * 176, device="cuda", generator=generator).mul(2).bfloat16()
    grad = torch.randn(208, 176, device="cuda", generator=generator).bfloat16()
    try:
        mine, theirs = (trial_quantizer(tex.DType.kFloat8E4M3) for _ in range(2))
        forward = differs(_Forward(tex.swiglu)(x, mine), tex.swiglu(x, theirs), mine, theirs)
        mine, theirs = (trial_quantizer(tex.DType.kFloat8E5M2) for _ in range(2))
        found = _Backward(tex.dswiglu)(grad, x, mine)[1]
        backward = differs(found, theirs(tex.dswiglu(grad, x, None)), mine, theirs)
    except Exception as error:  # Triton's compiler, or another TE
        return f"it fails ({first_line(error)})"
    return f"it computes another {forward or backward}" if forward or backward else None
