"""Refusal of what cannot fit: the reason, and the first way out of a table that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8_suite.core.errors import UserError, as_flag, bad_setting
from fp8_suite.core.settings import AUTO
from fp8_suite.training.config import config_from_dict
from fp8_suite.training.estimate.layout import SHORTEST_PART
from fp8_suite.training.estimate.memory import host_capacity, offloaded_bytes, resident_state
from fp8_suite.training.estimate.modes import make_setup
from fp8_suite.training.estimate.setup import TrainingSetup
from fp8_suite.training.estimate.sizes import (
    Sizing,
    auto_settings,
    check_number_of_ranks,
    choose_sizes,
    for_tensors,
    gb,
    global_batch,
    unpredicted_sizes,
)

# Warn if a prediction exceeds the GPU's memory by this factor. Predictions are within 4 % of recorded peaks.
CLEARLY_ABOVE = 1.1
Changes = dict[str, Any]  # values by setting
SHARDING_LESS = ("ddp", "fsdp_grad", "hsdp")  # than fsdp_full
FULLY_SHARDED: Changes = {"sharding_mode": "fsdp_full", "hsdp_shard_size": None, "fp8_weights": False}
OFFLOADED_ACTIVATIONS: Changes = {"recompute": "layer", "offload_activations": True}
OFFLOADED_STATE: Changes = {"offload_optimizer": True, "moment_dtype": "fp8", "grad_reduce_dtype": "bf16"}
# Settings that save memory and change numerics or need host memory. The first that fits is advised, on top
# of `unchanged_numerics`. Settings that the run refuses are passed over.
WAYS_OUT: tuple[Changes, ...] = (
    {},
    {"fp8_weights": True},  # alone only under LoRA, or if the optimizer is offloaded already
    {"moment_dtype": "fp8"},
    {"offload_optimizer": True},
    OFFLOADED_ACTIVATIONS,
    {"grad_reduce_dtype": "bf16"},
    {"moment_dtype": "fp8", "grad_reduce_dtype": "bf16"},
    {"moment_dtype": "fp8"} | OFFLOADED_ACTIVATIONS,
    OFFLOADED_STATE,
    {"offload_optimizer": True} | OFFLOADED_ACTIVATIONS,
    {"fp8_weights": True} | OFFLOADED_ACTIVATIONS,
    OFFLOADED_STATE | {"fp8_weights": True},
    OFFLOADED_STATE | {"fp8_weights": True} | OFFLOADED_ACTIVATIONS,
    OFFLOADED_STATE | OFFLOADED_ACTIVATIONS,
)
CONTEXT_SIZES = (2, 4, 8)  # ranks that share a sequence, also without a change of numerics


def refuse_misfit(sizing: Sizing) -> None:
    """Raise UserError if a GPU cannot hold its part of the state, or no values of `auto` fit."""
    if sizing.fits:
        return
    chosen, cfg = sizing.chosen, sizing.chosen.cfg
    if not sizing.holds_state:
        where = "on one GPU" if chosen.mode == "single" else f"--sharding_mode {chosen.mode}"
        raise bad_setting(
            f"{where}: {chosen.state_on_gpu} of {chosen.model.parameters / 1e9:.1f} B parameters need "
            f"{gb(resident_state(chosen), sizing.free)} per GPU; {way_out(sizing)}",
            model_name=cfg.model.model_name,
        )
    if names := auto_settings(sizing.requested.cfg):
        least = f"{cfg.optim.batch_size} x {cfg.data.max_seq_length} tokens"
        least += f" and --recompute {cfg.model.recompute}" * ("recompute" in names)
        excess = (sizing.needed - for_tensors(sizing.free)) / 1e9
        raise bad_setting(
            f"even with {least} {_shortage(sizing)}, {excess:.1f} GB too much; {way_out(sizing)}",
            **dict.fromkeys(names, AUTO),
        )


def warning(sizing: Sizing) -> str | None:
    """Return a warning if the predicted peak is clearly above the GPU's memory, else None."""
    if sizing.needed is None or sizing.needed <= CLEARLY_ABOVE * sizing.free:
        return None
    return f"WARNING: {_shortage(sizing)}: it will probably run out of memory; {way_out(sizing)}"


def _shortage(sizing: Sizing) -> str:
    return f"a step is predicted to need {gb(sizing.needed, sizing.free)}"


