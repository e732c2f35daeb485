"""Refuse settings and model sizes that the precision of a run cannot have."""

from __future__ import annotations

from typing import Any

import torch

from core.errors import UserError, bad_setting
from core.recipes import LM_HEAD_RECIPE, RECIPES
from training.config import Config
from training.precision.precision_map import TE_GEMMS
from training.precision.recipes import Precision, not_emulated
from training.precision.settings import PrecisionConfig

RECIPE_SETTINGS = frozenset().union(*(spec.settings for spec in RECIPES.values()))


def _changed_settings(cfg: PrecisionConfig) -> dict[str, Any]:
    """Return the settings of recipes that differ from their defaults."""
    default = PrecisionConfig()
    values = {name: value for name, value in vars(cfg).items() if name in RECIPE_SETTINGS}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


def unused_fp8_flags(cfg: Config, precision: Precision) -> str | None:
    """Return the warning about FP8 flags of a run that is not in FP8, or None."""
    given = {} if precision.fp8 else _changed_settings(cfg.precision)
    if not precision.fp8 and cfg.precision.fp8_scenario != "default":
        given = {"fp8_scenario": cfg.precision.fp8_scenario} | given
    if not given:
        return None
    flags = ", ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in given.items())
    return f"{flags}: not used in {precision.effective}; FP8 needs --mixed_precision fp8"


def check_flags_apply(cfg: Config, recipes: set[str]) -> None:
    """UserError for a setting that none of these recipes reads."""
    for name, value in _changed_settings(cfg.precision).items():
        readers = [recipe for recipe, spec in RECIPES.items() if name in spec.settings]
        if not recipes & set(readers):
            reason = f"applies to {', '.join(readers)}, not to {', '.join(sorted(recipes))}; drop it"
            raise bad_setting(reason, **{name: value})


def check_settings(cfg: Config, precision: Precision) -> None:
    """UserError for a setting that the recipes in use do not read, or that this machine's layers lack."""
    if not precision.fp8:
        return
    check_flags_apply(cfg, precision.in_use)
    native_scales = cfg.precision.fp8_fp32_scales and precision.te_backend == "native"
    if native_scales and torch.cuda.get_device_capability() >= (10, 0):
        major, minor = torch.cuda.get_device_capability()
        raise UserError(
            f"--fp8_fp32_scales --fp8_scenario block: on this GPU (compute capability {major}.{minor}) "
            "TE runs block scaling in MXFP8's GEMMs, whose scales are powers of two; drop it",
            flags=("fp8_fp32_scales",),
        )
    if cfg.precision.fp8_fast_accumulation and precision.te_backend == "emulated":
        raise not_emulated(cfg, "fp8_fast_accumulation", "have no such choice")


def odd_sizes(recipe: str, sizes: dict[str, int]) -> str:
    """Name the sizes that the recipe's GEMMs cannot run, with their values; empty if there are none."""
    multiple = RECIPES[recipe].feature_multiple
    odd = ", ".join(f"{name} {size}" for name, size in sizes.items() if size % multiple)
    return odd and f"{odd} not a multiple of {multiple}"


def check_recipe_sizes(recipe: str, model_name: str, sizes: dict[str, int]) -> None:
    """UserError naming the sizes of a model that a recipe's GEMMs cannot run."""
    if odd := odd_sizes(recipe, sizes):
        reason = f"{odd}, as its FP8 GEMMs need; use another recipe or --mixed_precision bf16"
        raise bad_setting(reason, fp8_scenario=recipe, model_name=model_name)


def check_sizes(precision: Precision, model_name: str, sizes: dict[str, int]) -> None:
    """UserError naming the sizes of a TE model, or its modules, that cannot run in their recipes."""
    if precision.recipe is not None and not precision.by_module:
        check_recipe_sizes(precision.effective, model_name, sizes)
    for module, recipe in precision.by_module.items():
        own_sizes = {name: sizes[name] for name in TE_GEMMS[module.split(".", 2)[2]]}
        if recipe != "bf16" and (odd := odd_sizes(recipe, own_sizes)):
            reason = f"{module} cannot run in {recipe}: {odd}; give it another recipe, or bf16"
            raise bad_setting(f"{reason} (--precision_map)", model_name=model_name)


def check_lm_head_sizes(model_name: str, sizes: dict[str, int]) -> None:
    """UserError naming the sizes of an LM head that --fp8_lm_head cannot run."""
    if odd := odd_sizes(LM_HEAD_RECIPE, sizes):
        raise bad_setting(
            f"{odd}, as FP8 GEMMs need; drop --fp8_lm_head", fp8_lm_head=True, model_name=model_name
        )


def check_lm_head(cfg: Config, precision: Precision, sizes: dict[str, int], *, plain: bool) -> None:
    """UserError where --fp8_lm_head cannot run. `plain`: the logits are the result of one GEMM."""
    model_name = cfg.model.model_name
    if not precision.fp8:
        reason = f"this run is in {precision.effective}; drop it, or add --mixed_precision fp8"
        raise bad_setting(reason, fp8_lm_head=True)
    if not plain:
        raise bad_setting(f"{model_name} does more to its logits than one GEMM; drop it", fp8_lm_head=True)
    check_lm_head_sizes(model_name, sizes)


def check_fp8_attention(cfg: Config, precision: Precision, head_size: int) -> None:
    """UserError with everything that FP8 attention lacks on a GPU before Blackwell (TE 2.20's conditions)."""
    if not cfg.precision.fp8_attention or precision.recipe is None:
        return
    if torch.cuda.get_device_capability() >= (10, 0):
        return
    reasons, cudnn = [], torch.backends.cudnn.version()
    for name in sorted(precision.attention_recipes):
        if not RECIPES[name].fp8_attention_before_blackwell:
            reasons.append(f"{name} scaling has it on Blackwell only: use --fp8_scenario delayed")
    if head_size != 128:
        reasons.append(f"head size {head_size}: only 128 has it before Blackwell")
    if cfg.data.packing and cudnn < 92300:
        reasons.append(f"--packing needs cuDNN 9.23.0, this is {cudnn}: add --no_packing")
    if cfg.optim.deterministic and cudnn < 91900:
        reasons.append(f"--deterministic needs cuDNN 9.19.0, this is {cudnn}: drop it")
    if reasons:
        raise UserError(
            f"--fp8_attention cannot run here: {'; '.join(reasons)}; or drop --fp8_attention",
            flags=("fp8_attention",),
        )
