"""Precision: which recipe runs, why another cannot, and what really ran in FP8.

FP8 training keeps weights and optimizer in higher precision and casts the operands of each GEMM to 8 bits.
A recipe says how the cast is scaled:

- delayed   one scale a tensor, from the largest value (amax) of the last steps; cheapest, since the scale is
            known before the tensor is. Its history is training state and is saved with checkpoints.
- current   one scale a tensor, from the tensor itself; one more read of each tensor.
- block     one scale per 1x128 activations and 128x128 weights; outliers stay local. Hopper and later.
- mxfp8     one power-of-two scale per 32 values, in hardware. Blackwell.
- nvfp4     4-bit values with two levels of scales. Blackwell.

HYBRID format: E4M3 (more precision) forward, E5M2 (more range) for gradients.
See https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from training.config import Config, PrecisionConfig

INSTALL_TE = "pip install --no-build-isolation -r requirements-gpu.txt"
STANDARD_RECIPE = "delayed"


@dataclass(frozen=True)
class RecipeSpec:
    """How to make a TE recipe, what tells whether it runs here, and the sizes its kernels take."""

    make: Callable[[PrecisionConfig, Any], Any]  # (settings, te recipe module) -> Recipe
    probe: str  # a te.is_*_available function
    token_multiple: int  # tokens of a micro-batch
    feature_multiple: int  # rows and columns of every weight


def _delayed(cfg: PrecisionConfig, te: Any) -> Any:
    return te.DelayedScaling(
        margin=cfg.fp8_margin,
        fp8_format=te.Format[cfg.fp8_format.upper()],
        amax_history_len=cfg.fp8_amax_history_len,
        amax_compute_algo=cfg.fp8_amax_compute_algo,
        fp8_dpa=cfg.fp8_attention,
    )


def _current(cfg: PrecisionConfig, te: Any) -> Any:
    return te.Float8CurrentScaling(fp8_format=te.Format[cfg.fp8_format.upper()], fp8_dpa=cfg.fp8_attention)


RECIPES: dict[str, RecipeSpec] = {
    "delayed": RecipeSpec(_delayed, "is_fp8_available", 16, 16),
    "current": RecipeSpec(_current, "is_fp8_available", 16, 16),
    "block": RecipeSpec(lambda cfg, te: te.Float8BlockScaling(), "is_fp8_block_scaling_available", 128, 128),
    "mxfp8": RecipeSpec(lambda cfg, te: te.MXFP8BlockScaling(), "is_mxfp8_available", 32, 32),
    "nvfp4": RecipeSpec(lambda cfg, te: te.NVFP4BlockScaling(), "is_nvfp4_available", 128, 32),
}
# Recipes only Blackwell runs; elsewhere --fp8_fallback decides between the standard recipe and an error.
FALLING_BACK = ("mxfp8", "nvfp4")


@dataclass(frozen=True)
class Precision:
    """What was asked for and what runs; both stand in env.json, the W&B config and summary.json."""

    requested: str
    effective: str
    fallback_reason: str | None = None
    recipe: Any = None  # the TE recipe; None outside FP8

    @property
    def token_multiple(self) -> int:
        """Tokens of a micro-batch must be a multiple of this; 8 keeps BF16 GEMMs aligned."""
        return RECIPES[self.effective].token_multiple if self.recipe is not None else 8

    def as_dict(self) -> dict[str, str | None]:
        return {
            "requested_recipe": self.requested,
            "recipe": self.effective,
            "fallback_reason": self.fallback_reason,
        }


def resolve_precision(cfg: Config) -> Precision:
    """Decide what runs, before any weight is read. RuntimeError names what cannot run here and what can."""
    mixed, use_te = cfg.precision.mixed_precision, cfg.model.use_te
    if use_te and (reason := why_not_te()):
        raise RuntimeError(
            f"--use_te cannot run here: {reason}. "
            "This machine runs: --mixed_precision bf16 or fp32 without --use_te"
        )
    if mixed != "fp8":
        return Precision(mixed, mixed)
    scenario = cfg.precision.fp8_scenario
    requested = STANDARD_RECIPE if scenario == "default" else scenario
    if not use_te:
        reason = why_not_te()
        hint = f", which cannot run here: {reason}" if reason else ""
        raise RuntimeError(
            f"--mixed_precision fp8 needs --use_te{hint}. FP8 without Transformer Engine is not built in; "
            "without FP8: --mixed_precision bf16"
        )
    reason = why_not(requested)
    if reason is None:
        return Precision(requested, requested, recipe=make_recipe(requested, cfg.precision))
    runs = ", ".join(name for name in RECIPES if why_not(name) is None) or "none; use --mixed_precision bf16"
    message = f"--fp8_scenario {scenario} cannot run here: {reason}. This machine runs: {runs}"
    if requested not in FALLING_BACK or cfg.precision.fp8_fallback == "error" or why_not(STANDARD_RECIPE):
        raise RuntimeError(message)
    return Precision(
        requested,
        STANDARD_RECIPE,
        fallback_reason=message,
        recipe=make_recipe(STANDARD_RECIPE, cfg.precision),
    )


def make_recipe(name: str, cfg: PrecisionConfig) -> Any:
    return RECIPES[name].make(cfg, importlib.import_module("transformer_engine.common.recipe"))


def why_not_te() -> str | None:
    """Why Transformer Engine cannot run here, or None."""
    if not torch.cuda.is_available():
        return "Transformer Engine needs a CUDA GPU and PyTorch sees none"
    if find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed; install it with `{INSTALL_TE}`"
    point_te_at_torchs_cudnn()
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        return f"Transformer Engine does not load ({first}); reinstall it for this torch with `{INSTALL_TE}`"
    return None


def why_not(name: str) -> str | None:
    """Why a recipe cannot run on this machine, in the library's own words, or None."""
    if reason := why_not_te():
        return reason
    te = importlib.import_module("transformer_engine.pytorch")
    available, reason = getattr(te, RECIPES[name].probe)(return_reason=True)
    if available:
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{reason.strip().rstrip('.')} (this GPU: {torch.cuda.get_device_name()}, {major}.{minor})"


