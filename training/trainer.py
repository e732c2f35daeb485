"""The loop: steps, evaluation, logging, saving. It knows no model, precision or sharding by name."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from core.signals import caught
from training.checkpoint.progress import Progress
from training.config import Config
from training.tracking.metrics import RATES, ModelShape, mfu, model_flops, perplexity, tokens_per_second

ASK_EVERY = 16  # evaluation batches between two looks for a signal, for which many ranks must wait
SPIKE, SPIKE_AFTER = 10, 20  # times the median gradient norm, once it is of so many steps
WARMUP_STEPS = 5  # left out of the reported rates: kernels are chosen and memory is reserved in them


@dataclass(frozen=True)
class StepResult:
    loss: Tensor  # mean over the global batch's label tokens, float32 scalar on the device
    grad_norm: Tensor
    learning_rate: float
    # Waits for the device and says whether the step was taken, whether any rank was asked to stop, and the
    # gradient norm.
    verdict: Callable[[], list[float]]


@dataclass
class Hooks:
    """What the loop calls at its turns; each does nothing by default."""

    prepare: Callable[[Any], None] = lambda batch: None  # once, with a batch, before anything is computed
    before_step: Callable[[int], None] = lambda step: None  # with the step's number
    after_step: Callable[[int], None] = lambda step: None  # before anything else is done with the model
    after_first_step: Callable[[], None] = lambda: None
    on_skipped: Callable[[], None] = lambda: None
    logged: Callable[[], None] = lambda: None  # a line of training's log is written
    evaluating: Callable[[], AbstractContextManager] = nullcontext
    beat: Callable[[str], None] = lambda doing: None  # what this rank does next, for who watches over it
    # (step, evaluation loss at it or None)
    save: Callable[[int, float | None], None] = lambda step, eval_loss: None
    rate: Callable[[int, float], None] = lambda step, eval_loss: None  # what was saved before its evaluation


def copy_to_host_async(values: Tensor) -> Callable[[], list[float]]:
    """Start to copy `values` to the host; calling the result waits for them, but for nothing after them."""
    if values.device.type != "cuda":
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read


def _due(step: int, interval: int) -> bool:
    return bool(interval) and step % interval == 0


class Stop(BaseException):
    """A signal came while data was waited for, when nothing is half done. Libraries catch Exceptions."""


class NonFinite(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass
class Meter:
    """Rates since the last log line: host counts and wall time of whole steps, data wait included.

    Emulated ones go by names of their own: no table or dashboard may set them beside real ones.
    """

    shape: ModelShape | None  # None: FLOPs are not known for this model
    world_size: int
    peaks: dict[str, float | None]
    emulated: bool = False
    seconds: float = 0.0
    waited: float = 0.0
    steps: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    disturbed: bool = False  # by a profiler, say: the interval's rates are no figures of the run
    rows_per_step: float = 0.0  # of the interval that was read last, over all ranks

    def add(self, window: list[Any], seconds: float, waited: float) -> None:
        self.seconds, self.waited, self.steps = self.seconds + seconds, self.waited + waited, self.steps + 1
        for batch in window:
            for name in ("real_tokens", "label_tokens", "padded_tokens", "sum_squared_lengths"):
                self.counts[name] = self.counts.get(name, 0) + getattr(batch, name)
            rows = len(batch.inputs["input_ids"]) if batch.real_tokens else 0  # none: of padding alone
            self.counts["rows"] = self.counts.get("rows", 0) + rows

    def read(
        self,
        total: Callable[[dict[str, int]], dict[str, int]],
        slowest: Callable[[list[float]], list[float]],
    ) -> dict[str, float]:
        """The metrics of the interval: counts summed over ranks by `total`, times the slowest rank's."""
        counts = total(self.counts)
        seconds, waited = slowest([self.seconds, self.waited])
        self.rows_per_step = counts["rows"] / self.steps
        out = {
            "perf/tokens_per_second": tokens_per_second(counts["real_tokens"], seconds),
            "perf/label_tokens_per_second": tokens_per_second(counts["label_tokens"], seconds),
            "perf/padded_tokens_per_second": tokens_per_second(counts["padded_tokens"], seconds),
            "perf/step_seconds": seconds / self.steps,
            "perf/data_wait_share": waited / seconds,
        }
        if self.shape is not None:
            tokens, pairs = counts["real_tokens"], counts["sum_squared_lengths"]
            flops = model_flops(self.shape, tokens=tokens, sum_squared_lengths=pairs)
            tflops = flops / seconds / self.world_size / 1e12
            out["perf/model_tflops_per_gpu"] = tflops
            out |= {f"perf/mfu_{p}": mfu(tflops, peak) for p, peak in self.peaks.items() if peak}
        self.seconds = self.waited = 0.0
        self.steps, self.counts, self.disturbed = 0, {}, False
        return {name.replace("perf/", "emulated/"): v for name, v in out.items()} if self.emulated else out


