"""Micro-batch and accumulation: from the global batch, and as large as the GPU's memory allows.

The loss and the gradient of a step do not depend on how its batch is split, so this changes no numerics; what
would change them is only advised. This module must not import torch, so that `benchmarks.plan` shows its help
and refuses wrong flags at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from core.errors import EXIT_BAD_SETTING, UserError, bad_setting, counted
from training.config import Config, config_from_dict
from training.optim.settings import AUTO, DEFAULT_BATCH, OptimConfig
from training.parallel.memory import peak
from training.parallel.settings import MODES
from training.parallel.step_plan import StepPlan

# For CUDA, NCCL and fragmentation. A recorded 8B run with 147.6 GB of tensors fit into 150.1 GB, and the
# largest underestimate of a recorded peak is 0.54 GB (`benchmarks.plan --check`).
RESERVED = 2e9
LARGEST_BATCH = 64  # sequences of a micro-batch that `auto` chooses
# Predictions are within 4 % of recorded peaks. A run this far above the memory is warned of.
CLEARLY_ABOVE = 1.1
# Flags that change numerics or speed and reduce memory, and their settings.
SMALLER: dict[str, dict[str, Any]] = {
    "--moment_dtype fp8": {"moment_dtype": "fp8"},
    "--grad_reduce_dtype bf16": {"grad_reduce_dtype": "bf16"},
}
MOST_GPUS = 4096  # advised at most


# The global batch


def global_batch(optim: OptimConfig, ranks: int) -> int:
    """Return the sequences per step over all ranks. --batch_size auto gives as many as the default."""
    batch = DEFAULT_BATCH if optim.batch_size == AUTO else optim.batch_size
    return optim.global_batch_size or batch * (optim.gradient_accumulation_steps or 1) * ranks


def allowed_batches(optim: OptimConfig, ranks: int) -> list[int]:
    """Return the micro-batches that the settings allow, largest first. UserError if there is none."""
    total, accumulation = optim.global_batch_size, optim.gradient_accumulation_steps
    if total is None and optim.batch_size != AUTO:
        return [optim.batch_size]
    if total is None:
        total, accumulation = global_batch(optim, ranks), None
    if total % ranks:
        reason = f"cannot be shared by {counted(ranks, 'rank')}; use {_nearest_multiple(total, ranks)}"
        raise bad_setting(reason, global_batch_size=total)
    each = total // ranks
    sizes = range(min(each, LARGEST_BATCH), 0, -1) if optim.batch_size == AUTO else [optim.batch_size]
    if optim.batch_size == AUTO and accumulation:
        sizes = [each // accumulation]
    found = [size for size in sizes if size and each % size == 0]
    if not found or (accumulation and found[0] * accumulation != each):
        raise _no_batch(optim, ranks, each)
    return found


def _no_batch(optim: OptimConfig, ranks: int, each: int) -> UserError:
    """Return the error of settings that cannot split the `each` sequences of a rank."""
    names = ("global_batch_size", "batch_size", "gradient_accumulation_steps")
    given = {name: value for name in names if (value := getattr(optim, name)) not in (None, AUTO)}
    if len(given) == len(names):
        product = optim.batch_size * optim.gradient_accumulation_steps * ranks
        reason = f"the last two give {product} on {counted(ranks, 'rank')}; drop one of them"
        return bad_setting(reason, **given)
    name, size = list(given.items())[1]
    divisor = min((n for n in range(1, each + 1) if each % n == 0), key=lambda n: abs(n - size))
    total = _nearest_multiple(optim.global_batch_size, size * ranks)
    reason = f"each of {counted(ranks, 'rank')} has {each} sequences per step"
    return bad_setting(f"{reason}; use --{name} {divisor}, or --global_batch_size {total}", **given)


def _nearest_multiple(number: int, unit: int) -> int:
    return max(1, round(number / unit)) * unit


def split_batch(cfg: Config, ranks: int, batch: int | None = None) -> Config:
    """Return the settings with numbers for micro-batch and accumulation. UserError if they contradict.

    `batch` is the choice for --batch_size auto; by default the largest one up to DEFAULT_BATCH.
    """
    allowed = allowed_batches(cfg.optim, ranks)
    batch = batch or next((size for size in allowed if size <= DEFAULT_BATCH), allowed[0])
    accumulation = global_batch(cfg.optim, ranks) // (batch * ranks)
    return replace(cfg, optim=replace(cfg.optim, batch_size=batch, gradient_accumulation_steps=accumulation))


# The choice


@dataclass(frozen=True)
class Fit:
    """Settings chosen for a GPU; `free` are the bytes of its memory that the run may use."""

    request: StepPlan  # settings as given
    plan: StepPlan  # with numbers in place of `auto`
    free: float | None  # None: no GPU, or a step that the memory model does not cover

    @property
    def needed(self) -> float:
        """Predicted peak in bytes."""
        return sum(peak(self.plan).values())

    @property
    def predicted_gb(self) -> float | None:
        """Predicted peak in GB; None if it is unknown."""
        return None if self.free is None else self.needed / 1e9

    @property
    def fits(self) -> bool:
        """True if the prediction leaves room, or there is none."""
        return self.free is None or self.needed <= room(self.free)

    @property
    def is_choice(self) -> bool:
        """True if the settings left something to choose."""
        return self.request.cfg != self.plan.cfg

    def describe(self) -> str:
        """Return the choice and the prediction in one line."""
        optim = self.plan.cfg.optim
        split = f"--batch_size {optim.batch_size} x {counted_micro_batches(self.plan.accumulation)}"
        if self.free is None:
            return f"fit: {split}"
        predicted = f"predicted {self.needed / 1e9:.1f} of {self.free / 1e9:.1f} GB"
        return f"{'fit' if self.fits else 'no fit'}: {split}; {predicted}"


def counted_micro_batches(number: int) -> str:
    return f"{number:,} micro-batch{'es' * (number > 1)}"


def room(free: float) -> float:
    """Return the bytes available to tensors of `free` bytes of GPU memory."""
    return free - RESERVED


def fit(request: StepPlan, free: float) -> Fit:
    """Return the first of the candidates whose predicted peak fits, else the smallest."""
    smallest = None
    for plan in _candidates(request):
        found = Fit(request, plan, free)
        if found.fits:
            return found
        if smallest is None or found.needed < smallest.needed:
            smallest = found
    return smallest


def _candidates(request: StepPlan) -> Iterator[StepPlan]:
    """Yield the settings that the request allows, the fastest first."""
    for batch in allowed_batches(request.cfg.optim, request.gpus):
        yield replace(request, cfg=split_batch(request.cfg, request.gpus, batch))


def unpredicted(cfg: Config, mode: str) -> tuple[str, dict[str, Any]] | None:
    """Return why memory and time of a step cannot be predicted and the settings at fault, or None."""
    own, model = cfg.precision, cfg.model
    layers_apart = "the planner covers whole layers only; use --bf16_first_layers and --bf16_last_layers"
    unfused = "TE may then run unfused attention, which the planner does not cover; drop one of them"
    modes = "the planner covers ds_zero1, ds_zero2, ds_zero3 and ds_zero3_offload; use one of them"
    # (unpredicted, reason, settings)
    rules = [
        (model.te_backend == "emulated", "the planner covers GPUs only; drop it", {"te_backend": "emulated"}),
        (own.mixed_precision == "fp32", "the planner covers bf16 and fp8", {"mixed_precision": "fp32"}),
        (own.precision_map, layers_apart, {"precision_map": own.precision_map}),
        (own.fp8_attention, "the planner covers attention in BF16 only; drop it", {"fp8_attention": True}),
        (
            cfg.optim.deterministic and model.use_te and not model.flash_attention,
            unfused,
            {"deterministic": True, "flash_attention": False},
        ),
        (mode == "deepspeed", modes, {"sharding_mode": mode}),
    ]
    return next(((reason, settings) for found, reason, settings in rules if found), None)


# Advice


def refuse_misfit(found: Fit) -> None:
    """Raise UserError if nothing that the settings allow fits."""
    if found.fits:
        return
    plan = found.plan
    excess = found.needed - room(found.free)
    raise UserError(
        f"{_requested(found)}: with {plan.cfg.optim.batch_size} x {plan.cfg.data.max_seq_length} tokens, the "
        f"least, {_shortage(found)}, {excess / 1e9:.1f} GB too much; {advice(found)}",
        flags=_requests(found),
        exit_code=EXIT_BAD_SETTING,
    )


def warning(found: Fit) -> str | None:
    """Return a warning if the predicted peak is clearly above the GPU's memory, else None."""
    if found.free is None or found.needed <= CLEARLY_ABOVE * found.free:
        return None
    return f"WARNING: {_shortage(found)}: it will probably run out of memory; {advice(found)}"


