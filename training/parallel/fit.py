"""Micro-batch, accumulation and recomputation: the cheapest that fit into the GPU's memory.

The loss and the gradient of a step depend neither on how its batch is split nor on what is recomputed. Flags
that change numerics or need host memory are only suggested. This module must not import torch, so that
`benchmarks.plan` shows its help and refuses wrong flags at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Any

from core.errors import EXIT_BAD_SETTING, UserError, bad_setting, counted
from core.settings import AUTO
from te_models.settings import RECOMPUTE_LEVELS
from training.config import Config, config_from_dict
from training.optim.settings import DEFAULT_BATCH, OptimConfig
from training.parallel.activations import recomputation_flops, stored_activations
from training.parallel.memory import fp8_copies, host_room, offloaded_bytes, peak
from training.parallel.step_plan import StepPlan
from training.parallel.step_time import REFERENCE_GPU, Gpu, step_seconds

# For CUDA, NCCL and fragmentation. A recorded 8B run with 147.6 GB of tensors fit into 150.1 GB, and the
# largest underestimate of a recorded peak is 0.54 GB (`benchmarks.plan --check`).
RESERVED = 2e9
HF_LEVELS = ("none", "mlp", "layer")  # levels of Hugging Face layers
TIE = 1.001  # step times are as good as equal up to this ratio
LARGEST_BATCH = 64  # sequences of a micro-batch that `auto` chooses
# Warn if a prediction exceeds the GPU's memory by this factor. Predictions are within 4 % of recorded peaks.
CLEARLY_ABOVE = 1.1
Settings = dict[str, dict[str, Any]]  # by flags
FP8_WEIGHTS = {"offload_optimizer": True, "fp8_weights": True}
# Flags that reduce memory and change numerics or need host memory, and their settings.
MEMORY_SAVING: Settings = {
    "--recompute layer --offload_activations": {
        "recompute": "layer",
        "gradient_checkpointing": False,
        "offload_activations": True,
    },
    "--moment_dtype fp8": {"moment_dtype": "fp8"},
    "--offload_optimizer": {"offload_optimizer": True},
    "--offload_optimizer --fp8_weights": FP8_WEIGHTS,
    "--grad_reduce_dtype bf16": {"grad_reduce_dtype": "bf16"},
}
MOST_GPUS = 4096  # that advice names


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


def resolve_auto(cfg: Config, ranks: int, batch: int | None = None, recompute: str = "none") -> Config:
    """Return the settings with these choices in place of `auto`, and the accumulation that follows.

    The default micro-batch is the largest up to DEFAULT_BATCH. UserError if no split has the global batch.
    """
    allowed = allowed_batches(cfg.optim, ranks)
    batch = batch or next((size for size in allowed if size <= DEFAULT_BATCH), allowed[0])
    accumulation = global_batch(cfg.optim, ranks) // (batch * ranks)
    optim = replace(cfg.optim, batch_size=batch, gradient_accumulation_steps=accumulation)
    chosen = recompute if cfg.model.recompute == AUTO else cfg.model.recompute
    return replace(cfg, optim=optim, model=replace(cfg.model, recompute=chosen))


def check_launch(cfg: Config, ranks: int) -> None:
    """Raise UserError for a batch, FP8 weights or an exchange that this number of devices rules out."""
    allowed_batches(cfg.optim, ranks)
    if ranks > 1 and cfg.precision.fp8_weights:
        raise bad_setting(f"only on one GPU, here {counted(ranks, 'rank')}; drop it", fp8_weights=True)
    if ranks == 1 and cfg.sharding.grad_reduce_dtype == "fp8":
        raise bad_setting(
            "one device exchanges no gradients; use bf16, the dtype of its sums over micro-batches, also to "
            "resume a run of several devices",
            grad_reduce_dtype="fp8",
        )


# The choice


@dataclass(frozen=True)
class Fit:
    """Settings chosen for a GPU; `free` are the bytes of its memory that the run may use."""

    request: StepPlan  # settings as given
    plan: StepPlan  # with numbers in place of `auto`
    free: float | None  # None: no GPU, or a step that the memory model does not cover
    gpu: Gpu = REFERENCE_GPU

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
        """True if the predicted peak fits, or is unknown."""
        return self.free is None or self.needed <= room(self.free)

    @property
    def is_choice(self) -> bool:
        """True if some settings were chosen here."""
        return self.request.cfg != self.plan.cfg

    def describe(self) -> str:
        """Return the choice and the prediction in one line."""
        cfg = self.plan.cfg
        chosen = f"--batch_size {cfg.optim.batch_size} x {counted_micro_batches(self.plan.accumulation)}"
        if self.request.cfg.model.recompute == AUTO:
            chosen += f", --recompute {cfg.model.recompute}"
        if self.free is None:
            return f"fit: {chosen}"
        predicted = f"predicted {self.needed / 1e9:.1f} of {_gb(self.free)}"
        return f"{'fit' if self.fits else 'no fit'}: {chosen}; {predicted}"


def counted_micro_batches(number: int) -> str:
    return f"{number:,} micro-batch{'es' * (number > 1)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def room(free: float) -> float:
    """Return the bytes available to tensors of `free` bytes of GPU memory."""
    return free - RESERVED


def fit(request: StepPlan, free: float, gpu: Gpu = REFERENCE_GPU) -> Fit:
    """Choose values for `auto`, so that the predicted peak fits into `free` bytes of GPU memory.

    Each size of micro-batch recomputes as little as possible. The choice is the largest of those whose step
    is predicted to be fastest on `gpu`; if nothing fits, it is what needs least.
    """
    sizes = allowed_batches(request.cfg.optim, request.gpus)
    found = [_least_recomputation(request, size, free, gpu) for size in sizes]
    if not (fitting := [each for each in found if each.fits]):
        return min(found, key=lambda each: each.needed)
    seconds = [sum(step_seconds(each.plan, gpu).values()) for each in fitting]
    return next(each for each, time in zip(fitting, seconds, strict=True) if time <= TIE * min(seconds))


def _least_recomputation(request: StepPlan, batch: int, free: float, gpu: Gpu) -> Fit:
    """Return the fit of a micro-batch with the least recomputation at which it fits, or else the most."""

    def choose(recompute: str) -> Fit:
        cfg = resolve_auto(request.cfg, request.gpus, batch, recompute)
        return Fit(request, replace(request, cfg=cfg), free, gpu)

    segments = recomputations(request, batch)
    for segment in segments:
        # Each further layer lowers the peak, except the last one, which backward recomputes first.
        for values in filter(None, (segment[:-1], segment[-1:])):
            if choose(values[-1]).fits:
                return choose(values[bisect_left(values, True, key=lambda value: choose(value).fits)])
    return choose(segments[-1][-1])


def recomputations(request: StepPlan, batch: int) -> list[list[str]]:
    """Return values of --recompute, least work first, in segments from one level to the next.

    A segment moves layer by layer to the level that saves the most bytes for its work.
    """
    model = request.cfg.model
    if model.recompute != AUTO:
        return [[model.recompute]]
    plan = replace(request, cfg=resolve_auto(request.cfg, request.gpus, batch))
    levels = [level for level in RECOMPUTE_LEVELS if level in HF_LEVELS or model.use_te]
    if plan.sharding.stage == 3 and model.use_te:  # ZeRO 3 recomputes all of a layer
        levels = ["none", "layer"]
    plans = {name: replace(plan, cfg=resolve_auto(request.cfg, request.gpus, batch, name)) for name in levels}
    work = {name: recomputation_flops(each) for name, each in plans.items()}
    kept = {name: stored_activations(each) for name, each in plans.items()}
    kept["none"] += fp8_copies(plan) * plan.keeps_fp8_weights
    segments, now, layers = [["none"]], "none", plan.model.shape.num_layers
    while further := [name for name in levels if kept[name] < kept[now] and work[name] > work[now]]:
        best = max(further, key=lambda name: (kept[now] - kept[name]) / (work[name] - work[now]))
        rest = "" if now == "none" else f"+{now}"
        segments.append([*(f"{best}:{count}{rest}" for count in range(1, layers)), best])
        now = best
    return segments


def unpredicted(cfg: Config, mode: str) -> tuple[str, dict[str, Any]] | None:
    """Return why memory and time of a step cannot be predicted and the settings at fault, or None."""
    own, model = cfg.precision, cfg.model
    layers_apart = "predictions cover whole layers only; use --bf16_first_layers and --bf16_last_layers"
    unfused = "TE may then run unfused attention, which predictions do not cover; drop one of them"
    modes = "predictions cover ds_zero1, ds_zero2, ds_zero3 and ds_zero3_offload; use one of them"
    # (unpredicted, reason, settings)
    rules = [
        (model.te_backend == "emulated", "predictions cover GPUs only; drop it", {"te_backend": "emulated"}),
        (own.mixed_precision == "fp32", "predictions cover bf16 and fp8", {"mixed_precision": "fp32"}),
        (own.precision_map, layers_apart, {"precision_map": own.precision_map}),
        (own.fp8_attention, "predictions cover attention in BF16 only; drop it", {"fp8_attention": True}),
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
    least = f"{plan.cfg.optim.batch_size} x {plan.cfg.data.max_seq_length} tokens"
    if found.request.cfg.model.recompute == AUTO:
        least += f" and --recompute {plan.cfg.model.recompute}"
    raise UserError(
        f"{_requested(found)}: even with {least} {_shortage(found)}, {_gb(excess)} too much; {advice(found)}",
        flags=auto_settings(found.request.cfg),
        exit_code=EXIT_BAD_SETTING,
    )


def warning(found: Fit) -> str | None:
    """Return a warning if the predicted peak is clearly above the GPU's memory, else None."""
    if found.free is None or found.needed <= CLEARLY_ABOVE * found.free:
        return None
    return f"WARNING: {_shortage(found)}: it will probably run out of memory; {advice(found)}"


