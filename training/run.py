"""One training run: prepare, build, restore, train, export, summarize."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fp8_suite.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, first_line
from fp8_suite.data.build import Loaders
from fp8_suite.data.chat import turn_end
from fp8_suite.te_models.build import export_tensors
from fp8_suite.te_models.kernels.bf16_on_cpu import fast_bf16
from fp8_suite.training.assembly import Assembly, assemble
from fp8_suite.training.checkpoint.export import export_hf
from fp8_suite.training.checkpoint.generate import generate_answers, generation_config, tokenizer_round_trips
from fp8_suite.training.checkpoint.progress import Progress, WallTime
from fp8_suite.training.checkpoint.resume import eval_losses, forget_evaluations, roll_back
from fp8_suite.training.checkpoint.run_folder import SAMPLES_FILE, discarded_if_refused, train_losses
from fp8_suite.training.checkpoint.state import CheckpointSaver, RunState, restore_run
from fp8_suite.training.config import Config, all_settings, changed_settings, parse_config
from fp8_suite.training.observers import Observers, open_environment, open_logs
from fp8_suite.training.optim import moments
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.optim.adamw import local
from fp8_suite.training.optim.schedule import learning_rate
from fp8_suite.training.outcome import ignore_broken_pipes, report_failure
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.parallel.watchdog import Watchdog
from fp8_suite.training.precision.scaling import DelayedScalingState, Scaling
from fp8_suite.training.prepare import PreparedRun, prepare
from fp8_suite.training.step import Stack
from fp8_suite.training.tracking import profiling
from fp8_suite.training.tracking.metrics import tail_mean
from fp8_suite.training.tracking.tracker import replaces_finished_run
from fp8_suite.training.trainer import Trainer


@ignore_broken_pipes()
@fast_bf16()
def main(
    argv: list[str],
    *,
    description: str,
    start: Callable[[Config], torch.device],
    started: float = 0.0,
    cfg: Config | None = None,
) -> int:
    """Run a training command and return its exit code. A UserError is printed as one line.

    `cfg` holds the settings if `argv` is already parsed. `start` initializes the process group, if any, and
    returns this rank's device. `started` is time.perf_counter() at process start, from which
    `seconds_to_first_step` is measured.
    """
    watchdog = None
    cleanup = ExitStack()  # closed on every exit
    signals = ExitStack()  # from the loop to the export: the first stop signal finishes them, a second exits
    try:
        cfg = cfg or parse_config(argv, prog=Path(sys.argv[0]).name, description=description)
        device = start(cfg)
        watchdog = Watchdog(cfg.sharding.timeout_minutes)
        _seed(cfg.optim.seed, deterministic=cfg.optim.deterministic)
        if ranks.rank() > 0:  # all ranks read the same rows: log once
            logging.getLogger("fp8_suite.data").setLevel(logging.ERROR)
        started = started or time.perf_counter()
        prepared, loaders = prepare(cfg, device, watchdog, started, cleanup)
        code = run(prepared, loaders, cleanup, signals)
        watchdog.pause()
        on_rank0 = ranks.rank() == 0
        ranks.leave(watchdog.close)
        try:
            if code == 0 and on_rank0:  # after the other ranks have released their GPUs
                signals.close()
                _generate_samples(prepared, loaders.eval_prompts)
        finally:
            if on_rank0:
                print(f"run folder: {prepared.folder}", flush=True)
        return code
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error, watchdog, cleanup.close)
    finally:
        signals.close()


def run(prepared: PreparedRun, loaders: Loaders, cleanup: ExitStack, signals: ExitStack) -> int:
    """Train a prepared run and return the exit code. Collective."""
    if prepared.finished:
        cleanup.close()
        remedy = f"it has {prepared.resume.step:,} steps; raise --max_steps or --num_epochs to continue"
        if not prepared.total_steps:
            remedy = f"to evaluate it: --resume {prepared.folder} --max_steps 0 and another --output_dir"
        print_rank0(f"this run is finished; {remedy}")
        return 0
    prepared.watchdog.starting("building the model")
    with discarded_if_refused(prepared.folder, is_new=prepared.new_folder):
        assembly = assemble(prepared)
        if ranks.world_size() > 1:
            torch.manual_seed(prepared.cfg.optim.seed + ranks.rank())  # dropout must differ between ranks
        ranks.raise_process_group_timeouts()
        _report_model(prepared, assembly)
        state, scaling, evaluated = restore(prepared, loaders, assembly)
    trainer, observers = open_loop(prepared, loaders, assembly, state, scaling, evaluated=evaluated)
    cleanup.callback(trainer.logs.tracker.give_up, EXIT_FAILED)  # does nothing after `finish`
    signals.enter_context(trainer.stop.listening())
    prepared.watchdog.starting("training")
    try:
        finished = trainer.train()
        trainer.stop.remaining_work = "the export and the logs"
        trainer.logs.display.close()
        if finished and prepared.cfg.exports:
            export(prepared, assembly)
        if finished:
            trainer.logs.tracker.summary(summarize(prepared, trainer, observers))
    finally:
        trainer.logs.display.close()
        observers.close()
    saves = prepared.cfg.checkpoint.save_checkpoints
    code = 0 if finished else EXIT_INTERRUPTED if saves else EXIT_FAILED
    prepared.watchdog.pause()  # uploads have their own timeout
    trainer.logs.tracker.finish(code)
    cleanup.close()
    if not finished and saves:
        print_rank0(f"to resume, repeat the command with --output_dir {prepared.folder}")
    elif not finished:
        print_rank0("nothing was saved (--no_save_checkpoints): the same command starts from scratch")
    return code


# Build and restore


def _seed(seed: int, *, deterministic: bool) -> None:
    """Seed all RNGs. Call before the first CUDA call: TE and cuBLAS read the variables only once."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # slow and not needed