def way_out(sizing: Sizing) -> str:
    """Return the first settings of the table that fit."""
    for changes in ways_out(sizing):
        candidate = resized(sizing, changes)
        if candidate and candidate.fits and fits_host(candidate.chosen):
            needed = f"{(candidate.needed or resident_state(candidate.chosen)) / 1e9:.1f} GB"
            if host := offloaded_bytes(candidate.chosen):
                needed += f", and {host / 1e9:.0f} GB of host memory"
            return f"use {describe(sizing.requested, changes)} ({needed})"
    return "use more GPUs in --sharding_mode fsdp_full, a smaller model or a lower --max_seq_length"


def ways_out(sizing: Sizing) -> list[Changes]:
    """Return the table's settings for this run, complete with those that change no numerics."""
    basis, request = unchanged_numerics(sizing), sizing.requested
    longest = min(request.gpus, request.cfg.data.max_seq_length // SHORTEST_PART)
    contexts = [{"context_parallel_size": size} for size in CONTEXT_SIZES if size <= longest]
    rows: Sequence[Changes] = (WAYS_OUT[0], *contexts, *WAYS_OUT[1:])
    if request.cfg.sharding.sharding_mode in SHARDING_LESS and request.gpus > 1:
        rows = ({}, *(FULLY_SHARDED | row for row in rows))
    return [basis | row for row in rows]


def unchanged_numerics(sizing: Sizing) -> Changes:
    """Return the settings that save memory without a change of numerics or host memory."""
    cfg = sizing.requested.cfg
    if sizing.needed is None:  # `auto` needs predictions
        return {}
    batch: Changes = {}
    if cfg.optim.batch_size != AUTO:
        total = None if cfg.optim.batch_ramp else global_batch(cfg, sizing.requested.data_ranks)
        batch = {"global_batch_size": total, "gradient_accumulation_steps": None, "batch_size": AUTO}
    if cfg.model.offload_activations:  # offloading needs a level
        return batch
    return batch | {"recompute": AUTO}


def resized(sizing: Sizing, changes: Changes) -> Sizing | None:
    """Return the sizing with other settings, as training would choose it; None if it is refused."""
    request, predicted = sizing.requested, sizing.needed is not None
    try:
        cfg = config_from_dict(request.cfg.to_dict() | changes)
        check_number_of_ranks(cfg, cfg.sharding.data_ranks(request.gpus))
        mode = cfg.sharding.sharding_mode if request.gpus > 1 else request.mode
        gpus = request.gpus, request.gpus_per_node
        known = {"effective": request.effective, "predicted": predicted}
        setup, _ = make_setup(cfg, request.model, mode, *gpus, sizing.free, **known)
        if predicted:
            return choose_sizes(setup, sizing.free, sizing.gpu)
        return unpredicted_sizes(setup, sizing.free)
    except UserError:
        return None


def describe(request: TrainingSetup, changes: Changes) -> str:
    """Return the flags to add, and those to drop."""
    current = request.cfg.to_dict()
    changed = {name: value for name, value in changes.items() if current[name] != value}
    dropped = [f"--{name}" for name, value in changed.items() if value in (None, False)]
    if current["gradient_accumulation_steps"] == 1:  # the default, so probably no flag to drop
        dropped = [flag for flag in dropped if flag != "--gradient_accumulation_steps"]
    flags = [as_flag(name, value) for name, value in changed.items() if value not in (None, False)]
    return " ".join(flags) + f" without {' and '.join(dropped)}" * bool(dropped)


def fits_host(setup: TrainingSetup) -> bool:
    """True if offloaded state and activations fit in this node's memory."""
    return offloaded_bytes(setup) <= host_capacity(setup)


def refuse_small_host(sizing: Sizing) -> None:
    """Raise UserError if offloaded state and activations do not fit in this node's memory."""
    setup = sizing.chosen
    if fits_host(setup):
        return
    names = [n for n in ("offload_optimizer", "offload_activations") if setup.cfg.to_dict()[n]]
    flags = dict.fromkeys(names, True) or {"sharding_mode": setup.mode}
    needed, room = (f"{size / 1e9:.0f} GB" for size in (offloaded_bytes(setup), host_capacity(setup)))
    reason = f"needs {needed} of host memory per node, which has {room} beside what its processes need"
    way_out = "drop it, or use --moment_dtype fp8, --recompute full, more sharding or more nodes"
    raise bad_setting(f"{reason}; {way_out}", **flags)