def auto_settings(cfg: Config) -> list[str]:
    """Return the names of the settings that are `auto`."""
    given = cfg.to_dict()
    return [name for name in ("batch_size", "recompute") if given[name] == AUTO]


def _requested(found: Fit) -> str:
    return " ".join(f"--{name} auto" for name in auto_settings(found.request.cfg))


def _shortage(found: Fit) -> str:
    return f"a step is predicted to need {found.needed / 1e9:.1f} of {_gb(found.free)}"


def advice(found: Fit) -> str:
    """Return the ways to make a step fit with the fewest flags, and the bytes that each would need."""
    total = global_batch(found.plan.cfg.optim, found.plan.gpus)
    choice = {"global_batch_size": total, "batch_size": AUTO, "recompute": AUTO}
    unset = {"gradient_accumulation_steps": None, "gradient_checkpointing": False}
    if other := refit(found, choice | unset):
        given = found.request.cfg.to_dict()
        flags = " ".join(f"--{name} {value}" for name, value in choice.items() if given[name] != value)
        replaced = [name for name, value in unset.items() if given[name] != value]
        if flags and given["gradient_accumulation_steps"] == 1:  # the default, unless it is a flag
            replaced.remove("gradient_accumulation_steps")
        without = " and ".join(f"--{name}" for name in replaced)
        if other.fits:
            return f"{flags}{f' without {without}' * bool(without)} needs {_gb(other.needed)}".lstrip()
        flags = f"with {flags}, " * bool(flags) + f"without {without}, " * bool(without)
    else:  # such as --offload_activations, which needs a level
        other, flags = found, ""
    ways = [*_smaller_settings(other), *_shorter_sequences(other), *_more_gpus(other), *_smaller_steps(other)]
    return flags + ", or ".join(ways) if ways else "no setting makes it fit; use a smaller model"


