"""One training run: prepare, build, restore, train, export, summarize."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from fp8_suite.core.errors import EXIT_FAILED, EXIT_INTERRUPTED
from fp8_suite.data.build import Loaders
from fp8_suite.te_models.kernels.bf16_on_cpu import fast_bf16
from fp8_suite.training.assembly import Assembly, assemble
from fp8_suite.training.checkpoint.progress import Progress, WallTime
from fp8_suite.training.checkpoint.run_folder import discarded_if_refused
from fp8_suite.training.checkpoint.saver import CheckpointSaver, choose_stager
from fp8_suite.training.checkpoint.state import RunState
from fp8_suite.training.config import Config, parse_config
from fp8_suite.training.finish import (
    evaluate_exports,
    export,
    generate_samples,
    summarize,
    warn_of_earlier_exports,
)
from fp8_suite.training.observers import Observers, open_environment, open_logs
from fp8_suite.training.optim import optimizer as optim
from fp8_suite.training.optim.schedule import learning_rate
from fp8_suite.training.outcome import ignore_broken_pipes, report_failure
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.parallel.watchdog import Watchdog
from fp8_suite.training.precision.scaling import Scaling
from fp8_suite.training.prepare import PreparedRun, prepare
from fp8_suite.training.restore import restore
from fp8_suite.training.step import Stack
from fp8_suite.training.tracking import profiling
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
    work: Callable[[Trainer], bool] | None = None,
) -> int:
    """Run a training command and return its exit code. A UserError is printed as one line.

    `cfg` holds the settings if `argv` is already parsed. `start` initializes the process group, if any, and
    returns this rank's device. `started` is time.perf_counter() at process start, from which
    `seconds_to_first_step` is measured. `work` replaces `Trainer.train`.
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
        code = run(prepared, loaders, cleanup, signals, work)
        watchdog.pause()
        on_rank0 = ranks.rank() == 0
        ranks.leave(watchdog.close)
        try:
            if code == 0 and on_rank0:  # after the other ranks have released their GPUs
                signals.close()
                evaluate_exports(prepared, loaders)
                generate_samples(prepared, loaders.eval_prompts)
        finally:
            if on_rank0:
                print(f"run folder: {prepared.folder}", flush=True)
        return code
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error, watchdog, cleanup.close)
    finally:
        signals.close()


def run(
    prepared: PreparedRun,
    loaders: Loaders,
    cleanup: ExitStack,
    signals: ExitStack,
    work: Callable[[Trainer], bool] | None = None,
) -> int:
    """Train a prepared run and return the exit code. Collective."""
    if prepared.finished:
        cleanup.close()
        _report_finished(prepared)
        return 0
    prepared.watchdog.starting("building the model")
    with discarded_if_refused(prepared.folder, is_new=prepared.new_folder):
        assembly = assemble(prepared)
        if (topology := prepared.strategy.topology).world_size > 1:
            torch.manual_seed(prepared.cfg.optim.seed + topology.rank)  # dropout must differ between ranks
        ranks.raise_process_group_timeouts()
        _report_model(prepared, assembly)
        state, scaling, evaluated = restore(prepared, loaders, assembly)
    trainer, observers = open_loop(prepared, loaders, assembly, state, scaling, evaluated=evaluated)
    cleanup.callback(trainer.logs.tracker.give_up, EXIT_FAILED)  # does nothing after `finish`
    cleanup.callback(trainer.saver.give_up)
    prepared.watchdog.saving = trainer.saver.saving
    signals.enter_context(trainer.stop.listening())
    prepared.watchdog.starting("training")
    try:
        finished = work(trainer) if work else trainer.train()
        trainer.stop.remaining_work = "the export and the logs"
        if finished and prepared.cfg.exports:
            with observers.wall_time.phase("export"):
                export(prepared, assembly)
        if finished:
            warn_of_earlier_exports(prepared, trainer.progress.step)
            trainer.logs.tracker.summary(summarize(prepared, trainer, observers))
    finally:
        observers.close()
    saves = prepared.cfg.checkpoint.save_checkpoints
    code = 0 if finished else EXIT_INTERRUPTED if saves else EXIT_FAILED
    prepared.watchdog.pause()  # uploads have their own timeout
    trainer.logs.tracker.finish(code)
    cleanup.close()
    if trainer.progress.step:
        print_rank0(trainer.progress.describe_wall_time())
    if not finished:
        _report_stopped(prepared)
    return code


