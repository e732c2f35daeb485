"""Requested and effective precision of a run, with fallbacks. For the recipes see `core.recipes`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from fp8_suite.core.errors import UserError, bad_setting
from fp8_suite.core.gpus import AMPERE
from fp8_suite.core.recipes import FALLBACK_RECIPE, RECIPES, TE_RECIPES
from fp8_suite.te_models.backend import Backend, te_module, te_recipes
from fp8_suite.training.config import Config
from fp8_suite.training.precision.settings import PrecisionConfig
from fp8_suite.training.precision.te_runtime import why_not_te

NATIVE_ONLY_SETTINGS = ("fp8_weights", "fp8_fast_accumulation")


@dataclass(frozen=True)
class Precision:
    """Requested and effective precision, recorded in env.json, the W&B config, summary.json and checkpoints.

    `requested` and `effective` are "bf16", "fp16", "fp32" or a name in RECIPES.
    """

    requested: str
    effective: str
    fallback_reason: str | None = None
    te_recipe: Any = None  # TE's recipe object; None outside FP8 and for torchao
    te_backend: Backend | None = None  # None without --use_te
    emulated: bool = False  # FP8 is emulated: losses are valid, throughput is meaningless
    # Only with a precision map, else empty:
    by_module: dict[str, str] = field(default_factory=dict)  # recipe, or "bf16", of every GEMM module
    te_recipe_of: dict[str, Any] = field(default_factory=dict)  # TE's recipe object by name

    @property
    def fp8(self) -> bool:
        """True if GEMMs run in a recipe."""
        return self.effective in RECIPES

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of activations and of GEMMs that do not run in FP8."""
        return {"fp32": torch.float32, "fp16": torch.float16}.get(self.effective, torch.bfloat16)

    @property
    def in_use(self) -> set[str]:
        """Recipes of all modules."""
        return {*self.by_module.values()} & RECIPES.keys() if self.by_module else {self.effective}

    @property
    def needs_calibration(self) -> bool:
        """True if a recipe in use has scaling state (delayed scaling)."""
        return self.fp8 and any(RECIPES[name].stateful for name in self.in_use)

    @property
    def token_multiple(self) -> int:
        """Required multiple of tokens per micro-batch; 8 keeps BF16 GEMMs aligned."""
        return max(RECIPES[name].token_multiple for name in self.in_use) if self.fp8 else 8

    def describe(self) -> str:
        """Name the recipe, or all recipes of a precision map."""
        by_module = ", ".join(sorted(set(self.by_module.values())))
        return f"by module ({by_module})" if self.by_module else self.effective

    def as_dict(self) -> dict[str, Any]:
        """Return the fields to record."""
        return {
            "requested_recipe": self.requested,
            "recipe": self.effective,
            "fallback_reason": self.fallback_reason,
            "te_backend": self.te_backend,
            "emulated": self.emulated,
        }


def resolve_precision(cfg: Config) -> Precision:
    """Choose the effective precision. UserError if the requested one cannot run and may not fall back."""
    name, backend = cfg.precision.mixed_precision, resolve_backend(cfg)
    if name == "bf16" and torch.cuda.is_available() and torch.cuda.get_device_capability() < AMPERE:
        reason = f"needs compute capability 8.0 (this GPU: {_describe_gpu()}); use fp16"
        raise bad_setting(reason, mixed_precision="bf16")
    if name != "fp8":
        return Precision(name, name, te_backend=backend, emulated=backend == "emulated")
    if backend is None:
        return Precision(cfg.requested_recipe, cfg.requested_recipe, emulated=fp8_gemms_are_emulated())
    for setting in NATIVE_ONLY_SETTINGS if backend == "emulated" else ():
        if getattr(cfg.precision, setting):
            raise bad_setting("not available with emulated TE layers; drop it", **{setting: True})
    name = cfg.requested_recipe
    fallback_reason = why_refused(name, f"--fp8_scenario {cfg.precision.fp8_scenario}", backend)
    if fallback_reason:
        may_fall_back = RECIPES[name].may_fall_back and cfg.precision.fp8_fallback == "warn"
        if not may_fall_back or why_not(FALLBACK_RECIPE, backend):
            raise UserError(fallback_reason, flags=("fp8_scenario", "fp8_fallback"))
        name = FALLBACK_RECIPE
    recipe = make_recipe(name, cfg.precision, backend)
    return Precision(cfg.requested_recipe, name, fallback_reason, recipe, backend, backend == "emulated")