def point_te_at_torchs_cudnn() -> None:
    """With a system cuDNN beside torch's, TE mixes the two and attention runs unfused, 4x slower.

    Has an effect only before TE loads; a CUDNN_HOME the user set stays.
    """
    if "CUDNN_HOME" in os.environ or "transformer_engine" in sys.modules:
        return
    spec = find_spec("nvidia.cudnn") if find_spec("nvidia") else None
    for location in spec.submodule_search_locations or [] if spec else []:
        if (Path(location) / "lib").is_dir():
            os.environ["CUDNN_HOME"] = location


def check_sizes(precision: Precision, model_name: str, sizes: dict[str, int]) -> None:
    """ValueError naming the sizes whose GEMMs the recipe's kernels cannot run."""
    if precision.recipe is None:
        return
    multiple = RECIPES[precision.effective].feature_multiple
    odd = [f"{name} {size}" for name, size in sizes.items() if size % multiple]
    if odd:
        raise ValueError(
            f"--fp8_scenario {precision.effective} --model_name {model_name}: {', '.join(odd)} not a "
            f"multiple of {multiple}, which its FP8 GEMMs need; use another recipe or --mixed_precision bf16"
        )


def check_fp8_attention(cfg: Config, precision: Precision, head_size: int) -> None:
    """RuntimeError with what FP8 attention lacks on GPUs before Blackwell (the conditions of TE 2.20)."""
    if not cfg.precision.fp8_attention or precision.recipe is None:
        return
    if torch.cuda.get_device_capability() >= (10, 0):
        return
    reasons, cudnn = [], torch.backends.cudnn.version()
    if precision.effective != "delayed":
        reasons.append(f"--fp8_scenario {precision.effective}: only delayed scaling has it before Blackwell")
    if head_size != 128:
        reasons.append(f"head size {head_size}: only 128 has it before Blackwell")
    if cfg.data.packing and cudnn < 92300:
        reasons.append(f"--packing needs cuDNN 9.23.0, this is {cudnn}: add --no_packing")
    if cfg.optim.deterministic and cudnn < 91900:
        reasons.append(f"--deterministic needs cuDNN 9.19.0, this is {cudnn}: drop it")
    if reasons:
        raise RuntimeError(f"--fp8_attention cannot run here: {'; '.join(reasons)}; or drop --fp8_attention")


def build_autocast(
    precision: Precision, *, device: torch.device, parameter_dtype: torch.dtype
) -> Callable[[], AbstractContextManager]:
    """The context that every forward runs in; backward stays outside."""
    if precision.recipe is not None:
        te = importlib.import_module("transformer_engine.pytorch")
        return lambda: te.autocast(enabled=True, recipe=precision.recipe)
    if precision.effective == "bf16" and parameter_dtype == torch.float32:
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext


# Delayed scaling's state: scales and amax histories that TE keeps outside parameters and buffers.


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """Live references to every scale [N] and amax history [steps, N], float32; delayed scaling only."""
    state: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        for direction in ("scaling_fwd", "scaling_bwd"):
            tensors = getattr(module, "fp8_meta", {}).get(direction)
            for part in ("scale", "amax_history"):
                if isinstance(value := getattr(tensors, part, None), Tensor):
                    state[f"{name}.{direction}.{part}"] = value
    return state


@torch.no_grad()
def scale_gradients(model: nn.Module, factor: float) -> None:
    """Make the gradients' scales those of a loss `factor` times as large; exact, since backward is linear.

    Delayed scaling starts from scales of 1, and the gradients of a mean over 10,000 tokens lie far below
    what E5M2 holds at that scale: they underflow, one layer lower with every step, and the first gradients
    are wrong (1B Llama, first step: norm 2.73 instead of 11.4). So calibration uses the summed loss, whose
    gradients fit, and this turns its scales into the mean's.
    """
    for name, tensor in scaling_state(model).items():
        if ".scaling_bwd." in name:
            tensor.mul_(factor if name.endswith("amax_history") else 1 / factor)