# Start


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


def _report_finished(prepared: PreparedRun) -> None:
    remedy = f"it has {prepared.resume.step:,} steps; raise --max_steps or --num_epochs to continue"
    if not prepared.total_steps:
        remedy = f"to evaluate it: --resume {prepared.folder} --max_steps 0 and another --output_dir"
    print_rank0(f"this run is finished; {remedy}")


def _report_stopped(prepared: PreparedRun) -> None:
    if prepared.cfg.checkpoint.save_checkpoints:
        print_rank0(f"to resume, repeat the command with --output_dir {prepared.folder}")
    else:
        print_rank0("nothing was saved (--no_save_checkpoints): the same command starts from scratch")


def _report_model(prepared: PreparedRun, assembly: Assembly) -> None:
    strategy, resolved = prepared.strategy, prepared.resolved
    layers = {"native": "Transformer Engine", "emulated": "emulated Transformer Engine"}
    where = str(strategy.device)
    if (topology := strategy.topology).world_size > 1:
        nodes = f" on {topology.nodes} nodes" if topology.nodes > 1 else ""
        where = f"{topology.world_size} x {strategy.device.type}{nodes}, {strategy.mode}"
        axes = {f"CP ({resolved.cp_comm_type})": topology.cp, "TP": topology.tp, "PP": topology.pp}
        where += "".join(f", {axis} {size}" for axis, size in axes.items() if size > 1)
    kind = layers.get(resolved.precision.te_backend, "Hugging Face")
    print_rank0(
        f"{resolved.model.name}: {assembly.parameters / 1e6:,.1f} M parameters, {kind} layers, on {where}"
    )
    if prepared.cfg.lora.enabled:
        numbers = [parameter.numel() for parameter in optim.trainable(assembly.model).values()]
        print_rank0(f"LoRA: {sum(numbers):,} parameters train, in {len(numbers) // 2} adapters")
    print_rank0(f"precision {resolved.precision.describe()}; {prepared.sizing.chosen.optimizer.describe()}")


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
    cfg, strategy, progress, batches = prepared.cfg, prepared.strategy, state.progress, prepared.batches
    resume_step = progress.step if prepared.resume else None
    wall_time = _open_wall_time(prepared, progress, resume_step)
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
    saver = CheckpointSaver(
        prepared.checkpoints if cfg.checkpoint.save_checkpoints else None,
        state,
        scaling,
        wall_time,
        stager=choose_stager(prepared.sizing.chosen, strategy, progress.step, prepared.total_steps),
        # Ranks write different numbers of files, so these beats do not count.
        heartbeat=lambda: prepared.watchdog.beat("saving", counts=False),
        saved_step=progress.step if prepared.resume is not None and prepared.resume.same_run else -1,
        restored_unevaluated=not evaluated,
    )
    stack = Stack(
        assembly.wrapped,
        assembly.optimizer,
        strategy,
        assembly.autocast,
        learning_rate=lambda step: learning_rate(step, cfg.optim, prepared.total_steps, batches.position),
        total_steps=prepared.total_steps,
        scaling=scaling,
        heartbeat=prepared.watchdog.beat,
        before_update=saver.before_update,
    )
    wall_time.count()
    return Trainer(cfg, stack, batches, loaders, logs, saver, wall_time, observers), observers


def _open_wall_time(prepared: PreparedRun, progress: Progress, resume_step: int | None) -> WallTime:
    gpus, nodes = prepared.gpus, prepared.strategy.topology.nodes
    wall_time = WallTime(prepared.folder, progress, prepared.started, gpus=gpus, nodes=nodes)
    if not replaces_finished_run(prepared.folder, resume_step):
        wall_time.restore()
    return wall_time
