"""Restore a run from its checkpoint: weights, optimizer, data position, FP8 scaling, evaluations."""

from __future__ import annotations

import math
from functools import partial

from fp8_suite.data.build import Loaders
from fp8_suite.training.assembly import Assembly
from fp8_suite.training.checkpoint.progress import Progress
from fp8_suite.training.checkpoint.resume import (
    eval_losses,
    forget_evaluations,
    frozen_base,
    gradient_ratio,
    roll_back,
)
from fp8_suite.training.checkpoint.state import RunState, region_of, restore_run
from fp8_suite.training.config import all_settings, changed_settings
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.precision.scaling import DelayedScalingState, Scaling, scale_gradients
from fp8_suite.training.prepare import PreparedRun


def restore(prepared: PreparedRun, loaders: Loaders, assembly: Assembly) -> tuple[RunState, Scaling, bool]:
    """Restore the checkpoint, if any. Return (state, FP8 scaling, True if its step has an eval loss)."""
    state = RunState(
        cfg=prepared.cfg,
        precision=prepared.resolved.precision,
        model=assembly.model,
        optimizer=assembly.optimizer,
        strategy=prepared.strategy,
        loader=loaders.train,
        progress=Progress(),
        total_steps=prepared.total_steps,
        evaluation=loaders.eval_fingerprint,
        base=frozen_base(prepared.cfg, prepared.resolved.digests),
        model_files=prepared.resolved.model_files,
    )
    prepared.checkpoints.region = partial(region_of, assembly.model)
    saved, evaluated = {}, False
    if prepared.resume:
        prepared.watchdog.starting("restoring the checkpoint")
        saved = restore_run(prepared.checkpoints, prepared.resume, state)
        scale_gradients(saved, gradient_ratio(prepared.resume.meta["config"], prepared.cfg.to_dict()))
        if prepared.strategy.loss_scale:
            prepared.strategy.loss_scale.load(state.progress.loss_scale)
        evaluated = _restore_evaluations(prepared, loaders.eval_fingerprint, state.progress)
        if not _same_training_config(prepared):
            state.progress.rates = {}
        if prepared.resume.rollback and state.progress.step < prepared.total_steps:
            ranks.run_on_rank0(lambda: roll_back(prepared.checkpoints, prepared.resume.path))
        print_rank0(f"resumed from {prepared.resume.path} at step {state.progress.step}")
    scaling = Scaling()
    if prepared.resolved.precision.needs_calibration:
        scaling = DelayedScalingState(
            model=assembly.model,
            wrapped=assembly.wrapped,
            optimizer=assembly.optimizer,
            strategy=prepared.strategy,
            autocast=assembly.autocast,
            micro_batches=prepared.batches.micro_batches(max(0, state.progress.step - 1)),  # of the last step
            saved=saved,
        )
    return state, scaling, evaluated


def _restore_evaluations(prepared: PreparedRun, fingerprint: str | None, progress: Progress) -> bool:
    """Restore the best eval loss. True if the restored step has an eval loss on the same data."""
    losses: dict[int, float] = {}
    if prepared.resume.meta.get("evaluation", fingerprint) != fingerprint:
        print_rank0("WARNING: the evaluation data has changed; earlier evaluations are discarded")
        progress.best_eval_loss = None
        ranks.run_on_rank0(lambda: forget_evaluations(prepared.checkpoints))
    else:
        losses = ranks.run_on_rank0(lambda: eval_losses(prepared.resume.path))
    candidates = [loss for loss in (progress.best_eval_loss, *losses.values()) if loss is not None]
    progress.best_eval_loss = min(filter(math.isfinite, candidates), default=None)
    return progress.step in losses


def _same_training_config(prepared: PreparedRun) -> bool:
    """True if settings and world size match the checkpoint, so its throughput is still valid."""
    meta = prepared.resume.meta
    ignored = [name for name, (section, *_) in all_settings().items() if section in ("checkpoint", "log")]
    same = not changed_settings(meta["config"], prepared.cfg, ignore=ignored)
    return same and meta["world_size"] == prepared.strategy.topology.world_size
