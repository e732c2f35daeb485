"""The kernels a run may choose: each is tried before it is taken, by all ranks or by none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_models import loss_fp8, packed_attention
from te_models.kernels import flash_attention, fused_norm, fused_residual, fused_swiglu, rotation
from training.config import Config
from training.parallel import ranks
from training.parallel.ranks import print_rank0
from training.precision.recipes import Precision
from training.tracking.metrics import ModelShape


@dataclass(frozen=True)
class Kernels:
    """What was taken and must be said to the model; the rest its modules were told."""

    flash_attention: bool  # version 4
    one_pass_rotation: bool  # queries, keys and values split and rotated at once
    residuals_in_norms: bool  # gradients of residual connections added up in the norms' backward


def choose_kernels(
    cfg: Config, precision: Precision, shape: ModelShape | None, device: torch.device
) -> Kernels:
    """What runs here, with a warning for kernels that compute something wrong. Collective.

    RuntimeError where those of --fp8_lm_head do, which has no others.
    """
    fp8_head = cfg.precision.fp8_lm_head and device.type == "cuda"
    if fp8_head and (said := _wrong_somewhere(loss_fp8.why_not)):
        raise RuntimeError(f"--fp8_lm_head: on this machine {said}; drop it")
    flash = _choose_flash_attention(cfg, precision, shape)
    if precision.te_backend != "native":
        return Kernels(flash, one_pass_rotation=False, residuals_in_norms=False)
    rotated = not cfg.precision.fp8_attention and _right(
        lambda: rotation.why_not(shape.num_heads, shape.num_kv_heads, shape.head_dim),
        "queries, keys and values are not split and rotated in one pass",
    )
    width = shape.hidden_size
    residuals = cfg.model.fused_residuals and _right(
        lambda: fused_residual.why_not(width), "gradients of residual connections are added separately"
    )
    fused_residual.use(residuals)
    if "delayed" in precision.in_use:
        fused_swiglu.use(_right(fused_swiglu.why_not, "SwiGLU is not fused with its casts"))
        otherwise = "norms are not fused with their casts"
        gains = width not in fused_norm.TUNED_IN_TE
        fused_norm.use(gains and _right(lambda: fused_norm.why_not(width), otherwise))
    return Kernels(flash, rotated, residuals)


def _choose_flash_attention(cfg: Config, precision: Precision, shape: ModelShape | None) -> bool:
    tries = ranks.run_on_all_ranks(lambda: _try_flash_attention(cfg, precision, shape))
    taken = all(ran for ran, _ in tries)
    if said := next((wrong for _, wrong in tries if wrong), None):
        print_rank0(f"WARNING: FlashAttention 4 is not used: {said}")
    if precision.te_backend == "native":
        flash_attention.tell_te(take=taken)
    elif taken:
        packed_attention.use_flash_attention_4()
    return taken


def _try_flash_attention(
    cfg: Config, precision: Precision, shape: ModelShape | None
) -> tuple[bool, str | None]:
    """Whether FlashAttention 4 can run attention, and what is wrong with one that is installed."""
    backend = precision.te_backend
    packed_attention.use_torch()
    if backend == "emulated" or (backend == "native" and flash_attention.chosen_by_user()):
        return False, None
    wanted = cfg.model.flash_attention and not cfg.precision.fp8_attention  # which is cuDNN's alone
    if not wanted or shape is None or cfg.precision.mixed_precision == "fp32":
        return False, None
    if reason := flash_attention.why_not(shape.head_dim):
        return False, reason if flash_attention.load_failed() else None
    sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
    if backend == "native":
        how = {"packed": cfg.data.packing, "deterministic": cfg.optim.deterministic}
        wrong = flash_attention.wrong_in_te(*sizes, **how)
    else:
        packed_attention.use_flash_attention_4()
        wrong = flash_attention.wrong(packed_attention.attend_packed, *sizes)
        packed_attention.use_torch()
    return wrong is None, wrong


def _wrong_somewhere(why_not: Callable[[], str | None]) -> str | None:
    """What the first rank to find something wrong with kernels says of them; None if all may take them."""
    return next(filter(None, ranks.run_on_all_ranks(why_not)), None)


def _right(why_not: Callable[[], str | None], otherwise: str) -> bool:
    """Whether all ranks may take the kernels; if not, it is said what is done `otherwise`, and why."""
    if said := _wrong_somewhere(why_not):
        print_rank0(f"WARNING: {otherwise}: {said}")
    return said is None
