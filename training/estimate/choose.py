"""Choice of sharding mode, optimizer and micro-batch, and refusal of what cannot fit, before any weights."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist
from fp8_suite.core.errors import UserError, as_flag, bad_setting
from fp8_suite.core.gpus import REFERENCE_GPU, planned_gpu
from fp8_suite.core.settings import AUTO
from fp8_suite.te_models.families import FAMILIES
from fp8_suite.te_models.shape import ModelShape
from fp8_suite.te_models.spec import ModelSpec, count_parameters
from fp8_suite.training.config import Config, refused_by_zero_3
from fp8_suite.training.estimate import advice, memory, sizes
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup
from fp8_suite.training.estimate.sizes import Sizing
from fp8_suite.training.optim.optimizer import choose_optimizer, moment_warning
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.engines import build_strategy
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.parallel.settings import MODES
from fp8_suite.training.parallel.strategies import Strategy

# From this many parameters on, sharding the optimizer step saves more time than gathering weights costs.
LARGE_MODEL = 2 * 10**9
# Fractions of a GPU's memory for weights, gradients and optimizer state. The rest is for activations, FP8
# copies and NCCL.
ROOM = 0.6
# fsdp_full, the last mode that `auto` chooses, may fill this much: activations still fit with
# --gradient_checkpointing.
LAST_ROOM = 0.75
ROOM_ON_ONE_GPU = 0.9  # sharding cannot help there; an 8B trains with 80 % of an H200


def choose_strategy(
    cfg: Config, model: ModelSpec, device: torch.device, effective: str
) -> tuple[Strategy, Sizing]:
    """Choose and build the strategy; choose optimizer and micro-batch, the same on every rank. Collective.

    `effective` is the precision that runs, also after a fallback. Applies --memory_limit_gb.
    UserError if the training state, or a step with `auto`, cannot fit.
    """
    usable = ranks.run_on_all_ranks(lambda: limit_memory(cfg, device))
    capacity = min(usable) if device.type == "cuda" else None
    ranks.run_on_rank0(lambda: sizes.check_launch(cfg, ranks.world_size()))
    mode = ranks.run_on_rank0(lambda: _resolve_mode(cfg, model, device, effective, capacity))
    free = min(ranks.run_on_all_ranks(lambda: free_memory(capacity, device))) if capacity else None
    sizing = ranks.run_on_rank0(lambda: _choose_sizes(cfg, model, device, effective, mode, free))
    strategy = build_strategy(mode, device, sizing.chosen.cfg)
    ranks.run_on_all_ranks(lambda: check_recomputation(sizing.chosen.cfg, strategy))
    ranks.run_on_all_ranks(lambda: check_memory(sizing.chosen, model, strategy, capacity))
    if sizing.is_choice:
        print_rank0(sizing.describe())
    beta2 = moment_warning(sizing.chosen.optimizer, cfg.optim.adam_beta2)
    for text in filter(None, [advice.warning(sizing), beta2]):
        print_rank0(text)
    return strategy, sizing


def limit_memory(cfg: Config, device: torch.device) -> int | None:
    """Apply --memory_limit_gb. Return the bytes of GPU memory that this rank may use; None without a GPU."""
    limit = cfg.sharding.memory_limit_gb
    if device.type != "cuda":
        if limit is not None:
            raise bad_setting("this run has no GPU; drop it", memory_limit_gb=limit)
        return None
    total = torch.cuda.get_device_properties(device).total_memory
    if limit is None:
        return total
    if limit * 1e9 > total:
        raise bad_setting(f"the GPU has {total / 1e9:.1f} GB; give less, or drop it", memory_limit_gb=limit)
    torch.cuda.set_per_process_memory_fraction(limit * 1e9 / total, device)
    return int(limit * 1e9)


def free_memory(limit: int, device: torch.device) -> int:
    """Return the bytes of GPU memory that this rank can still allocate, at most `limit`."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(limit, torch.cuda.mem_get_info(device)[0] + cached)


