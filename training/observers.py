"""Training-loop hooks and logs: FP8 statistics, profiler, precision coverage, wall time, env.json."""

from __future__ import annotations

import gc
import platform
import time
from dataclasses import asdict, dataclass
from typing import Any

from fp8_suite.core.errors import EXIT_FAILED, UserError
from fp8_suite.core.files import explaining_write_errors, write_json
from fp8_suite.core.gpus import peak_tflops
from fp8_suite.core.readers import read_record
from fp8_suite.core.redact import redacted
from fp8_suite.data.build import Loaders
from fp8_suite.te_models.kernels import flash_attention
from fp8_suite.training.assembly import Assembly
from fp8_suite.training.checkpoint.progress import WallTime
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.precision import te_runtime
from fp8_suite.training.precision.coverage import coverage
from fp8_suite.training.prepare import PreparedRun
from fp8_suite.training.tracking.display import Display
from fp8_suite.training.tracking.environment import describe_environment
from fp8_suite.training.tracking.meter import Meter
from fp8_suite.training.tracking.profiling import StepProfiler
from fp8_suite.training.tracking.tracker import Tracker, build_tracker
from fp8_suite.training.trainer import Hooks, Logs

# env.json fields that are only known after the first step.
KNOWN_AFTER_FIRST_STEP = (
    "coverage",
    "attention_backend",
    "cp_comm_type",
    "flash_attention",
    "seconds_to_first_step",
    "seconds_by_phase",
)


@dataclass
class Observers(Hooks):
    """Hooks that record FP8 statistics, profiles, coverage and wall time."""

    prepared: PreparedRun
    loader: Any
    assembly: Assembly
    logs: Logs
    environment: dict[str, Any]  # contents of env.json; the first step adds to them
    wall_time: WallTime
    profiler: StepProfiler
    first_step_done: bool = False

    def before_step(self, step: int) -> None:
        self.assembly.fp8_stats.before_step(step)
        if step in self.profiler.steps:
            self.logs.meter.profiled = True
            if step == self.profiler.steps[0] and ranks.rank() == 0:
                self.profiler.start()

    def after_step(self, step: int) -> None:
        strategy = self.prepared.strategy
        if statistics := self.assembly.fp8_stats.after_step(step, strategy):
            self.logs.tracker.log(step, statistics)
        if step in self.profiler.steps[-1:]:
            self.logs.display.message("\n".join(ranks.run_on_rank0(self.profiler.finish)))
            self.logs.meter.restart_clock()
        if not self.first_step_done:
            self.first_step_done = True
            self._record_first_step()
            self.wall_time.count()
            _tune_garbage_collection()

    def after_log(self) -> None:
        if self.prepared.cfg.data.streaming:  # at the start, ranks compared only the first rows of the stream
            state = self.loader.state
            position = {"epoch": state.epoch, "row and sequence": state.position}
            ranks.agree("positions in the stream", position)

    def close(self) -> None:
        self.wall_time.count()
        self.assembly.fp8_stats.close()
        self.profiler.close()
        gc.unfreeze()  # undo gc.freeze(): one process may run several trainings

    def _record_first_step(self) -> None:
        """Record FP8 coverage, attention backend and time to the first step in env.json."""
        cfg, precision = self.prepared.cfg, self.prepared.resolved.precision
        topology = self.prepared.strategy.topology
        unquantized = "bf16" if precision.fp8 else precision.effective
        gather = (lambda part: ranks.gather(part)[:: topology.stage_size]) if topology.pp > 1 else None
        covered = coverage(self.assembly.model, unquantized, gather)
        backend = te_runtime.attention_backend() if cfg.model.use_te else self.assembly.model.attention
        self.environment |= {
            "coverage": asdict(covered),
            "attention_backend": backend,
            "cp_comm_type": self.prepared.resolved.cp_comm_type,
            "flash_attention": self._flash_attention_version(),
            "seconds_to_first_step": round(time.perf_counter() - self.prepared.started, 2),
            "seconds_by_phase": self._start_up(),
        }
        write_environment(self.prepared, self.environment)
        self.logs.display.message("\n".join(covered.lines()))
        in_fp8 = (row for row in covered.rows if row.precision.startswith("fp8"))
        if precision.fp8 and all("lm_head" in row.modules for row in in_fp8):
            reason = "no module ran in FP8 in the first step; this is a bug: open an issue with env.json"
            raise UserError(f"--mixed_precision fp8: {reason}", exit_code=EXIT_FAILED)
        if backend == "unfused":
            flash, exact = self.prepared.kernels.flash_attention, cfg.optim.deterministic
            warning = te_runtime.unfused_warning(deterministic=exact, flash_attention=flash)
            self.logs.display.message(warning)

    def _start_up(self) -> dict[str, float]:
        """Return the seconds of each phase up to now, the end of the first step, without very short ones."""
        phases = [("importing libraries", self.prepared.started), *self.prepared.watchdog.phases]
        ends = [start for _, start in phases[1:]] + [time.perf_counter()]
        seconds: dict[str, float] = {}
        for (name, start), end in zip(phases, ends, strict=True):
            seconds[name] = round(seconds.get(name, 0.0) + end - start, 2)
        return {name: value for name, value in seconds.items() if value >= 0.1}

    def _flash_attention_version(self) -> str | None:
        """Version of the FlashAttention used, or None."""
        if self.prepared.resolved.precision.te_backend == "native":
            return te_runtime.flash_attention_version()
        used = self.prepared.kernels.flash_attention and self.assembly.model.attention_fallback is None
        return flash_attention.installed() if used else None


