"""Composition root: builds everything in order, trains, exports, sums up; it alone sees the others."""

from __future__ import annotations

import gc
import logging
import math
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core.errors import EXIT_FAILED, EXIT_INTERRUPTED, first_line
from core.files import explaining_write_errors, read_record, write_json
from core.packages import software
from core.redact import redacted
from core.signals import caught
from data.build import BatchShape, build_loaders
from data.chat import load_tokenizer, turn_end
from te_models import build as te_models
from te_models.kernels import flash_attention
from training.assembly import assemble, compiles
from training.checkpoint.export import check_export, export_hf
from training.checkpoint.generate import answer, generation_config, reads_back
from training.checkpoint.progress import Progress
from training.checkpoint.run_folder import (
    WallTime,
    check_resume,
    open_run_folder,
    see_folder,
    train_losses,
    write_config,
)
from training.checkpoint.state import restore_run, save_run
from training.checkpoint.store import Checkpoints, resolve_resume
from training.config import Config, all_settings, changed_settings, parse_config
from training.decision import decide
from training.kernels import choose_kernels
from training.optim import optimizer as optim
from training.optim.schedule import learning_rate
from training.outcome import end, lasting_output
from training.parallel import ranks
from training.parallel.memory_plan import plan_memory
from training.parallel.ranks import print_rank0
from training.parallel.watchdog import DATA_SECONDS, Watchdog
from training.precision import fp8_stats, precision_map, scaling_state, te_runtime
from training.precision.coverage import coverage
from training.steps import count_steps, steps_of_a_resumed_run
from training.tracking import metrics, profiling
from training.tracking.display import Display
from training.tracking.environment import describe_environment
from training.tracking.tracker import Tracker, build_tracker, replaces_finished_run
from training.trainer import Hooks, Meter, Trainer

# In env.json, beside what is known before it.
TOLD_BY_FIRST_STEP = ("coverage", "attention_backend", "flash_attention", "seconds_to_first_step")


@lasting_output()
def main(
    argv: list[str], *, description: str, start: Callable[[Config], torch.device], started: float = 0.0
) -> int:
    """Parse, run, and turn errors a user can act on into one line. Returns the exit code.

    `start` joins the job's other ranks, if there are any, and returns this one's device. `started` is
    time.perf_counter() at the command's start, from which the first step's time is told.
    """
    watchdog = run = None
    try:
        cfg = parse_config(argv, prog=Path(sys.argv[0]).name, description=description)
        device = start(cfg)
        watchdog = Watchdog(cfg.sharding.timeout_minutes)
        run = Run(cfg, device, watchdog, started or time.perf_counter())
        code = run.run()
        watchdog.rest()
        first = ranks.rank() == 0
        ranks.leave(watchdog.close)
        try:
            if code == 0 and first:  # the other GPUs are free by now
                run.signals.close()
                run.answer_prompts()
        finally:
            if first:
                print(f"run folder: {run.folder}", flush=True)
        return code
    except (Exception, KeyboardInterrupt) as error:
        return end(error, watchdog, run.give_up if run is not None else lambda: None)
    finally:
        if run is not None:
            run.signals.close()


