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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.errors import first_line
from core.packages import version

PACKAGE = "flash-attn-4"
MODULE = "flash_attn.cute.interface"
INSTALL = f"pip install '{PACKAGE}[cu13]==4.0.0b29'"
TE_SWITCHES = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4")
CACHE = Path("~/.cache/flash_attention_4")  # of compiled kernels, which take seconds at every start
# Queries [T, H, K], keys and values [T, G, K], borders of sequences int32 [N+1] and the longest -> [T, H, K].
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def why_not(head_size: int) -> str | None:
    """Why FlashAttention 4 is not to run attention of such heads here, or None."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "only Hopper GPUs are known to gain by it"
    if installed() is None:
        return f"it is not installed: {INSTALL}"
    if head_size % 8 or not 8 <= head_size <= 256:
        return f"head size {head_size}: it takes multiples of 8 up to 256"
    if error := load_error():
        return f"{PACKAGE} {installed()} does not load ({first_line(error)}): {INSTALL}"
    return None


def installed() -> str | None:
    """Its version, or None."""
    return version(PACKAGE)


@functools.cache
def load_error() -> Exception | None:
    """What importing it raises, or None; its compiled kernels are kept on disk from here on."""
    warnings.filterwarnings("ignore", message=".*cannot be converted to a JitArgument")
    try:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(CACHE.expanduser()))
        importlib.import_module(MODULE)
    except Exception as error:  # it comes with a compiler, which may fail in any way
        return error
    return None


def load_failed() -> bool:
    """Whether it is installed and was found not to load."""
    return load_error.cache_info().currsize > 0 and load_error() is not None


def as_te_calls(*, packed: bool, deterministic: bool = False) -> Attend:
    """Its attention with the arguments that TE gives it for a causal layer."""
    interface: Any = importlib.import_module(MODULE)
    settings = {"causal": True, "window_size": (-1, 0), "deterministic": deterministic}

    def attend(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int) -> Tensor:
        if packed:
            spans = {"cu_seqlens_q": borders, "cu_seqlens_k": borders}
            spans |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
            return _first(interface.flash_attn_varlen_func(q, k, v, **spans, **settings))
        rows = (t.unflatten(0, (-1, longest)) for t in (q, k, v))
        return _first(interface.flash_attn_func(*rows, **settings)).flatten(0, 1)

    return attend


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def wrong(attend: Attend, heads: int, groups: int, head_size: int, device: str = "cuda") -> str | None:
    """What is wrong with attention of `heads` query and `groups` key heads, or None.

    Two sequences of one length, forward and backward, against the definition in float32.
    """
    length, generator = 160, torch.Generator(device).manual_seed(0)
    borders = torch.tensor([0, length, 2 * length], dtype=torch.int32, device=device)
    shapes = [(2 * length, n, head_size) for n in (heads, groups, groups, heads)]
    drawn = [torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes]
    *inputs, grad = drawn

    def definition(*inputs: Tensor) -> Tensor:
        parts = zip(*(t.split(length) for t in inputs), strict=True)
        return torch.cat([_causal(*part) for part in parts])

    try:
        found = _with_gradients(lambda *inputs: attend(*inputs, borders, length), inputs, grad)
    except Exception as error:  # a version that is called otherwise, its compiler, or what it kept on disk
        said = first_line(error)
        cache = os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", CACHE)
        return f"{PACKAGE} {installed()} fails ({said}): {INSTALL}, or remove its kernels in {cache}"
    expected = _with_gradients(definition, [t.float() for t in inputs], grad.float())
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
    if not all(error < 0.02 for error in errors):  # NaN is not
        return f"{PACKAGE} {installed()} computes wrong attention as it is called here: {INSTALL}"
    return None


def wrong_in_te(heads: int, groups: int, head_size: int, *, packed: bool, **how: bool) -> str | None:
    """`wrong` of all calls that a run of TE's layers makes; rows of packed runs may be one sequence each."""
    forms = (True, False) if packed else (False,)
    found = (wrong(as_te_calls(packed=form, **how), heads, groups, head_size) for form in forms)
    return next(filter(None, found), None)


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


def tell_te(*, take: bool) -> None:
    """Have TE take it instead of all others, or not even where cuDNN has none; before a first forward.

    TE takes it by itself in deterministic runs, say, and whatever it computes. Without effect where one of
    TE's own switches is the user's.
    """
    take_back()
    if chosen_by_user():
        return
    for name in ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN_V3") if take else ("NVTE_FLASH_ATTN_V4",):
        os.environ[name] = "0"
        _told.add(name)


def chosen_by_user() -> bool:
    """Whether one of TE's own switches, set before the run, says which attention it takes."""
    return any(name in os.environ for name in TE_SWITCHES if name not in _told)


def take_back() -> None:
    """Unset what `tell_te` set; TE's choice is its own again."""
    while _told:
        os.environ.pop(_told.pop(), None)


_told: set[str] = set()  # switches set here, for an earlier run of this process
