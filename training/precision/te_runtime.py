"""Transformer Engine on this machine: whether it loads, and what its attention runs on."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from importlib.util import find_spec

import torch

from core.errors import first_line
from core.packages import version
from te_models.kernels.flash_attention import INSTALL as INSTALL_FLASH
from training.precision import cudnn

INSTALL_TE = "pip install --no-build-isolation -r requirements-gpu.txt"


def why_not_te() -> str | None:
    """Why Transformer Engine cannot run here, or None."""
    if not torch.cuda.is_available():
        return "Transformer Engine needs a CUDA GPU and PyTorch sees none"
    if find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed; install it with `{INSTALL_TE}`"
    if error := load_error():
        said = first_line(error)
        return f"Transformer Engine does not load ({said}); build it for this torch with `{rebuild_te()}`"
    return None


@functools.cache
def load_error() -> Exception | None:
    """What importing TE raises, or None. Asked once: a second import would fail in another way."""
    point_te_at_torchs_cudnn()
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # TE asserts that versions match
        return error
    return None


def rebuild_te() -> str:
    """The command; pip takes an extension for another torch as installed, and keeps what it built once."""
    found = version("transformer_engine")
    pin = f"=={found}" if found else ""
    options = "--no-build-isolation --no-cache-dir --force-reinstall --no-deps"
    return f"pip install {options} transformer_engine_torch{pin}"


@functools.cache
def point_te_at_torchs_cudnn() -> str | None:
    """With a system cuDNN beside torch's, TE mixes the two and attention runs unfused, 4x slower.

    Has an effect only before TE loads; a CUDNN_HOME the user set stays. Returns what to say of it, on every
    call: None where there is no second cuDNN.
    """
    if "CUDNN_HOME" in os.environ or "transformer_engine" in sys.modules:
        return None
    own, other = cudnn.of_torch(), cudnn.of_te()
    if own is None or (other and other[0] == own):
        return None
    os.environ["CUDNN_HOME"] = str(own)
    if other is None:
        return None
    folder, origin = other
    return (
        f"two cuDNNs: Transformer Engine would load the one in {folder} (found by {origin}) beside torch's; "
        f"CUDNN_HOME={own} makes it load torch's"
    )


def _chosen_attention() -> dict:
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention")
    return getattr(module, "_attention_backends", {})


def attention_backend() -> str | None:
    """The backend TE's attention chose last: fused, flash or unfused; None before any forward."""
    chosen = _chosen_attention()
    for kind in ("flash", "fused", "unfused"):
        if chosen.get(f"use_{kind}_attention"):
            return kind
    return None


def flash_attention_version() -> str | None:
    """Of the FlashAttention that TE's attention chose last; None if it chose none."""
    chosen = _chosen_attention()
    found = chosen.get("flash_attention_backend") if chosen.get("use_flash_attention") else None
    return str(found) if found else None


def unfused_warning(*, deterministic: bool, flash_attention: bool) -> str:
    """What to say of attention that TE runs unfused, by its likeliest cause."""
    if flash_attention:
        cause = "Transformer Engine refused FlashAttention 4: add --no_flash_attention."
    elif deterministic:
        cause = (
            "--deterministic has no fused kernel for large packed batches: install FlashAttention 4 "
            f"({INSTALL_FLASH}), add --no_packing or drop it."
        )
    else:
        cause = (
            "Usually two cuDNNs are mixed: before the start, set CUDNN_HOME to the folder of torch's own "
            "(python -c 'import nvidia.cudnn; print(nvidia.cudnn.__path__[0])')."
        )
    return (
        f"WARNING: attention runs UNFUSED, about 4x slower and with 5x the memory. {cause} "
        "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints TE's reasons"
    )
