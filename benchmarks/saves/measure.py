"""Train in intervals, undisturbed and with a save at the beginning, and compare their wall time."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from fp8_suite.benchmarks.saves.disk import disk_rates
from fp8_suite.benchmarks.saves.kinds import Kind, Suite, Torch
from fp8_suite.benchmarks.saves.record import write_record
from fp8_suite.core.errors import EXIT_FAILED
from fp8_suite.data.build import Loaders
from fp8_suite.training.assembly import assemble
from fp8_suite.training.checkpoint.state import weights_and_optimizer
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0
from fp8_suite.training.prepare import PreparedRun
from fp8_suite.training.restore import restore
from fp8_suite.training.run import open_loop
from fp8_suite.training.trainer import Hooks, Trainer

WARMUP = 4  # steps
UNDISTURBED_SECONDS = 5.0  # of an interval without a save, if steps are short
MARGIN = 1.6  # an interval lasts this times as long as direct writes of the state


class Repeated:
    """A loader that yields the same micro-batches for ever, so that no epoch ends."""

    def __init__(self, loader: Any, number: int):
        self.loader = loader
        self.batches = list(islice(loader, number))

    def __iter__(self) -> Iterator[Any]:
        return cycle(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class Quiet:
    """A saver that ignores the loop's own saves, at the end of intervals."""

    def __init__(self, saver: Any):
        self.saver = saver

    def save(self, step: int, eval_loss: float | None) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self.saver, name)


class Clock(Hooks):
    """The run's hooks, which also note when each step ends."""

    def __init__(self, hooks: Hooks):
        self.before_step, self.after_log, self.hooks = hooks.before_step, hooks.after_log, hooks
        self.ends: list[float] = []

    def after_step(self, step: int) -> None:
        self.hooks.after_step(step)
        self.ends.append(time.perf_counter())


@dataclass
class Interval:
    """Steps with at most one save, at their beginning. Times are of time.perf_counter()."""

    began: float  # the device was idle
    ends: list[float]  # of steps on the host, and of the last one on the device
    published: float = -math.inf
    blocked: float = 0.0  # seconds that the host waited for the save
    size: int = 0  # bytes of the checkpoint

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.began

    def step_seconds(self, *, until: float = math.inf) -> float | None:
        """Return the mean of the steps after the first one that ended before `until`; None for too few."""
        # On the host, a step ends when the device has finished the step before.
        ends = [end for end in self.ends[1:-1] if end <= until]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None


def measure_saves(
    prepared: PreparedRun,
    loaders: Loaders,
    cleanup: ExitStack,
    signals: ExitStack,
    *,
    kinds: Sequence[str],
    repeats: int,
    steps: int | None,
) -> int:
    """Measure, print and record in place of `training.run.run`. Collective."""
    if ranks.rank() == 0:
        for name in ("checkpoints", "torch", ".disk"):
            cleanup.callback(shutil.rmtree, prepared.folder / name, ignore_errors=True)
    accumulation = prepared.cfg.optim.gradient_accumulation_steps
    loaders = replace(loaders, train=Repeated(loaders.train, accumulation))
    prepared.watchdog.starting("building the model")
    assembly = assemble(prepared)
    ranks.raise_process_group_timeouts()
    state, scaling, evaluated = restore(prepared, loaders, assembly)
    trainer, observers = open_loop(prepared, loaders, assembly, state, scaling, evaluated=evaluated)
    cleanup.callback(trainer.logs.tracker.give_up, EXIT_FAILED)
    cleanup.callback(trainer.saver.give_up)
    prepared.watchdog.saving = trainer.saver.saving
    signals.enter_context(trainer.stop.listening())
    tensors, _ = weights_and_optimizer(state.model, state.optimizer, state.strategy, state.cfg)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    del tensors
    prepared.watchdog.starting("measuring the disk")
    disk = disk_rates(prepared.folder / ".disk", size)
    prepared.watchdog.starting("training")
    results: list[dict[str, Any]] = []
    text = ""
    try:
        disk_seconds = size / (disk["direct"] or disk["buffered"])
        for row in measure_kinds(trainer, disk_seconds, kinds, repeats, steps):
            results.append(row)
            text = ranks.run_on_rank0(lambda: write_record(prepared.folder, disk, results))
    finally:
        trainer.logs.display.close()
        observers.close()
    print_rank0(text)
    prepared.watchdog.pause()
    trainer.logs.tracker.finish(0)
    cleanup.close()
    return 0


