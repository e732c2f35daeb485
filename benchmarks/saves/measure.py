"""Train in intervals, undisturbed and with a save at the beginning, and compare their wall time."""

from __future__ import annotations

import gc
import math
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from operator import itemgetter
from pathlib import Path
from statistics import fmean, median
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.benchmarks.records.table import ENVIRONMENT, RECORD
from fp8_suite.benchmarks.report.tables import make_table, markdown, provenance
from fp8_suite.benchmarks.saves.disk import disk_rates
from fp8_suite.core.files import write_json
from fp8_suite.training.checkpoint.index import MANIFEST, step_name
from fp8_suite.training.checkpoint.manifest import THREADS
from fp8_suite.training.checkpoint.saver import CheckpointSaver
from fp8_suite.training.checkpoint.state import RunState, weights_and_optimizer
from fp8_suite.training.checkpoint.store import Checkpoints
from fp8_suite.training.parallel import ranks
from fp8_suite.training.trainer import Hooks, Trainer
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

WARMUP = 4  # steps
UNDISTURBED_SECONDS = 5.0  # of an interval without a save, if steps are short
MARGIN = 1.6  # an interval lasts this times as long as direct writes of the state
FORMATS = {"of direct": "{:.0%}", "steps beside a save": "{:+.1%}", "step, s": "{:.4f}"}
FORMATS |= dict.fromkeys(("saves", "steps a save"), "{}")  # of the other columns: {:.2f}


def live_tensors(run: RunState) -> dict[str, Tensor]:
    """Return weights and optimizer state as a checkpoint holds them. Collective for DeepSpeed."""
    tensors, _ = weights_and_optimizer(run.model, run.optimizer, run.strategy, run.cfg)
    return {name: tensor.detach() for name, tensor in tensors.items()}  # torch cannot copy Parameters


class Suite:
    """The saver of the run itself, in the background if it has a stager."""

    last_file = MANIFEST

    def __init__(self, saver: CheckpointSaver, checkpoints: Checkpoints):
        self.saver, self.checkpoints, self.folder = saver, checkpoints, checkpoints.folder

    def save(self, step: int) -> tuple[Callable, Callable]:
        """Start; return what waits until the state may change, and until the checkpoint is complete."""
        self.saver.checkpoints = self.checkpoints
        self.saver.save(step)
        self.saver.checkpoints = None  # the loop itself saves nothing
        return self.saver.before_update, self.saver.finish


class KeptStager(DefaultStager):
    """A stager that keeps its memory: torch 2.11 closes it after each save, torch 2.13 does not."""

    def __init__(self, options: StagingOptions):
        super().__init__(options)
        self._state_dict_stager.close = lambda: None

    def close(self) -> None: ...


class Torch:
    """torch.distributed.checkpoint.async_save of weights and optimizer state, staged in pinned memory."""

    last_file = ".metadata"

    def __init__(self, saver: CheckpointSaver, checkpoints: Checkpoints):
        self.run, self.folder = saver.run, checkpoints.folder.with_name("torch")
        gpu = self.run.strategy.device.type == "cuda"
        options = StagingOptions(use_pinned_memory=gpu, use_shared_memory=False, use_non_blocking_copy=gpu)
        group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.options: dict[str, Any] = {"async_stager": KeptStager(options), "process_group": group}

    def save(self, step: int) -> tuple[Callable, Callable]:
        # torch's default is one thread; with as many as the suite's it is the faster opponent.
        writer = dcp.FileSystemWriter(self.folder / step_name(step), thread_count=THREADS)
        pending = dcp.async_save(live_tensors(self.run), storage_writer=writer, **self.options)
        return pending.staging_completion.result, pending.upload_completion.result


