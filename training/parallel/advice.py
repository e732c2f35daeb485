"""Ways to make a step fit: other settings, shorter sequences, more GPUs.

This module must not import torch, so that `benchmarks.plan` shows its help and refuses wrong flags at once.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

from fp8_suite.core.errors import EXIT_BAD_SETTING, UserError
from fp8_suite.core.settings import AUTO
from fp8_suite.training.config import Config, config_from_dict
from fp8_suite.training.parallel.fit import Fit, auto_settings, check_launch, fit, gb, global_batch, room
from fp8_suite.training.parallel.memory import host_room, offloaded_bytes

# Warn if a prediction exceeds the GPU's memory by this factor. Predictions are within 4 % of recorded peaks.
CLEARLY_ABOVE = 1.1
Settings = dict[str, dict[str, Any]]  # by flags
# Flags that reduce memory and change numerics or need host memory, and their settings.
MEMORY_SAVING: Settings = {
    "--recompute layer --offload_activations": {
        "recompute": "layer",
        "gradient_checkpointing": False,
        "offload_activations": True,
    },
    "--moment_dtype fp8": {"moment_dtype": "fp8"},
    "--offload_optimizer": {"offload_optimizer": True},
    "--fp8_weights": {"fp8_weights": True},
    "--grad_reduce_dtype bf16": {"grad_reduce_dtype": "bf16"},
}
MOST_GPUS = 4096  # that advice names


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
        f"{_requested(found)}: even with {least} {_shortage(found)}, {gb(excess)} too much; {advise(found)}",
        flags=auto_settings(found.request.cfg),
        exit_code=EXIT_BAD_SETTING,
    )


def warning(found: Fit) -> str | None:
    """Return a warning if the predicted peak is clearly above the GPU's memory, else None."""
    if found.free is None or found.needed <= CLEARLY_ABOVE * found.free:
        return None
    return f"WARNING: {_shortage(found)}: it will probably run out of memory; {advise(found)}"


def _requested(found: Fit) -> str:
    return " ".join(f"--{name} auto" for name in auto_settings(found.request.cfg))


def _shortage(found: Fit) -> str:
    return f"a step is predicted to need {found.needed / 1e9:.1f} of {gb(found.free)}"


def advise(found: Fit) -> str:
    """Return the ways to make a step fit with the fewest flags, and the bytes that each would need."""
    total = global_batch(found.plan.cfg.optim, found.plan.gpus)
    choice = {"global_batch_size": total, "batch_size": AUTO, "recompute": AUTO}
    unset = {"gradient_accumulation_steps": None, "gradient_checkpointing": False}
    if other := refit(found, choice | unset):
        given = found.request.cfg.to_dict()
        flags = " ".join(f"--{name} {value}" for name, value in choice.items() if given[name] != value)
        replaced = [name for name, value in unset.items() if given[name] != value]
        if flags and given["gradient_accumulation_steps"] == 1:  # the default, so probably no flag to drop
            replaced.remove("gradient_accumulation_steps")
        if other.fits:
            return f"{flags}{without(replaced)} needs {gb(other.needed)}".lstrip()
        flags = f"with {flags}, " * bool(flags) + f"{without(replaced).lstrip()}, " * bool(replaced)
    else:  # such as --offload_activations, which needs a level
        other, flags = found, ""
    ways = [*_smaller_settings(other), *_shorter_sequences(other), *_more_gpus(other), *_smaller_steps(other)]
    return flags + ", or ".join(ways) if ways else "no setting makes it fit; use a smaller model"


def refit(found: Fit, changes: dict[str, Any], gpus: int = 0, mode: str = "") -> Fit | None:
    """Return the fit with other settings, GPUs or mode; None if they are refused."""
    from fp8_suite.training.optim.optimizer import choose_optimizer  # imports torch

    plan, mode = found.request, mode or found.request.mode
    if not (cfg := changed_config(plan.cfg, changes, gpus or plan.gpus)):
        return None
    try:
        optimizer = choose_optimizer(cfg, mode, on_gpu=True)
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


def combined(table: Settings, count: int) -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the settings of all combinations of `count` keys of a table."""
    return {
        keys: {name: value for key in keys for name, value in table[key].items()}
        for keys in combinations(table, count)
    }


def without(names: list[str]) -> str:
    """Return " without --NAME and --NAME", or "" without names."""
    return f" without {' and '.join(f'--{name}' for name in names)}" if names else ""


def _smaller_settings(found: Fit) -> list[str]:
    for count in range(1, len(MEMORY_SAVING) + 1):
        ways = []
        for flags, changes in combined(MEMORY_SAVING, count).items():
            if not (other := refit(found, changes)) or not other.fits:
                continue
            if (host := offloaded_bytes(other.plan)) <= host_room(other.plan):
                offloaded = f", and {host / 1e9:.0f} GB of host memory" if host else ""
                saved = found.needed - other.needed
                ways.append(f"{' '.join(flags)} needs {gb(other.needed)}, {gb(saved)} less{offloaded}")
        if ways:
            return ways
    return []


def _shorter_sequences(found: Fit) -> list[str]:
    length = 1 << (found.request.cfg.data.max_seq_length - 1).bit_length() - 1  # the next lower power of 2
    while length >= 128:
        if (other := refit(found, {"max_seq_length": length})) and other.fits:
            return [f"--max_seq_length {length} needs {gb(other.needed)}"]
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
            return [f"--global_batch_size {batch * plan.gpus} needs {gb(other.needed)}"]
    return []


def _more_gpus(found: Fit) -> list[str]:
    plan, given = found.request, found.request.cfg.optim.global_batch_size
    mode = "fsdp_full" if plan.mode in ("single", "ddp", "fsdp_grad", "hsdp") else plan.mode
    changes: dict[str, Any] = {"hsdp_shard_size": None, "fp8_weights": False}
    dropped = without([name for name in changes if plan.cfg.to_dict()[name]])
    gpus = plan.gpus
    while (gpus := 2 * gpus) <= MOST_GPUS:
        larger = ""
        if given:
            changes |= {"gradient_accumulation_steps": None, "global_batch_size": max(given, gpus)}
            larger = f", --global_batch_size {gpus} instead of {given}" if gpus > given else ""
        if (other := refit(found, changes, gpus, mode)) and other.fits:
            return [f"{gpus} GPUs with --sharding_mode {mode}{larger}{dropped} need {gb(other.needed)} each"]
    return []
