"""SwiGLU fused with the FP8 casts in TE's MLP, for delayed scaling on Hopper (kernels: `swiglu_triton`).

TE writes BF16 and casts it in a second pass over memory, forward and backward; the kernels here need one
pass each. TE's MLP looks up its activation in `layernorm_mlp._act_func`, which returns three functions:
forward, backward, and backward fused with the cast. TE has no fused one for SwiGLU. `enabled` patches the
lookup.

T tokens, F feed-forward size.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from fp8_suite.core.patches import SWIGLU
from fp8_suite.te_models.kernels.selection import reports_failure
from torch import Tensor

TOKEN_MULTIPLE = 4  # the kernels pack four tokens' bytes into one 32-bit number
# Largest share of FP8 values that may differ from TE's by one code, because the last bit of exp may differ.
MAX_ROUNDING_DIFFERENCES = 1e-3


def enabled() -> AbstractContextManager[None]:
    """Make TE's MLP use the fused functions under delayed scaling."""
    return SWIGLU.on(lambda unfused: functools.partial(_act_func, unfused))


def _act_func(unfused: Any, activation: str, recipe: Any = None) -> tuple:
    functions = unfused(activation, recipe)
    if activation != "swiglu" or recipe is None or not recipe.delayed():
        return functions
    forward, backward, _ = functions
    return functools.partial(swiglu, forward), backward, functools.partial(swiglu_backward, backward)


def swiglu(unfused: Any, x: Tensor, quantizer: Any, **settings: Any) -> Any:
    """Replace `tex.swiglu`: [T, 2F] -> [T, F], cast by `quantizer`; fused if the kernel supports it."""
    if settings or not _can_cast(quantizer, x):
        return unfused(x, quantizer, **settings)
    return _run("swiglu_kernel", [x], (x.shape[0], x.shape[1] // 2), quantizer)


def swiglu_backward(unfused: Any, grad: Tensor, x: Tensor, quantizer: Any, **settings: Any) -> tuple:
    """Replace `tex.dswiglu` and its cast: [T, F], [T, 2F] -> None (there is no bias), [T, 2F]."""
    if settings or not _can_cast(quantizer, x, grad):
        return None, quantizer(unfused(grad, x, None, **settings))
    return None, _run("swiglu_backward_kernel", [grad, x], x.shape, quantizer)


def _can_cast(quantizer: Any, *inputs: Tensor) -> bool:
    return (
        type(quantizer) is _float8_tensor().Float8Quantizer
        and all(t.ndim == 2 and t.dtype == torch.bfloat16 and t.is_contiguous() for t in inputs)
        and all(t.numel() and t.shape[0] % TOKEN_MULTIPLE == 0 for t in inputs)
    )


def _run(kernel: str, inputs: list[Tensor], shape: tuple[int, ...], quantizer: Any) -> Any:
    """Run a kernel of `swiglu_triton` and return its output, a quantized tensor of this shape."""
    triton = importlib.import_module("fp8_suite.te_models.kernels.swiglu_triton")
    out = quantizer.make_empty(shape, dtype=torch.bfloat16, device=quantizer.scale.device)
    rows = out._data if quantizer.rowwise_usage else None
    columns = out._transpose if quantizer.columnwise_usage else None
    outputs = [rows, columns, quantizer.scale, out._scale_inv, quantizer.amax]
    triton.launch(getattr(triton, kernel), inputs, outputs, e5m2=quantizer.dtype.name == "kFloat8E5M2")
    out._transpose_invalid = not quantizer.columnwise_usage
    return out


@reports_failure
def self_test() -> str | None:
    """Compare the kernels with TE's; return the first difference, or None."""
    tex = importlib.import_module("transformer_engine_torch")
    generator = torch.Generator("cuda").manual_seed(0)
    # These sizes do not fill the last blocks.
    x = torch.randn(208, 2 * 176, device="cuda", generator=generator).mul(2).bfloat16()
    grad = torch.randn(208, 176, device="cuda", generator=generator).bfloat16()
    # This raises if TE's lookup has changed.
    mlp = importlib.import_module("transformer_engine.pytorch.module.layernorm_mlp")
    mlp._act_func("swiglu", SimpleNamespace(delayed=lambda: True))
    fused, separate = (_trial_quantizer(tex.DType.kFloat8E4M3) for _ in range(2))
    wrong = difference(swiglu(tex.swiglu, x, fused), tex.swiglu(x, separate), fused, separate)
    fused, separate = (_trial_quantizer(tex.DType.kFloat8E5M2) for _ in range(2))
    gradient = swiglu_backward(tex.dswiglu, grad, x, fused)[1]
    wrong = wrong or difference(gradient, separate(tex.dswiglu(grad, x, None)), fused, separate)
    return f"the {wrong} differs from the reference" if wrong else None


def _trial_quantizer(dtype: Any) -> Any:
    """Return a delayed-scaling quantizer whose scale and amax are views, as in training.

    Triton compiles separate kernels for aligned and unaligned pointers, and these views are unaligned.
    """
    scale, amax = torch.full((4,), 37.3, device="cuda"), torch.zeros(4, device="cuda")
    quantizer = _float8_tensor().Float8Quantizer(scale[3:], amax[3:], dtype)
    quantizer.internal = True
    return quantizer


def difference(result: Any, expected: Any, quantizer: Any, te_quantizer: Any) -> str | None:
    """Name the part of the quantized tensor or its quantizer that differs, or None."""
    if not torch.allclose(quantizer.amax, te_quantizer.amax, rtol=1e-6):
        return "amax"
    if not torch.equal(result._scale_inv.flatten(), expected._scale_inv.flatten()):
        return "scale"
    for name, used in (("_data", quantizer.rowwise_usage), ("_transpose", quantizer.columnwise_usage)):
        if not used:
            continue
        a, b = (getattr(t, name).view(torch.uint8) for t in (result, expected))
        # FP8 codes of one sign are ordered by magnitude, so adjacent values differ by 1.
        distance = (a.to(torch.int16) - b.to(torch.int16)).abs()
        if a.shape != b.shape or distance.max() > 1 or distance.float().mean() > MAX_ROUNDING_DIFFERENCES:
            return name.strip("_")
    return None


def _float8_tensor() -> Any:
    return importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
