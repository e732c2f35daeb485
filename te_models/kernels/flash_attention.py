"""FlashAttention 4 on Hopper: its package, its self-test, and its use in TE's layers.

Attention runs in FlashAttention 4 where it is installed and passes the self-test: in TE's layers inside
`enabled_in_te`, in transformers models by `te_models.packed_attention`. Otherwise TE chooses, usually
cuDNN's, and transformers models run torch's FlashAttention 2; both are slower here (docs/performance.md).

FlashAttention 4 is a beta: versions from 4.0.0b30 on return zeros, without an error, for the causal mask as
TE 2.20 requests it. The self-test therefore calls it in the form in which the layers will.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import first_line
from core.packages import version
from te_models.kernels.selection import on_hopper, patched

PACKAGE = "flash-attn-4"
MODULE = "flash_attn.cute.interface"
INSTALL = f"pip install '{PACKAGE}[cu13]==4.0.0b29'"
TE_SWITCHES = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4")
CACHE = Path("~/.cache/flash_attention_4")  # compiled kernels, which otherwise cost seconds at every start
# q [T, H, K], k and v [T, G, K], cu_seqlens int32 [N+1], longest sequence -> [T, H, K]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def why_not(head_size: int) -> str | None:
    """Return why FlashAttention 4 does not apply here to heads of this size, or None."""
    if not on_hopper():
        return "only Hopper GPUs are known to gain by it"
    if installed() is None:
        return f"it is not installed: {INSTALL}"
    if head_size % 8 or not 8 <= head_size <= 256:
        return f"head size {head_size}: it supports multiples of 8 up to 256"
    return None


def installed() -> str | None:
    """Return the installed version, or None."""
    return version(PACKAGE)


@functools.cache
def interface() -> Any:
    """Import FlashAttention 4, which compiles kernels at first use, and keep those on disk."""
    warnings.filterwarnings("ignore", message=".*cannot be converted to a JitArgument")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(CACHE.expanduser()))
    return importlib.import_module(MODULE)


def set_by_user() -> bool:
    """True if the user chose TE's attention by one of TE's own switches."""
    return any(name in os.environ for name in TE_SWITCHES)


def enabled_in_te() -> AbstractContextManager[None]:
    """Let TE prefer FlashAttention 4 to cuDNN's attention; enter before the first forward pass."""
    return patched(os.environ, NVTE_FUSED_ATTN="0", NVTE_FLASH_ATTN_V3="0")


def disabled_in_te() -> AbstractContextManager[None]:
    """Keep TE from choosing FlashAttention 4 untested, as in deterministic runs, unless the user chose."""
    return patched(os.environ, **({} if set_by_user() else {"NVTE_FLASH_ATTN_V4": "0"}))


def self_test_te(heads: int, groups: int, head_size: int, *, packed: bool, **how: bool) -> str | None:
    """Run `self_test` on each form in which TE's layers call it; packed runs also have unpacked batches."""
    forms = (True, False) if packed else (False,)
    found = (self_test(as_te_calls(packed=form, **how), heads, groups, head_size) for form in forms)
    return next(filter(None, found), None)


def as_te_calls(*, packed: bool, deterministic: bool = False) -> Attend:
    """Return its attention, called with the arguments that TE passes for a causal layer."""
    settings = {"causal": True, "window_size": (-1, 0), "deterministic": deterministic}

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        if packed:
            lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
            lengths |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
            return _first(interface().flash_attn_varlen_func(q, k, v, **lengths, **settings))
        rows = (t.unflatten(0, (-1, longest)) for t in (q, k, v))  # [N, longest, H or G, K]
        return _first(interface().flash_attn_func(*rows, **settings)).flatten(0, 1)

    return attend


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def self_test(attend: Attend, heads: int, groups: int, head_size: int, device: str = "cuda") -> str | None:
    """Compare `attend`, forward and backward, with the definition in float32: the problem, or None."""
    length, generator = 160, torch.Generator(device).manual_seed(0)
    cu_seqlens = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=device)
    shapes = [(2 * length, n, head_size) for n in (heads, groups, groups, heads)]
    *inputs, grad = (torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes)

    def definition(*inputs: Tensor) -> Tensor:
        rows = (t.unflatten(0, (2, length)).transpose(1, 2) for t in inputs)  # [2, H or G, S, K]
        out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=heads != groups)
        return out.transpose(1, 2).flatten(0, 1)  # [T, H, K]

    try:
        found = _with_gradients(lambda *inputs: attend(*inputs, cu_seqlens, length), inputs, grad)
    except Exception as error:  # its import, its compiler, its cache, or another signature
        cache = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", CACHE)
        reason = f"{PACKAGE} {installed()} fails ({first_line(error)})"
        return f"{reason}: {INSTALL}, or remove its compiled kernels in {cache}"
    expected = _with_gradients(definition, [t.float() for t in inputs], grad.float())
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    if not all(error < 0.02 for error in errors):  # false for NaN
        return f"{PACKAGE} {installed()} computes wrong attention as it is called here: {INSTALL}"
    return None


def _with_gradients(attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the result and the gradients of the inputs, in float32."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = attend(*leaves)
        return [t.detach().float() for t in (out, *torch.autograd.grad(out, leaves, grad))]
