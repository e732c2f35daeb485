"""Build the model, its optimizer and its autocast context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from fp8_suite.core.recipes import TORCHAO_RECIPES
from fp8_suite.data.collate import round_up
from fp8_suite.te_models.build import build_model
from fp8_suite.te_models.fp8_weights import quantize_shards, quantize_weights
from fp8_suite.te_models.options import BuildOptions, ContextParallel, NativeOptions
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.layout import pipeline_stages
from fp8_suite.training.estimate.sizes import compiles_layers
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.optim.adamw import split_master
from fp8_suite.training.parallel.context_parallel import check_attention, join_context
from fp8_suite.training.precision import precision_map, torchao_fp8
from fp8_suite.training.precision.fp8_stats import Fp8Stats
from fp8_suite.training.precision.recipes import Precision, build_autocast
from fp8_suite.training.prepare import PreparedRun
from torch import nn


@dataclass
class Assembly:
    """The model with its optimizer, which training changes, and its autocast context."""

    model: nn.Module  # without the strategy's wrapper; saved and exported
    wrapped: nn.Module  # called by the training loop
    optimizer: torch.optim.Optimizer
    parameters: int  # parameter count of the unsharded model
    autocast: Callable[[], AbstractContextManager]
    fp8_stats: Fp8Stats  # inactive without --fp8_stats_interval


def assemble(prepared: PreparedRun) -> Assembly:
    """Build and shard the model, load or initialize its weights, and build the optimizer. Collective."""
    cfg, precision, strategy = prepared.cfg, prepared.resolved.precision, prepared.strategy
    torchao = precision.effective in TORCHAO_RECIPES
    setup = prepared.sizing.chosen
    dtypes = {
        "parameter_dtype": setup.optimizer.parameter_dtype,
        "compute_dtype": precision.compute_dtype,
    }

    fp8_stats = Fp8Stats(cfg, precision, prepared.folder)  # TE inspects only modules built after this
    topology, device, resolved = strategy.topology, strategy.device, prepared.resolved
    context = join_context(topology, resolved.cp_comm_type, resolved.shape, device)
    model = _build_model(prepared, dtypes, context)
    if context:
        prepared.watchdog.starting("testing attention")
        check_attention(model, context)
    # A phase of its own, so that the watchdog can name ranks that are still loading weights.
    prepared.watchdog.starting("building the optimizer")
    precision_map.apply(model, precision, topology.stage_group)
    fp8_stats.attach(model)
    strategy.reshard(model)  # the packing check ran forward passes, which left weights gathered
    low_halves = optim.take_low_halves(model, offload=setup.optimizer.offload)
    parameters = strategy.count_parameters(model)

    unquantized = {}  # BF16 shards, from which the optimizer's masters start
    if setup.optimizer.holds_fp8_weights and not cfg.lora.enabled:  # LoRA's were read as FP8
        unquantized = quantize_shards(model) if setup.gathers_fp8 else quantize_weights(model)
    optimizer = optim.build_optimizer(model, cfg.optim, setup.optimizer)
    optim.set_weights(optimizer, model, unquantized)
    unquantized.clear()
    exact = {name for name, low in low_halves.items() if low.any()}  # products that BF16 does not hold
    optim.set_low_halves(optimizer, model, low_halves)
    if _starts_masters(prepared) and resolved.model.weights and not cfg.lora.enabled:
        optim.spread_masters(optimizer, model, cfg.optim.seed, exact)
    if setup.gathers_fp8 and torchao:
        torchao_fp8.refresh_scales_after_steps(model, optimizer)
    if prepared.total_steps and not strategy.owns_masters:
        # Allocate the state now, so that what fits in the first step fits in the second.
        optim.optimizer_state(optimizer, model)
    wrapped = strategy.wrap(model, optimizer)
    # FSDP2 casts parameters before it gathers them.
    dtype = dtypes["compute_dtype" if strategy.shards_weights else "parameter_dtype"]
    autocast = build_autocast(precision, device=device, parameter_dtype=dtype, group=topology.stage_group)
    return Assembly(model, wrapped, optimizer, parameters, autocast, fp8_stats)


def _starts_masters(prepared: PreparedRun) -> bool:
    """True if the run trains BF16 weights whose FP32 masters do not come from a checkpoint of a run."""
    chosen = prepared.sizing.chosen.optimizer
    splits = chosen.kind == "fused_adamw" and chosen.master_weights
    return splits and prepared.resume is None and prepared.total_steps > 0


def _build_model(
    prepared: PreparedRun, dtypes: dict[str, torch.dtype], context: ContextParallel | None
) -> nn.Module:
    cfg, precision, strategy = prepared.cfg, prepared.resolved.precision, prepared.strategy
    setup = prepared.sizing.chosen
    torchao = precision.effective in TORCHAO_RECIPES
    row_multiple = strategy.topology.context.row_multiple(precision.token_multiple * strategy.topology.tp)
    layers = getattr(prepared.resolved.model.config, "num_hidden_layers", 0)
    options = BuildOptions(
        te_backend=precision.te_backend,
        dtype=dtypes["parameter_dtype"],
        device=strategy.device,
        seed=cfg.optim.seed,
        load_weights=prepared.resume is None or strategy.owns_masters or cfg.lora.enabled,
        lora=cfg.lora,
        split_master=split_master if _starts_masters(prepared) else None,
        compute_dtype=dtypes["compute_dtype"],
        fp8_lm_head=cfg.precision.fp8_lm_head,
        packed=cfg.data.packing,
        max_positions=round_up(cfg.data.max_seq_length, row_multiple),
        recompute=cfg.model.recomputation,
        offload_activations=cfg.model.offload_activations,
        reentrant=strategy.reentrant,
        shard=(lambda model: strategy.shard(model, **dtypes)) if strategy.shards_weights else None,
        stages=pipeline_stages(setup.layout, layers, strategy.topology.pipeline_rank),
        context=context,
        tensor=strategy.tensor,
        kernels=prepared.kernels,
        native=NativeOptions(
            cache_fp8_weights=precision.fp8 and setup.caches_fp8_weights,
            fuse_gradient_sums=setup.fuses_gradient_sums,
            weight_recipe=precision.te_recipe if setup.gathers_fp8 and not torchao else None,
            frozen_recipe=precision.te_recipe if cfg.lora.enabled and cfg.precision.fp8_weights else None,
        ),
        convert=(lambda model: _convert(model, cfg, precision, setup.gathers_fp8)) if torchao else None,
        compile_layers=compiles_layers(cfg, strategy.mode, on_gpu=strategy.device.type == "cuda"),
    )
    return build_model(prepared.resolved.model, options)


def _convert(model: Any, cfg: Config, precision: Precision, fp8_gather: bool) -> None:
    """Convert a Hugging Face model's linear layers to torchao's FP8 layers."""
    recipes = precision_map.assign(cfg, torchao_fp8.linear_names(model), len(model.blocks))
    torchao_fp8.convert(
        model,
        recipes.get,
        emulated=precision.emulated,
        all_gather=fp8_gather,
        fp32_scales=cfg.precision.fp8_fp32_scales,
    )