def refit(found: Fit, changes: dict[str, Any], gpus: int = 0, mode: str = "") -> Fit | None:
    """Return the fit with other settings, GPUs or mode; None if they are refused."""
    from training.optim.optimizer import plan_optimizer  # imports torch

    plan, mode = found.request, mode or found.request.mode
    if not (cfg := changed_config(plan.cfg, changes, gpus or plan.gpus)):
        return None
    try:
        optimizer = plan_optimizer(cfg, mode, on_gpu=True)
        changed = replace(plan, cfg=cfg, optimizer=optimizer, mode=mode)
        if gpus:
            changed = replace(changed, gpus=gpus, gpus_per_node=max(plan.gpus_per_node, min(gpus, 8)))
        return fit(changed, found.free, found.gpu)
    except UserError:
        return None


def changed_config(cfg: Config, changes: dict[str, Any], ranks: int) -> Config | None:
    """Return other settings; None if they are refused on this number of ranks."""
    try:
        changed = config_from_dict(cfg.to_dict() | changes)
        check_launch(changed, ranks)
    except UserError:
        return None
    return changed


def contained(flags: str, table: Settings) -> list[str]:
    """Return the keys of a table whose settings are among those of the key `flags`, itself included."""
    return [other for other, settings in table.items() if settings.items() <= table[flags].items()]


