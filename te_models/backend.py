"""The two implementations of TE's layers: Transformer Engine itself, and its emulation in plain PyTorch."""

from __future__ import annotations

import importlib
from typing import Any, Literal

Backend = Literal["native", "emulated"]


def te_module(backend: Backend) -> Any:
    """Import the module with `TransformerLayer`, `RMSNorm`, `autocast` and `checkpoint`."""
    name = "transformer_engine.pytorch" if backend == "native" else "fp8_suite.te_models.emulation"
    return importlib.import_module(name)


def te_recipes(backend: Backend) -> Any:
    """Import the module with the recipe classes and `Format`."""
    native = backend == "native"
    name = "transformer_engine.common.recipe" if native else "fp8_suite.te_models.emulation.recipes"
    return importlib.import_module(name)