class Run:
    """One training run. Building decides and refuses; `run` trains and returns the exit code.

    From its loop on, signals end no rank alone, until whoever runs it has left the job and closes `signals`.
    """

    def __init__(self, cfg: Config, device: torch.device, watchdog: Watchdog, started: float):
        self.cfg, self.device, self.watchdog, self.started = cfg, device, watchdog, started
        self.signals, self.tracker = ExitStack(), Tracker()
        set_determinism(cfg.optim.deterministic, cfg.optim.seed)
        if ranks.rank() > 0:  # every rank reads the same rows and would say the same of them
            logging.getLogger("data").setLevel(logging.ERROR)
        watchdog.starting("comparing settings")
        ranks.agree("the settings", cfg.to_dict())
        if ranks.world_size() > 1:  # it reads every file of the suite
            ranks.agree("the software", software())
        watchdog.run_on_all_ranks("deciding what runs", self._decide)
        ranks.agree("what can run", self.precision.in_short())
        ranks.agree("the model's files", self.model_files)
        watchdog.starting("choosing kernels")
        self.kernels = choose_kernels(cfg, self.precision, self.shape, device)
        watchdog.starting("planning memory")
        self._plan_memory()
        self.folder = watchdog.run_on_rank0("opening the run folder", self._open_folder)
        see_folder(self.folder)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints",
            keep_last=cfg.checkpoint.keep_last,
            on_progress=lambda: watchdog.beat(
                "saving", counts=False
            ),  # ranks write different numbers of files
        )
        self.resume, self.meta = watchdog.run_on_rank0("looking for a checkpoint", self._find_checkpoint)
        watchdog.run_on_all_ranks("loading the data", self._load_data, DATA_SECONDS)
        self._agree_on_data()
        self.finished = self._is_finished()
        if not self.finished:
            ranks.run_on_rank0(lambda: write_config(cfg, self.folder))
            watchdog.starting("building the model")
            self._assemble()

    def _decide(self) -> None:
        found = decide(self.cfg)
        self.precision, self.plan, self.model_files = found.precision, found.plan, found.model_files
        self.shape, self.counted = found.shape, found.counted

    def _plan_memory(self) -> None:
        planned = plan_memory(self.cfg, self.plan, self.device)
        self.strategy, self.optimizer_plan = planned.strategy, planned.optimizer
        compiled = compiles(self.cfg, self.strategy)
        ranks.run_on_all_ranks(lambda: fp8_stats.check(self.cfg, self.precision, compiles=compiled))
        ranks.run_on_all_ranks(lambda: profiling.check(self.cfg.log.profile_steps, self.device))

    def _open_folder(self) -> Path:
        folder, self.lock = open_run_folder(self.cfg, self.plan.short_name, self.precision.effective)
        if self._exports():
            check_export(folder / "export", self.plan.weights)
        if not self.cfg.checkpoint.output_dir:
            print_rank0(
                f"run folder: {folder}; after a stop, the same command with --output_dir {folder} goes on"
            )
        return folder

    def _exports(self) -> bool:
        return self.cfg.checkpoint.export and self.cfg.optim.max_steps != 0

    def _find_checkpoint(self) -> tuple[Path | None, dict]:
        """The checkpoint to go on from, and its meta; from here on the folder is this run's."""
        resume = resolve_resume(self.cfg.checkpoint.resume, self.checkpoints)
        meta = self.checkpoints.read_meta(resume) if resume else {}
        asked = Path(self.cfg.checkpoint.resume).expanduser()
        if self.cfg.checkpoint.resume not in ("auto", "none") and not self.checkpoints.covers(asked):
            self._check_origin(asked, resume)
        beside = resume and resume.resolve().parent == asked.resolve().parent
        if beside and asked.name.startswith("step_") and asked.name != resume.name:
            print_rank0(
                f"--resume {asked}: this run went back there before, and goes on from {resume.name}; another "
                "--output_dir starts from it again"
            )
        finished = (self.folder / "summary.json").exists()
        if not resume and finished and self._exports() and (self.folder / "export").exists():
            raise ValueError(
                f"--output_dir {self.folder}: its run is finished and has no checkpoints any more, so this "
                "would train it anew and replace its export; choose another folder, or move the export away"
            )
        if resume:
            precision_map.check_resume(meta, self.precision)
            other = not self.checkpoints.holds(resume)
            recipe, world_size = self.precision.effective, ranks.world_size()
            if notice := check_resume(meta, self.cfg, recipe, resume, world_size, of_another_run=other):
                print_rank0(notice)
        if not finished:  # else it may stay as it is
            write_config(self.cfg, self.folder)
        return resume, meta

    def _check_origin(self, asked: Path, resume: Path) -> None:
        """ValueError if another run's checkpoint is asked for in a folder that did not start from it."""
        before = str(read_record(self.folder / "config.json").get("resume"))
        if self.checkpoints.holds(resume) and Path(before).expanduser().resolve() != asked.resolve():
            raise ValueError(
                f"--resume {asked}: --output_dir {self.folder} holds a run of another start, with "
                f"{resume.name}; choose another --output_dir, or leave --resume out to go on with that run"
            )

    def _load_data(self) -> None:
        cfg = self.cfg
        self.tokenizer = self._load_tokenizer()
        config = self.plan.config.get_text_config()
        self.loaders = build_loaders(
            cfg.data,
            self.tokenizer,
            BatchShape(
                batch_size=cfg.optim.batch_size,
                eval_batch_size=cfg.optim.eval_batch_size or cfg.optim.batch_size,
                pad_multiple=self.precision.token_multiple,
                micro_batches_per_step=cfg.optim.gradient_accumulation_steps,
                rank=ranks.rank(),
                world_size=ranks.world_size(),
                pin_memory=self.device.type == "cuda",
            ),
            seed=cfg.optim.seed,
            vocab_size=config.vocab_size,
            max_positions=getattr(config, "max_position_embeddings", None),
        )
        if cfg.needs_evaluation and self.loaders.eval is None and not self.resume:
            raise ValueError(
                f"--split_name {cfg.data.split_name}: leaves no rows to evaluate on, which --max_steps 0 and "
                "--generate_samples need; give --eval_split or more rows, or drop the flag"
            )
        train, held_out = self.loaders.report, self.loaders.eval_report
        for line in train.lines():
            print_rank0(line)
        for line in held_out.lines(after=train) if held_out else ():
            print_rank0(f"evaluation: {line}")
        self.total_steps = count_steps(cfg, self.loaders.train.micro_batches_per_epoch)
        if (warmup := cfg.optim.num_warmup_steps or 0) >= self.total_steps > 0:
            print_rank0(
                f"WARNING: --num_warmup_steps {warmup}: the run has {self.total_steps:,} steps and does not "
                f"come to --learning_rate {cfg.optim.learning_rate}"
            )

    def _logged(self) -> None:
        self.wall_time.count(keep=False)
        if self.cfg.data.streaming:  # of which the ranks have compared the first window alone
            train = self.loaders.train
            ranks.agree("places in the stream", {"epoch": train.epoch, "row and sequence": train.position})

    def _agree_on_data(self) -> None:
        held = self.loaders.eval
        batches = None if held is None else held.micro_batches_per_epoch
        ranks.agree("the data", self.loaders.train.identity | {"evaluation": [self._evaluation(), batches]})

    def _evaluation(self) -> Any:
        """What tells the evaluation's samples from others; None without any."""
        return None if self.loaders.eval is None else self.loaders.eval.identity["samples"]

    def _load_tokenizer(self) -> Any:
        cfg, plan = self.cfg, self.plan
        default = "demo" if plan.name in te_models.LOCAL_PRESETS else plan.name
        tokenizer = load_tokenizer(
            cfg.model.tokenizer_name or default,
            family=plan.family,
            trust_remote_code=cfg.model.trust_remote_code,
            cache_dir=cfg.model.weights_cache_dir,
        )
        if plan.weights is None:  # a model without weights of its own speaks this tokenizer's special tokens
            plan.config.bos_token_id = tokenizer.bos_token_id
            plan.config.eos_token_id = tokenizer.eos_token_id
            # An end-of-text token in its place is no padding token to a model, which would start it at zero.
            own_pad = tokenizer.pad_token_id != tokenizer.eos_token_id
            plan.config.pad_token_id = tokenizer.pad_token_id if own_pad else None
        return tokenizer

    def _assemble(self) -> None:
        cfg, strategy = self.cfg, self.strategy
        self.fp8_stats = fp8_stats.Fp8Stats(cfg, self.precision, self.folder)
        built = assemble(
            cfg,
            self.precision,
            self.plan,
            self.optimizer_plan,
            strategy,
            self.kernels,
            self.fp8_stats,
            self.watchdog,
        )
        self.model, self.wrapped, self.optimizer = built.model, built.wrapped, built.optimizer
        self.optimizer_plan, self.autocast = built.optimizer_plan, built.autocast
        ranks.raise_process_group_timeouts()
        layers = {"native": "Transformer Engine", "emulated": "emulated Transformer Engine"}.get(
            self.precision.te_backend, "Hugging Face"
        )
        where = str(self.device)
        if strategy.world_size > 1:
            nodes = f" on {strategy.num_nodes} nodes" if strategy.num_nodes > 1 else ""
            where = f"{strategy.world_size} x {self.device.type}{nodes}, {strategy.mode}"
            torch.manual_seed(cfg.optim.seed + strategy.rank)  # dropout, if any, differs between ranks
        print_rank0(
            f"{self.plan.name}: {built.parameters / 1e6:,.1f} M parameters, {layers} layers, on {where}"
        )
        print_rank0(f"precision {self.precision.describe()}; {self.optimizer_plan.describe()}")

    def _is_finished(self) -> bool:
        """Whether the checkpoint is the end of a run that was summed up; nothing need be built to tell."""
        if not self.resume:
            return False
        self.loaders.train.load_state_dict(self.meta["loader"])  # how much data is left
        done = self.meta["progress"]["step"]
        self.total_steps = steps_of_a_resumed_run(self.cfg, self.meta, self.loaders.train, ranks.world_size())
        exported = not self._exports() or ranks.run_on_rank0((self.folder / "export").exists)
        summed_up = ranks.run_on_rank0(self._summed_up)
        if self.checkpoints.holds(self.resume) and self.total_steps <= done < (summed_up or 0):
            raise ValueError(
                f"--resume {self.cfg.checkpoint.resume}: the run in this folder is finished, with "
                f"{summed_up:,} steps; to export or evaluate its step {done:,}, give another --output_dir"
            )
        complete = exported and summed_up == done
        if 0 < self.total_steps < done and not complete:
            flag = "num_epochs" if self.cfg.optim.max_steps is None else "max_steps"
            raise ValueError(
                f"--{flag} {getattr(self.cfg.optim, flag)}: {self.resume} has {done:,} steps already; raise "
                "it, or evaluate that with --max_steps 0 and another --output_dir"
            )
        if self.total_steps > done and self.total_steps != (saved := self.meta["total_steps"]):
            print_rank0(
                f"the learning rate follows {self.total_steps:,} steps from here on, until now {saved:,}"
            )
        return done >= self.total_steps and complete

    def _summed_up(self) -> int | None:
        """Steps of the run that the folder's summary.json is of; None without one of the checkpoint's run."""
        summary, config = (read_record(self.folder / name) for name in ("summary.json", "config.json"))
        # Else the folder may have been for another checkpoint, or be asked for an evaluation again.
        same = config.get("resume") == self.cfg.checkpoint.resume and self.cfg.optim.max_steps != 0
        return summary.get("steps") if same or self.checkpoints.holds(self.resume) else None

    def run(self) -> int:
        if self.finished:
            self._unlock()
            done = self.meta["progress"]["step"]
            way_on = f"it has {done:,} steps; raise --max_steps or --num_epochs to go on"
            if not self.total_steps:
                way_on = f"to evaluate it: --resume {self.folder} --max_steps 0 and another --output_dir"
            print_rank0(f"this run is finished; {way_on}")
            return 0
        progress = self._restore()
        self._open_logs(progress)
        self.trainer = self._build_trainer(progress)
        self.wall_time.count()
        self.signals.enter_context(caught())
        try:
            finished = self.trainer.fit()
            self.display.close()
            if finished and self._exports():
                self._export()
            if finished:
                self.tracker.summary(self._summary())
            code = 0 if finished else EXIT_INTERRUPTED
        finally:
            self.display.close()
            self.fp8_stats.close()
            self.profiler.close()
            gc.unfreeze()  # a process that makes another run must be able to let go of this one
        self.watchdog.rest()  # uploads have a limit of their own
        self.tracker.finish(code)
        self._unlock()
        if code == EXIT_INTERRUPTED and not self.cfg.checkpoint.save_checkpoints:
            code = EXIT_FAILED
            print_rank0(
                "nothing was saved (--no_save_checkpoints): the same command would do these steps again"
            )
        elif code == EXIT_INTERRUPTED:
            print_rank0(f"to go on: the same command with --output_dir {self.folder}")
        return code

    def _restore(self) -> Progress:
        """What the run has done in earlier starts, with everything as the checkpoint has it."""
        progress, self.scaling, self.evaluated = Progress(), {}, {}
        if self.resume:
            self.watchdog.starting("restoring the checkpoint")
            progress, self.scaling = restore_run(
                self.checkpoints,
                self.resume,
                self.meta,
                self.cfg,
                model=self.model,
                optimizer=self.optimizer,
                strategy=self.strategy,
                loader=self.loaders.train,
            )
            if not self._does_the_same_work():
                progress.rates = {}
            if self.meta.get("evaluation", self._evaluation()) != self._evaluation():
                print_rank0("WARNING: the evaluation data has changed; earlier evaluations count no longer")
                progress.best_eval_loss = None
                ranks.run_on_rank0(self.checkpoints.forget_evaluations)
            else:
                self.evaluated = ranks.run_on_rank0(lambda: self.checkpoints.eval_losses(self.resume))
            asked_for = Path(self.cfg.checkpoint.resume).expanduser().resolve() == self.resume.resolve()
            if asked_for and progress.step < self.total_steps:
                ranks.run_on_rank0(lambda: self.checkpoints.go_back(self.resume))
            losses = [progress.best_eval_loss, *self.evaluated.values()]
            finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
            progress.best_eval_loss = min(finite, default=None)
            print_rank0(f"resumed from {self.resume} at step {progress.step}")
        return progress

    def _does_the_same_work(self) -> bool:
        """Whether the checkpoint's run took its steps as this start would."""
        records = [name for name, (section, *_) in all_settings().items() if section in ("checkpoint", "log")]
        changed = changed_settings(self.meta["config"], self.cfg, but=records)
        return not changed and self.meta["world_size"] == self.strategy.world_size

    def _open_logs(self, progress: Progress) -> None:
        """Once everything is restored: the tracker cuts the log at the step that goes on."""
        resume_step = progress.step if self.resume else None
        gpus, nodes = self._gpus(), self.strategy.num_nodes
        self.wall_time = WallTime(self.folder, progress, self.started, gpus=gpus, nodes=nodes)
        if not replaces_finished_run(self.folder, resume_step):
            self.wall_time.take()
        count, total = self.cfg.log.profile_steps, self.total_steps
        profiled = ranks.run_on_all_ranks(
            lambda: profiling.profiled_steps(count, done=progress.step, total=total)
        )[0]
        self.profiler = profiling.StepProfiler(self.folder, profiled)
        self.environment = self._environment()
        if progress.step >= total:  # no step of this start tells them
            self.environment |= self._told_by_first_step()
        self._write_environment()
        self.watchdog.starting("opening the logs")
        self.tracker = build_tracker(
            self.cfg.log,
            self.folder,
            config=self.cfg.to_dict() | self.precision.as_dict(),
            tags=self._tags(),
            resume_step=resume_step,
            evaluates_again=progress.step >= total and self.loaders.eval is not None,
            enabled=self.strategy.rank == 0,
        )
        self.display = Display(self.total_steps, progress.step, enabled=self.strategy.rank == 0)

    def _environment(self) -> dict[str, Any]:
        """The values of env.json that are known before the first step."""
        held_out = self.loaders.eval_report
        return {
            **describe_environment(),
            **self.precision.as_dict(),
            "optimizer": self.optimizer_plan.describe(),
            "sharding_mode": self.strategy.mode,
            "world_size": self.strategy.world_size,
            "nodes": self.strategy.num_nodes,
            "hosts": sorted(set(ranks.gather(platform.node()))),
            "data": {
                "train": redacted(self.loaders.report.as_dict()),  # a system prompt is among it
                "eval": redacted(held_out.as_dict()) if held_out else None,
            },
        }

    def give_up(self) -> None:
        """Close what `run` has left open because of an error, within seconds."""
        self.tracker.give_up(EXIT_FAILED)
        self._unlock()

    def _unlock(self) -> None:
        if self.strategy.rank == 0:
            self.lock.release()

    def _told_by_first_step(self) -> dict[str, Any]:
        """What the start before wrote into env.json after its first step."""
        path = self.folder / "env.json"
        before = ranks.run_on_rank0(lambda: read_record(path))
        return {name: before[name] for name in TOLD_BY_FIRST_STEP if name in before}

    def _write_environment(self) -> None:
        if self.strategy.rank == 0:
            path = self.folder / "env.json"
            with explaining_write_errors(path):
                write_json(path, self.environment)

    def _tags(self) -> list[str]:
        layers = "te" if self.cfg.model.use_te else "hf"
        mode = [self.strategy.mode] if self.strategy.world_size > 1 else []
        emulated = ["emulated"] if self.precision.emulated else []
        return [self.plan.short_name, self.precision.effective, layers, *emulated, *mode]

    def _build_trainer(self, progress: Progress) -> Trainer:
        return Trainer(
            self.cfg,
            model=self.wrapped,
            optimizer=self.optimizer,
            strategy=self.strategy,
            autocast=self.autocast,
            learning_rate=lambda step: learning_rate(step, self.cfg.optim, self.total_steps),
            total_steps=self.total_steps,
            loaders=self.loaders,
            tracker=self.tracker,
            display=self.display,
            meter=Meter(self.counted, self.strategy.world_size, self._peaks(), self.precision.emulated),
            hooks=Hooks(
                prepare=self._prepare,
                before_step=self._before_step,
                after_step=self._after_step,
                after_first_step=self._after_first_step,
                on_skipped=lambda: scaling_state.scrub_scaling(self.model),
                logged=self._logged,
                evaluating=lambda: scaling_state.frozen_scaling(self.model),
                save=self._save,
                rate=self._rate,
                beat=self.watchdog.beat,
            ),
            progress=progress,
            saved_step=progress.step if self._goes_on_here() else -1,
            owes_evaluation=progress.step not in self.evaluated,
        )

    def _goes_on_here(self) -> bool:
        """Whether the checkpoint that this start goes on from is one of its own folder."""
        return self.resume is not None and self.checkpoints.holds(self.resume)

    def _peaks(self) -> dict[str, float | None]:
        name = self.environment.get("gpu_name")
        peaks = {p: metrics.peak_tflops(name, p) if name else None for p in ("bf16", "fp8")}
        if name and not peaks["bf16"]:
            print_rank0(f"no peak rate is known for {name}: MFU is left out")
        return peaks

    def _prepare(self, batch: Any) -> None:
        """On a resume this makes TE allocate its state, which the checkpoint's then overwrites."""
        if not self.precision.needs_calibration:
            return
        micro_batches = self.cfg.optim.gradient_accumulation_steps
        scaling_state.calibrate(
            self.model, self.wrapped, self.optimizer, self.strategy, self.autocast, batch, micro_batches
        )
        scaling_state.restore_scaling(self.model, self.scaling)

    def _before_step(self, step: int) -> None:
        self.fp8_stats.before_step(step)
        steps = self.profiler.steps
        if step in steps:
            self.trainer.meter.disturbed = True
            if step == steps[0] and self.strategy.rank == 0:
                self.profiler.start()

    def _after_step(self, step: int) -> None:
        if found := self.fp8_stats.after_step(step, self.strategy):
            self.tracker.log(step, found)
        if step in self.profiler.steps[-1:]:
            self.display.message("\n".join(ranks.run_on_rank0(self.profiler.finish)))
            self.trainer.restart_clock()

    def _after_first_step(self) -> None:
        found = coverage(self.model, self.precision)
        backend = te_runtime.attention_backend() if self.cfg.model.use_te else self.model.attention
        self.environment |= {
            "coverage": found.as_dict(),
            "attention_backend": backend,
            "flash_attention": self._flash_attention_version(),
            "seconds_to_first_step": round(time.perf_counter() - self.started, 2),
        }
        self._write_environment()
        self.display.message("\n".join(found.lines()))
        in_fp8 = (row.modules for row in found.rows if row.precision.startswith("fp8"))
        if self.precision.fp8 and all("lm_head" in modules for modules in in_fp8):
            raise RuntimeError(
                "--mixed_precision fp8: no module ran in FP8 in the first step; report it with env.json"
            )
        if backend == "unfused":
            self.display.message(
                te_runtime.unfused_warning(
                    deterministic=self.cfg.optim.deterministic, flash_attention=self.kernels.flash_attention
                )
            )
        self.wall_time.count()
        tune_garbage_collection()

    def _flash_attention_version(self) -> str | None:
        """That of the FlashAttention which ran, or None."""
        if self.precision.te_backend == "native":
            return te_runtime.flash_attention_version()
        packed = self.kernels.flash_attention and self.model.own_attention is None
        return flash_attention.installed() if packed else None

    def _save(self, step: int, eval_loss: float | None) -> None:
        if not self.cfg.checkpoint.save_checkpoints:
            return
        self.wall_time.count()
        save_run(
            self.checkpoints,
            self.cfg,
            self.precision,
            model=self.model,
            optimizer=self.optimizer,
            strategy=self.strategy,
            loader=self.loaders.train,
            evaluation=self._evaluation(),
            progress=self.trainer.progress,
            total_steps=self.total_steps,
            eval_loss=eval_loss,
            # Without a step or an evaluation since the resume TE has no state yet.
            scaling=scaling_state.scaling_state(self.model) or self.scaling,
        )

    def _rate(self, step: int, eval_loss: float) -> None:
        if self.cfg.checkpoint.save_checkpoints:
            self.checkpoints.record_eval_loss(step, eval_loss)

    def _gpus(self) -> int:
        return self.strategy.world_size if self.device.type == "cuda" else 0

    def _export(self) -> None:
        self.watchdog.beat("exporting")
        self.strategy.reshard(self.model)
        tensors = te_models.export_tensors(self.model, self._gather)
        print_rank0(f"exported to {ranks.iterate_on_rank0(tensors, self._write_export)}")

    def answer_prompts(self) -> None:
        """Answer --generate_samples evaluation prompts with the exported model; on one rank."""
        prompts = self.loaders.eval_prompts[: self.cfg.checkpoint.generate_samples]
        if prompts and (self.folder / "export").exists():
            trusted = {"trust_remote_code": self.plan.trust_remote_code}
            try:
                text = answer(self.folder / "export", prompts, self.device, **trusted)
                (self.folder / "samples.txt").write_text(text, encoding="utf-8")
            except Exception as error:  # of any library; a finished run is not to fail by it
                print_rank0(
                    f"WARNING: --generate_samples: no answers ({type(error).__name__}: {first_line(error)})"
                )
                return
            print_rank0(f"\nsamples from the exported model:\n\n{text}")

    def _gather(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whole weights for the export: from FP32 masters where the weights are in FP8."""
        self.watchdog.beat("exporting")
        masters = [optim.master_of(self.optimizer, parameter) for parameter in parameters]
        exact = [p if m is None else m for p, m in zip(parameters, masters, strict=True)]
        return self.strategy.gather(exact)

    def _write_export(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Path:
        folder = export_hf(
            self.folder / "export",
            tensors,
            config=self.plan.config,
            tokenizer=self.tokenizer,
            generation_config=generation_config(
                self.plan,
                self.tokenizer,
                turn_end=turn_end(self.tokenizer),
                own_tokenizer=self.cfg.model.tokenizer_name is None,
            ),
            trust_remote_code=self.plan.trust_remote_code,
            code_folder=self.plan.weights,
        )
        if not reads_back(folder, self.tokenizer, trust_remote_code=self.plan.trust_remote_code):
            print_rank0(
                f"WARNING: transformers reads the tokenizer in {folder} as another than the model was "
                f"trained with; load {self.tokenizer.name_or_path} instead"
            )
        return folder

    def _summary(self) -> dict[str, Any]:
        """The values of summary.json: counts and losses over all starts of the run, rates of the last one.

        A start that took no step has the rates of the one before, if its settings were the same.
        """
        self.wall_time.count()
        progress, losses = self.trainer.progress, ranks.run_on_rank0(lambda: train_losses(self.folder))
        tail = losses[-max(1, len(losses) // 10) :]
        gpus = self._gpus()
        peak = torch.tensor(torch.cuda.max_memory_allocated(self.device) / 1e9 if gpus else 0.0)
        return {
            "model_name": self.cfg.model.model_name,
            "mixed_precision": self.cfg.precision.mixed_precision,
            "use_te": self.cfg.model.use_te,
            **self.precision.as_dict(),
            "steps": progress.step,
            "skipped_steps": progress.skipped_steps,
            "tokens": progress.real_tokens,
            "label_tokens": progress.label_tokens,
            "train_loss": losses[-1] if losses else None,
            "train_loss_tail_mean": sum(tail) / len(tail) if losses else None,
            **self.trainer.results(),
            "best_eval_loss": progress.best_eval_loss,
            "runtime_seconds": progress.wall_seconds,
            "train_seconds": progress.train_seconds,
            "peak_memory_gb": self.strategy.max(peak).item() if gpus else None,
            "num_layers": getattr(self.plan.config.get_text_config(), "num_hidden_layers", None),
            "gpu_name": self.environment.get("gpu_name"),
            "gpus": gpus,
            "world_size": self.strategy.world_size,
            "sharding_mode": self.strategy.mode,
            "nodes": self.strategy.num_nodes,
            "gpu_hours": progress.gpu_seconds / 3600,
            "node_hours": progress.node_seconds / 3600,
            "seconds_to_first_step": self.environment.get("seconds_to_first_step"),
        }


def set_determinism(deterministic: bool, seed: int) -> None:
    """Seed every generator; before the first CUDA call, since TE and cuBLAS read their switches once."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, hides nothing here


def tune_garbage_collection() -> None:
    """Python's full collections stall launches for tens of milliseconds: freeze what outlives every step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
