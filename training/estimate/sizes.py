"""Micro-batch, accumulation and recomputation: the cheapest that fit into the GPU's memory.

The loss and the gradient of a step depend neither on how its batch is split nor on what is recomputed. Flags
that change numerics or need host memory are only suggested.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter
from typing import Any

from fp8_suite.core.errors import bad_setting, counted
from fp8_suite.core.gpus import REFERENCE_GPU, Gpu
from fp8_suite.core.settings import AUTO
from fp8_suite.te_models.settings import RECOMPUTE_LEVELS
from fp8_suite.training.config import Config
from fp8_suite.training.estimate.activations import recomputation_flops, stored_activations
from fp8_suite.training.estimate.memory import fp8_copies, peak, peak_with_caches, resident_state
from fp8_suite.training.estimate.setup import TrainingSetup
from fp8_suite.training.estimate.step_time import step_seconds
from fp8_suite.training.optim.batch_ramp import ramp_sequences
from fp8_suite.training.optim.settings import DEFAULT_BATCH
from fp8_suite.training.parallel.settings import AXES, MODES

# For CUDA, NCCL and fragmentation. A recorded 8B run with 147.6 GB of tensors fit into 150.1 GB, and the
# largest underestimate of a recorded peak is 0.54 GB (`benchmarks.plan --check`).
RESERVED = 2e9
HF_LEVELS = ("none", "mlp", "layer")  # levels of Hugging Face layers
TIE = 1.001  # step times are as good as equal up to this ratio
LARGEST_BATCH = 64  # sequences of a micro-batch that `auto` chooses
UNCOMPILED = "layers without torch.compile keep more activations than are counted"
SPLIT = ("batch_size", "gradient_accumulation_steps")  # settings that split the global batch

# The global batch


def global_batch(cfg: Config, ranks: int) -> int:
    """Return the sequences per step over all ranks, at the end of a ramp.

    --batch_size auto gives as many as the default.
    """
    optim = cfg.optim
    if optim.batch_ramp:
        return ramp_sequences(cfg, 1, ranks)[-1]
    batch = DEFAULT_BATCH if optim.batch_size == AUTO else optim.batch_size
    return optim.global_batch_size or batch * (optim.gradient_accumulation_steps or 1) * ranks


def allowed_batches(cfg: Config, ranks: int) -> list[int]:
    """Return the micro-batches that the settings allow, largest first. UserError if there is none."""
    optim = cfg.optim
    total, accumulation = optim.global_batch_size, optim.gradient_accumulation_steps
    if optim.batch_ramp:
        return _allowed_by_ramp(cfg, ranks)
    if total is None and optim.batch_size != AUTO:
        return [optim.batch_size]
    if total is None:
        total, accumulation = global_batch(cfg, ranks), None
    fixed = {name: value for name in SPLIT if (value := getattr(optim, name)) not in (None, AUTO)}
    unit = ranks * math.prod(fixed.values())  # sequences that the ranks take at once
    is_exact = len(fixed) == len(SPLIT)
    if total % unit or (is_exact and total != unit):
        nearest = unit if is_exact else max(1, round(total / unit)) * unit
        reason = f"cannot be shared by {counted(ranks, 'rank')}; use {nearest} sequences per step"
        raise bad_setting(reason, global_batch_size=total, **fixed)
    share = total // ranks
    if optim.batch_size != AUTO:
        return [optim.batch_size]
    if accumulation:
        return [share // accumulation]
    return [size for size in range(min(share, LARGEST_BATCH), 0, -1) if share % size == 0]


def runnable_batches(request: TrainingSetup) -> list[int]:
    """Return the allowed micro-batches that fill the pipeline, or all if none does."""
    layout, allowed = request.layout, allowed_batches(request.cfg, request.data_ranks)
    if layout.pp == 1:
        return allowed
    setups = [replace(request, cfg=with_sizes(request.cfg, request.data_ranks, batch)) for batch in allowed]
    filled = [layout.is_filled(setup.batches.micro_batches(0)) for setup in setups]
    return [*compress(allowed, filled)] or allowed


def _allowed_by_ramp(cfg: Config, ranks: int) -> list[int]:
    """Return the micro-batches that divide the batches of all phases. UserError if there is none."""
    batch, accumulation = cfg.optim.batch_size, cfg.optim.gradient_accumulation_steps
    totals = ramp_sequences(cfg, 1 if batch == AUTO else batch, ranks)
    sizes = [batch] if batch != AUTO else range(LARGEST_BATCH, 0, -1)
    shared = [size for size in sizes if all(total % (size * ranks) == 0 for total in totals)]
    if accumulation is None:
        return shared
    if allowed := [size for size in shared if size * ranks * accumulation == totals[-1]]:
        return allowed
    reason = f"--batch_ramp {cfg.optim.batch_ramp} sets the accumulation; drop it"
    raise bad_setting(reason, gradient_accumulation_steps=accumulation)


def with_sizes(cfg: Config, ranks: int, batch: int | None = None, recompute: str = "none") -> Config:
    """Return the settings with these choices in place of `auto`, and the accumulation that follows.

    The default micro-batch is the largest up to DEFAULT_BATCH. UserError if no split has the global batch.
    """
    allowed = allowed_batches(cfg, ranks)
    batch = batch or next((size for size in allowed if size <= DEFAULT_BATCH), allowed[0])
    accumulation = global_batch(cfg, ranks) // (batch * ranks)
    optim = replace(cfg.optim, batch_size=batch, gradient_accumulation_steps=accumulation)
    chosen = recompute if cfg.model.recompute == AUTO else cfg.model.recompute
    return replace(cfg, optim=optim, model=replace(cfg.model, recompute=chosen))


def check_number_of_ranks(cfg: Config, ranks: int) -> None:
    """Raise UserError for a batch, FP8 weights or an exchange that this number of data ranks rules out."""
    allowed_batches(cfg, ranks)
    ranks *= cfg.sharding.context_parallel_size * cfg.sharding.pipeline_parallel_size
    if ranks > 1 and cfg.precision.fp8_weights and not cfg.lora.enabled:
        raise bad_setting(f"only on one GPU, here {counted(ranks, 'rank')}; drop it", fp8_weights=True)
    if ranks == 1 and cfg.sharding.grad_reduce_dtype == "fp8":
        reason = "one device exchanges no gradients; use bf16, also to resume a run of several devices"
        raise bad_setting(reason, grad_reduce_dtype="fp8")


# The choice


@dataclass(frozen=True)
class Sizing:
    """Setup as requested and as chosen, with the predicted peak of the latter."""

    requested: TrainingSetup
    chosen: TrainingSetup  # with numbers in place of `auto`
    needed: float | None  # predicted peak in bytes; None: not covered by the memory model
    free: float | None  # bytes of GPU memory that the run may use; None: no GPU
    gpu: Gpu = REFERENCE_GPU

    @property
    def holds_state(self) -> bool:
        """True if a GPU has room for its part of weights, gradients and optimizer state."""
        return self.free is None or resident_state(self.chosen) <= self.free

    @property
    def fits(self) -> bool:
        """True if everything that can be predicted fits."""
        return self.holds_state and (self.needed is None or self.needed <= for_tensors(self.free))

    @property
    def has_room(self) -> bool:
        """True if what torch caches for FSDP2's streams fits too, so that a step never flushes the cache."""
        return self.fits and peak_with_caches(self.chosen) <= for_tensors(self.free)

    @property
    def is_choice(self) -> bool:
        """True if some settings were chosen here."""
        return self.requested.cfg != self.chosen.cfg

    def describe(self) -> str:
        """Return the choice and the prediction in one line."""
        cfg = self.chosen.cfg
        sizes = f"--batch_size {cfg.optim.batch_size} x {self.chosen.batches.describe()}"
        if self.requested.cfg.model.recompute == AUTO:
            sizes += f", --recompute {cfg.model.recompute}"
        if self.needed is None:
            return f"fit: {sizes}"
        return f"{'fit' if self.fits else 'no fit'}: {sizes}; predicted {gb(self.needed, self.free)}"


