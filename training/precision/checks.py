"""Checks of settings and model sizes against the precision of a run."""

from __future__ import annotations

from typing import Any

import torch
from fp8_suite.core.errors import UserError, as_flag, bad_setting
from fp8_suite.core.recipes import LM_HEAD_RECIPE, RECIPES
from fp8_suite.training.config import Config
from fp8_suite.training.precision.precision_map import TE_GEMMS
from fp8_suite.training.precision.recipes import Precision, not_emulated
from fp8_suite.training.precision.settings import changed_recipe_settings, unread_settings


def unused_fp8_flags(cfg: Config, precision: Precision) -> str | None:
    """Return a warning about FP8 flags in a run without FP8, or None."""
    scenario = cfg.precision.fp8_scenario
    given = {} if scenario == "default" else {"fp8_scenario": scenario}
    given |= changed_recipe_settings(cfg.precision)
    if precision.fp8 or not given:
        return None
    flags = ", ".join(as_flag(name, value) for name, value in given.items())
    return f"{flags}: not used in {precision.effective}; FP8 needs --mixed_precision fp8"


def check_flags_apply(cfg: Config, recipes: set[str]) -> None:
    """UserError for a setting that none of these recipes uses."""
    for name, reason in unread_settings(cfg.precision, recipes):
        raise bad_setting(reason, **{name: getattr(cfg.precision, name)})


def check_settings(cfg: Config, precision: Precision) -> None:
    """UserError for a setting that the recipes in use ignore or that is not available here."""
    if not precision.fp8:
        return
    check_flags_apply(cfg, precision.in_use)
    if cfg.precision.fp8_fp32_scales and precision.te_backend == "native" and _on_blackwell():
        raise UserError(
            "--fp8_fp32_scales --fp8_scenario block: on this GPU (compute capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability()))}) TE runs block scaling in MXFP8's "
            "GEMMs, whose scales are powers of two; drop it",
            flags=("fp8_fp32_scales",),
        )
    if cfg.precision.fp8_fast_accumulation and precision.te_backend == "emulated":
        raise not_emulated(cfg, "fp8_fast_accumulation", "not available")


def _on_blackwell() -> bool:
    return torch.cuda.get_device_capability() >= (10, 0)


def check_gemm_sizes(recipe: str, sizes: dict[str, int], *, way_out: str = "", **settings: Any) -> None:
    """UserError naming the sizes that are not a multiple of what the recipe's GEMMs need."""
    multiple = RECIPES[recipe].feature_multiple
    if odd := ", ".join(f"{name} {size}" for name, size in sizes.items() if size % multiple):
        way_out = way_out or "use another recipe or --mixed_precision bf16"
        raise bad_setting(f"{odd} not a multiple of {multiple}, as FP8 GEMMs need; {way_out}", **settings)


def check_sizes(precision: Precision, model_name: str, sizes: dict[str, int]) -> None:
    """UserError if sizes of a TE model or its modules cannot run in their recipes."""
    if precision.recipe is not None and not precision.by_module:
        recipe = precision.effective
        check_gemm_sizes(recipe, sizes, fp8_scenario=recipe, model_name=model_name)
    for module, recipe in precision.by_module.items():
        module_sizes = {name: sizes[name] for name in TE_GEMMS[module.split(".", 2)[2]]}
        if recipe != "bf16":
            way_out = f"{module} cannot run in {recipe}: give it another recipe, or bf16 (--precision_map)"
            check_gemm_sizes(recipe, module_sizes, way_out=way_out, model_name=model_name)


def check_lm_head_sizes(model_name: str, sizes: dict[str, int]) -> None:
    """UserError if --fp8_lm_head cannot run an LM head of these sizes."""
    given = {"fp8_lm_head": True, "model_name": model_name}
    check_gemm_sizes(LM_HEAD_RECIPE, sizes, way_out="drop --fp8_lm_head", **given)


def check_lm_head(cfg: Config, sizes: dict[str, int], *, plain: bool) -> None:
    """UserError if --fp8_lm_head cannot run. `plain`: the logits are the output of one GEMM."""
    model_name = cfg.model.model_name
    if not plain:
        raise bad_setting(
            f"{model_name} computes its logits with more than one GEMM; drop it", fp8_lm_head=True
        )
    check_lm_head_sizes(model_name, sizes)
