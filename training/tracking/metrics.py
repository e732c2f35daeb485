"""Table of metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """Label and format of a logged metric.

    `summary` reduces the log for reports of runs without summary.json; `median` ones also go to summary.json.
    """

    label: str
    format: str
    summary: Literal["last", "median", "max"] | None = None
    terminal: str | None = None  # format in a progress line; None: not shown


# Metrics in the display and in reports, in order. Rates of emulated runs are logged as emulated/*.
METRICS: dict[str, Metric] = {
    "train/loss": Metric("train loss", "{:.4f}", "last", "loss {:.4f}"),
    "train/grad_norm": Metric("gradient norm", "{:.3g}", terminal="grad norm {:.3g}"),
    "train/loss_scale": Metric("loss scale", "{:,.0f}", "last"),
    "train/learning_rate": Metric("learning rate", "{:.2e}", terminal="lr {:.2e}"),
    "train/tokens_per_step": Metric("tokens per step", "{:,.0f}", "last", "{:,.0f} tokens per step"),
    "train/tokens_seen": Metric("tokens seen", "{:,.0f}", "last"),
    "eval/loss": Metric("eval loss", "{:.4f}", "last"),
    "eval/perplexity": Metric("perplexity", "{:.2f}", "last"),
    "eval/token_accuracy": Metric("token accuracy", "{:.2%}", "last"),
    "perf/tokens_per_second": Metric("tokens/s", "{:,.0f}", "median", "{:,.0f} tokens/s"),
    "perf/padded_tokens_per_second": Metric("tokens/s with padding", "{:,.0f}", "median"),
    "perf/model_tflops_per_gpu": Metric("TFLOP/s per GPU", "{:,.1f}", "median"),
    "perf/mfu_bf16": Metric("MFU of BF16 peak", "{:.1%}", "median", "MFU {:.1%}"),
    "perf/mfu_fp8": Metric("MFU of FP8 peak", "{:.1%}", "median", "FP8 MFU {:.1%}"),
    "perf/data_wait_share": Metric("data wait", "{:.2%}", "median"),
    "perf/goodput": Metric("goodput", "{:.1%}", "last"),
    "perf/tokens_per_wall_second": Metric("tokens/s of wall time", "{:,.0f}", "last"),
    "perf/peak_memory_gb": Metric("peak GB", "{:.1f}", "max", "{:.1f} GB"),
    "perf/cache_flushes": Metric("flushes of torch's cache", "{:,.0f}", "max"),
}
RATES = tuple(name for name, metric in METRICS.items() if metric.summary == "median")
WALL_RATES = ("perf/goodput", "perf/tokens_per_wall_second")  # of all launches
# What wall time is spent on. `start` is everything before the first step of a launch; `lost` is the time of
# steps that a resume had to do again, or left out.
WALL_TIME_KINDS = ("start", "steps", "data", "saving", "evaluation", "export", "lost", "other")


def summary_name(metric: str) -> str:
    """Return a logged metric's name in summary.json."""
    return metric.removeprefix("perf/").replace("/", "_")


def tail_mean(values: Sequence[float]) -> float:
    """Return the mean of the last 10 % of the values (at least one value)."""
    return fmean(values[-max(1, len(values) // 10) :])


def perplexity(loss: float) -> float:
    """Return exp(mean loss per token in nats); infinity on overflow."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