@torch.no_grad()
def restore_scaling(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy a checkpoint's scales and histories over those TE allocated; ValueError if they do not match."""
    state = scaling_state(model)
    if saved and saved.keys() != state.keys():
        raise ValueError("--resume: the checkpoint's FP8 scaling state is of another model or TE version")
    for name, tensor in saved.items():
        state[name].copy_(tensor)


@contextmanager
def frozen_scaling(model: nn.Module) -> Iterator[None]:
    """Undo what forward passes leave in the amax histories: evaluation must not steer training."""
    saved = {name: tensor.clone() for name, tensor in scaling_state(model).items()}
    yield
    for name, tensor in scaling_state(model).items():
        if name in saved:
            tensor.copy_(saved[name])


def scrub_scaling(model: nn.Module) -> None:
    """Forget non-finite amaxes of a step that was not taken; one would pin its scale for a whole history."""
    for name, tensor in scaling_state(model).items():
        if name.endswith("amax_history"):
            tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


# What ran in FP8.


@dataclass(frozen=True)
class CoverageRow:
    modules: str  # names with layer numbers folded: layers.*.self_attention.proj
    count: int
    precision: str
    gemm_share: float  # of the FLOPs of all weight GEMMs; attention's own products are not among them


@dataclass(frozen=True)
class Coverage:
    rows: list[CoverageRow]
    fp8_modules: int
    fp8_gemm_share: float

    def lines(self) -> list[str]:
        width = max(len(row.modules) for row in self.rows)
        body = [
            f"  {row.modules:<{width}}  x{row.count:<4} {row.precision:<14} {row.gemm_share:6.1%} of GEMMs"
            for row in self.rows
        ]
        total = f"FP8 ran in {self.fp8_modules} modules: {self.fp8_gemm_share:.1%} of GEMM FLOPs"
        return [f"precision coverage of the first step; {total}", *body]

    def as_dict(self) -> dict[str, Any]:
        return {
            "fp8_modules": self.fp8_modules,
            "fp8_gemm_share": self.fp8_gemm_share,
            "rows": [vars(row) for row in self.rows],
        }


def coverage(model: nn.Module, precision: Precision) -> Coverage:
    """Read off the modules, after a step, in which precision each one's GEMMs ran.

    A GEMM's FLOPs are proportional to its weight's elements, since every weight sees the same tokens.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for name, module in model.named_modules():
        # ZeRO-3 leaves an empty tensor where a weight was, and its shape beside it.
        shapes = [getattr(p, "ds_shape", p.shape) for p in module.parameters(recurse=False)]
        elements = sum(shape.numel() for shape in shapes if len(shape) == 2)
        is_attention = type(module).__name__ == "DotProductAttention"
        if isinstance(module, nn.Embedding) or not (elements or is_attention):
            continue
        key = (re.sub(r"\.\d+(?=\.|$)", ".*", name), _ran_in(module, precision, is_attention))
        count, total = found.get(key, (0, 0))
        found[key] = (count + 1, total + elements)
    all_elements = sum(total for _, total in found.values())
    rows = [CoverageRow(name, n, ran, e / all_elements) for (name, ran), (n, e) in found.items()]
    fp8 = [row for row in rows if row.precision.startswith("fp8")]
    return Coverage(rows, sum(r.count for r in fp8), sum(r.gemm_share for r in fp8))


def _ran_in(module: nn.Module, precision: Precision, is_attention: bool) -> str:
    """`fp8 <recipe>` if TE says that this module's last forward was quantised, else the compute dtype."""
    recipe = getattr(module, "fp8_meta", {}).get("recipe")
    quantised = getattr(module, "fp8", False) and getattr(module, "fp8_initialized", False)
    if quantised and (not is_attention or getattr(recipe, "fp8_dpa", False)):
        return f"fp8 {precision.effective}"
    return "fp32" if precision.effective == "fp32" else "bf16"


def attention_backend() -> str | None:
    """The backend TE's attention chose last: fused, flash or unfused; None before any forward."""
    module = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention")
    chosen = getattr(module, "_attention_backends", {})
    for kind in ("flash", "fused", "unfused"):
        if chosen.get(f"use_{kind}_attention"):
            return kind
    return None


def unfused_warning(*, deterministic: bool) -> str:
    """What to say of attention that TE runs unfused, by its likeliest cause."""
    cause = (
        "--deterministic has no fused kernel for large packed batches: add --no_packing or drop it."
        if deterministic
        else "Usually two cuDNNs are mixed: before the start, set CUDNN_HOME to the folder of torch's own "
        "(python -c 'import nvidia.cudnn; print(nvidia.cudnn.__path__[0])')."
    )
    return (
        f"WARNING: attention runs UNFUSED, about 4x slower and with 5x the memory. {cause} "
        "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints TE's reasons"
    )
