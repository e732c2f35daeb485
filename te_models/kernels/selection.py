"""Kernels selected for a run, and the one way in which they replace a library's functions.

A library is changed only inside `patched`. Each kernel that replaces a function offers a context `enabled`
for it; `training.kernels` enters those whose self-test passed, and leaves them before another run of the same
process selects its own. A kernel that changes single layers is applied by the decoder as it builds them.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Kernels:
    """Kernels that a run uses; each passed its self-test on every rank."""

    flash_attention: bool = False  # FlashAttention 4, see `flash_attention`
    fp8_lm_head: bool = False  # see `te_models.loss_fp8`
    qkv_rope: bool = False  # QKV split and RoPE in one pass, see `rope`
    residual_gradients: bool = False  # added in the norms' backward, see `fused_residual`
    swiglu: bool = False  # fused with its FP8 casts, see `fused_swiglu`


DEFAULT_KERNELS = Kernels(qkv_rope=True)  # of models built without a selection: no library is patched


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
    """True if this process's GPU is a Hopper, the architecture that most of the kernels are written for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
