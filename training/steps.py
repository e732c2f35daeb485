"""How many optimizer steps a run takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from training.checkpoint.run_folder import global_batch
from training.config import Config


def count_steps(cfg: Config, micro_batches: int | None) -> int:
    """All steps of a run whose epochs have so many `micro_batches` a rank; None: not known, a stream."""
    if cfg.optim.max_steps is not None:
        return cfg.optim.max_steps
    assert micro_batches is not None  # Config refuses streaming without --max_steps
    return cfg.optim.num_epochs * -(-micro_batches // cfg.optim.gradient_accumulation_steps)


def steps_of_a_resumed_run(cfg: Config, meta: dict, loader: Any, world_size: int) -> int:
    """All steps of a run that goes on from a checkpoint with this `meta`, where `loader` stands, too.

    As the settings say, unless the global batch changes now, or did at an earlier resume.
    """
    old, saved = meta["config"], meta["total_steps"]
    if global_batch(old, meta["world_size"]) == global_batch(cfg.to_dict(), world_size):
        then = replace(cfg.optim, max_steps=old["max_steps"], num_epochs=old["num_epochs"])
        per_epoch = loader.micro_batches_per_epoch
        if saved == count_steps(replace(cfg, optim=then), per_epoch):
            return count_steps(cfg, per_epoch)
        if then == cfg.optim:
            return saved
    return _steps_left(cfg, loader, done=meta["progress"]["step"])


def _steps_left(cfg: Config, loader: Any, done: int) -> int:
    """All steps of a run that goes on after `done` with another global batch: the data's rest decides."""
    per_epoch = loader.micro_batches_per_epoch
    if cfg.optim.max_steps is not None or per_epoch is None:
        return count_steps(cfg, per_epoch)
    accumulation = cfg.optim.gradient_accumulation_steps
    epochs_after = max(0, cfg.optim.num_epochs - loader.epoch - 1)
    here = loader.micro_batches_left() if loader.epoch < cfg.optim.num_epochs else 0
    return done + -(-here // accumulation) + epochs_after * -(-per_epoch // accumulation)
