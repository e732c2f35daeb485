"""Checks of settings and model sizes against the precision of a run."""

from __future__ import annotations

from typing import Any

import torch
from fp8_suite.core.errors import as_flag, bad_setting
from fp8_suite.core.recipes import LM_HEAD_RECIPE, RECIPES
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.layout import Layout, check_layout
from fp8_suite.training.optim import moments
from fp8_suite.training.parallel.context_parallel import comm_type
from fp8_suite.training.precision.precision_map import TE_GEMMS
from fp8_suite.training.precision.recipes import Precision
from fp8_suite.training.precision.settings import changed_recipe_settings, parse_moment_dtype, unread_settings


def unused_fp8_flags(cfg: Config, precision: Precision) -> str | None:
    """Return a warning about FP8 flags in a run without FP8, or None."""
    scenario = cfg.precision.fp8_scenario
    unused = {} if scenario == "default" else {"fp8_scenario": scenario}
    unused |= changed_recipe_settings(cfg.precision)
    if precision.fp8 or not unused:
        return None
    flags = ", ".join(as_flag(name, value) for name, value in unused.items())
    return f"{flags}: not used in {precision.effective}; FP8 needs --mixed_precision fp8"


def check_settings(cfg: Config, precision: Precision) -> None:
    """UserError for a setting that the recipes in use ignore or that this GPU does not have."""
    if not precision.fp8:
        return
    for name, reason in unread_settings(cfg.precision, precision.in_use):
        raise bad_setting(reason, **{name: getattr(cfg.precision, name)})
    scales_on_te = cfg.precision.fp8_fp32_scales and precision.te_backend == "native"
    if scales_on_te and torch.cuda.get_device_capability() >= (10, 0):
        reason = "on this GPU TE runs block scaling in MXFP8's GEMMs, whose scales are powers of two; drop it"
        raise bad_setting(reason, fp8_fp32_scales=True)


def check_gemm_sizes(recipe: str, sizes: dict[str, int], /, *, way_out: str = "", **settings: Any) -> None:
    """UserError naming the sizes that are not a multiple of what the recipe's GEMMs need."""
    multiple = RECIPES[recipe].feature_multiple
    if odd := ", ".join(f"{name} {size}" for name, size in sizes.items() if size % multiple):
        smaller = "a smaller --tensor_parallel_size, " if "tensor_parallel_size" in settings else ""
        way_out = way_out or f"use {smaller}another recipe or --mixed_precision bf16"
        raise bad_setting(f"{odd} not a multiple of {multiple}, as FP8 GEMMs need; {way_out}", **settings)


def check_sizes(precision: Precision, model_name: str, sizes: dict[str, int], **settings: Any) -> None:
    """UserError if sizes of a TE model or its modules cannot run in their recipes. It names `settings`."""
    settings |= {"model_name": model_name}
    if precision.te_recipe is not None and not precision.by_module:
        recipe = precision.effective
        check_gemm_sizes(recipe, sizes, fp8_scenario=recipe, **settings)
    for module, recipe in precision.by_module.items():
        module_sizes = {name: sizes[name] for name in TE_GEMMS[module.split(".", 2)[2]]}
        if recipe != "bf16":
            way_out = f"{module} cannot run in {recipe}: give it another recipe, or bf16 (--precision_map)"
            check_gemm_sizes(recipe, module_sizes, way_out=way_out, **settings)


def check_lm_head(cfg: Config, hidden_size: int, vocab_size: int, *, one_gemm: bool = True) -> None:
    """UserError if --fp8_lm_head cannot run. `one_gemm`: the logits are the output of a single GEMM."""
    settings = {"fp8_lm_head": True, "model_name": cfg.model.model_name}
    if not one_gemm:
        raise bad_setting("this model computes its logits with more than one GEMM; drop it", **settings)
    sizes = {"hidden size": hidden_size, "vocabulary": vocab_size}
    if (parts := cfg.sharding.tensor_parallel_size) > 1:
        sizes = {"hidden size": hidden_size, "a rank's vocabulary": vocab_size // parts}
        settings["tensor_parallel_size"] = parts
    check_gemm_sizes(LM_HEAD_RECIPE, sizes, way_out="drop --fp8_lm_head", **settings)


def check_part(
    cfg: Config, *, shape: ModelShape, gpus_per_node: int, precision: Precision | None = None
) -> str | None:
    """UserError if ranks cannot share this model's TE layers and sequences. Return the `comm_type` that runs.

    `precision` None: the requested one.
    """
    check_tensor_parallel(cfg, shape, gpus_per_node)
    parts, name = cfg.sharding.tensor_parallel_size, cfg.model.model_name
    part, settings = shape.part(parts), {"tensor_parallel_size": parts} if parts > 1 else {}
    if precision:
        check_sizes(precision, name, part.gemm_sizes, **settings)
    elif cfg.precision.mixed_precision == "fp8" and cfg.model.use_te:
        recipe = cfg.requested_recipe
        check_gemm_sizes(recipe, part.gemm_sizes, fp8_scenario=recipe, model_name=name, **settings)
    if cfg.precision.fp8_lm_head:
        check_lm_head(cfg, shape.hidden_size, shape.vocab_size)
    return comm_type(cfg.sharding, part, precision.te_backend if precision else "native")


def check_tensor_parallel(cfg: Config, shape: ModelShape, gpus_per_node: int) -> None:
    """UserError if ranks cannot share this model's layers, or moments in blocks of their columns."""
    size, moment_dtype = cfg.sharding.tensor_parallel_size, cfg.precision.moment_dtype
    if size == 1:
        return
    check_layout(Layout(tp=size), shape, gpus_per_node, cfg.data.max_seq_length)
    part = shape.part(size)
    widths = part.num_heads * part.head_dim, part.ffn_hidden_size
    in_blocks = any(moments.FORMATS[name].mantissa for name in parse_moment_dtype(moment_dtype))
    if in_blocks and any(width % moments.BLOCK and width * size % moments.BLOCK == 0 for width in widths):
        reason = f"moments have blocks of {moments.BLOCK} columns, and a rank has {widths[0]} and {widths[1]}"
        settings = {"moment_dtype": moment_dtype, "tensor_parallel_size": size}
        raise bad_setting(f"{reason}; use fp32 or bf16, or fewer ranks", **settings)
