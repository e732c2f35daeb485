"""Model, optimizer and autocast, put together as the settings, the strategy and the kernels ask."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from core.recipes import TORCHAO_RECIPES
from data.collate import round_up
from te_models import build as te_models
from te_models.kernels.selection import Kernels
from te_models.options import BuildOptions, NativeOptions
from training.config import Config
from training.optim import optimizer as optim
from training.optim.optimizer import OptimizerPlan
from training.parallel.strategies import Strategy
from training.parallel.watchdog import Watchdog
from training.precision import precision_map, torchao_fp8
from training.precision import recipes as precision
from training.precision.fp8_stats import Fp8Stats
from training.precision.recipes import Precision


@dataclass(frozen=True)
class Assembly:
    model: nn.Module  # the bare one, which is saved and exported
    wrapped: nn.Module  # what the loop calls
    optimizer: torch.optim.Optimizer
    optimizer_plan: OptimizerPlan  # as it was followed
    parameters: int  # of the whole model
    autocast: Callable[[], AbstractContextManager]


def assemble(
    cfg: Config,
    resolved: Precision,
    plan: te_models.ModelPlan,
    optimizer_plan: OptimizerPlan,
    strategy: Strategy,
    kernels: Kernels,
    stats: Fp8Stats,
    watchdog: Watchdog,
) -> Assembly:
    """Build everything a step needs, with weights read or drawn. Collective."""
    torchao = resolved.effective in TORCHAO_RECIPES
    compute = torch.float32 if cfg.precision.mixed_precision == "fp32" else torch.bfloat16
    dtypes = {"parameter_dtype": optimizer_plan.parameter_dtype, "compute_dtype": compute}
    # FP8 weights are gathered as they are, if there is anything to gather.
    fp8_gather = cfg.sharding.fp8_all_gather and strategy.shards_weights
    fp8_weights = fp8_gather and not torchao  # torchao quantises just before it gathers
    if fp8_weights:
        optimizer_plan = replace(optimizer_plan, kind="te_fused_adam")
    options = BuildOptions(
        te_backend=resolved.te_backend,
        dtype=optimizer_plan.parameter_dtype,
        device=strategy.device,
        packed=cfg.data.packing,
        max_positions=round_up(cfg.data.max_seq_length, resolved.token_multiple),
        seed=cfg.optim.seed,
        compute_dtype=compute,
        fp8_lm_head=cfg.precision.fp8_lm_head,
        gradient_checkpointing=cfg.model.gradient_checkpointing,
        reentrant=strategy.reentrant,
        shard=(lambda model: strategy.shard(model, **dtypes)) if strategy.shards_weights else None,
        parameter_device=torch.device("cpu") if strategy.master_home == "cpu" else strategy.device,
        native=NativeOptions(
            cache_fp8_weights=_caches_fp8_weights(cfg, resolved, strategy),
            fuse_gradient_sums=strategy.fuses_wgrad_accumulation(optimizer_plan.kind),
            kernels=kernels,
            weight_recipe=resolved.recipe if fp8_weights else None,
        ),
        convert=(lambda model: _convert(model, cfg, resolved, fp8_gather)) if torchao else None,
        compile_layers=compiles(cfg, strategy),
    )
    model = te_models.build_model(plan, options)
    watchdog.starting("building the optimizer")  # a rank that still reads weights is behind
    precision_map.apply(model, resolved, fp8_attention=cfg.precision.fp8_attention)
    stats.attach(model)
    strategy.reshard(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    shards = model.quantize_weights() if fp8_weights else {}
    optimizer = optim.build_optimizer(model, cfg.optim, optimizer_plan)
    if fp8_weights:
        optim.set_masters(optimizer, model, shards)
    elif fp8_gather:
        torchao_fp8.refresh_scales_after_steps(model, optimizer)
    wrapped, optimizer = strategy.wrap(model, optimizer)
    autocast = precision.build_autocast(
        resolved, device=strategy.device, parameter_dtype=strategy.compute_dtype(**dtypes)
    )
    return Assembly(model, wrapped, optimizer, optimizer_plan, parameters, autocast)


def compiles(cfg: Config, strategy: Strategy) -> bool:
    """Hugging Face layers are compiled on a GPU, where it pays, unless the user says otherwise.

    Under DeepSpeed, whose hooks on every module would cut each layer's graph in pieces, only if asked.
    """
    if cfg.model.use_te or cfg.model.compile is not None:
        return bool(cfg.model.compile)
    return strategy.device.type == "cuda" and strategy.master_home != "zero"


def _caches_fp8_weights(cfg: Config, resolved: Precision, strategy: Strategy) -> bool:
    """Whether a step's first micro-batch casts weights for all; recomputation casts them anyway."""
    wanted = cfg.precision.fp8_weight_cache and not cfg.model.gradient_checkpointing
    wanted = wanted and not cfg.sharding.fp8_all_gather  # whose weights are in FP8 as they are
    return wanted and resolved.fp8 and strategy.accumulates and strategy.keeps_weights_gathered


def _convert(model: Any, cfg: Config, resolved: Precision, fp8_gather: bool) -> None:
    """Give a Hugging Face model's linear layers the FP8 recipes that the settings ask for."""
    names = torchao_fp8.linear_names(model)
    torchao_fp8.convert(
        model,
        precision_map.assign(cfg, names, len(model.blocks)).get,
        emulated=resolved.emulated,
        all_gather=fp8_gather,
        fp32_scales=cfg.precision.fp8_fp32_scales,
    )