def gb(size: float, total: float) -> str:
    return f"{size / 1e9:.1f} of {total / 1e9:.1f} GB"


def for_tensors(free: float) -> float:
    """Return the bytes available to tensors of `free` bytes of GPU memory."""
    return free - RESERVED


def unpredicted_sizes(request: TrainingSetup, free: float | None) -> Sizing:
    """Return the default sizes, for a step that the memory model does not cover."""
    allowed = runnable_batches(request)
    batch = next((size for size in allowed if size <= DEFAULT_BATCH), allowed[0])
    cfg = with_sizes(request.cfg, request.data_ranks, batch)
    return Sizing(request, replace(request, cfg=cfg), None, free)


def choose_sizes(request: TrainingSetup, free: float, gpu: Gpu = REFERENCE_GPU) -> Sizing:
    """Choose values for `auto`, so that the predicted peak fits into `free` bytes of GPU memory.

    Each size of micro-batch recomputes as little as possible. The choice is the largest of those whose step
    is predicted to be fastest on `gpu`, first among those that have room for torch's caches; if nothing fits,
    it is what needs least.
    """
    batches = runnable_batches(request)
    for suffices in map(attrgetter, ("has_room", "fits") if request.caches_by_stream else ("fits",)):
        candidates = [_least_recomputation(request, batch, free, gpu, suffices) for batch in batches]
        if fitting := [sizing for sizing in candidates if suffices(sizing)]:
            seconds = [sum(step_seconds(sizing.chosen, gpu).values()) for sizing in fitting]
            limit = TIE * min(seconds)
            return next(sizing for sizing, time in zip(fitting, seconds, strict=True) if time <= limit)
    return min(candidates, key=lambda sizing: sizing.needed)