def _choose_sizes(
    cfg: Config, model: ModelSpec, device: torch.device, effective: str, mode: str, free: int | None
) -> Sizing:
    """Choose values for `auto` on GPUs with `free` bytes. UserError if nothing fits or memory is unknown."""
    request = _setup_of(cfg, device, effective, mode)
    if free is not None and cfg.optim.max_steps != 0:
        if not (reason := _why_unpredicted(cfg, model, mode)):
            gpu = planned_gpu(torch.cuda.get_device_name(device)) or REFERENCE_GPU
            found = sizes.choose_sizes(replace(request, model=_size_of(model)), free, gpu)
            if sizes.auto_settings(cfg):
                advice.refuse_misfit(found)
            return found
        if names := sizes.auto_settings(cfg):
            unknown = f"the memory of a step is unknown, as {reason}"
            way_out = ", or give a value" if ";" in reason else "; give a value"
            raise bad_setting(unknown + way_out, **dict.fromkeys(names, AUTO))
    return Sizing(request, replace(request, cfg=sizes.resolve_auto(cfg, request.gpus)), None)


def _why_unpredicted(cfg: Config, model: ModelSpec, mode: str) -> str | None:
    """Return why the memory model does not cover a step, or None."""
    if not model.is_known_family:
        return f"model type {model.family} is not covered"
    if not cfg.model.use_te and not compiles_layers(cfg, mode, on_gpu=True):
        return "layers without torch.compile keep more activations than are counted"
    found = sizes.unpredicted(cfg, mode)
    return found and f"{' '.join(as_flag(*each) for each in found[1].items())}: {found[0]}"


def compiles_layers(cfg: Config, mode: str, *, on_gpu: bool) -> bool:
    """True if Hugging Face layers run under torch.compile. On by default on a GPU.

    Off by default under DeepSpeed: its hooks on every module cause graph breaks.
    """
    if cfg.model.use_te or cfg.model.compile is not None:
        return bool(cfg.model.compile)
    return on_gpu and MODES[mode].engine != "deepspeed"


def check_recomputation(cfg: Config, strategy: Strategy) -> None:
    """Raise UserError for recomputation that the device or the strategy cannot run."""
    if cfg.model.offload_activations and strategy.device.type != "cuda":
        raise bad_setting("without a GPU, activations are in host memory; drop it", offload_activations=True)
    for name, reason in refused_by_zero_3(cfg.model) if strategy.reentrant else ():
        raise bad_setting(reason, **{name: getattr(cfg.model, name)})


def check_memory(setup: TrainingSetup, model: ModelSpec, strategy: Strategy, capacity: int | None) -> None:
    """Raise UserError if the training state cannot fit in host memory, or on a GPU of `capacity` bytes."""
    only_evaluates = setup.cfg.optim.max_steps == 0
    # Counting parameters builds the model on the meta device, where remote code may fail: no check then.
    if (only_evaluates or model.trust_remote_code) and not strategy.steps_on_cpu:
        return
    setup = replace(setup, model=_size_of(model))
    if capacity is not None and not strategy.steps_on_cpu:
        refuse_small_gpu(setup, capacity)
    if strategy.steps_on_cpu or setup.optimizer.offload:
        refuse_small_host(setup)
    if setup.cfg.model.offload_activations and not only_evaluates:
        refuse_activations(setup)


def _resolve_mode(
    cfg: Config, model: ModelSpec, device: torch.device, effective: str, capacity: int | None
) -> str:
    mode = cfg.sharding.sharding_mode
    if not dist.is_initialized():
        if mode != "auto":
            gather = " --fp8_all_gather" if cfg.sharding.fp8_all_gather else ""
            print_rank0(
                f"--sharding_mode {mode}{gather} ignored: one device, nothing to shard; launch "
                "train_multi_gpu.py with torchrun"
            )
        return "single"
    if mode != "auto":
        return mode
    if cfg.precision.fp8_weights:
        return "single"
    unsharded = _setup_of(cfg, device, effective, "ddp")
    size = _size_of(model)
    if _why_unpredicted(cfg, model, "fsdp_full"):
        size = replace(size, shape=None)  # only the training state is known
    mode, why = choose_mode(replace(unsharded, model=size), capacity)
    print_rank0(f"--sharding_mode auto: {mode} ({why})")
    return mode


def resident_bytes(setup: TrainingSetup) -> float:
    """Return the bytes on a GPU of optimizer state, weights and gradients, also gathered and accumulated."""
    resident = setup.model.parameters * _gpu_bytes(setup) / setup.shards
    if setup.fsdp:
        resident += memory.accumulated_gradients(setup)
    if setup.exchanges_sums:
        resident += memory.accumulated_gradients(setup) - 2 * setup.model.parameters  # FP32 instead of BF16
    if setup.sharding.gathers_once:
        # Weights, and gradients until they are reduced. With accumulation this is an upper bound, as each
        # block's gradient is then added to the sums above and freed.
        resident += 2 * setup.model.parameters * (4 if setup.cfg.precision.mixed_precision == "fp32" else 2)
    return resident