def _requests(found: Fit) -> list[str]:
    """Return the settings that are `auto`."""
    given = found.request.cfg.to_dict()
    return [name for name in ("batch_size",) if given[name] == AUTO]


def _requested(found: Fit) -> str:
    return " ".join(f"--{name} auto" for name in _requests(found))


def _shortage(found: Fit) -> str:
    return f"a step is predicted to need {found.needed / 1e9:.1f} of {found.free / 1e9:.1f} GB"


def advice(found: Fit) -> str:
    """Return the ways to make a step fit, with what each would need; the fewest flags only."""
    split = {"batch_size": AUTO, "gradient_accumulation_steps": None}
    split |= {"global_batch_size": global_batch(found.plan.cfg.optim, found.plan.gpus)}
    if (other := refit(found, split)) and other.fits:
        ways = [f"--global_batch_size {split['global_batch_size']} --batch_size auto"]
        return f"{ways[0]} needs {other.needed / 1e9:.1f} GB"
    ways = [*_smaller_settings(found), *_shorter_sequences(found), *_more_gpus(found)]
    return ", or ".join(ways) or "no setting makes it fit; use a smaller model"


def refit(found: Fit, changes: dict[str, Any], gpus: int = 0, mode: str = "") -> Fit | None:
    """Return the fit with other settings, GPUs or mode; None if they are refused."""
    from training.optim.optimizer import plan_optimizer  # imports torch

    plan, mode = found.request, mode or found.request.mode
    try:
        cfg = config_from_dict(plan.cfg.to_dict() | changes)
        optimizer = plan_optimizer(cfg.precision, on_gpu=True, master_home=MODES[mode].master_home)
        changed = replace(plan, cfg=cfg, optimizer=optimizer, mode=mode)
        if gpus:
            changed = replace(changed, gpus=gpus, gpus_per_node=max(plan.gpus_per_node, min(gpus, 8)))
        return fit(changed, found.free)
    except UserError:
        return None


