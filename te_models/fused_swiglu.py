"""TE's MLP under delayed scaling on Hopper with SwiGLU and its casts in one kernel each, see `swiglu_triton`.

TE looks up the functions of an activation in `layernorm_mlp._act_func`, by recipe: forward, backward, and
backward fused with the cast, which it has for other activations alone. What these are is changed here.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Once a process is enough; does nothing but on Hopper."""
    module = importlib.import_module("transformer_engine.pytorch.module.layernorm_mlp")
    original = module._act_func
    if torch.cuda.get_device_capability() != (9, 0) or getattr(original, "fuses_swiglu", False):
        return

    def act_func(activation: str, recipe: Any = None) -> tuple:
        functions = original(activation, recipe)
        if activation != "swiglu" or recipe is None or not recipe.delayed():
            return functions
        forward, backward, _ = functions
        return _Forward(forward), backward, _Backward(backward)

    act_func.fuses_swiglu = True
    module._act_func = act_func


class _Forward:
    """`tex.swiglu`, fused with the cast where there is one: [T, 2F] and a quantizer -> [T, F]."""

    def __init__(self, unfused: Any):
        self.unfused = unfused

    def __call__(self, x: Tensor, quantizer: Any, **settings: Any) -> Any:
        if settings or not _can_cast(quantizer, x):
            return self.unfused(x, quantizer, **settings)
        from te_models.swiglu_triton import swiglu_kernel

        return _run(swiglu_kernel, [x], (x.shape[0], x.shape[1] // 2), quantizer)


class _Backward:
    """`tex.dswiglu` and the cast: [T, F], [T, 2F] and a quantizer -> no bias gradient, [T, 2F]."""

    def __init__(self, unfused: Any):
        self.unfused = unfused

    def __call__(self, grad: Tensor, x: Tensor, quantizer: Any, **settings: Any) -> tuple[None, Any]:
        if settings or not _can_cast(quantizer, x, grad):
            return None, quantizer(self.unfused(grad, x, None, **settings))
        from te_models.swiglu_triton import swiglu_backward_kernel

        return None, _run(swiglu_backward_kernel, [grad, x], x.shape, quantizer)


def _can_cast(quantizer: Any, *read: Tensor) -> bool:
    tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
    return type(quantizer) is tensors.Float8Quantizer and all(
        t.ndim == 2 and t.dtype == torch.bfloat16 and t.is_contiguous() and t.numel() for t in read
    )


def _run(kernel: Any, read: list[Tensor], shape: tuple[int, ...], quantizer: Any) -> Any:
    from te_models.swiglu_triton import launch

    out = quantizer.make_empty(shape, dtype=torch.bfloat16, device=read[0].device)
    launch(
        kernel,
        read,
        out._data if quantizer.rowwise_usage else None,
        out._transpose if quantizer.columnwise_usage else None,
        scale=quantizer.scale,
        scale_inverse=out._scale_inv,
        amax=quantizer.amax,
        e5m2=quantizer.dtype.name == "kFloat8E5M2",
    )
    out._transpose_invalid = not quantizer.columnwise_usage
    return out