def choose_mode(request: TrainingSetup, capacity: int | None) -> tuple[str, str]:
    """Return the fastest mode that fits on GPUs of `capacity` bytes (None: no GPU), and the reason.

    First the training state decides. Activations, where they are known, can only change that to a mode that
    shards more.
    """
    if capacity is None:
        return "ddp", "no GPU, so GPU memory is no limit"
    setup = replace(request, cfg=sizes.resolve_auto(request.cfg, request.gpus))
    groups = setup.nodes > 1 and setup.gpus_per_node > 1 and setup.gpus % setup.gpus_per_node == 0
    modes = ["ddp", "fsdp_grad", *["hsdp"] * groups, "fsdp_full"]
    mode, why = _choose_by_state(setup, capacity, modes)
    if mode == "single" or not setup.model.shape or sizes.unpredicted(setup.cfg, mode):
        return mode, why
    for other in modes[modes.index(mode) :]:
        found = sizes.choose_sizes(replace(request, mode=other), free=capacity)
        if found.fits:
            needs = f"; in {other} a step is predicted to need {found.needed / 1e9:.1f} GB"
            return other, why if other == mode else why + needs
    return mode, why


def _choose_by_state(setup: TrainingSetup, capacity: int, modes: list[str]) -> tuple[str, str]:
    """Return the fastest mode whose weights, gradients and optimizer state fit, and the reason."""
    needed = {mode: resident_bytes(replace(setup, mode=mode)) for mode in modes}
    unsharded, room, last_room = needed["ddp"], ROOM * capacity, LAST_ROOM * capacity
    if setup.gpus == 1 and unsharded <= ROOM_ON_ONE_GPU * capacity:
        return "single", "one GPU, nothing to shard"
    why = f"{_on_gpu(setup)} need {unsharded / 1e9:.1f} GB, "
    why += f"a GPU has room for {room / 1e9:.1f} GB"
    if accumulated := memory.accumulated_gradients(replace(setup, mode="fsdp_full")):
        why += f"; accumulated gradients need {accumulated / 1e9:.1f} GB"
    if unsharded <= room and setup.model.parameters < LARGE_MODEL:
        return "ddp", why
    if needed["fsdp_grad"] <= room:
        return "fsdp_grad", f"{why}; a shard plus gathered weights and gradients fits"
    if unsharded <= room:
        return "ddp", why
    if "hsdp" in modes and needed["hsdp"] <= room:
        return "hsdp", f"{why}; sharded over the {setup.gpus_per_node} ranks of a node they fit"
    if needed["fsdp_full"] <= last_room:
        limit = "" if needed["fsdp_full"] <= room else f" into {last_room / 1e9:.1f} GB"
        return "fsdp_full", f"{why}; sharded over {setup.gpus} ranks they fit{limit}"
    why += f"; sharded over {setup.gpus} ranks they do not fit into {last_room / 1e9:.1f} GB"
    return "single" if setup.gpus == 1 else "fsdp_full", why


def _gpu_bytes(setup: TrainingSetup) -> float:
    """Return the bytes per parameter of the training state that GPUs hold."""
    return setup.optimizer.state_bytes + setup.fp8_share - setup.host_bytes


def _on_gpu(setup: TrainingSetup) -> str:
    """Name the training state that GPUs hold."""
    return "weights and gradients" if setup.optimizer.offload else "weights, gradients and optimizer state"


def _setup_of(cfg: Config, device: torch.device, effective: str, mode: str) -> TrainingSetup:
    """Return the step of these settings on this job's ranks, for a model of unknown size."""
    optimizer = choose_optimizer(cfg, mode, on_gpu=device.type == "cuda")
    gpus = ranks.world_size(), ranks.local_rank_and_size()[1]
    return TrainingSetup(cfg, ModelSize(0), optimizer, mode, *gpus, effective)


def _size_of(model: ModelSpec) -> ModelSize:
    config, family = model.config.get_text_config(), FAMILIES.get(model.family)
    return ModelSize(
        count_parameters(model),
        ModelShape.from_hf_config(model.config),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        qk_norm=family is not None and family.qk_norm,
    )


