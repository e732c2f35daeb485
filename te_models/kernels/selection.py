"""Kernels selected for a run, and `patched`, with which kernels replace functions of libraries.

Each kernel that replaces a library function has a context manager. `training.kernels` enters it if the
kernel's self-test passed, and exits it before another run in the same process. Kernels that change single
layers are applied by the decoder when it builds them.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Kernels:
    """Kernels used by a run; each passed its self-test on every rank. Fields: `training.kernels.KERNELS`."""

    flash_attention: bool = False  # FlashAttention 4, see `flash_attention`
    fp8_lm_head: bool = False  # see `te_models.loss_fp8`
    qkv_rope: bool = False  # QKV split and RoPE in one pass, see `rope`
    swiglu: bool = False  # SwiGLU fused with its FP8 casts, see `fused_swiglu`


DEFAULT_KERNELS = Kernels(qkv_rope=True)  # used without a selection; patches no library


@contextmanager
def patched(owner: Any, **replacements: Any) -> Iterator[None]:
    """Replace attributes of a module, or entries of a mapping such as os.environ, until exit."""
    names = owner if isinstance(owner, MutableMapping) else vars(owner)
    originals = {name: names[name] for name in replacements if name in names}
    names.update(replacements)
    try:
        yield
    finally:
        for name in replacements.keys() - originals.keys():
            names.pop(name, None)
        names.update(originals)


def on_hopper() -> bool:
    """True if this process's GPU is a Hopper, which most of the kernels are written for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
