"""Tables of a report for the terminal, the HTML page and W&B: one row per run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.core.redact import redacted
from fp8_suite.training.parallel.settings import AXES
from fp8_suite.training.tracking.metrics import METRICS, WALL_RATES, WALL_TIME_KINDS, summary_name, tail_mean

Source = str | Callable[[Any], Any]  # the name in `item.value(name)`, or a function of the item
Columns = dict[str, tuple[Source, str]]  # heading -> (source, format)


class Table(NamedTuple):
    """Headings and rows of formatted cells."""

    headings: list[str]
    rows: list[tuple[str, ...]]


def make_table(columns: Columns, items: Sequence[Any]) -> Table:
    """Return a table with a row per item; columns in which all values are None are left out."""
    kept = {}
    for heading, (source, form) in columns.items():
        values = [item.value(source) if isinstance(source, str) else source(item) for item in items]
        if any(value is not None for value in values):
            kept[heading] = ["-" if value is None else form.format(value) for value in values]
    return Table(list(kept), list(zip(*kept.values(), strict=True)))


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns; "|" in cells is escaped."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (headings, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines)


def metric_columns(*names: str) -> Columns:
    """Return the columns of metrics: their values in summary.json."""
    return {METRICS[name].label: (summary_name(name), METRICS[name].format) for name in names}


LOSSES = {"training_loss": "train/loss", "validation_loss": "eval/loss"}
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "maximum": max,
    "minimum": min,
    "mean": fmean,
    "final": lambda values: values[-1],
    "standard deviation": pstdev,
    "mean of last 10 %": tail_mean,
}
PACKAGES = ("torch", "transformer_engine", "torchao", "transformers")
MACHINE = (
    *("gpu_name", "driver", "cuda", "cudnn", "python", "platform", "recipe", "fallback_reason", "optimizer"),
    *("attention_backend", "emulated", "sharding_mode", "world_size", "nodes"),
)


def report_tables(runs: list[RunRecord], price_per_gpu_hour: float | None = None) -> dict[str, Table]:
    """Return the tables by name. Those of losses and coverage exist only if a run recorded them."""
    names = tagged(runs)
    kinds = dict.fromkeys(kind for run in runs for kind in run.coverage)
    coverage: Columns = {kind: (lambda run, kind=kind: run.coverage.get(kind), "{:.1%}") for kind in kinds}
    columns = {"runs": _run_columns(runs, price_per_gpu_hour), "hours": HOURS}
    columns |= {"coverage": coverage} if kinds else {}
    for title, metric in LOSSES.items():
        if any(run.logged(metric) for run in runs):
            columns[title] = _statistics(metric)
    run: Columns = {"run": (names.get, "{}")}
    return {title: make_table(run | shown, runs) for title, shown in columns.items()}


def _run_columns(runs: list[RunRecord], price: float | None) -> Columns:
    def cost(run: RunRecord) -> float | None:
        hours = run.value("gpu_hours") if run.timed else None
        return None if hours is None or price is None else hours * price

    return {
        "precision": (_precision, "{}"),
        **metric_columns("train/loss"),
        "train loss, mean of last 10 %": ("train_loss_tail_mean", "{:.4f}"),
        **metric_columns("eval/loss", "eval/perplexity", "eval/token_accuracy", "perf/tokens_per_second"),
        "eval loss in BF16": ("eval_loss_bf16", "{:.4f}"),
        "export's loss": ("export_loss_bf16", "{:.4f}"),
        "FP8 export's loss": ("export_loss_fp8", "{:.4f}"),
        "tokens/s per GPU": (lambda run: run.tokens_per_gpu, "{:,.0f}"),
        "scaling": (lambda run: _scaling(run, runs), "{:.1%}"),
        **metric_columns("perf/mfu_bf16", "perf/mfu_fp8", "perf/model_tflops_per_gpu", "perf/peak_memory_gb"),
        **metric_columns("perf/goodput"),
        "GPU-hours": (lambda run: run.value("gpu_hours") or None, "{:.2f}"),
        "cost": (cost, "{:,.2f}"),
        "LoRA rank": (lambda run: run.setting("lora_rank") or None, "{}"),
        "trainable parameters": ("trainable_parameters", "{:,}"),
        "steps": ("steps", "{:,}"),
        **metric_columns("train/tokens_per_step", "train/tokens_seen"),
        "GPUs": (lambda run: run.gpus or None, "{}"),
        "mode": (lambda run: run.mode, "{}"),
        **{axis.upper(): (lambda run, flag=flag: _parallel(run, flag), "{}") for axis, flag in AXES.items()},
        "model": ("model_name", "{}"),
    }


def _parallel(run: RunRecord, flag: str) -> int | None:
    """Return the size of a parallel axis; None if it is 1, so that tables leave out axes of no run."""
    size = run.config.get(flag, 1)
    return size if size > 1 else None


HOURS: Columns = {
    "runtime, hours": (lambda run: (seconds := run.value("runtime_seconds")) and seconds / 3600, "{:,.3f}"),
    "nodes": (lambda run: run.nodes, "{}"),
    "GPUs": (lambda run: run.gpus, "{}"),
    "node-hours": ("node_hours", "{:,.3f}"),
    "GPU-hours": ("gpu_hours", "{:,.3f}"),
    **metric_columns(*WALL_RATES),
    **{  # what took the rest of the wall time; columns of zeros are left out
        kind: (lambda run, kind=kind: run.wall_shares.get(kind) or None, "{:.1%}")
        for kind in WALL_TIME_KINDS
        if kind != "steps"
    },
}


def _precision(run: RunRecord) -> str:
    mixed = run.value("mixed_precision")
    text = mixed if run.precision == mixed else f"{mixed} {run.precision}"
    if run.value("fallback_reason"):
        text += f" (instead of {run.value('requested_recipe')})"
    return f"{text}{' (emulated)' if run.emulated else ''}, {run.layers} layers"


def _scaling(run: RunRecord, runs: list[RunRecord]) -> float | None:
    """Return tokens/s per GPU relative to the one-GPU run of the same work; None unless there is one."""
    single = [candidate for candidate in runs if candidate.gpus == 1 and candidate.work == run.work]
    if run.gpus < 2 or len(single) != 1 or not run.tokens_per_gpu or not single[0].tokens_per_gpu:
        return None
    return run.tokens_per_gpu / single[0].tokens_per_gpu


def _statistics(metric: str) -> Columns:
    """Return columns with statistics of a metric's finite values, and with counts of values."""

    def column(reduce: Callable[[list[float]], float]) -> Callable[[RunRecord], float | None]:
        return lambda run: reduce(values) if (values := [v for _, v in run.series(metric)]) else None

    columns: Columns = {name: (column(reduce), "{:.4f}") for name, reduce in STATISTICS.items()}
    return columns | {
        "values": (lambda run: len(run.series(metric)), "{:,}"),
        "not finite": (lambda run: len(run.logged(metric)) - len(run.series(metric)), "{}"),
    }