def _least_recomputation(
    request: TrainingSetup, batch: int, free: float, gpu: Gpu, suffices: Callable[[Sizing], bool]
) -> Sizing:
    """Return the sizing of a micro-batch with the least recomputation that suffices, or else the most."""

    def choose(recompute: str) -> Sizing:
        setup = replace(request, cfg=with_sizes(request.cfg, request.data_ranks, batch, recompute))
        return Sizing(request, setup, sum(peak(setup).values()), free, gpu)

    segments = recomputations(request, batch)
    for segment in segments:
        # Each further layer lowers the peak, except the last one, which backward recomputes first.
        for values in filter(None, (segment[:-1], segment[-1:])):
            if suffices(choose(values[-1])):
                return choose(values[bisect_left(values, True, key=lambda value: suffices(choose(value)))])
    return choose(segments[-1][-1])


def recomputations(request: TrainingSetup, batch: int) -> list[list[str]]:
    """Return values of --recompute, least work first, in segments from one level to the next.

    A segment moves layer by layer to the level that saves the most bytes for its work.
    """
    model = request.cfg.model
    if model.recompute != AUTO:
        return [[model.recompute]]
    setup = replace(request, cfg=with_sizes(request.cfg, request.data_ranks, batch))
    levels = [level for level in RECOMPUTE_LEVELS if level in HF_LEVELS or model.use_te]
    if setup.mode_spec.stage == 3 and model.use_te:  # ZeRO 3 recomputes all of a layer
        levels = ["none", "layer"]
    ranks = request.data_ranks
    setups = {name: replace(setup, cfg=with_sizes(request.cfg, ranks, batch, name)) for name in levels}
    work = {name: recomputation_flops(level) for name, level in setups.items()}
    kept = {name: stored_activations(level) for name, level in setups.items()}
    kept["none"] += fp8_copies(setup) * setup.keeps_fp8_weights
    segments, now, layers = [["none"]], "none", setup.model.shape.num_layers
    while further := [name for name in levels if kept[name] < kept[now] and work[name] > work[now]]:
        best = max(further, key=lambda name: (kept[now] - kept[name]) / (work[name] - work[now]))
        rest = "" if now == "none" else f"+{now}"
        segments.append([*(f"{best}:{count}{rest}" for count in range(1, layers)), best])
        now = best
    return segments


def why_unpredicted(cfg: Config, mode: str) -> tuple[dict[str, Any], str] | None:
    """Return settings under which memory and time of a step cannot be predicted, and the reason, or None."""
    model, precision_map = cfg.model, cfg.precision.precision_map
    layers_apart = "predictions cover whole layers only; use --bf16_first_layers and --bf16_last_layers"
    unfused = "TE may then run unfused attention, which predictions do not cover; drop one of them"
    modes = "predictions cover ds_zero1, ds_zero2, ds_zero3 and ds_zero3_offload; use one of them"
    # (unpredicted, settings at fault, reason)
    rules = [
        (model.te_backend == "emulated", {"te_backend": "emulated"}, "predictions cover GPUs only; drop it"),
        (
            cfg.precision.mixed_precision in ("fp16", "fp32"),
            {"mixed_precision": cfg.precision.mixed_precision},
            "predictions cover bf16 and fp8",
        ),
        (precision_map, {"precision_map": precision_map}, layers_apart),
        (
            cfg.optim.deterministic and model.use_te and not model.flash_attention,
            {"deterministic": True, "flash_attention": False},
            unfused,
        ),
        (mode == "deepspeed", {"sharding_mode": mode}, modes),
    ]
    return next(((settings, reason) for applies, settings, reason in rules if applies), None)


def compiles_layers(cfg: Config, mode: str, *, on_gpu: bool) -> bool:
    """True if Hugging Face layers run under torch.compile. On by default on a GPU.

    Off by default under DeepSpeed: its hooks on every module cause graph breaks.
    """
    if cfg.model.use_te or cfg.model.compile is not None:
        return bool(cfg.model.compile)
    return on_gpu and MODES[mode].engine != "zero"


def auto_settings(cfg: Config) -> list[str]:
    """Return the names of the settings that are `auto`."""
    values = cfg.to_dict()
    return [name for name in ("batch_size", "recompute") if values[name] == AUTO]


def auto_sizes(cfg: Config) -> dict[str, str]:
    """Return the parallel sizes that are `auto`, as settings."""
    return {name: AUTO for name in AXES.values() if getattr(cfg.sharding, name) == AUTO}


def searched_settings(cfg: Config) -> list[str]:
    """Return the names of the settings that the search of a layout chooses; none without sizes of `auto`."""
    if not (names := [*auto_sizes(cfg)]):
        return []
    names += ["sharding_mode"] * (cfg.sharding.sharding_mode == AUTO)
    return names + ["virtual_stages"] * ("pipeline_parallel_size" in names)


def without_auto_sizes(cfg: Config) -> Config:
    """Return the settings with 1 in place of `auto` for parallel sizes."""
    return replace(cfg, sharding=replace(cfg.sharding, **dict.fromkeys(auto_sizes(cfg), 1)))


def with_data_ranks(cfg: Config, gpus: int) -> tuple[Config, int]:
    """Return `without_auto_sizes(cfg)` and its data ranks. UserError if sizes do not divide `gpus`."""
    cfg = without_auto_sizes(cfg)
    return cfg, cfg.sharding.data_ranks(gpus)