def write_environment(prepared: PreparedRun, environment: dict[str, Any]) -> None:
    """Write env.json on rank 0. UserError if the disk is full."""
    if ranks.rank() == 0:
        path = prepared.folder / "env.json"
        with explaining_write_errors(path):
            write_json(path, environment)


def open_environment(prepared: PreparedRun, loaders: Loaders, *, takes_steps: bool) -> dict[str, Any]:
    """Write env.json with the fields known before the first step, and return them. Collective.

    A launch without training steps keeps the other fields of an earlier launch.
    """
    strategy = prepared.strategy
    environment = {
        **describe_environment(),
        **prepared.resolved.precision.as_dict(),
        "dequantized_weights": prepared.resolved.model.dequantized,
        "optimizer": prepared.sizing.chosen.optimizer.describe(),
        "sharding_mode": strategy.mode,
        "fit": prepared.sizing.describe(),
        "world_size": strategy.topology.world_size,
        "nodes": strategy.topology.nodes,
        "hosts": sorted(set(ranks.gather(platform.node()))),
        "data": {  # includes the system prompt
            name: redacted(asdict(report)) if report else None
            for name, report in (("train", loaders.report), ("eval", loaders.eval_report))
        },
    }
    if not takes_steps:
        previous = ranks.run_on_rank0(lambda: read_record(prepared.folder / "env.json"))
        environment |= {name: previous[name] for name in KNOWN_AFTER_FIRST_STEP if name in previous}
    write_environment(prepared, environment)
    return environment


def open_logs(
    prepared: PreparedRun, resume_step: int | None, environment: dict[str, Any], *, evaluates: bool
) -> Logs:
    """Open tracker, terminal display and throughput meter."""
    cfg, strategy, precision = prepared.cfg, prepared.strategy, prepared.resolved.precision
    prepared.watchdog.starting("opening the logs")
    layers = "te" if cfg.model.use_te else "hf"
    emulated = ["emulated"] if precision.emulated else []
    mode = [strategy.mode] if strategy.topology.world_size > 1 else []
    done, on_rank0 = resume_step or 0, strategy.topology.rank == 0
    tracker = Tracker()
    if on_rank0:
        tracker = build_tracker(
            cfg.log,
            prepared.folder,
            config=cfg.to_dict() | precision.as_dict(),
            tags=[prepared.resolved.model.short_name, precision.effective, layers, *emulated, *mode],
            resume_step=resume_step,
            evaluates_again=done >= prepared.total_steps and evaluates,
        )
    name = environment.get("gpu_name")
    peaks = {p: peak_tflops(name, p) if name else None for p in ("bf16", "fp8")}
    if name and not peaks["bf16"]:
        print_rank0(f"MFU is not reported: no peak rate is known for {name}")
    meter = Meter(
        prepared.resolved.flops_shape,
        strategy.topology.world_size,
        peaks,
        emulated=precision.emulated,
        adapters=prepared.sizing.chosen.model.adapters,
    )
    display = Display(prepared.total_steps, done, on_rank0, prepared.batches.position)
    return Logs(tracker, display, meter)


def _tune_garbage_collection() -> None:
    """Freeze long-lived objects: full collections stall kernel launches for tens of milliseconds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
