"""Preparation of a run before the model is built: recipe, kernels, sharding, run folder, checkpoint, data.

Invalid runs fail here, before any weights are loaded. Ranks compare every decision.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from fp8_suite.core.errors import bad_setting
from fp8_suite.core.packages import software
from fp8_suite.data import synthetic
from fp8_suite.data.build import Loaders, build_loaders
from fp8_suite.data.order import BatchShape
from fp8_suite.data.tokenizer import load_tokenizer
from fp8_suite.te_models.kernels.selection import Kernels
from fp8_suite.te_models.presets import LOCAL_PRESETS
from fp8_suite.te_models.spec import with_special_tokens
from fp8_suite.training.checkpoint.resume import (
    ResumePoint,
    check_base,
    check_resume,
    count_resumed_steps,
    count_steps,
    find_resume_point,
    frozen_base,
    is_finished,
)
from fp8_suite.training.checkpoint.run_folder import (
    check_shared,
    check_space,
    discarded_if_refused,
    open_run_folder,
    write_config,
)
from fp8_suite.training.checkpoint.store import Checkpoints
from fp8_suite.training.config import Config, settings_path
from fp8_suite.training.estimate.choose import choose_strategy
from fp8_suite.training.estimate.memory import checkpoint_bytes
from fp8_suite.training.estimate.sizes import Sizing, compiles_layers, global_batch
from fp8_suite.training.export.write import check_export
from fp8_suite.training.kernels import KernelInputs, enable_kernels
from fp8_suite.training.optim.batch_ramp import BatchSchedule
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.parallel.strategies import Strategy
from fp8_suite.training.parallel.topology import Topology
from fp8_suite.training.parallel.watchdog import DATA_SECONDS, Watchdog
from fp8_suite.training.precision import fp8_stats
from fp8_suite.training.resolve import Resolved, resolve, resolve_layout
from fp8_suite.training.tracking import profiling

T = TypeVar("T")


@dataclass(frozen=True)
class PreparedRun:
    """Decisions of a run before its model is built, and the services that carry it out.

    What training changes is elsewhere: `Loaders`, `Assembly`, `RunState`.
    """

    cfg: Config  # with numbers in place of `auto`
    watchdog: Watchdog
    started: float  # time.perf_counter() at process start
    resolved: Resolved
    kernels: Kernels
    strategy: Strategy
    sizing: Sizing
    folder: Path
    new_folder: bool  # created by this launch
    checkpoints: Checkpoints
    resume: ResumePoint | None
    tokenizer: Any
    total_steps: int
    finished: bool  # an earlier launch wrote the summary and the export

    @property
    def gpus(self) -> int:
        """Number of GPUs, over all ranks."""
        return self.strategy.topology.world_size if self.strategy.device.type == "cuda" else 0

    @property
    def batches(self) -> BatchSchedule:
        return BatchSchedule.of(self.cfg, self.strategy.topology.data_size)


def prepare(
    cfg: Config, device: torch.device, watchdog: Watchdog, started: float, cleanup: ExitStack
) -> tuple[PreparedRun, Loaders]:
    """Resolve and check the settings and load the data. Collective.

    `cleanup` releases the run folder's lock and disables the kernels. UserError if the run cannot start.
    """
    resolved, kernels, strategy, sizing = _decide(cfg, device, watchdog, cleanup)
    cfg = sizing.chosen.cfg
    folder, is_new = watchdog.run_on_rank0(
        "opening the run folder", lambda: _open_folder(cfg, resolved, cleanup)
    )
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=cfg.checkpoint.keep_last)
    with discarded_if_refused(folder, is_new=is_new):
        check_shared(folder)
        resume = watchdog.run_on_rank0(
            "looking for a checkpoint",
            lambda: _find_checkpoint(cfg, resolved, folder, checkpoints, strategy.topology),
        )
        starts = cfg.optim.max_steps != 0 and not (resume and resume.same_run)
        size = checkpoint_bytes(sizing.chosen) if starts and cfg.checkpoint.save_checkpoints else 0.0
        ranks.run_on_rank0(checkpoints.delete_leftovers)
        ranks.run_on_rank0(lambda: check_space(folder, size, cfg))
        ranks.run_on_rank0(lambda: _record_settings(cfg, folder))  # loading the data may take hours
        load = partial(_load_data, cfg, resolved, strategy, resumes=resume is not None)
        tokenizer, loaders = _on_each_rank(watchdog, "loading the data", load, DATA_SECONDS)
        ranks.agree("the data", loaders.identity)
        if resolved.model.weights is None:
            resolved = replace(resolved, model=with_special_tokens(resolved.model, tokenizer))
        total_steps, finished = _count_steps(cfg, folder, resume, loaders, strategy.topology)
    if not finished:
        ranks.run_on_rank0(lambda: write_config(cfg, folder))
    prepared = PreparedRun(
        cfg=cfg,
        watchdog=watchdog,
        started=started,
        resolved=resolved,
        kernels=kernels,
        strategy=strategy,
        sizing=sizing,
        folder=folder,
        new_folder=is_new,
        checkpoints=checkpoints,
        resume=resume,
        tokenizer=tokenizer,
        total_steps=total_steps,
        finished=finished,
    )
    return prepared, loaders


def _decide(
    cfg: Config, device: torch.device, watchdog: Watchdog, cleanup: ExitStack
) -> tuple[Resolved, Kernels, Strategy, Sizing]:
    """Choose precision, model, kernels, sharding, micro-batch and optimizer. Enables kernels. Collective."""
    watchdog.starting("comparing settings")
    ranks.agree("the settings", cfg.to_dict())
    if ranks.world_size() > 1:  # hashes all source files
        ranks.agree("the software", software())
    watchdog.starting("choosing the layout")
    cfg = resolve_layout(cfg, device)
    resolved = _on_each_rank(watchdog, "resolving precision and model", lambda: resolve(cfg))
    precision = resolved.precision.as_dict() | {"fallback_reason": None}  # it names a rank's GPU
    ranks.agree("the effective precision", precision)
    ranks.agree("the model's files", resolved.digests)
    watchdog.starting("testing kernels")
    kernels = enable_kernels(KernelInputs(cfg, resolved.precision, resolved.shape, device), cleanup)
    watchdog.starting("choosing how to shard")
    strategy, sizing = choose_strategy(cfg, resolved.model, device, resolved.precision.effective)
    compiles = compiles_layers(cfg, strategy.mode, on_gpu=device.type == "cuda")
    ranks.run_on_all_ranks(lambda: fp8_stats.check(cfg, resolved.precision, compiles=compiles))
    ranks.run_on_all_ranks(lambda: profiling.check(cfg.log.profile_steps, device))
    return resolved, kernels, strategy, sizing


def _on_each_rank(watchdog: Watchdog, doing: str, work: Callable[[], T], limit: float | None = None) -> T:
    """Run `work` on every rank and return the local result. If any rank fails, all raise its error."""
    result: list[T] = []
    watchdog.run_on_all_ranks(doing, lambda: result.append(work()), limit)
    return result[0]


def _open_folder(cfg: Config, resolved: Resolved, cleanup: ExitStack) -> tuple[Path, bool]:
    """Return the run folder and True if it is new. Call on rank 0."""
    # Path.exists would raise if the folder cannot be read; open_run_folder explains that.
    is_new = not os.path.exists(cfg.checkpoint.output_dir or "")
    folder, lock = open_run_folder(cfg, resolved.model.short_name, resolved.precision.effective)
    cleanup.callback(lock.release)
    for name in cfg.export_folders.values():
        check_export(folder / name, resolved.model.weights)
    if cfg.exports and cfg.lora.enabled:
        check_export(folder / "adapter")
    if not cfg.checkpoint.output_dir:
        print_rank0(f"run folder: {folder}; to resume, repeat the command with --output_dir {folder}")
    return folder, is_new


def _find_checkpoint(
    cfg: Config, resolved: Resolved, folder: Path, checkpoints: Checkpoints, topology: Topology
) -> ResumePoint | None:
    """Return the checkpoint to resume from, if any. UserError if it does not fit. Call on rank 0."""
    point = find_resume_point(cfg.checkpoint.resume, checkpoints)
    finished = (folder / "summary.json").exists()
    if not point and finished and any((folder / name).exists() for name in cfg.export_folders.values()):
        reason = "its run is finished and its checkpoints are gone; to train again, choose another folder"
        raise bad_setting(reason, output_dir=folder)
    if point:
        recipe = resolved.precision.effective
        if notice := check_resume(point, cfg, recipe, topology.world_size, resolved.model_files):
            print_rank0(notice)
        check_base(point, frozen_base(cfg, resolved.digests))
    return point


def _record_settings(cfg: Config, folder: Path) -> None:
    """Write settings.json of a new run; a resumed one keeps its own while it may be refused. On rank 0."""
    if not settings_path(folder).exists():
        write_config(cfg, folder)


def _load_data(cfg: Config, resolved: Resolved, strategy: Strategy, *, resumes: bool) -> tuple[Any, Loaders]:
    """Load the tokenizer, build the loaders, and print which columns and rows they use."""
    spec = resolved.model
    tokenizer = load_tokenizer(
        cfg.model.tokenizer_name or ("demo" if spec.name in LOCAL_PRESETS else spec.name),
        family=spec.family,
        trust_remote_code=cfg.model.trust_remote_code,
    )
    config = spec.config.get_text_config()
    evaluated = "checkpoint" if resumes else "model"
    loaders = build_loaders(
        synthetic.with_rows(cfg.data, global_batch(cfg, strategy.topology.data_size), cfg.optim.max_steps),
        tokenizer,
        BatchShape(
            batch_size=cfg.optim.batch_size,
            eval_batch_size=cfg.optim.eval_batch_size or cfg.optim.batch_size,
            pad_multiple=resolved.precision.token_multiple * strategy.topology.tp,
            micro_batches_per_step=cfg.optim.gradient_accumulation_steps,
            rank=strategy.topology.data_rank,
            world_size=strategy.topology.data_size,
            context=strategy.topology.context,
            pin_memory=strategy.device.type == "cuda",
        ),
        seed=cfg.optim.seed,
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
        evaluate_only=evaluated if cfg.optim.max_steps == 0 else None,
    )
    samples = cfg.checkpoint.generate_samples
    if samples and not loaders.eval_prompts and (loaders.eval or not resumes):
        reason = "there are no prompts: plain text has none, others need rows for evaluation; drop it"
        raise bad_setting(reason, generate_samples=samples)
    for line in loaders.report.lines() if loaders.report else ():
        print_rank0(line)
    for line in loaders.eval_report.lines() if loaders.eval_report else ():
        print_rank0(f"evaluation: {line}")
    return tokenizer, loaders


def _count_steps(
    cfg: Config, folder: Path, resume: ResumePoint | None, loaders: Loaders, topology: Topology
) -> tuple[int, bool]:
    """Return (total steps of the run, True if an earlier launch finished it). Collective.

    On resume, set `loaders.train` to the checkpoint's position.
    """
    if loaders.train is None:
        finished = resume and ranks.run_on_rank0(lambda: is_finished(resume, cfg, folder, 0))
        return 0, bool(finished)
    batches = BatchSchedule.of(cfg, topology.data_size)
    if batches.is_ramp:
        print_rank0(batches.describe_ramp())
    if resume is None:
        total = count_steps(cfg.optim, batches, loaders.train.micro_batches_per_epoch)
        if (warmup := cfg.optim.num_warmup_steps or 0) > total > 0:
            print_rank0(f"WARNING: --num_warmup_steps {warmup}: longer than the run ({total:,} steps)")
        return total, False
    loaders.train.load_state_dict(resume.meta["loader"])
    total = count_resumed_steps(cfg, batches, resume.meta, loaders.train, topology.world_size)
    finished = ranks.run_on_rank0(lambda: is_finished(resume, cfg, folder, total))
    if total > resume.step and total != (saved := resume.meta["total_steps"]):
        print_rank0(f"the learning rate schedule now spans {total:,} steps (was {saved:,})")
    return total, finished
