"""FlashAttention 4 on Hopper: where it is installed, attention runs in it, in TE's layers and in others.

TE prefers cuDNN's attention to it, torch has FlashAttention 2; both are slower there (docs/performance.md).
On other GPUs their choice stands. FlashAttention 4 is a beta: its versions from 4.0.0b30 on give zeros,
without an error, for the causal mask as TE 2.20 asks for it. So it is tried before it is used.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACKAGE = "flash-attn-4"
MODULE = "flash_attn.cute.interface"
INSTALL = f"pip install '{PACKAGE}[cu13]==4.0.0b29'"
TE_SWITCHES = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V4")
CACHE = Path("~/.cache/flash_attention_4")  # of compiled kernels, which take seconds at every start


def why_not(head_size: int) -> str | None:
    """Why FlashAttention 4 is not to run attention of such heads here, or None."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "only Hopper GPUs are known to gain by it"
    if installed() is None:
        return f"it is not installed: {INSTALL}"
    if head_size % 8 or not 8 <= head_size <= 256:
        return f"head size {head_size}: it takes multiples of 8 up to 256"
    if error := load_error():
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{PACKAGE} {installed()} does not load ({said}): {INSTALL}"
    return None


def installed() -> str | None:
    """Its version, or None."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


@functools.cache
def load_error() -> Exception | None:
    """What importing it raises, or None; its compiled kernels are kept on disk from here on."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(CACHE.expanduser()))
    warnings.filterwarnings("ignore", message=".*cannot be converted to a JitArgument")
    try:
        importlib.import_module(MODULE)
    except Exception as error:  # it comes with a compiler, which may fail in any way
        return error
    return None


def chosen_by_user() -> bool:
    """Whether one of TE's own switches says which attention it takes."""
    return any(name in os.environ for name in TE_SWITCHES)


def wrong_in_te(heads: int, groups: int, head_size: int, device: str = "cuda") -> str | None:
    """What is wrong with attention of `heads` query and `groups` key heads as TE calls it, or None.

    Two sequences, forward and backward, against the definition in float32.
    """
    interface: Any = importlib.import_module(MODULE)
    lengths, generator = [100, 156], torch.Generator(device).manual_seed(0)
    borders = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    spans = {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
    spans |= {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    shapes = [(sum(lengths), n, head_size) for n in (heads, groups, groups, heads)]
    q, k, v, grad = (torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes)

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = interface.flash_attn_varlen_func(q, k, v, causal=True, window_size=(-1, 0), **spans)
        return out[0] if isinstance(out, tuple) else out

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(t.split(lengths) for t in (q, k, v)), strict=True)
        return torch.cat([_causal(*part) for part in parts])

    try:
        found = _with_gradients(flash, [q, k, v], grad)
    except Exception as error:  # another version's call, or its compiler
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{PACKAGE} {installed()} fails as Transformer Engine calls it ({said}): {INSTALL}"
    expected = _with_gradients(definition, [t.float() for t in (q, k, v)], grad.float())
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    if not max(errors) < 0.02:
        return f"{PACKAGE} {installed()} computes wrong attention as Transformer Engine calls it: {INSTALL}"
    return None


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[S, H, K], [S, G, K] twice -> [S, H, K]."""
    heads = (t.transpose(0, 1)[None] for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=grouped)[0].transpose(0, 1)


def _with_gradients(attend: Any, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The result and the inputs' gradients, in float32."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = attend(*leaves)
        return [t.detach().float() for t in (out, *torch.autograd.grad(out, leaves, grad))]


def prefer_in_te() -> None:
    """Have TE take it instead of cuDNN's attention; before its first forward."""
    os.environ["NVTE_FUSED_ATTN"] = "0"


def keep_from_te() -> None:
    """TE takes it by itself where cuDNN cannot, as in deterministic runs; not any more."""
    os.environ["NVTE_FLASH_ATTN_V4"] = "0"