def labels(runs: list[RunRecord]) -> dict[RunRecord, str]:
    """Return a label per run: its folder's name, or its path if several runs have that name."""
    names = [run.name for run in runs]
    return {run: run.name if names.count(run.name) == 1 else str(run.folder) for run in runs}


def tagged(runs: list[RunRecord]) -> dict[RunRecord, str]:
    """Return the labels, marked "(unfinished)" where a run did not finish."""
    return {run: name + " (unfinished)" * (run.summary is None) for run, name in labels(runs).items()}


def provenance(run: RunRecord, *, date: bool = True) -> str:
    """Return a run's GPUs, date, package versions and commit in one line."""
    environment = run.environment
    if not environment:
        return "stopped before its environment was recorded"
    versions, git = environment.get("versions") or {}, environment.get("git")
    machine = environment.get("gpu_name") or "CPU"
    parts = [f"{run.gpus} x {machine}" if run.gpus else machine]
    parts += [str(environment.get("date", "no date"))[:10]] if date else []
    parts += [f"{name} {versions[name]}" for name in PACKAGES if versions.get(name)]
    if git:
        changes = " with uncommitted changes" if git.get("dirty") else ""
        parts.append(f"commit {str(git.get('commit'))[:12]}{changes}")
    return ", ".join(parts)


def settings(run: RunRecord) -> dict[str, Any]:
    """Return the settings, hardware and software of a run, without secrets."""
    environment = run.environment
    git = environment.get("git") or {}
    return (
        redacted(run.config)
        | {name: environment.get(name) for name in MACHINE}
        | {f"version of {name}": version for name, version in (environment.get("versions") or {}).items()}
        | {"commit": git.get("commit"), "uncommitted changes": git.get("dirty")}
    )
