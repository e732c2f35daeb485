"""Models of TE's and Hugging Face's layers. `from_pretrained` and `convert` return transformers models."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["convert", "from_pretrained"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported on use, because commands print --help without torch.
    return getattr(importlib.import_module("fp8_suite.training.library.build"), name)