def refuse_small_gpu(setup: TrainingSetup, capacity: int) -> None:
    """Raise UserError if a shard of weights, gradients and optimizer state exceeds `capacity` bytes."""
    parameters, shards = setup.model.parameters, setup.shards
    total = parameters * _gpu_bytes(setup)
    if total / shards <= capacity:
        return
    ways_out, given = [], []
    sharded = replace(setup, mode="fsdp_full")
    if setup.cfg.precision.fp8_weights:
        given = ["fp8_weights"]
        sharded = replace(sharded, optimizer=replace(setup.optimizer, holds_fp8_weights=False))
    if setup.optimizer.kind == "fused_adamw":
        smaller = {
            "--moment_dtype fp8": {"moment_dtypes": ("fp8", "fp8")},
            "--offload_optimizer": {"offload": True},
        }
        both = {"offload_optimizer": True, "fp8_weights": True}
        if setup.mode == "single" and advice.changed_config(setup.cfg, both, setup.gpus):
            smaller["--offload_optimizer --fp8_weights"] = {"offload": True, "holds_fp8_weights": True}
        for flag, changes in smaller.items():
            other = replace(setup, optimizer=replace(setup.optimizer, **changes))
            needed = parameters * _gpu_bytes(other) / shards
            if needed <= capacity and _host_holds(other):
                ways_out.append(f"{flag} needs {needed / 1e9:.1f} GB")
    if (room := LAST_ROOM * capacity - memory.accumulated_gradients(sharded)) > 0:
        gpus = math.ceil(parameters * _gpu_bytes(sharded) / room)
        ways_out.append(f"--sharding_mode fsdp_full{advice.without(given)} needs {gpus} such GPUs")
    where = "on one GPU" if setup.mode == "single" else f"--sharding_mode {setup.mode}"
    raise UserError(
        f"--model_name {setup.cfg.model.model_name}, {where}: {_on_gpu(setup)} of "
        f"{parameters / 1e9:.1f} B parameters need {total / shards / 1e9:.1f} GB per GPU, which has "
        f"{capacity / 1e9:.1f} GB: {', or '.join(ways_out) or 'use a smaller model'}"
    )


def _host_holds(setup: TrainingSetup) -> bool:
    return not setup.optimizer.offload or memory.host_needs(setup) <= memory.host_room(setup)


def _host_sizes(needed: float, room: float) -> str:
    sizes = f"{needed / 1e9:.0f} GB of host memory per node, which has {room / 1e9:.0f} GB"
    return f"{sizes} beside what its processes need"


def refuse_small_host(setup: TrainingSetup) -> None:
    """Raise UserError if offloaded state does not fit in this node's memory."""
    needed, room = memory.host_needs(setup), memory.host_room(setup)
    if needed <= room:
        return
    sizes = f"{_host_sizes(needed, room)}; "
    if setup.optimizer.offload:
        ways_out, flags = [], {"offload_optimizer": True}
        smaller = replace(setup, optimizer=replace(setup.optimizer, moment_dtypes=("fp8", "fp8")))
        if memory.host_needs(smaller) < needed and _host_holds(smaller):
            ways_out.append(f"--moment_dtype fp8 needs {memory.host_needs(smaller) / 1e9:.0f} GB")
        if setup.cfg.precision.fp8_weights:
            flags["fp8_weights"] = True
            whole = replace(setup, optimizer=replace(setup.optimizer, holds_fp8_weights=False))
            if _host_holds(whole):
                ways_out.append(f"dropping --fp8_weights needs {memory.host_needs(whole) / 1e9:.0f} GB")
        if setup.shards < setup.gpus:
            sharded = replace(setup, mode="fsdp_full")
            ways_out.append(f"--sharding_mode fsdp_full needs {memory.host_needs(sharded) / 1e9:.0f} GB")
        if setup.mode != "single":
            ways_out.append("use more nodes")
        ways_out.append("drop both" if len(flags) > 1 else "drop it")
        raise bad_setting(f"masters and moments need {sizes}{', or '.join(ways_out)}", **flags)
    raise UserError(
        f"--sharding_mode {setup.mode}: weights, gradients, moments and checkpoint saves need {sizes}use "
        "more nodes, or --sharding_mode ds_zero3"
    )


def refuse_activations(setup: TrainingSetup) -> None:
    """Raise UserError if activations do not fit in this node's memory, beside offloaded state."""
    needed, room = memory.offloaded_bytes(setup), memory.host_room(setup)
    if needed > room:
        raise bad_setting(
            f"micro-batches of {setup.tokens:,} tokens need {_host_sizes(needed, room)}; use --recompute "
            "full or fewer tokens, or drop it",
            offload_activations=True,
        )