class Repeated:
    """A loader that yields the same micro-batches for ever, so that no epoch ends."""

    def __init__(self, loader: Any, number: int):
        self.loader, self.batches = loader, list(islice(loader, number))

    def __iter__(self) -> Iterator[Any]:
        return cycle(self.batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


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
    published: float = math.inf
    blocked: float = 0.0  # seconds that the host waited for the save
    size: int = 0  # bytes of the checkpoint

    def wait(self, work: Callable[[], Any]) -> Any:
        """Do a part of the save that the host waits for."""
        began = time.perf_counter()
        result = work()
        self.blocked += time.perf_counter() - began
        return result

    def watch(self, path: Path) -> None:
        """Wait for the last file of the checkpoint, and note when it appears."""
        while not path.exists():
            time.sleep(0.001)
        self.published = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.ends[-1] - self.began

    def step_seconds(self, *, until: float = math.inf) -> float | None:
        """Return the mean of the steps after the first one that ended before `until`; None for too few."""
        # On the host, a step ends when the device has finished the step before.
        ends = [end for end in self.ends[1:-1] if end <= until]
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None


def measure_saves(trainer: Trainer, *, repeats: int, steps: int | None) -> bool:
    """Measure, print and record, in place of `Trainer.train`. Collective."""
    folder = Path(trainer.cfg.checkpoint.output_dir)
    try:
        text = measure_kinds(trainer, folder, repeats, steps)
    finally:
        trainer.saver.give_up()
        if ranks.rank() == 0:
            for name in ("checkpoints", "torch", ".disk"):
                shutil.rmtree(folder / name, ignore_errors=True)
    trainer.logs.display.message(text)
    return True


def measure_kinds(trainer: Trainer, folder: Path, repeats: int, steps: int | None) -> str:
    """Record all kinds of saves, with undisturbed intervals around each, and return the text. Collective."""
    saver, checkpoints, loaders = trainer.saver, trainer.saver.checkpoints, trainer.loaders
    size = sum(tensor.numel() * tensor.element_size() for tensor in live_tensors(saver.run).values())
    disk = disk_rates(folder / ".disk", size)
    saver.checkpoints = None  # the loop itself saves nothing
    repeated = Repeated(loaders.train, trainer.cfg.optim.gradient_accumulation_steps)
    trainer.loaders, trainer.hooks = replace(loaders, train=repeated), Clock(trainer.hooks)
    train(trainer, WARMUP)
    if reserved := getattr(saver.stager, "reserved", None):  # page-locking, which slows steps down
        reserved.result()
    warm = train(trainer, WARMUP)
    step = ranks.run_on_rank0(lambda: warm.seconds / WARMUP)
    pause = steps or max(WARMUP, math.ceil(UNDISTURBED_SECONDS / step))
    between = steps or math.ceil(MARGIN * size / (disk["direct"] or disk["buffered"]) / step) + WARMUP
    before, rows, text = train(trainer, pause), [], ""
    # The run has reserved memory for saves in the background: they come first, then it is free for torch's.
    for kind, make in (("async", Suite), ("sync", Suite), ("torch", Torch)):
        if kind == "async" and saver.stager is None:
            continue  # the run has said why
        saves, length = make(saver, checkpoints), WARMUP if kind == "sync" else between
        intervals = [train(trainer, length, saves) for _ in range(repeats + 1)]
        saver.stager = None
        gc.collect()
        after = train(trainer, pause)
        rows.append({"saves": kind} | compare(intervals, [before, after], disk))
        text = ranks.run_on_rank0(partial(write_record, folder, disk, rows))
        before = after
    return text


def train(trainer: Trainer, steps: int, saves: Suite | Torch | None = None) -> Interval:
    """Train, after starting a save of that kind, if any, and wait for it at the end. Collective."""
    step, device = trainer.progress.step, trainer.stack.strategy.device
    trainer.stack.total_steps, trainer.hooks.ends = step + steps, []
    ranks.gather(None)
    torch.get_device_module(device).synchronize()
    interval = Interval(time.perf_counter(), trainer.hooks.ends)
    if saves:
        folder = saves.folder / step_name(step)
        last_file = folder / saves.last_file
        watcher = Thread(target=interval.watch, args=(last_file,), daemon=True)
        watcher.start()
        trainer.stack.heartbeat("saving")
        before_update, finish = interval.wait(lambda: saves.save(step))
        if last_file.exists():  # steps would delay the watcher
            watcher.join()
        trainer.stack.before_update = lambda: interval.wait(before_update)
    if not trainer.train():
        raise KeyboardInterrupt  # a stop signal
    if saves:
        finish()
        watcher.join()
        interval.size = ranks.run_on_rank0(lambda: sum(file.stat().st_size for file in folder.iterdir()))
        ranks.run_on_rank0(lambda: shutil.rmtree(folder))
    return interval


def compare(intervals: list[Interval], undisturbed: list[Interval], disk: dict[str, Any]) -> dict[str, Any]:
    """Compare intervals with a save with the undisturbed ones around them; the first save counts apart."""
    step = fmean(interval.seconds / len(interval.ends) for interval in undisturbed)
    plain = fmean(interval.step_seconds() for interval in undisturbed)
    first, *added = [interval.seconds - step * len(interval.ends) for interval in intervals]
    repeats = intervals[1:]
    beside = [interval.step_seconds(until=interval.published) for interval in repeats]
    slowdowns = [seconds / plain - 1 for seconds in beside if seconds is not None]
    published = median(interval.published - interval.began for interval in repeats)
    rate = repeats[-1].size / published
    return {
        "GB": repeats[-1].size / 1e9,
        "s to publish": published,
        "GB/s": rate / 1e9,
        "of direct": rate / disk["direct"] if disk["direct"] else None,
        "s added": median(added),
        "host waits, s": median(interval.blocked for interval in repeats),
        "s added, first": first,
        "steps beside a save": median(slowdowns) if slowdowns else None,
        "step, s": step,
        "steps a save": len(intervals[0].ends),
    }


def write_record(folder: Path, disk: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Write record.json of the run in `folder`, which benchmarks.records.add takes, and return its text."""
    run = read_run(folder)
    environment = run.environment
    columns = {name: (itemgetter(name), FORMATS.get(name, "{:.2f}")) for name in rows[0]}
    table = make_table(columns, rows)
    rates = [f"{kind} writes {rate / 1e9:.2f} GB/s" for kind, rate in disk.items() if rate]
    lines = [
        f"$ python -m benchmarks.saves {shlex.join(shlex.split(environment['command'])[1:])}",
        f"{provenance(run)}, {environment['platform']}, {environment['cpu_count']} CPUs",
        f"disk: {', '.join(rates)}",
        f"{run.value('model_name')}, {run.precision}, {run.value('optimizer')}, {run.mode}",
        f"\n{markdown(*table)}",
    ]
    kept = {name: environment[name] for name in ENVIRONMENT if name in environment}
    record = {"text": "\n".join(lines), "disk_bytes_per_second": disk, "saves": rows, "environment": kept}
    write_json(folder / RECORD, record)
    return record["text"]
