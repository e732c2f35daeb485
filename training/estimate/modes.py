"""Sharding mode of a setup, and the choice of `auto`: the fastest mode that fits."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8_suite.core.settings import AUTO
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.memory import accumulated_gradients, resident_state
from fp8_suite.training.estimate.setup import ModelSize, TrainingSetup, rank_setups, with_adapters
from fp8_suite.training.estimate.sizes import choose_sizes, why_unpredicted, with_sizes

# From this many parameters on, sharding the optimizer step saves more time than gathering weights costs.
LARGE_MODEL = 2 * 10**9
# Fraction of a GPU's memory for weights, gradients and optimizer state. The rest is for activations, FP8
# copies and NCCL. fsdp_full, the last mode that `auto` chooses, may take more.
STATE_SHARE = 0.6


def make_setup(
    cfg: Config,
    model: ModelSize,
    mode: str,
    gpus: int,
    gpus_per_node: int,
    free: float | None,
    *,
    effective: str | None = None,
    predicted: bool = True,
) -> tuple[TrainingSetup, str]:
    """Return a setup in `mode` with its optimizer, and the reason for the mode if it is `auto`, else "".

    UserError if the mode's optimizer refuses the settings.
    """
    from fp8_suite.training.optim.optimizer import choose_optimizer  # imported here because it imports torch

    if model.shape and not model.adapters:
        model = with_adapters(model, cfg.lora)

    def setup(mode: str) -> TrainingSetup:
        optimizer = choose_optimizer(cfg, mode, on_gpu=free is not None)
        return TrainingSetup(cfg, model, optimizer, mode, gpus, gpus_per_node, effective)

    if mode != AUTO:
        return setup(mode), ""
    mode, reason = choose_mode(setup("ddp"), free, predicted=predicted)
    return setup(mode), reason


def choose_mode(request: TrainingSetup, free: float | None, *, predicted: bool = True) -> tuple[str, str]:
    """Return the fastest mode that fits into `free` bytes of a GPU (None: no GPU), and the reason.

    First the training state decides. Activations, if a step can be predicted, can only change that to a mode
    that shards more.
    """
    if request.gpus == 1:
        return "single", "one device, nothing to shard"
    if free is None:
        return "ddp", "no GPU, so GPU memory is no limit"
    if request.optimizer.holds_fp8_weights:  # frozen
        return "ddp", "FP8 weights are not sharded"
    setup = rank_setups(replace(request, cfg=with_sizes(request.cfg, request.data_ranks)))[0]
    local = setup.gpus_per_node
    whole_nodes = setup.nodes > 1 and local > 1 and setup.gpus % local == 0 and local % setup.layout.cp == 0
    if setup.gpus == 1:
        modes, mode, reason = ["ddp", "fsdp_full"], "ddp", "every rank holds another part of the model"
    else:
        modes = ["ddp", "fsdp_grad", *["hsdp"] * whole_nodes, "fsdp_full"]
        mode, reason = _choose_by_state(setup, free, modes)
    if not predicted or not setup.model.shape or why_unpredicted(setup.cfg, mode):
        return mode, reason
    for candidate in modes[modes.index(mode) :]:
        sizing = choose_sizes(replace(request, mode=candidate), free)
        if sizing.fits:
            needs = f"; in {candidate} a step is predicted to need {sizing.needed / 1e9:.1f} GB"
            return candidate, reason if candidate == mode else reason + needs
    return mode, reason


def _choose_by_state(setup: TrainingSetup, free: float, modes: list[str]) -> tuple[str, str]:
    """Return the fastest mode whose weights, gradients and optimizer state fit, and the reason."""
    needed = {mode: _resident_bytes(replace(setup, mode=mode)) for mode in modes}
    limit, is_small = STATE_SHARE * free, setup.model.trained < LARGE_MODEL
    order = [*["ddp"] * is_small, "fsdp_grad", "ddp", "hsdp"]
    mode = next((mode for mode in order if needed.get(mode, math.inf) <= limit), "fsdp_full")
    reason = f"{setup.state_on_gpu} need {needed['ddp'] / 1e9:.1f} GB"
    reason += f" (in {mode} {needed[mode] / 1e9:.1f} GB)" * (mode != "ddp")
    return mode, f"{reason}, a GPU has room for {limit / 1e9:.1f} GB"


def _resident_bytes(setup: TrainingSetup) -> float:
    """Return the bytes on a GPU of optimizer state, weights and gradients, also gathered and accumulated."""
    resident = resident_state(setup)
    if setup.fsdp:
        resident += accumulated_gradients(setup)
    if setup.exchanges_sums:
        resident += accumulated_gradients(setup) - 2 * setup.model.trained  # FP32 instead of BF16
    if setup.mode_spec.gathers_once:
        # Weights, and gradients until they are reduced. With accumulation this is an upper bound, as each
        # block's gradient is then added to the sums above and freed.
        itemsize = 4 if setup.cfg.precision.mixed_precision == "fp32" else 2
        resident += itemsize * (setup.model.parameters + setup.model.trained)
    return resident
