"""RMSNorm of TE's layers under delayed scaling on Hopper, and its cast to both layouts, see `norm_triton`.

The norms that TE's layers have before their GEMMs look their function up in `cpp_extensions`, and hand it the
quantizer of what they return. What is found there is changed here, if the kernels, compiled for this machine,
are found to compute what TE's do.
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

# Hidden sizes for which TE has norms of their own, as fast as the kernels here with the transpose after them
# (8,192 x 4,096 values on an H200: 65 us either way). What TE has for all others takes twice as long.
TUNED_IN_TE = frozenset({512, 768, 1024, 2048, 4096, 8192})


def why_not(width: int) -> str | None:
    """What is wrong with the kernel on this machine for a hidden size of `width`, or None.

    On others than Hopper TE's own are as good.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        return None
    if not hasattr(_functions(), "rmsnorm_fwd"):
        return "this Transformer Engine has no place for it"
    try:
        looked_up = _looked_up()
    except Exception as error:
        return f"this Transformer Engine looks norms up otherwise ({first_line(error)})"
    return _wrong(width) if looked_up else "this Transformer Engine looks norms up elsewhere"


def use(wanted: bool) -> None:
    """From now on, for all models of the process, on Hopper; or TE's own kernels again."""
    if torch.cuda.get_device_capability() != (9, 0):
        return
    stand_in(_functions(), "rmsnorm_fwd", _Forward, wanted=wanted)


def _functions() -> Any:
    return importlib.import_module("transformer_engine.pytorch.cpp_extensions")


class _Forward:
    """`tex.rmsnorm_fwd`, fused with the cast where there is one: [T, H] -> [T, H], no mean, 1 / rms [T]."""

    def __init__(self, original: Any):
        self.original = original

    def __call__(self, *given: Any, **named: Any) -> Any:
        if named or not _can_run(*given):
            return self.original(*given, **named)
        x, weight, eps, _, quantizer, *_ = given
        return _run(x, weight, eps, quantizer)


def _can_run(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> bool:
    return (
        can_cast(quantizer, x)
        and quantizer.rowwise_usage
        and out is None
        and dtype.name == "kBFloat16"
        and weight.dtype == torch.bfloat16
        and weight.shape == x.shape[1:]
        and weight.is_contiguous()
        and not (sm_margin or zero_centered)
    )


def _run(x: Tensor, weight: Tensor, eps: float, quantizer: Any) -> list[Any]:
    from te_models.kernels.norm_triton import launch

    reciprocals = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    launch = functools.partial(launch, x, weight, eps, reciprocals)
    return [write(launch, x.shape, quantizer, x.device), None, reciprocals]


def _looked_up() -> bool:
    """Whether TE's layers would find a function that is put where `use` puts the kernel's."""
    common = importlib.import_module("transformer_engine.pytorch.module._common")
    functions, mark = _functions(), object()
    before = functions.rmsnorm_fwd
    functions.rmsnorm_fwd = mark
    try:
        return common._get_normalization_func("RMSNorm", True) is mark
    finally:
        functions.rmsnorm_fwd = before


def _wrong(width: int) -> str | None:
    """What the kernel does that TE's do not, on blocks that are full and not, or None."""
    tex = importlib.import_module("transformer_engine_torch")
    plain = getattr(_functions().rmsnorm_fwd, "original", _functions().rmsnorm_fwd)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(208, width, device="cuda", generator=generator).mul(2).bfloat16()
    weight = torch.rand(width, device="cuda", generator=generator).add(0.5).bfloat16()
    try:
        mine, theirs = (trial_quantizer(tex.DType.kFloat8E4M3) for _ in range(2))
        settings = tex.DType.kBFloat16, 0, False
        expected, _, same = plain(x, weight, 1e-5, None, theirs, *settings)
        found, _, reciprocals = _Forward(plain)(x, weight, 1e-5, None, mine, *settings)
        wrong = differs(found, expected, mine, theirs)
    except Exception as error:  # Triton's compiler, or another TE
        return f"it fails ({first_line(error)})"
    if not (wrong or torch.allclose(reciprocals, same, rtol=1e-5, atol=0.0)):
        wrong = "root of the mean square"
    return f"it computes another {wrong}" if wrong else None