def _smaller_settings(found: Fit) -> list[str]:
    for count in range(1, len(SMALLER) + 1):
        ways = []
        for flags in combinations(SMALLER, count):
            changes = {name: value for flag in flags for name, value in SMALLER[flag].items()}
            if (other := refit(found, changes)) and other.fits:
                saved = found.needed - other.needed
                ways.append(f"{' '.join(flags)} needs {other.needed / 1e9:.1f} GB, {saved / 1e9:.1f} less")
        if ways:
            return ways
    return []


def _shorter_sequences(found: Fit) -> list[str]:
    length = 1 << (found.request.cfg.data.max_seq_length - 1).bit_length() - 1  # the next lower power of 2
    while length >= 128:
        if (other := refit(found, {"max_seq_length": length})) and other.fits:
            return [f"--max_seq_length {length} needs {other.needed / 1e9:.1f} GB"]
        length //= 2
    return []


def _more_gpus(found: Fit) -> list[str]:
    plan = found.request
    mode = "fsdp_full" if plan.mode in ("single", "ddp", "fsdp_grad", "hsdp") else plan.mode
    gpus, changes = plan.gpus, {"hsdp_shard_size": None}
    if plan.cfg.optim.global_batch_size:
        changes["gradient_accumulation_steps"] = None
    while gpus <= MOST_GPUS:
        gpus *= 2
        if (other := refit(found, changes, gpus, mode)) and other.fits:
            return [f"{gpus} GPUs with --sharding_mode {mode} need {other.needed / 1e9:.1f} GB each"]
    return []
