"""TE's recipe objects: which run on this machine, how to make them, and their names."""

from __future__ import annotations

from typing import Any

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.recipes import RECIPES
from fp8_suite.te_models.backend import Backend, te_module, te_recipes
from fp8_suite.te_models.precision.te_runtime import why_not_te
from fp8_suite.training.precision.settings import PrecisionConfig


def why_not(name: str, backend: Backend = "native") -> str | None:
    """Return why a recipe cannot run on this machine, in TE's words or the emulation's, or None."""
    if backend == "emulated":
        emulated, te_class = te_recipes(backend), RECIPES[name].te_class
        return None if hasattr(emulated, te_class) else emulated.NOT_EMULATED.get(te_class, "not emulated")
    if reason := why_not_te():
        return reason
    available, reason = getattr(te_module(backend), RECIPES[name].probe)(return_reason=True)
    return None if available else f"{reason.strip().rstrip('.')} (this GPU: {describe_gpu()})"


def describe_gpu() -> str:
    """Return name and compute capability of this process's GPU."""
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


def check_gemm_sizes(recipe: str, sizes: dict[str, int], /, *, way_out: str = "", **settings: Any) -> None:
    """UserError naming the sizes that are not a multiple of what the recipe's GEMMs need."""
    multiple = RECIPES[recipe].feature_multiple
    if odd := ", ".join(f"{name} {size}" for name, size in sizes.items() if size % multiple):
        way_out = way_out or "use another recipe or --mixed_precision bf16"
        raise bad_setting(f"{odd} not a multiple of {multiple}, as FP8 GEMMs need; {way_out}", **settings)