def fewest_first(table: Settings) -> Iterator[list[tuple[str, ...]]]:
    """Yield the combinations of a table's keys in groups, those with the fewest flags first."""

    def number(keys: tuple[str, ...]) -> int:
        return sum(len(contained(key, table)) for key in keys)

    keys = [each for count in range(1, len(table) + 1) for each in combinations(table, count)]
    for _, group in groupby(sorted(keys, key=number), number):
        yield list(group)


def _smaller_settings(found: Fit) -> list[str]:
    for group in fewest_first(MEMORY_SAVING):
        ways = []
        for flags in group:
            changes = {name: value for flag in flags for name, value in MEMORY_SAVING[flag].items()}
            if not (other := refit(found, changes)) or not other.fits:
                continue
            if (host := offloaded_bytes(other.plan)) <= host_room(other.plan):
                offloaded = f", and {host / 1e9:.0f} GB of host memory" if host else ""
                saved = found.needed - other.needed
                ways.append(f"{' '.join(flags)} needs {_gb(other.needed)}, {_gb(saved)} less{offloaded}")
        if ways:
            return ways
    return []


def _shorter_sequences(found: Fit) -> list[str]:
    length = 1 << (found.request.cfg.data.max_seq_length - 1).bit_length() - 1  # the next lower power of 2
    while length >= 128:
        if (other := refit(found, {"max_seq_length": length})) and other.fits:
            return [f"--max_seq_length {length} needs {_gb(other.needed)}"]
        length //= 2
    return []


def _smaller_steps(found: Fit) -> list[str]:
    """Return the largest step without accumulation, for which FSDP keeps no whole gradients."""
    plan = found.request
    if not plan.fsdp or found.plan.accumulation == 1:
        return []
    each = global_batch(plan.cfg.optim, plan.gpus) // plan.gpus
    for batch in (size for size in (64, 32, 16, 8, 4, 2, 1) if size <= each):
        changes = {"batch_size": batch, "global_batch_size": None, "gradient_accumulation_steps": None}
        if (other := refit(found, changes)) and other.fits:
            return [f"--global_batch_size {batch * plan.gpus} needs {_gb(other.needed)}"]
    return []


def _more_gpus(found: Fit) -> list[str]:
    plan, given = found.request, found.request.cfg.optim.global_batch_size
    mode = "fsdp_full" if plan.mode in ("single", "ddp", "fsdp_grad", "hsdp") else plan.mode
    changes: dict[str, Any] = {"hsdp_shard_size": None, "fp8_weights": False}
    dropped = [name for name in changes if plan.cfg.to_dict()[name]]
    without = f" without --{dropped[0]}" if dropped else ""
    gpus = plan.gpus
    while (gpus := 2 * gpus) <= MOST_GPUS:
        larger = ""
        if given:
            changes |= {"gradient_accumulation_steps": None, "global_batch_size": max(given, gpus)}
            larger = f", --global_batch_size {gpus} instead of {given}" if gpus > given else ""
        if (other := refit(found, changes, gpus, mode)) and other.fits:
            return [f"{gpus} GPUs with --sharding_mode {mode}{larger}{without} need {_gb(other.needed)} each"]
    return []
