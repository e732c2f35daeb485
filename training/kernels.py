"""Optional kernels that replace library ones. Each is used only if its self-test passes on every rank.

A pass is remembered for the same software, GPU and sizes, so that only the first start runs the test.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.packages import software
from fp8_suite.te_models.kernels import (
    flash_attention,
    flash_attention_cache,
    fused_swiglu,
    loss_fp8,
    packed_attention,
    rope,
)
from fp8_suite.te_models.kernels.selection import Kernels, on_hopper
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import Config
from fp8_suite.training.parallel import gradient_exchange, ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.precision.recipes import Precision


class KernelInputs(NamedTuple):
    """Properties of a run that decide which kernels apply."""

    cfg: Config
    precision: Precision
    shape: ModelShape | None  # None: a Hugging Face model of unknown dimensions
    device: torch.device

    @property
    def native(self) -> bool:
        """True if the model uses native Transformer Engine layers."""
        return self.precision.te_backend == "native"

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and head size."""
        return self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim


@dataclass(frozen=True)
class OptionalKernel:
    """A kernel with its condition, self-test, on and off switches, and fallback."""

    name: str  # field of `Kernels` if builders select it; its flag if it has no fallback
    applies: Callable[[KernelInputs], bool]
    self_test: Callable[..., str | None]  # compares with the library; a problem, or None
    fallback: str | None  # warning if the self-test fails; None: there is no fallback, raise an error
    arguments: Callable[[KernelInputs], tuple[Any, ...]] = lambda run: ()  # arguments of the self-test
    on: Callable[[KernelInputs], AbstractContextManager] = lambda run: nullcontext()
    off: Callable[[KernelInputs], AbstractContextManager] = lambda run: nullcontext()


def _flash_attention_applies(run: KernelInputs) -> bool:
    if run.precision.te_backend == "emulated" or (run.native and flash_attention.set_by_user()):
        return False
    supported = run.cfg.precision.mixed_precision in ("bf16", "fp8") and run.shape is not None
    # TE has no a2a+p2p in FlashAttention 4.
    supported = supported and run.cfg.sharding.cp_comm_type != "a2a+p2p"
    enabled = run.cfg.model.flash_attention and supported
    return enabled and flash_attention.why_not(run.shape.head_dim) is None


def _test_flash_attention(
    native: bool, packed: bool, deterministic: bool, heads: tuple[int, int, int]
) -> str | None:
    kernels = flash_attention_cache.variants(heads, native=native, packed=packed, deterministic=deterministic)
    if not all(variant.record().exists() for variant in kernels):
        print_rank0("compiling FlashAttention 4's kernels, once on this machine")
    flash_attention_cache.wait_for_compilers()
    if not native:
        return packed_attention.self_test(*heads)
    return flash_attention.self_test_te(*heads, packed=packed, deterministic=deterministic)


KERNELS = (
    OptionalKernel(
        "fp8_lm_head",
        applies=lambda run: run.cfg.precision.fp8_lm_head and run.device.type == "cuda",
        self_test=loss_fp8.self_test,
        fallback=None,
    ),
    OptionalKernel(
        "qkv_rope",
        applies=lambda run: run.native,
        self_test=rope.self_test,
        arguments=lambda run: run.heads,
        fallback="TE splits queries, keys and values and applies RoPE in separate passes",
    ),
    OptionalKernel(
        "swiglu",
        # On other GPUs and with other recipes TE's own kernels are as fast.
        applies=lambda run: run.native and "delayed" in run.precision.in_use and on_hopper(),
        self_test=fused_swiglu.self_test,
        fallback="SwiGLU is not fused with its FP8 casts",
        on=lambda run: fused_swiglu.enabled(),
    ),
    OptionalKernel(
        "fp8_exchange",
        applies=lambda run: run.cfg.sharding.grad_reduce_dtype == "fp8" and run.device.type == "cuda",
        self_test=gradient_exchange.self_test,
        fallback="the FP8 exchange of gradients casts them in several passes",
        on=lambda run: gradient_exchange.fused_fp8(),
    ),
    OptionalKernel(  # last, because its kernels may still be compiling
        "flash_attention",
        applies=_flash_attention_applies,
        self_test=_test_flash_attention,
        arguments=lambda run: (run.native, run.cfg.data.packing, run.cfg.optim.deterministic, run.heads),
        fallback="FlashAttention 4 is not used",
        on=lambda run: flash_attention.enabled_in_te() if run.native else nullcontext(),
        off=lambda run: flash_attention.disabled_in_te() if run.native else nullcontext(),
    ),
)


def enable_kernels(
    run: KernelInputs, cleanup: ExitStack, kernels: Iterable[OptionalKernel] = KERNELS
) -> Kernels:
    """Self-test the kernels that apply and enable those that pass on every rank. Collective.

    A kernel that fails falls back to the library's, with a warning. UserError if it has no fallback.
    `cleanup` restores the libraries.
    """
    enabled = set()
    for kernel in kernels:
        results = ranks.run_on_all_ranks(lambda kernel=kernel: _test(kernel, run))
        problem = next(filter(None, (problem for _, problem in results)), None)
        if problem and kernel.fallback is None:
            reason = f"its self-test failed on this machine: {problem}; drop it"
            raise bad_setting(reason, **{kernel.name: True})
        if problem:
            print_rank0(f"WARNING: {kernel.fallback}: {problem}")
        if used := all(applies for applies, _ in results) and problem is None:
            enabled.add(kernel.name)
        cleanup.enter_context(kernel.on(run) if used else kernel.off(run))
    return Kernels(flash_attention="flash_attention" in enabled, qkv_rope="qkv_rope" in enabled)


def _test(kernel: OptionalKernel, run: KernelInputs) -> tuple[bool, str | None]:
    """Return whether a kernel applies, and the problem that its self-test finds."""
    if not kernel.applies(run):
        return False, None
    arguments = kernel.arguments(run)
    passed = _passed_test(kernel.name, arguments)
    if passed.exists():
        return True, None
    problem = kernel.self_test(*arguments)
    if problem is None:
        with suppress(OSError):  # a folder that cannot be written only means a test at every start
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
    return True, problem


def _passed_test(name: str, arguments: tuple[Any, ...]) -> Path:
    """Return the empty file that exists if this self-test passed with this software on such a GPU."""
    key = hashlib.sha256(repr((arguments, *_machine())).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "fp8_suite" / f"{name}-{key[:16]}"


@functools.cache
def _machine() -> tuple[str, str]:
    """Return the GPU's name, and the versions and source code that its kernels come from."""
    return torch.cuda.get_device_name(), repr(software())
