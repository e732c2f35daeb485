"""Optional kernels that replace library ones. Each is used only if its self-test passes on every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.te_models import loss_fp8, packed_attention
from fp8_suite.te_models.kernels import flash_attention, fused_swiglu, rope
from fp8_suite.te_models.kernels.selection import Kernels, on_hopper
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import Config
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.precision.recipes import Precision


class Workload(NamedTuple):
    """Properties of a run that decide which kernels apply."""

    cfg: Config
    precision: Precision
    shape: ModelShape | None  # None: a Hugging Face model of unknown dimensions
    device: torch.device

    @property
    def native(self) -> bool:
        """True if the model uses native Transformer Engine layers."""
        return self.precision.te_backend == "native"


@dataclass(frozen=True)
class Kernel:
    """An optional kernel: its condition, self-test, on and off switches, and fallback."""

    name: str  # field of `Kernels`
    applies: Callable[[Workload], bool]
    self_test: Callable[[Workload], str | None]  # compares with the library; a problem, or None
    fallback: str | None  # warning if the self-test fails; None: there is no fallback, raise an error
    on: Callable[[Workload], AbstractContextManager] = lambda run: nullcontext()
    off: Callable[[Workload], AbstractContextManager] = lambda run: nullcontext()


def _flash_attention_applies(run: Workload) -> bool:
    if run.precision.te_backend == "emulated" or (run.native and flash_attention.set_by_user()):
        return False
    cfg = run.cfg
    supported = cfg.precision.mixed_precision != "fp32" and run.shape is not None
    enabled = cfg.model.flash_attention and supported
    return enabled and flash_attention.why_not(run.shape.head_dim) is None


def _test_flash_attention(run: Workload) -> str | None:
    sizes = run.shape.num_heads, run.shape.num_kv_heads, run.shape.head_dim
    if not flash_attention.compiled():
        print_rank0("compiling FlashAttention 4's kernels, once on this machine")
    if not run.native:
        return packed_attention.self_test(*sizes)
    options = {"packed": run.cfg.data.packing, "deterministic": run.cfg.optim.deterministic}
    return flash_attention.self_test_te(*sizes, **options)


KERNELS = (
    Kernel(
        "fp8_lm_head",
        applies=lambda run: run.cfg.precision.fp8_lm_head and run.device.type == "cuda",
        self_test=lambda run: loss_fp8.self_test(),
        fallback=None,
    ),
    Kernel(
        "flash_attention",
        applies=_flash_attention_applies,
        self_test=_test_flash_attention,
        fallback="FlashAttention 4 is not used",
        on=lambda run: (
            flash_attention.enabled_in_te() if run.native else packed_attention.flash_attention_4()
        ),
        off=lambda run: flash_attention.disabled_in_te() if run.native else nullcontext(),
    ),
    Kernel(
        "qkv_rope",
        applies=lambda run: run.native,
        self_test=lambda run: rope.self_test(run.shape.num_heads, run.shape.num_kv_heads, run.shape.head_dim),
        fallback="TE splits queries, keys and values and applies RoPE in separate passes",
    ),
    Kernel(
        "swiglu",
        # On other GPUs and with other recipes TE's own kernels are as fast.
        applies=lambda run: run.native and "delayed" in run.precision.in_use and on_hopper(),
        self_test=lambda run: fused_swiglu.self_test(),
        fallback="SwiGLU is not fused with its FP8 casts",
        on=lambda run: fused_swiglu.enabled(),
    ),
)


def enable_kernels(run: Workload, cleanup: ExitStack) -> Kernels:
    """Self-test the kernels that apply and enable those that pass on every rank. Collective.

    A kernel that fails falls back to the library's, with a warning. UserError if it has no fallback.
    `cleanup` restores the libraries.
    """
    used = {}
    for kernel in KERNELS:
        results = ranks.run_on_all_ranks(lambda kernel=kernel: _test(kernel, run))
        problem = next(filter(None, (problem for _, problem in results)), None)
        if problem and kernel.fallback is None:
            reason = f"its self-test failed on this machine: {problem}; drop it"
            raise bad_setting(reason, **{kernel.name: True})
        if problem:
            print_rank0(f"WARNING: {kernel.fallback}: {problem}")
        used[kernel.name] = all(applies for applies, _ in results) and problem is None
        cleanup.enter_context(kernel.on(run) if used[kernel.name] else kernel.off(run))
    return Kernels(**used)


def _test(kernel: Kernel, run: Workload) -> tuple[bool, str | None]:
    applies = kernel.applies(run)
    return applies, kernel.self_test(run) if applies else None