def resolve_backend(cfg: Config) -> Backend | None:
    """Return the backend of TE layers, or None without --use_te. UserError if it cannot run here."""
    if not cfg.model.use_te:
        return None
    requested = cfg.model.te_backend
    if requested == "emulated" or (requested == "auto" and not torch.cuda.is_available()):
        return "emulated"
    if reason := why_not_te():
        raise UserError(
            f"--use_te --te_backend {requested} cannot run here: {reason}; `python -m training.doctor` "
            "checks the installation",
            flags=("use_te", "te_backend"),
        )
    return "native"


def fp8_gemms_are_emulated() -> bool:
    """True if torchao emulates FP8 GEMMs, for lack of a GPU. UserError on a GPU without FP8."""
    if not torch.cuda.is_available():
        return True
    if torch.cuda.get_device_capability() < (8, 9):
        raise UserError(
            "--mixed_precision fp8 cannot run here: FP8 GEMMs need compute capability 8.9 (this GPU: "
            f"{_describe_gpu()}); use --mixed_precision bf16",
            flags=("mixed_precision",),
        )
    return False


def why_refused(name: str, flag: str, backend: Backend) -> str | None:
    """Return the message that refuses a TE recipe which cannot run on this machine, else None."""
    if (reason := why_not(name, backend)) is None:
        return None
    able = [name for name in TE_RECIPES if why_not(name, backend) is None]
    runs = ", ".join(able) or "none; use --mixed_precision bf16"
    return f"{flag} cannot run here: {reason}. This machine runs: {runs}"


def why_not(name: str, backend: Backend = "native") -> str | None:
    """Return why a recipe cannot run on this machine, in TE's words, or None."""
    if backend == "emulated":
        has_class = hasattr(te_recipes(backend), RECIPES[name].te_class)
        return None if has_class else "its stochastic rounding is not emulated"
    if reason := why_not_te():
        return reason
    available, reason = getattr(te_module(backend), RECIPES[name].probe)(return_reason=True)
    return None if available else f"{reason.strip().rstrip('.')} (this GPU: {_describe_gpu()})"


def _describe_gpu() -> str:
    return f"{torch.cuda.get_device_name()}, {'.'.join(map(str, torch.cuda.get_device_capability()))}"


def make_recipe(name: str, cfg: PrecisionConfig, backend: Backend = "native") -> Any:
    """Build TE's recipe object from the settings."""
    te, spec = te_recipes(backend), RECIPES[name]
    recipe = spec.make(cfg, te)
    fast = cfg.fp8_fast_accumulation and "fp8_fast_accumulation" in spec.settings
    if fast and backend == "native":
        for gemm in ("fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            setattr(recipe, gemm, te.MMParams(use_split_accumulator=False))
    return recipe


def recipe_name(recipe: Any) -> str:
    """Return the name in RECIPES of a TE recipe object, native or emulated."""
    return next(name for name, spec in RECIPES.items() if spec.te_class == type(recipe).__name__)


def build_autocast(
    precision: Precision, *, device: torch.device, parameter_dtype: torch.dtype, group: Any = None
) -> Callable[[], AbstractContextManager]:
    """Return a factory of the autocast context for forward passes. Run backward outside it.

    The ranks of `group` (None: all) have the same layers and share the scales of delayed scaling.
    """

    def autocast() -> AbstractContextManager:
        contexts = ExitStack()
        if precision.effective != "fp32" and parameter_dtype == torch.float32:
            contexts.enter_context(torch.autocast(device.type, dtype=precision.compute_dtype))
        if precision.te_recipe is not None:
            te = te_module(precision.te_backend)
            region = te.autocast(enabled=True, recipe=precision.te_recipe, amax_reduction_group=group)
            contexts.enter_context(region)
        return contexts

    return autocast
