"""Transformer Engine on this machine: availability, cuDNN, and the attention backend in use."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from fp8_suite.core.errors import first_line
from fp8_suite.te_models.kernels.flash_attention import INSTALL as INSTALL_FLASH
from fp8_suite.te_models.kernels.flash_attention_cache import cache_on_disk

INSTALL_TE = "pip install --no-build-isolation -r requirements-gpu.txt"
MAPS = Path("/proc/self/maps")


def why_not_te() -> str | None:
    """Return why Transformer Engine cannot run here and how to fix it, or None."""
    if not torch.cuda.is_available():
        return "Transformer Engine needs a CUDA GPU and PyTorch sees none"
    if find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed; install it with `{INSTALL_TE}`"
    if error := load_error():
        cure = "`python -m training.doctor` prints the command that fixes it"
        return f"Transformer Engine does not load ({first_line(error)}); {cure}"
    return None


@functools.cache
def load_error() -> Exception | None:
    """Import Transformer Engine and return its error, or None. Cached: a second import fails differently."""
    point_te_at_torchs_cudnn()
    cache_on_disk()  # TE imports FlashAttention, which reads this at import
    silence_advice()
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # TE asserts that versions match
        return error
    return None


def silence_advice() -> None:
    """Filter TE's advice to install FlashAttention 2, which runs in none of the suite's modes."""
    logger = logging.getLogger("DotProductAttention")
    logger.addFilter(lambda record: not record.getMessage().startswith("flash-attn may provide"))


def loaded_cudnns() -> list[Path]:
    """Return the folders of the cuDNN libraries loaded in this process. More than one is a conflict."""
    try:
        lines = MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return []
    paths = [Path(line.split(maxsplit=5)[5]) for line in lines if "/libcudnn" in line]
    return list(dict.fromkeys(path.parent.resolve() for path in paths if path.name.startswith("libcudnn")))


def torch_cudnn() -> Path | None:
    """Return the folder of torch's cuDNN: the loaded one, else pip's. None for a CPU build."""
    if torch.version.cuda is None:
        return None
    if folders := loaded_cudnns():
        return folders[0]
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    places = (spec and spec.submodule_search_locations) or ()
    folders = (Path(place, "lib").resolve() for place in places)
    return next((folder for folder in folders if folder.is_dir()), None)


def point_te_at_torchs_cudnn() -> None:
    """Set CUDNN_HOME to torch's cuDNN, unless the user set it or TE is loaded.

    TE prefers a system cuDNN. With two versions loaded, attention silently runs unfused, 4x slower.
    """
    if "transformer_engine" not in sys.modules and (folder := torch_cudnn()):
        os.environ.setdefault("CUDNN_HOME", str(folder))


def _selected_attention() -> dict:
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention")
    return getattr(module, "_attention_backends", {})


def attention_backend() -> str | None:
    """Return TE's last attention backend: fused, flash or unfused. None before the first forward pass."""
    selected = _selected_attention()
    kinds = ("flash", "fused", "unfused")
    return next((kind for kind in kinds if selected.get(f"use_{kind}_attention")), None)


def flash_attention_version() -> str | None:
    """Return the version of FlashAttention that TE used last, or None."""
    selected = _selected_attention()
    backend = selected.get("use_flash_attention") and selected.get("flash_attention_backend")
    return str(backend) if backend else None


def unfused_warning(*, deterministic: bool, flash_attention: bool) -> str:
    """Return the warning about unfused attention, with the likely cause and its fix."""
    off = [name for name in ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN") if os.environ.get(name) == "0"]
    cudnns = " and ".join(map(str, loaded_cudnns()))
    causes = (
        (off, f"the environment disables the fused kernels: unset {' '.join(off)}"),
        (" and " in cudnns, f"two cuDNNs are mixed, {cudnns}: set CUDNN_HOME to torch's"),
        (flash_attention, "TE refused FlashAttention 4: add --no_flash_attention"),
        (deterministic, f"--deterministic has no fused kernel for large packed batches: {INSTALL_FLASH}"),
        (True, "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints TE's reasons"),
    )
    cause = next(text for applies, text in causes if applies)
    return f"WARNING: attention runs UNFUSED, about 4x slower and with 5x the memory; {cause}"