def _report_model(prepared: PreparedRun, assembly: Assembly) -> None:
    strategy, resolved = prepared.strategy, prepared.resolved
    layers = {"native": "Transformer Engine", "emulated": "emulated Transformer Engine"}
    where = str(strategy.device)
    if strategy.world_size > 1:
        nodes = f" on {strategy.num_nodes} nodes" if strategy.num_nodes > 1 else ""
        where = f"{strategy.world_size} x {strategy.device.type}{nodes}, {strategy.mode}"
    kind = layers.get(resolved.precision.te_backend, "Hugging Face")
    print_rank0(
        f"{resolved.model.name}: {assembly.parameters / 1e6:,.1f} M parameters, {kind} layers, on {where}"
    )
    print_rank0(f"precision {resolved.precision.describe()}; {prepared.sizing.chosen.optimizer.describe()}")


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
    )
    saved, evaluated = {}, False
    if prepared.resume:
        prepared.watchdog.starting("restoring the checkpoint")
        saved = restore_run(prepared.checkpoints, prepared.resume, state)
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
            micro_batches=prepared.cfg.optim.gradient_accumulation_steps,
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
    return same and meta["world_size"] == prepared.strategy.world_size


# The loop


def open_loop(
    prepared: PreparedRun,
    loaders: Loaders,
    assembly: Assembly,
    state: RunState,
    scaling: Scaling,
    *,
    evaluated: bool,
) -> tuple[Trainer, Observers]:
    """Open the logs and build the trainer. Collective."""
    cfg, strategy, progress = prepared.cfg, prepared.strategy, state.progress
    resume_step = progress.step if prepared.resume else None
    wall_time = WallTime(
        prepared.folder, progress, prepared.started, gpus=prepared.gpus, nodes=strategy.num_nodes
    )
    if not replaces_finished_run(prepared.folder, resume_step):
        wall_time.restore()
    steps = profiling.profiled_steps(cfg.log.profile_steps, done=progress.step, total=prepared.total_steps)
    environment = open_environment(prepared, loaders, takes_steps=progress.step < prepared.total_steps)
    logs = open_logs(prepared, resume_step, environment, evaluates=loaders.eval is not None)
    observers = Observers(
        prepared,
        loaders.train,
        assembly,
        logs,
        environment=environment,
        wall_time=wall_time,
        profiler=profiling.StepProfiler(prepared.folder, steps),
    )
    stack = Stack(
        assembly.wrapped,
        assembly.optimizer,
        strategy,
        assembly.autocast,
        learning_rate=lambda step: learning_rate(step, cfg.optim, prepared.total_steps),
        total_steps=prepared.total_steps,
        scaling=scaling,
        heartbeat=prepared.watchdog.beat,
    )
    saver = CheckpointSaver(
        prepared.checkpoints if cfg.checkpoint.save_checkpoints else None,
        state,
        scaling,
        wall_time,
        saved_step=progress.step if prepared.resume is not None and prepared.resume.same_run else -1,
        restored_unevaluated=not evaluated,
    )
    wall_time.count()
    return Trainer(cfg, stack, loaders, logs, saver, progress, observers), observers


