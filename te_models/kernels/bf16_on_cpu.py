"""BF16 matrix products on CPUs without BF16 instructions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# ATen operators to replace -> index of the result that stays in FP32 even for BF16 operands, or None.
OPERATORS: dict[str, int | None] = {
    **dict.fromkeys(("mm", "mm.out", "addmm", "bmm", "baddbmm")),
    "_scaled_dot_product_flash_attention_for_cpu": 1,  # log-sum-exp
    "_scaled_dot_product_flash_attention_for_cpu_backward": None,
}


def has_bf16_instructions() -> bool:
    """True if PyTorch multiplies BF16 matrices fast on this CPU (x86: AVX-512 or newer)."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@contextmanager
def fast_bf16() -> Iterator[None]:
    """Compute BF16 matrix products and attention of CPU tensors in FP32 where BF16 would be slow.

    Without BF16 instructions PyTorch multiplies BF16 matrices about a hundred times slower than FP32 ones.
    The operands are BF16 numbers either way, sums are in FP32, and results are rounded to BF16 once. Only
    attention probabilities differ: they stay in FP32. Applies to every model in the process, in forward and
    backward passes; does nothing on other CPUs and for tensors on a GPU.
    """
    if has_bf16_instructions():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name, fp32_result in OPERATORS.items():
                kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
                library.impl(name, _in_fp32(kernel.call_boxed, fp32_result), "CPU", with_keyset=True)
        yield
    finally:
        library._destroy()


def _in_fp32(kernel: Callable, fp32_result: int | None) -> Callable:
    """Wrap a kernel: widen BF16 operands to FP32 and round results to BF16, except number `fp32_result`."""

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype != torch.bfloat16:
            return kernel(keys, *args, **kwargs)
        widened, options = tree_map_only(Tensor, _widen, (args, kwargs))
        results = kernel(keys, *widened, **options)
        if "out" in kwargs:
            return kwargs["out"].copy_(results)
        if isinstance(results, Tensor):
            return results.bfloat16()
        return tuple(x if i == fp32_result else x.bfloat16() for i, x in enumerate(results))

    return call


def _widen(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x
