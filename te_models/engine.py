"""The two implementations of TE's layers: Transformer Engine itself, and its emulation in plain PyTorch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

Backend = Literal["native", "emulated"]


@dataclass(frozen=True)
class NativeOptions:
    """What Transformer Engine's layers do beside what `te.TransformerLayer` does; the emulation has none."""

    cache_fp8_weights: bool = False  # those of a step's first micro-batch serve the others
    fuse_gradient_sums: bool = False  # GEMMs add to `main_grad`, see `training.optim.accumulation`
    one_pass_rotation: bool = True  # see `te_models.kernels.rotation`
    residuals_in_norms: bool = False  # see `te_models.kernels.fused_residual`


def engine(backend: Backend) -> Any:
    """The module that has `TransformerLayer`, `RMSNorm`, `autocast`, `checkpoint` and the recipes' probes."""
    return importlib.import_module(
        {"native": "transformer_engine.pytorch", "emulated": "te_models.emulation"}[backend]
    )


def recipes(backend: Backend) -> Any:
    """The module that has the recipes' classes and `Format`."""
    return importlib.import_module(
        {"native": "transformer_engine.common.recipe", "emulated": "te_models.emulation"}[backend]
    )
