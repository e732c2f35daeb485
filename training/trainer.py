"""The training loop, independent of model, recipe and sharding mode."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from fp8_suite.core.signals import StopFlag, Stopped
from fp8_suite.data.build import Loaders
from fp8_suite.training.checkpoint.progress import Progress, WallTime
from fp8_suite.training.checkpoint.saver import CheckpointSaver
from fp8_suite.training.checkpoint.settings import SaveTimer
from fp8_suite.training.config import Config
from fp8_suite.training.guard import StepGuard
from fp8_suite.training.optim.batch_ramp import BatchSchedule
from fp8_suite.training.step import Stack, StepResult, evaluate, train_step
from fp8_suite.training.tracking.display import Display
from fp8_suite.training.tracking.memory import GpuMemory
from fp8_suite.training.tracking.meter import Meter, warmup_steps
from fp8_suite.training.tracking.tracker import Tracker


class Hooks:
    """Callbacks of the training loop; no-ops by default."""

    def before_step(self, step: int) -> None: ...
    def after_step(self, step: int) -> None: ...  # before logging, saving and evaluation
    def after_log(self) -> None: ...


@dataclass(frozen=True)
class Logs:
    """Logs of metrics and messages."""

    tracker: Tracker
    display: Display
    meter: Meter
    memory: GpuMemory = field(default_factory=GpuMemory)


class Trainer:
    """Trains to `stack.total_steps`, evaluating, logging and saving when due."""

    def __init__(
        self,
        cfg: Config,
        stack: Stack,
        batches: BatchSchedule,
        loaders: Loaders,
        logs: Logs,
        saver: CheckpointSaver,
        wall_time: WallTime,
        hooks: Hooks,
    ):
        self.cfg, self.stack, self.batches, self.loaders = cfg, stack, batches, loaders
        self.logs, self.saver, self.wall_time, self.hooks = logs, saver, wall_time, hooks
        self.first_step = self.progress.step + 1  # first step of this launch
        self.stop = StopFlag(announces=stack.strategy.topology.rank == 0)
        self.save_timer = SaveTimer(cfg.checkpoint.save_interval)
        logs.meter.real_tokens = self.progress.real_tokens  # of earlier launches
        self.guard = StepGuard(cfg.optim, stack, self.progress, warn=logs.display.message)
        self.last_eval: tuple[int, dict[str, float]] = (-1, {})  # step and metrics
        self._unsaved_counts = {"real_tokens": 0, "label_tokens": 0}  # on this rank, since the last save
        self._loader_state: dict[str, Any] = {}  # before the current step's micro-batches

    @property
    def progress(self) -> Progress:
        return self.wall_time.progress

    def train(self) -> bool:
        """Train to the end and save. False if a stop signal ended it early, see `StopFlag`. Collective."""
        if self.stack.total_steps == 0:
            self._evaluate()
            return not self._any_stop()
        stopped = False
        try:
            for micro_batches, waited in self._steps():
                self._before_step(micro_batches)
                with self.wall_time.phase("steps"):
                    result = train_step(
                        self.stack,
                        micro_batches,
                        done=self.progress.step,
                        max_grad_norm=self.cfg.optim.max_grad_norm,
                        stop_requested=lambda: self.stop.requested,
                        save_due=self.save_timer.is_due,
                    )
                    stopped = self._after_step(micro_batches, waited, result)
                if stopped:
                    break
        except Stopped:
            self.loaders.train.load_state_dict(self._loader_state)
            stopped = True
        if not stopped:
            self._finish()
            stopped = self._any_stop()
        if stopped:
            self._finish_stopped()
        return not stopped

    def _steps(self) -> Iterator[tuple[list[Any], float]]:
        """Yield (micro-batches of a step, seconds waited for them) for all remaining steps.

        The last step of an epoch may have fewer micro-batches.
        """
        while self.progress.step < self.stack.total_steps:
            self.logs.meter.restart_clock()
            batches, began = iter(self.loaders.train), time.perf_counter()
            while self.progress.step < self.stack.total_steps and (loaded := self._load_step(batches)):
                yield loaded, time.perf_counter() - began
                began = time.perf_counter()

    def _load_step(self, batches: Iterator[Any]) -> list[Any]:
        """Return the next step's micro-batches on the device; none at the end of an epoch."""
        strategy, size = self.stack.strategy, self.batches.micro_batches(self.progress.step)
        self.stack.heartbeat(f"loading the data of step {self.progress.step + 1}")
        self._loader_state = self.loaders.train.state_dict()
        with self.wall_time.phase("data" if self.progress.step >= self.first_step else "start"):
            micro_batches = self.stop.wait_for(
                lambda: list(islice(batches, size)), interruptible=strategy.topology.world_size == 1
            )
            return [batch.to(strategy.device) for batch in micro_batches]

    def _before_step(self, micro_batches: list[Any]) -> None:
        step = self.progress.step + 1
        if step == self.first_step:
            self._before_first_step(micro_batches[0])
        before, now = (self.batches.micro_batches(number) for number in (max(0, step - 2), step - 1))
        if before != now:
            self.stack.scaling.scale_gradients(before / now)
        self.saver.check()
        self.hooks.before_step(step)

    def _after_step(self, micro_batches: list[Any], waited: float, result: StepResult) -> bool:
        """Do what is due after a step. True if any rank received a stop signal.

        The step's time excludes evaluation and saving.
        """
        progress, cfg, strategy = self.progress, self.cfg, self.stack.strategy
        first = progress.step + 1 == self.first_step
        progress.step += 1
        last = progress.step == self.stack.total_steps
        log = last or _due(progress.step, cfg.log.log_interval)
        evaluates = not last and _due(progress.step, cfg.log.eval_interval)
        saves = not last and _due(progress.step, self.save_timer.steps)
        on_gpu = strategy.device.type == "cuda"
        self.guard.add(progress.step, result)
        due = log or evaluates or saves
        stop, save_due = self.guard.read(all_steps=due or not on_gpu)
        if save_due and not last:
            saves = due = True
            stop |= self.guard.read(all_steps=True)[0]
        if on_gpu and due:
            torch.cuda.synchronize(strategy.device)  # include the optimizer step in this interval
        progress.train_seconds += self.logs.meter.end_step(micro_batches, 0.0 if first else waited)
        for name in self._unsaved_counts:
            self._unsaved_counts[name] += sum(getattr(batch, name) for batch in micro_batches)
        with self.wall_time.phase("other"):
            if first:
                self.saver.reserve()
            self.hooks.after_step(progress.step)
            if log:
                self._log(result)
            if saves:  # before the evaluation, which may fail
                self._save()
            if evaluates:
                self._evaluate()
        if on_gpu and _due(progress.step, cfg.sharding.empty_cache_freq):
            torch.cuda.empty_cache()
        if first or evaluates or saves:
            self.logs.meter.restart_clock()
        if evaluates or saves or strategy.topology.world_size == 1:
            return self._any_stop()
        return stop  # already reduced over ranks, together with the loss

    def _before_first_step(self, batch: Any) -> None:
        """Prepare FP8 scaling and run an evaluation that is due, outside the timed region."""
        self.stack.scaling.prepare(batch)
        step, log = self.progress.step, self.cfg.log
        missed = self.saver.restored_unevaluated and step > 0 and _due(step, log.eval_interval)
        if missed or (log.eval_at_start and step == 0):
            self._evaluate()
        self.wall_time.end_start()
        self.logs.meter.restart_clock()
        self.save_timer.restart()

    def _finish(self) -> None:
        """Save and evaluate the final weights. UserError if their loss is not finite."""
        self.wall_time.end_start()  # a launch may have no step left
        self._save()
        self._evaluate()
        self._finish_save()
        evaluated, metrics = self.last_eval
        if evaluated == self.progress.step:
            self.guard.check_final(metrics["eval/loss"])

    def _finish_stopped(self) -> None:
        """Read the last outcomes and save, after a stop signal. Collective."""
        self.guard.read(all_steps=True)
        if self.progress.step > 0:
            self._save()
        self._finish_save()
        done = f"after step {self.progress.step}" if self.progress.step else "before the first step"
        self.logs.display.message(f"stopped by a signal {done}")

    def _any_stop(self) -> bool:
        return self.stack.strategy.any(self.stop.requested)

    def _log(self, result: StepResult) -> None:
        meter, progress = self.logs.meter, self.progress
        metrics: dict[str, float] = {
            "train/loss": result.loss.item(),
            "train/grad_norm": result.grad_norm.item(),
            "train/learning_rate": result.learning_rate,
            "train/epoch": self._epoch(),
            "train/skipped_steps": progress.skipped_steps,
            **self.batches.metrics(progress.step),
        }
        if result.loss_scale is not None:
            metrics["train/loss_scale"] = result.loss_scale.item()
        metrics |= meter.read(self._sum_counts, self._max_seconds, warm=self._is_warm())
        metrics |= self.read_memory()
        if warning := self.logs.memory.warning(metrics):
            self.logs.display.message(warning)
        metrics |= meter.named(self.wall_time.rates(meter.real_tokens))
        self.logs.tracker.log(progress.step, metrics)
        self.hooks.after_log()
        self.logs.display.update(progress.step, metrics)

    def _is_warm(self) -> bool:
        """True if this interval has no step of the warm-up, or if the launch is too short to warm up."""
        optim, length, before = self.cfg.optim, self.cfg.data.max_seq_length, self.first_step - 1
        warmup = warmup_steps(self.batches.micro_batches(before) * optim.batch_size * length)
        done = self.progress.step - self.logs.meter.steps - before  # steps of this launch before the interval
        return done >= warmup or self.stack.total_steps <= before + warmup

    def _epoch(self) -> float:
        loader = self.loaders.train
        if loader.micro_batches_per_epoch is None:
            return float(loader.state.epoch)
        return loader.state.epoch + 1 - loader.micro_batches_left() / loader.micro_batches_per_epoch

    def _sum_counts(self, counts: dict[str, int]) -> dict[str, int]:
        strategy = self.stack.strategy
        values = torch.tensor(list(counts.values()), device=strategy.device, dtype=torch.float64)
        return dict(zip(counts, (int(v) for v in strategy.sum(values).tolist()), strict=True))

    def _max_seconds(self, seconds: list[float]) -> list[float]:
        strategy = self.stack.strategy
        return strategy.max(torch.tensor(seconds, device=strategy.device, dtype=torch.float64)).tolist()

    def read_memory(self) -> dict[str, float]:
        """Return the metrics of GPU memory, see `GpuMemory.read`. Collective."""
        strategy = self.stack.strategy
        return self.logs.memory.read(strategy.device, strategy.max)

    def _evaluate(self) -> None:
        step = self.progress.step
        if self.loaders.eval is None or self.last_eval[0] == step:
            return
        with self.wall_time.phase("evaluation"):
            metrics = evaluate(self.stack, self.loaders.eval, stop_requested=lambda: self.stop.requested)
        if metrics is None:
            return
        self.last_eval, loss, best = (step, metrics), metrics["eval/loss"], self.progress.best_eval_loss
        if math.isfinite(loss) and (best is None or loss < best):
            self.progress.best_eval_loss = loss
        self.logs.tracker.log(step, metrics)
        if self.saver.saved_step == step:
            self.saver.record_eval_loss(step, loss)
        self.logs.display.message(
            f"step {step}: eval loss {loss:.4f}, perplexity {metrics['eval/perplexity']:.2f}, "
            f"token accuracy {metrics['eval/token_accuracy']:.2%}"
        )

    def _save(self) -> None:
        step, progress = self.progress.step, self.progress
        if self.saver.saved_step == step:
            return
        self.stack.heartbeat(f"saving at step {step}")
        for name, count in self._sum_counts(self._unsaved_counts).items():
            setattr(progress, name, getattr(progress, name) + count)
            self._unsaved_counts[name] = 0
        progress.rates = self._rates()
        if loss_scale := self.stack.strategy.loss_scale:
            progress.loss_scale = loss_scale.state()
        evaluated, metrics = self.last_eval
        with self.wall_time.phase("saving"):
            self.saver.save(step)
            if evaluated == step:
                self.saver.record_eval_loss(step, metrics["eval/loss"])
        self.save_timer.restart()  # the save may have taken longer than the interval

    def _finish_save(self) -> None:
        with self.wall_time.phase("saving"):
            self.saver.finish()

    def results(self) -> dict[str, float]:
        """Return the last evaluation and the median rates after warm-up, for summary.json."""
        evaluation = {name.replace("eval/", "eval_"): value for name, value in self.last_eval[1].items()}
        return evaluation | self._rates()

    def _rates(self) -> dict[str, float]:
        """Median rates of this launch, or the checkpoint's if this launch ran no step."""
        stepped = self.progress.step >= self.first_step
        return self.logs.meter.medians() if stepped else self.progress.rates


def _due(step: int, interval: int) -> bool:
    return bool(interval) and step % interval == 0
