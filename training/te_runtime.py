"""Transformer Engine on this machine: whether it loads, and what its attention runs on."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

INSTALL_TE = "pip install --no-build-isolation -r requirements-gpu.txt"


def why_not_te() -> str | None:
    """Why Transformer Engine cannot run here, or None."""
    if not torch.cuda.is_available():
        return "Transformer Engine needs a CUDA GPU and PyTorch sees none"
    if find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed; install it with `{INSTALL_TE}`"
    point_te_at_torchs_cudnn()
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        return f"Transformer Engine does not load ({first}); reinstall it for this torch with `{INSTALL_TE}`"
    return None


def point_te_at_torchs_cudnn() -> None:
    """With a system cuDNN beside torch's, TE mixes the two and attention runs unfused, 4x slower.

    Has an effect only before TE loads; a CUDNN_HOME the user set stays.
    """
    if "CUDNN_HOME" in os.environ or "transformer_engine" in sys.modules:
        return
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    for location in spec.submodule_search_locations or [] if spec else []:
        if (Path(location) / "lib").is_dir():
            os.environ["CUDNN_HOME"] = location


def attention_backend() -> str | None:
    """The backend TE's attention chose last: fused, flash or unfused; None before any forward."""
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention")
    chosen = getattr(module, "_attention_backends", {})
    for kind in ("flash", "fused", "unfused"):
        if chosen.get(f"use_{kind}_attention"):
            return kind
    return None


def unfused_warning(*, deterministic: bool) -> str:
    """What to say of attention that TE runs unfused, by its likeliest cause."""
    cause = (
        "--deterministic has no fused kernel for large packed batches: add --no_packing or drop it."
        if deterministic
        else "Usually two cuDNNs are mixed: before the start, set CUDNN_HOME to the folder of torch's own "
        "(python -c 'import nvidia.cudnn; print(nvidia.cudnn.__path__[0])')."
    )
    return (
        f"WARNING: attention runs UNFUSED, about 4x slower and with 5x the memory. {cause} "
        "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints TE's reasons"
    )
