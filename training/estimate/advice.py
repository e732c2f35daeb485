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
from fp8_suite.training.estimate.memory import host_room, offloaded_bytes
from fp8_suite.training.estimate.sizes import (
    Sizing,
    auto_settings,
    check_launch,
    choose_sizes,
    gb,
    global_batch,
    room,
)

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


def refuse_misfit(found: Sizing) -> None:
    """Raise UserError if nothing that the settings allow fits."""
    if found.fits:
        return
    setup = found.chosen
    excess = found.needed - room(found.free)
    least = f"{setup.cfg.optim.batch_size} x {setup.cfg.data.max_seq_length} tokens"
    if found.requested.cfg.model.recompute == AUTO:
        least += f" and --recompute {setup.cfg.model.recompute}"
    raise UserError(
        f"{_requested(found)}: even with {least} {_shortage(found)}, {gb(excess)} too much; {advise(found)}",
        flags=auto_settings(found.requested.cfg),
        exit_code=EXIT_BAD_SETTING,
    )


def warning(found: Sizing) -> str | None:
    """Return a warning if the predicted peak is clearly above the GPU's memory, else None."""
    if found.free is None or found.needed <= CLEARLY_ABOVE * found.free:
        return None
    return f"WARNING: {_shortage(found)}: it will probably run out of memory; {advise(found)}"


def _requested(found: Sizing) -> str:
    return " ".join(f"--{name} auto" for name in auto_settings(found.requested.cfg))


def _shortage(found: Sizing) -> str:
    return f"a step is predicted to need {found.needed / 1e9:.1f} of {gb(found.free)}"


def advise(found: Sizing) -> str:
    """Return the ways to make a step fit with the fewest flags, and the bytes that each would need."""
    total = global_batch(found.chosen.cfg.optim, found.chosen.gpus)
    choice = {"global_batch_size": total, "batch_size": AUTO, "recompute": AUTO}
    unset = {"gradient_accumulation_steps": None, "gradient_checkpointing": False}
    if other := resize(found, choice | unset):
        given = found.requested.cfg.to_dict()
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


def resize(found: Sizing, changes: dict[str, Any], gpus: int = 0, mode: str = "") -> Sizing | None:
    """Return the fit with other settings, GPUs or mode; None if they are refused."""
    from fp8_suite.training.optim.optimizer import choose_optimizer  # imports torch

    setup, mode = found.requested, mode or found.requested.mode
    if not (cfg := changed_config(setup.cfg, changes, gpus or setup.gpus)):
        return None
    try:
        optimizer = choose_optimizer(cfg, mode, on_gpu=True)
        changed = replace(setup, cfg=cfg, optimizer=optimizer, mode=mode)
        if gpus:
            changed = replace(changed, gpus=gpus, gpus_per_node=max(setup.gpus_per_node, min(gpus, 8)))
        return choose_sizes(changed, found.free, found.gpu)
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


def _smaller_settings(found: Sizing) -> list[str]:
    for count in range(1, len(MEMORY_SAVING) + 1):
        ways = []
        for flags, changes in combined(MEMORY_SAVING, count).items():
            if not (other := resize(found, changes)) or not other.fits:
                continue
            if (host := offloaded_bytes(other.chosen)) <= host_room(other.chosen):
                offloaded = f", and {host / 1e9:.0f} GB of host memory" if host else ""
                saved = found.needed - other.needed
                ways.append(f"{' '.join(flags)} needs {gb(other.needed)}, {gb(saved)} less{offloaded}")
        if ways:
            return ways
    return []


def _shorter_sequences(found: Sizing) -> list[str]:
    length = 1 << (found.requested.cfg.data.max_seq_length - 1).bit_length() - 1  # the next lower power of 2
    while length >= 128:
        if (other := resize(found, {"max_seq_length": length})) and other.fits:
            return [f"--max_seq_length {length} needs {gb(other.needed)}"]
        length //= 2
    return []


def _smaller_steps(found: Sizing) -> list[str]:
    """Return the largest step without accumulation, for which FSDP keeps no whole gradients."""
    setup = found.requested
    if not setup.fsdp or found.chosen.accumulation == 1:
        return []
    each = global_batch(setup.cfg.optim, setup.gpus) // setup.gpus
    for batch in (size for size in (64, 32, 16, 8, 4, 2, 1) if size <= each):
        changes = {"batch_size": batch, "global_batch_size": None, "gradient_accumulation_steps": None}
        if (other := resize(found, changes)) and other.fits:
            return [f"--global_batch_size {batch * setup.gpus} needs {gb(other.needed)}"]
    return []


def _more_gpus(found: Sizing) -> list[str]:
    setup, given = found.requested, found.requested.cfg.optim.global_batch_size
    mode = "fsdp_full" if setup.mode in ("single", "ddp", "fsdp_grad", "hsdp") else setup.mode
    changes: dict[str, Any] = {"hsdp_shard_size": None, "fp8_weights": False}
    dropped = without([name for name in changes if setup.cfg.to_dict()[name]])
    gpus = setup.gpus
    while (gpus := 2 * gpus) <= MOST_GPUS:
        larger = ""
        if given:
            changes |= {"gradient_accumulation_steps": None, "global_batch_size": max(given, gpus)}
            larger = f", --global_batch_size {gpus} instead of {given}" if gpus > given else ""
        if (other := resize(found, changes, gpus, mode)) and other.fits:
            return [f"{gpus} GPUs with --sharding_mode {mode}{larger}{dropped} need {gb(other.needed)} each"]
    return []
