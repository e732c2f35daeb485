"""Watches the training loop from outside: FP8 statistics, profiler, coverage of the first step, wall time."""

from __future__ import annotations

import gc
import time
from typing import Any

from core.errors import EXIT_FAILED, UserError
from core.files import explaining_write_errors, read_record, write_json
from te_models.kernels import flash_attention
from training.assembly import Assembly
from training.checkpoint.run_folder import WallTime
from training.parallel import ranks
from training.precision import te_runtime
from training.precision.coverage import Coverage, coverage
from training.precision.fp8_stats import Fp8Stats
from training.prepare import Job
from training.tracking.profiling import StepProfiler
from training.trainer import Hooks, Logs

# env.json fields that are only known after the first step.
KNOWN_AFTER_FIRST_STEP = ("coverage", "attention_backend", "flash_attention", "seconds_to_first_step")


class Observers:
    """The loop's hooks."""

    def __init__(
        self,
        job: Job,
        built: Assembly,
        logs: Logs,
        *,
        environment: dict[str, Any],
        wall_time: WallTime,
        fp8_stats: Fp8Stats,
        profiler: StepProfiler,
    ):
        self.job, self.built, self.logs, self.environment = job, built, logs, environment
        self.wall_time, self.fp8_stats, self.profiler = wall_time, fp8_stats, profiler
        self.first_step_done = False

    def hooks(self) -> Hooks:
        return Hooks(self.before_step, self.after_step, self.after_log)

    def before_step(self, step: int) -> None:
        self.fp8_stats.before_step(step)
        if step in self.profiler.steps:
            self.logs.meter.profiled = True
            if step == self.profiler.steps[0] and ranks.rank() == 0:
                self.profiler.start()

    def after_step(self, step: int) -> None:
        strategy = self.job.memory.strategy
        if found := self.fp8_stats.after_step(step, strategy):
            self.logs.tracker.log(step, found)
        if step in self.profiler.steps[-1:]:
            self.logs.display.message("\n".join(ranks.run_on_rank0(self.profiler.finish)))
            self.logs.meter.restart_clock()
        if not self.first_step_done:
            self.first_step_done = True
            self._record_first_step()
            self.wall_time.count()
            _tune_garbage_collection()

    def after_log(self) -> None:
        self.wall_time.count(write=False)
        if self.job.cfg.data.streaming:  # ranks compared only the first window of the data
            loader = self.job.loaders.train
            ranks.agree(
                "positions in the stream", {"epoch": loader.epoch, "row and sequence": loader.position}
            )

    def close(self) -> None:
        self.fp8_stats.close()
        self.profiler.close()
        gc.unfreeze()  # a process that makes another run must be able to free this one

    def _record_first_step(self) -> None:
        """Record which modules ran in FP8, the attention backend and the time to the first step."""
        cfg, precision = self.job.cfg, self.job.resolved.precision
        found = coverage(self.built.model, precision)
        backend = te_runtime.attention_backend() if cfg.model.use_te else self.built.model.attention
        self.environment |= {
            "coverage": found.as_dict(),
            "attention_backend": backend,
            "flash_attention": self._flash_attention_version(),
            "seconds_to_first_step": round(time.perf_counter() - self.job.started, 2),
        }
        write_environment(self.job, self.environment)
        self.logs.display.message("\n".join(found.lines()))
        if precision.fp8 and not _layers_in_fp8(found):
            raise UserError(
                "--mixed_precision fp8: no module ran in FP8 in the first step; report it with env.json",
                exit_code=EXIT_FAILED,
            )
        if backend == "unfused":
            self.logs.display.message(
                te_runtime.unfused_warning(
                    deterministic=cfg.optim.deterministic, flash_attention=self.job.kernels.flash_attention
                )
            )

    def _flash_attention_version(self) -> str | None:
        """Version of the FlashAttention used, or None."""
        if self.job.resolved.precision.te_backend == "native":
            return te_runtime.flash_attention_version()
        used = self.job.kernels.flash_attention and self.built.model.own_attention is None
        return flash_attention.installed() if used else None


def _layers_in_fp8(found: Coverage) -> bool:
    """True if any module other than the LM head ran in FP8."""
    return any("lm_head" not in row.modules for row in found.rows if row.precision.startswith("fp8"))


def write_environment(job: Job, environment: dict[str, Any]) -> None:
    """Write env.json on rank 0. UserError if the disk is full."""
    if ranks.rank() == 0:
        path = job.folder / "env.json"
        with explaining_write_errors(path):
            write_json(path, environment)


def earlier_first_step(job: Job) -> dict[str, Any]:
    """Return what an earlier launch recorded after its first step. Collective."""
    before = ranks.run_on_rank0(lambda: read_record(job.folder / "env.json"))
    return {name: before[name] for name in KNOWN_AFTER_FIRST_STEP if name in before}


def _tune_garbage_collection() -> None:
    """Freeze what outlives every step: full collections stall kernel launches for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
