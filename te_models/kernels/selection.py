"""Kernels selected for a run.

Each kernel that replaces a library function has a context manager (`core.patches`). `training.kernels` enters
it if the kernel's self-test passed, and exits it before another run in the same process. Kernels that change
single layers are applied by the decoder when it builds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fp8_suite.core.errors import first_line
from fp8_suite.core.gpus import HOPPER


@dataclass(frozen=True)
class Kernels:
    """Kernels that the builder of a model selects; each passed its self-test on every rank."""

    flash_attention: bool = False  # FlashAttention 4, see `flash_attention`
    qkv_rope: bool = False  # QKV split and RoPE in one pass, see `rope`


DEFAULT_KERNELS = Kernels(qkv_rope=True)  # used without a selection; patches no library


def reports_failure(self_test: Callable[..., str | None]) -> Callable[..., str | None]:
    """Decorate a self-test that may raise, as Triton's compiler does, to return the reason instead."""

    @functools.wraps(self_test)
    def guarded(*arguments: Any, **settings: Any) -> str | None:
        try:
            return self_test(*arguments, **settings)
        except Exception as error:
            return f"it fails ({first_line(error)})"

    return guarded


def on_hopper() -> bool:
    """True if this process's GPU is a Hopper, which most of the kernels are written for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