def measure_kinds(
    trainer: Trainer, disk_seconds: float, kinds: Sequence[str], repeats: int, steps: int | None
) -> Iterator[dict[str, Any]]:
    """Yield a row of results for every kind; undisturbed intervals surround each. Collective."""
    saver, stagers = trainer.saver, {"async": trainer.saver.stager}
    trainer.hooks, trainer.saver = Clock(trainer.hooks), Quiet(saver)
    train(trainer, WARMUP)
    if reserved := getattr(stagers["async"], "reserved", None):  # page-locking, which slows steps down
        reserved.result()
    warm = train(trainer, WARMUP)
    step = ranks.run_on_rank0(lambda: warm.seconds / WARMUP)
    pause = steps or max(WARMUP, math.ceil(UNDISTURBED_SECONDS / step))
    between = steps or math.ceil(MARGIN * disk_seconds / step) + WARMUP
    before = train(trainer, pause)
    for kind in kinds:
        if kind == "async" and stagers["async"] is None:
            continue  # the run has said why
        saves = Torch(saver) if kind == "torch" else Suite(saver, stagers.pop(kind, None))
        length = WARMUP if kind == "sync" else between
        intervals = [train(trainer, length, saves) for _ in range(repeats + 1)]
        saves.close()
        after = train(trainer, pause)
        yield {"kind": kind} | compare(intervals, [before, after])
        before = after


def train(trainer: Trainer, steps: int, saves: Kind | None = None) -> Interval:
    """Train, after starting a save of that kind, if any, and wait for it at the end. Collective."""
    step, device = trainer.progress.step, trainer.stack.strategy.device
    trainer.total_steps, trainer.hooks.ends = step + steps, []
    ranks.gather(None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    interval = Interval(time.perf_counter(), trainer.hooks.ends)
    if saves is None:
        _run(trainer)
        return interval
    path = saves.published_as(step)

    def blocked(work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        interval.blocked += time.perf_counter() - began

    trainer.stack.before_update = lambda: blocked(saves.before_update)
    with watching(path) as published:
        trainer.stack.heartbeat("saving")
        blocked(lambda: saves.save(step))
        _run(trainer)
        saves.finish()
    interval.published = published[0]
    interval.size = ranks.run_on_rank0(lambda: sum(file.stat().st_size for file in path.parent.iterdir()))
    ranks.run_on_rank0(lambda: shutil.rmtree(path.parent))
    return interval


def _run(trainer: Trainer) -> None:
    if not trainer.train():
        raise KeyboardInterrupt  # a stop signal


def compare(intervals: list[Interval], undisturbed: list[Interval]) -> dict[str, Any]:
    """Compare intervals with a save with the undisturbed ones around them."""
    step = fmean(interval.seconds / len(interval.ends) for interval in undisturbed)
    plain = fmean(interval.step_seconds() for interval in undisturbed)
    added = [interval.seconds - step * len(interval.ends) for interval in intervals]
    until = [interval.published - interval.began for interval in intervals]
    beside = [interval.step_seconds(until=interval.published) for interval in intervals[1:]]
    slowdowns = [seconds / plain - 1 for seconds in beside if seconds is not None]
    return {
        "steps": len(intervals[0].ends),
        "step_seconds": step,
        "added_first": added[0],
        "added": median(added[1:]),
        "added_each": added,
        "blocked": median(interval.blocked for interval in intervals[1:]),
        "slowdown": median(slowdowns) if slowdowns else None,
        "slowdown_each": slowdowns,
        "published": median(until[1:]),
        "published_each": until,
        "gb": intervals[-1].size / 1e9,
        "gb_per_second": intervals[-1].size / 1e9 / median(until[1:]),
    }


@contextmanager
def watching(path: Path) -> Iterator[list[float]]:
    """Yield a list that has the time at which `path` appeared, once it has."""
    seen: list[float] = []

    def watch() -> None:
        while not seen:
            if path.exists():
                seen.append(time.perf_counter())
            time.sleep(0.005)

    thread = threading.Thread(target=watch, daemon=True, name="watching")
    thread.start()
    yield seen
    thread.join()
