"""Training throughput: token counts and step times, reduced over ranks at log lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fp8_suite.te_models.shape import ModelShape, model_flops
from fp8_suite.training.tracking.metrics import RATES

LONG_STEP = 131_072  # tokens per data rank; a step of so many takes seconds


def warmup_steps(tokens: int) -> int:
    """Return the number of steps without reported rates, in which kernels are tuned and memory is allocated.

    `tokens` are those of a step, per data rank. Rates of long steps are steady from the second one on.
    """
    return 2 if tokens >= LONG_STEP else 5


@dataclass
class Meter:
    """Counts and times since the last log line, and rates of all log lines of this launch.

    Rates of emulated FP8 are named `emulated/...`, to keep them apart from real ones.
    """

    shape: ModelShape | None  # None if the model's FLOPs are not known
    world_size: int
    peaks: dict[str, float | None]  # TFLOP/s of the GPU, by precision
    emulated: bool = False
    adapters: int = 0  # parameters of LoRA; the model's weights are then frozen
    seconds: float = 0.0
    waited: float = 0.0
    steps: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    profiled: bool = False  # profiling slows this interval: exclude its rates
    rates: list[dict[str, float]] = field(default_factory=list)
    clock: float = 0.0
    real_tokens: int = 0  # of all ranks and launches, up to the last log line

    def restart_clock(self) -> None:
        """Exclude everything since the last step from training time."""
        self.clock = time.perf_counter()

    def end_step(self, micro_batches: list[Any], waited: float) -> float:
        """Count a step's micro-batches and the time since the last step. Return that time in seconds."""
        now = time.perf_counter()
        seconds, self.clock = now - self.clock, now
        self.seconds, self.waited, self.steps = self.seconds + seconds, self.waited + waited, self.steps + 1
        for batch in micro_batches:
            for name in ("real_tokens", "label_tokens", "padded_tokens", "sum_squared_lengths"):
                self.counts[name] = self.counts.get(name, 0) + getattr(batch, name)
        return seconds

    def read(
        self,
        sum_counts: Callable[[dict[str, int]], dict[str, int]],
        max_seconds: Callable[[list[float]], list[float]],
        *,
        warm: bool,
    ) -> dict[str, float]:
        """Return the interval's metrics and start the next one.

        `sum_counts` and `max_seconds` reduce over ranks. Only `warm` intervals enter the run's medians.
        """
        counts = sum_counts(self.counts)
        self.real_tokens += counts["real_tokens"]
        seconds, waited = max_seconds([self.seconds, self.waited])
        out = {
            "perf/tokens_per_second": counts["real_tokens"] / seconds,
            "perf/label_tokens_per_second": counts["label_tokens"] / seconds,
            "perf/padded_tokens_per_second": counts["padded_tokens"] / seconds,
            "perf/step_seconds": seconds / self.steps,
            "perf/data_wait_share": waited / seconds,
        }
        if self.shape is not None:
            tokens, pairs = counts["real_tokens"], counts["sum_squared_lengths"]
            flops = model_flops(self.shape, tokens=tokens, sum_squared_lengths=pairs, adapters=self.adapters)
            tflops = flops / seconds / self.world_size / 1e12
            out["perf/model_tflops_per_gpu"] = tflops
            out |= {f"perf/mfu_{p}": tflops / peak for p, peak in self.peaks.items() if peak}
        if warm and not self.profiled and not self.emulated:
            self.rates.append({n: out[n] for n in RATES if n in out})
        self.seconds = self.waited = 0.0
        self.steps, self.counts, self.profiled = 0, {}, False
        return self.named(out)

    def named(self, rates: dict[str, float]) -> dict[str, float]:
        """Return rates by the name under which they are logged."""
        return {n.replace("perf/", "emulated/"): v for n, v in rates.items()} if self.emulated else rates

    def medians(self) -> dict[str, float]:
        """Return the median rates after warm-up, by metric name without the `perf/` prefix."""
        names = self.rates[0] if self.rates else ()
        return {name.removeprefix("perf/"): median(rates[name] for rates in self.rates) for name in names}
