"""The two implementations of TE's layers: Transformer Engine itself, and its emulation in plain PyTorch."""

from __future__ import annotations

import importlib
from typing import Any, Literal

Backend = Literal["native", "emulated"]


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