class Trainer:
    """Trains `model` on `loaders.train` to `total_steps`, evaluating on `loaders.eval`.

    `model(**batch.inputs)` returns (summed loss, correct predictions); a batch is a `data.Batch`.
    """

    def __init__(
        self,
        cfg: Config,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Any,
        autocast: Callable[[], AbstractContextManager],
        learning_rate: Callable[[int], float],
        total_steps: int,
        loaders: Any,
        tracker: Any,
        display: Any,
        meter: Meter,
        hooks: Hooks | None = None,
        progress: Progress | None = None,
        saved_step: int = -1,
        owes_evaluation: bool = False,
    ):
        """`saved_step`: step of the checkpoint resumed from, -1 for none or another run's.

        `owes_evaluation`: that checkpoint has no evaluation yet.
        """
        self.cfg, self.model, self.optimizer, self.strategy = cfg, model, optimizer, strategy
        self.autocast, self.learning_rate, self.total_steps = autocast, learning_rate, total_steps
        self.loaders, self.tracker, self.display, self.meter = loaders, tracker, display, meter
        self.hooks, self.progress = hooks or Hooks(), progress or Progress()
        self.device = strategy.device
        self.stop_requested = False
        # The process whose wait a signal ends, if any: workers that it forks have its handlers. And where the
        # data was before the wait.
        self._waiting, self._place = None, None
        self.rates: list[dict[str, float]] = []  # of each log interval after warm-up
        self._short_rates: list[dict[str, float]] = []  # of those that an epoch's last, smaller step was in
        self._began = self.progress.step  # steps of earlier starts
        self._clock = 0.0  # when the time of the current step began
        self._prepared, self._covered = False, False
        self._unread: list[tuple[int, StepResult]] = []  # steps whose verdict is not known yet
        self._saved_step, self._evaluated_step = saved_step, -1
        self._owes_evaluation = owes_evaluation
        self._last_eval: dict[str, float] = {}
        self._norms: deque[float] = deque(maxlen=100)  # of the steps taken last
        self._uncounted = {"real_tokens": 0, "label_tokens": 0}  # of this rank, since the last save

    def train_step(self, micro_batches: list[Any]) -> StepResult:
        """One optimizer step; the result is the same for any split into micro-batches and ranks."""
        self.hooks.beat(f"computing step {self.progress.step + 1}")
        self.hooks.before_step(self.progress.step + 1)
        rate = self.learning_rate(self.progress.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        labels = sum(batch.label_tokens for batch in micro_batches)
        tokens = self.strategy.sum(torch.full((), labels, device=self.device, dtype=torch.float32))
        divisor = tokens.clamp(min=1)
        loss_sum = torch.zeros((), device=self.device)
        for i, batch in enumerate(micro_batches):
            ends = {"first": i == 0, "last": i == len(micro_batches) - 1}
            with self.strategy.accumulating(self.model, **ends):
                with self.autocast():
                    loss, _ = self.model(**batch.inputs)  # summed over this micro-batch's label tokens
                # Backward stays outside autocast; ranks average gradients, world_size undoes that.
                self.strategy.backward(self.model, loss * (self.strategy.world_size / divisor))
            loss_sum += loss.detach()
        asked = torch.full((), float(self.stop_requested), device=self.device)
        total, stop = self.strategy.sum(torch.stack([loss_sum, asked])).unbind()
        mean = total / divisor
        self.hooks.beat(f"waiting for step {self.progress.step + 1}")
        outcome = self.strategy.step(
            self.model,
            self.optimizer,
            usable=mean.isfinite() & (tokens > 0),
            max_norm=self.cfg.optim.max_grad_norm,
        )
        taken = outcome.taken.to(self.device, torch.float32)  # known on the CPU where weights are offloaded
        verdict = copy_to_host_async(
            torch.stack([taken, stop, outcome.grad_norm.to(self.device, torch.float32)])
        )
        return StepResult(mean, outcome.grad_norm, rate, verdict)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float] | None:
        """Loss, perplexity and token accuracy over the whole evaluation set, weighted by label tokens.

        None if a signal asks to stop meanwhile.
        """
        sums = torch.zeros(3, device=self.device, dtype=torch.float64)  # loss, correct, label tokens
        self.model.eval()
        batches = (batch.to(self.device) for batch in self.loaders.eval)
        first = next(batches)
        self._prepare(first)  # whose state evaluation must leave alone
        with self.hooks.evaluating():
            for i, batch in enumerate(chain([first], batches)):
                self.hooks.beat(f"evaluating at step {self.progress.step}")
                ask = self.strategy.world_size == 1 or i % ASK_EVERY == 0
                if ask and self.strategy.any(self.stop_requested):
                    break
                with self.autocast():
                    loss, correct = self.model(**batch.inputs)
                sums[0] += loss
                sums[1] += correct
                sums[2] += batch.label_tokens
        self.model.train()
        if self.strategy.any(self.stop_requested):
            return None
        loss_sum, correct_sum, tokens = self.strategy.sum(sums).tolist()
        loss = loss_sum / max(tokens, 1)
        return {
            "eval/loss": loss,
            "eval/perplexity": perplexity(loss),
            "eval/token_accuracy": correct_sum / max(tokens, 1),
            "eval/label_tokens": tokens,
        }

    def fit(self) -> bool:
        """Run to the end; False if a signal stopped it first. Everything is saved either way."""
        with caught(self._on_signal):
            return self._fit()

    def _fit(self) -> bool:
        if self.total_steps == 0:
            self._evaluate_and_log()
            return not self.strategy.any(self.stop_requested)
        try:
            if self._train():
                return self._stop()
        except Stop:
            self.loaders.train.load_state_dict(self._place)
            return self._stop()
        if (skipped := self.progress.skipped_in_a_row) > 0:
            self.display.message(f"WARNING: the last {skipped} steps were not taken: the weights are older")
        self._save()
        self._evaluate_and_log()
        return not self.strategy.any(self.stop_requested) or self._stop()

    def _train(self) -> bool:
        """Steps up to the last one; True if a rank was asked to stop before."""
        while self.progress.step < self.total_steps:
            self._clock = time.perf_counter()
            for window, waited in self._windows():
                window = [batch.to(self.device) for batch in window]
                if not self._covered:  # the preparations are no part of the first step's time
                    self._first_time(window[0])
                    self._clock, waited = time.perf_counter(), 0.0
                result = self.train_step(window)
                if self._account(window, result, waited):
                    return True
                if self.progress.step >= self.total_steps:
                    break
        return False

    def _stop(self) -> bool:
        self._judge(all_of_them=True)
        if self.progress.step > 0:
            self._save()
        self.display.message(f"stopped by a signal after step {self.progress.step}")
        return False

    def _windows(self) -> Iterator[tuple[list[Any], float]]:
        """The micro-batches of each optimizer step up to the epoch's end, and the seconds waited for them.

        The last window may be shorter.
        """
        began = time.perf_counter()
        batches = iter(self.loaders.train)
        while True:
            self.hooks.beat(f"loading the data of step {self.progress.step + 1}")
            if not (window := self._wait_for_window(batches)):
                return
            yield window, time.perf_counter() - began
            began = time.perf_counter()

    def _wait_for_window(self, batches: Iterator[Any]) -> list[Any]:
        """A signal to a single device ends the wait, which may last for ever, with `Stop`."""
        self._place = self.loaders.train.state_dict()
        self._waiting = os.getpid() if self.strategy.world_size == 1 else None
        try:
            if self._waiting and self.stop_requested:  # by a signal that came just before
                raise Stop
            return list(islice(batches, self.cfg.optim.gradient_accumulation_steps))
        finally:
            self._waiting = None

    def _prepare(self, batch: Any) -> None:
        if not self._prepared:
            self._prepared = True
            self.hooks.prepare(batch)

    def _first_time(self, batch: Any) -> None:
        self._prepare(batch)
        step, settings = self.progress.step, self.cfg.log
        owed = self._owes_evaluation and step > 0 and _due(step, settings.eval_interval)
        if owed or (settings.eval_at_start and step == 0):
            self._evaluate_and_log()

    def _account(self, window: list[Any], result: StepResult, waited: float) -> bool:
        """Count, log, evaluate and save what is due after a step; the last two are not in a step's time.

        True if a rank was asked to stop. What came with a step's own sums spares many ranks another exchange,
        and is read a step later, so that the GPU always has its next step before the host waits.
        """
        progress, settings = self.progress, self.cfg
        progress.step += 1
        last = progress.step == self.total_steps
        log = last or progress.step % settings.log.log_interval == 0
        evaluate = not last and _due(progress.step, settings.log.eval_interval)
        save = not last and _due(progress.step, settings.checkpoint.save_interval)
        self._unread.append((progress.step, result))
        stop = self._judge(all_of_them=log or evaluate or save or self.device.type != "cuda")
        if (log or evaluate or save) and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the optimizer still runs, on this interval's time
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        progress.train_seconds += seconds
        for name in self._uncounted:
            self._uncounted[name] += sum(getattr(batch, name) for batch in window)
        self.meter.add(window, seconds, waited)
        self.hooks.after_step(progress.step)
        first, self._covered = not self._covered, True
        if first:
            self.hooks.after_first_step()
        if log:
            self._log(result)
        if save:  # before the evaluation, which may fail
            self._save()
        if evaluate:
            self._evaluate_and_log()
        if self.device.type == "cuda" and _due(progress.step, settings.sharding.empty_cache_freq):
            torch.cuda.empty_cache()
        if first or evaluate or save:
            self.restart_clock()
        if evaluate or save or self.strategy.world_size == 1:
            return self.strategy.any(self.stop_requested)
        return stop

    def restart_clock(self) -> None:
        """What was done since the last step is on no step's time."""
        self._clock = time.perf_counter()

    def _judge(self, *, all_of_them: bool) -> bool:
        """Read the verdicts on all steps, or all but the newest; True if one of them says stop."""
        stop = False
        while len(self._unread) > (0 if all_of_them else 1):
            step, result = self._unread.pop(0)
            self.hooks.beat(f"waiting for step {step}")
            taken, asked, norm = result.verdict()
            stop = stop or asked > 0
            if taken:
                self.progress.skipped_in_a_row = 0
                self._tell_spikes(step, norm)
            else:
                self._skip(step, result)
        return stop

    def _tell_spikes(self, step: int, norm: float) -> None:
        """Steps with them are taken, clipped; whoever looks for their data must know which."""
        usual = median(self._norms) if len(self._norms) >= SPIKE_AFTER else math.inf
        if 0 < SPIKE * usual < norm:
            self.display.message(
                f"WARNING: step {step}: the gradient norm {norm:.3g} is {norm / usual:.0f} times the median "
                f"of the last {len(self._norms)} steps (--max_grad_norm {self.cfg.optim.max_grad_norm:g})"
            )
        self._norms.append(norm)

    def _skip(self, step: int, result: StepResult) -> None:
        self.progress.skipped_in_a_row += 1
        self.progress.skipped_steps += 1
        in_a_row = self.progress.skipped_in_a_row
        self.hooks.on_skipped()
        loss, norm = result.loss.item(), result.grad_norm.item()
        self.display.message(
            f"step {step} not taken: loss {loss}, gradient norm {norm} "
            f"({self.progress.skipped_steps} skipped so far)"
        )
        # A window without labels is skipped, too, and finite.
        no_number = not (math.isfinite(loss) and math.isfinite(norm))
        none_taken = no_number and self.progress.skipped_steps == step == self.total_steps
        if none_taken or in_a_row >= self.cfg.optim.max_skipped_steps:
            error = NonFinite(
                f"{in_a_row} steps in a row had no finite loss and gradient "
                f"(--max_skipped_steps {self.cfg.optim.max_skipped_steps}); {self._way_out(step)}, or look "
                "at the data near it"
            )
            error.ranks = dict.fromkeys(range(self.strategy.world_size))  # all, so that no one is blamed
            raise error

    def _way_out(self, step: int) -> str:
        if self.progress.skipped_steps == step:
            return (
                "none was ever taken: the weights of --model_name may be damaged; if not, try "
                "--mixed_precision bf16"
            )
        return (
            "try a lower --learning_rate, from the start or, with another --output_dir, from a checkpoint "
            "before it (--resume RUN/checkpoints/step_N); more warm-up, --fp8_scenario current or "
            "--mixed_precision bf16"
        )

    def _log(self, result: StepResult) -> None:
        metrics: dict[str, float] = {
            "train/loss": result.loss.item(),
            "train/grad_norm": result.grad_norm.item(),
            "train/learning_rate": result.learning_rate,
            "train/epoch": self._epoch(),
            "train/skipped_steps": self.progress.skipped_steps,
        }
        steps, disturbed = self.meter.steps, self.meter.disturbed
        metrics |= self.meter.read(self._sum_counts, self._slowest) | self._memory()
        before = self.progress.step - steps - self._began  # steps of this start ahead of the interval
        warm = before >= WARMUP_STEPS or self.total_steps - self._began <= WARMUP_STEPS
        if warm and not disturbed:
            rates = self._short_rates if self.meter.rows_per_step < self._rows_of_a_step() else self.rates
            rates.append({name: metrics[name] for name in RATES if name in metrics})
        self.tracker.log(self.progress.step, metrics)
        self.hooks.logged()
        self.display.update(self.progress.step, metrics)

    def _rows_of_a_step(self) -> int:
        optim = self.cfg.optim
        return optim.batch_size * optim.gradient_accumulation_steps * self.strategy.world_size

    def _epoch(self) -> float:
        loader = self.loaders.train
        if loader.micro_batches_per_epoch is None:
            return float(loader.epoch)
        return loader.epoch + 1 - loader.micro_batches_left() / loader.micro_batches_per_epoch

    def _count_tokens(self) -> None:
        for name, count in self._sum_counts(self._uncounted).items():
            setattr(self.progress, name, getattr(self.progress, name) + count)
            self._uncounted[name] = 0

    def _sum_counts(self, counts: dict[str, int]) -> dict[str, int]:
        values = torch.tensor(list(counts.values()), device=self.device, dtype=torch.float64)
        return dict(zip(counts, (int(v) for v in self.strategy.sum(values).tolist()), strict=True))

    def _slowest(self, seconds: list[float]) -> list[float]:
        return self.strategy.max(torch.tensor(seconds, device=self.device, dtype=torch.float64)).tolist()

    def _memory(self) -> dict[str, float]:
        if self.device.type != "cuda":
            return {}
        peak = torch.tensor(torch.cuda.max_memory_allocated(self.device) / 1e9, device=self.device)
        return {"perf/peak_memory_gb": self.strategy.max(peak).item()}

    def _evaluate_and_log(self) -> None:
        if self.loaders.eval is None or self._evaluated_step == self.progress.step:
            return
        if (metrics := self.evaluate()) is None:
            return
        self._evaluated_step, self._last_eval = self.progress.step, metrics
        best = self.progress.best_eval_loss
        if math.isfinite(metrics["eval/loss"]) and (best is None or metrics["eval/loss"] < best):
            self.progress.best_eval_loss = metrics["eval/loss"]
        self.tracker.log(self.progress.step, metrics)
        if self._saved_step == self.progress.step:
            self.hooks.rate(self.progress.step, metrics["eval/loss"])
        self.display.message(
            f"step {self.progress.step}: eval loss {metrics['eval/loss']:.4f}, perplexity "
            f"{metrics['eval/perplexity']:.2f}, token accuracy {metrics['eval/token_accuracy']:.2%}"
        )

    def _save(self) -> None:
        if self._saved_step == self.progress.step:
            return
        self._saved_step = self.progress.step
        self.hooks.beat(f"saving at step {self.progress.step}")
        self._count_tokens()
        self.progress.rates = self._median_rates()
        fresh = self._evaluated_step == self.progress.step
        self.hooks.save(self.progress.step, self._last_eval.get("eval/loss") if fresh else None)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.stop_requested = True  # a second signal during the save changes nothing
        if self._waiting == os.getpid():
            self._waiting = None
            raise Stop

    def results(self) -> dict[str, float]:
        """Final evaluation and the median rates after warm-up, for summary.json."""
        evaluation = {name.replace("eval/", "eval_"): value for name, value in self._last_eval.items()}
        return evaluation | self._median_rates()

    def _median_rates(self) -> dict[str, float]:
        """Of this start, or where it has taken no step, of those that did."""
        if not self._covered:
            return self.progress.rates
        counted = self.rates or self._short_rates
        medians = {name: median(rates[name] for rates in counted) for name in (counted[0] if counted else ())}
        return {name.removeprefix("perf/"): value for name, value in medians.items()}