# Export and summary


def export(prepared: PreparedRun, assembly: Assembly) -> None:
    """Export the model in Hugging Face format; FP8 weights as BF16. Collective."""
    strategy, watchdog = prepared.strategy, prepared.watchdog
    watchdog.beat("exporting")
    strategy.reshard(assembly.model)

    def gather(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        watchdog.beat("exporting")
        weights = []
        for parameter in parameters:
            weight = optim.weight_of(assembly.optimizer, parameter)
            if weight is not parameter:  # may be in host memory, where NCCL cannot gather
                weight = moments.with_layout(local(weight).to(strategy.device), weight)
            weights.append(weight)
        return strategy.gather(weights)

    def write(tensors: Iterator[tuple[str, torch.Tensor]]) -> Path:
        spec, tokenizer = prepared.resolved.model, prepared.tokenizer
        folder = export_hf(
            prepared.folder / "export",
            tensors,
            config=spec.config,
            tokenizer=tokenizer,
            generation_config=generation_config(
                spec,
                tokenizer,
                turn_end=turn_end(tokenizer),
                own_tokenizer=prepared.cfg.model.tokenizer_name is None,
            ),
            trust_remote_code=spec.trust_remote_code,
            code_folder=spec.weights,
        )
        if not tokenizer_round_trips(folder, tokenizer, trust_remote_code=spec.trust_remote_code):
            print_rank0(
                f"WARNING: AutoTokenizer loads a different tokenizer from {folder} than the one used in "
                f"training; this suite reads it right, but other programs must load {tokenizer.name_or_path}"
            )
        return folder

    tensors = export_tensors(assembly.model, gather)
    print_rank0(f"exported to {ranks.iterate_on_rank0(tensors, write)}")


def summarize(prepared: PreparedRun, trainer: Trainer, observers: Observers) -> dict[str, Any]:
    """Return summary.json: totals over all launches, rates of the last launch with steps. Collective."""
    observers.wall_time.count()
    cfg, strategy, progress = prepared.cfg, prepared.strategy, trainer.progress
    losses = ranks.run_on_rank0(lambda: train_losses(prepared.folder))
    return {
        "model_name": cfg.model.model_name,
        "mixed_precision": cfg.precision.mixed_precision,
        "use_te": cfg.model.use_te,
        **prepared.resolved.precision.as_dict(),
        "steps": progress.step,
        "skipped_steps": progress.skipped_steps,
        "tokens": progress.real_tokens,
        "label_tokens": progress.label_tokens,
        "train_loss": losses[-1] if losses else None,
        "train_loss_tail_mean": tail_mean(losses) if losses else None,
        **trainer.results(),
        "best_eval_loss": progress.best_eval_loss,
        "runtime_seconds": progress.wall_seconds,
        "train_seconds": progress.train_seconds,
        "peak_memory_gb": trainer.peak_memory_gb(),
        "predicted_memory_gb": prepared.sizing.predicted_gb,
        "num_layers": getattr(prepared.resolved.model.config.get_text_config(), "num_hidden_layers", None),
        "gpu_name": observers.environment.get("gpu_name"),
        "gpus": prepared.gpus,
        "world_size": strategy.world_size,
        "sharding_mode": strategy.mode,
        "nodes": strategy.num_nodes,
        "gpu_hours": progress.gpu_seconds / 3600,
        "node_hours": progress.node_seconds / 3600,
        "seconds_to_first_step": observers.environment.get("seconds_to_first_step"),
    }


def _generate_samples(prepared: PreparedRun, prompts: list[Any]) -> None:
    """Generate answers to --generate_samples evaluation prompts with the exported model, on one rank."""
    prompts, export = prompts[: prepared.cfg.checkpoint.generate_samples], prepared.folder / "export"
    if not prompts or not export.exists():
        return
    trusts_code, device = prepared.resolved.model.trust_remote_code, prepared.strategy.device
    try:
        text = generate_answers(export, prompts, prepared.tokenizer, device, trust_remote_code=trusts_code)
        (prepared.folder / SAMPLES_FILE).write_text(text, encoding="utf-8")
    except Exception as error:  # must not fail a finished run
        print_rank0(f"WARNING: --generate_samples: no answers ({type(error).__name__}: {first_line(error)})")
        return
    print_rank0(f"\nsamples from the exported model:\n\n{text}")
