"""FlashAttention 4 on Hopper: package, self-test and use in TE's layers.

FlashAttention 4 is used if it is installed and passes the self-test: in TE's layers inside `enabled_in_te`,
in transformers models by `packed_attention`. Otherwise TE selects a backend, usually cuDNN, and
transformers models run torch's FlashAttention 2. Both are slower on Hopper (docs/performance.md).

FlashAttention 4 is a beta. Versions 4.0.0b30 and later silently return zeros for the causal mask as TE 2.20
requests it, so the self-test calls it with the same arguments as the layers.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from fp8_suite.core.errors import first_line
from fp8_suite.core.packages import version
from fp8_suite.core.patches import FLASH_ATTENTION_4_OFF, FLASH_ATTENTION_4_ON
from fp8_suite.te_models.kernels import flash_attention_cache
from fp8_suite.te_models.kernels.flash_attention_cache import PACKAGE, Variant
from fp8_suite.te_models.kernels.selection import on_hopper
from torch import Tensor

MODULE = "flash_attn.cute.interface"
INSTALL = f"pip install '{PACKAGE}[cu13]==4.0.0b29'"
TE_SWITCHES = ("NVTE_FUSED_ATTN", "NVTE_FLASH_ATTN", "NVTE_FLASH_ATTN_V3", "NVTE_FLASH_ATTN_V4")
# Sequence length of tests. Shorter ones run other kernels, which have one block of up to 192 queries or keys.
LENGTH = 208
# T tokens, N sequences, S tokens per row, H query heads, G key/value groups, K head size.
# Arguments: q [T, H, K], k and v [T, G, K], cu_seqlens [N+1] int32, longest sequence; returns [T, H, K].
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def why_not(head_size: int) -> str | None:
    """Return why FlashAttention 4 cannot run on this machine with this head size, or None."""
    if not on_hopper():
        return "it is known to be faster on Hopper GPUs only"
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
    """Import FlashAttention 4."""
    flash_attention_cache.cache_on_disk()
    return importlib.import_module(MODULE)


def set_by_user() -> bool:
    """True if the user selected TE's attention by one of TE's environment variables."""
    return any(name in os.environ for name in TE_SWITCHES)


def enabled_in_te() -> AbstractContextManager[None]:
    """Make TE use FlashAttention 4 instead of cuDNN; enter before the first forward pass."""
    return FLASH_ATTENTION_4_ON.on(lambda value: "0")


def disabled_in_te() -> AbstractContextManager[None]:
    """Keep TE from selecting FlashAttention 4 without a self-test, unless the user selected it."""
    return nullcontext() if set_by_user() else FLASH_ATTENTION_4_OFF.on(lambda value: "0")


def self_test_te(
    heads: int, groups: int, head_size: int, *, packed: bool, deterministic: bool = False
) -> str | None:
    """Run `self_test` with each call of TE's layers; return the first problem, or None.

    Packed runs also have unpacked batches.
    """
    forms = dict.fromkeys((packed, False))
    calls = [as_te_calls(packed=form, deterministic=deterministic) for form in forms]
    return next(filter(None, (self_test(call, heads, groups, head_size) for call in calls)), None)


def as_te_calls(*, packed: bool, deterministic: bool = False) -> Attend:
    """Return FlashAttention 4, called with the arguments that TE passes for a causal layer."""
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
    """Compare `attend`, with and without gradients, with torch in float32; return the problem, or None."""
    generator = torch.Generator(device).manual_seed(0)
    cu_seqlens = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32, device=device)
    shapes = [(2 * LENGTH, n, head_size) for n in (heads, groups, groups, heads)]
    *inputs, grad = (torch.randn(shape, device=device, generator=generator).bfloat16() for shape in shapes)

    def reference(*inputs: Tensor) -> Tensor:
        rows = (t.unflatten(0, (2, LENGTH)).transpose(1, 2) for t in inputs)  # [2, H or G, S, K]
        out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=heads != groups)
        return out.transpose(1, 2).flatten(0, 1)  # [T, H, K]

    try:
        results = _results(lambda *inputs: attend(*inputs, cu_seqlens, LENGTH), inputs, grad)
    except Exception as error:  # from its import, compiler, cache or a changed signature
        reason = f"{PACKAGE} {installed()} fails ({first_line(error)})"
        return f"{reason}: {INSTALL}, or delete its compiled kernels in {flash_attention_cache.folder()}"
    expected = _results(reference, [t.float() for t in inputs], grad.float())
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(results, expected, strict=True)]
    if not all(error < 0.02 for error in errors):  # false for NaN
        return f"{PACKAGE} {installed()} computes wrong attention: {INSTALL}"
    return None


def _results(attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the outputs without and with gradients, and the gradients of the inputs, in float32."""
    with torch.no_grad():
        evaluated = attend(*inputs)
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = attend(*leaves)
        return [t.detach().float() for t in (evaluated, out, *torch.autograd.grad(out, leaves, grad))]


# Compiling beside other work, see `flash_attention_cache`


def compile_ahead(variant: Variant) -> None:
    """Compile kernels as TE's layers call them, without a GPU.

    It changes FlashAttention, so it needs a process of its own.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    for function in (interface().FlashAttnFunc, interface().FlashAttnVarlenFunc):
        function.apply = _without_autograd(function)
    heads, groups, head_size, packed, deterministic, trained = variant
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (
            torch.empty(2 * LENGTH, n, head_size, dtype=torch.bfloat16, device="cuda", requires_grad=trained)
            for n in (heads, groups, groups)
        )
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="cuda")
        as_te_calls(packed=packed, deterministic=deterministic)(q, k, v, cu_seqlens, LENGTH)
    variant.record().touch()


def _without_autograd(function: Any) -> Any:
    """Return an autograd function's forward and backward without autograd, which needs a GPU."""

    def apply(q: Tensor, *arguments: Any) -> Any:
        context = SimpleNamespace(set_materialize_grads=lambda value: None)
        context.save_for_backward = lambda *tensors: setattr(context, "saved_tensors", tensors)
        results = function.forward(context, q, *arguments)
        if q.requires_grad:
            function.backward(context, results[0].clone(), None)
        return results

    return apply


if __name__ == "__main__":
    compile_ahead(Variant(*json.loads(sys.argv[1])))
