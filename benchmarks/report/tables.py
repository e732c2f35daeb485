"""Tables of a report, for the terminal, the page and W&B: one value per run and column."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, pstdev
from typing import Any

from benchmarks.records.runs import RunRecord, tail_mean
from core.redact import redacted
from training.tracking.metrics import METRICS, summary_name

# Heading -> (value of a run among all runs of the report, format). A column that no run has is left out.
Columns = dict[str, tuple[Callable[[RunRecord, list[RunRecord]], Any], str]]

LOSSES = {"training": "train/loss", "validation": "eval/loss"}
PACKAGES = ("torch", "transformer_engine", "torchao", "transformers")
MACHINE = (
    *("gpu_name", "driver", "cuda", "cudnn", "python", "platform", "recipe", "fallback_reason", "optimizer"),
    *("attention_backend", "emulated", "sharding_mode", "world_size", "nodes"),
)


def _value(name: str, form: str) -> tuple[Callable[[RunRecord, list[RunRecord]], Any], str]:
    return lambda run, _: run.value(name), form


def _precision(run: RunRecord, _: list[RunRecord]) -> str:
    mixed = run.value("mixed_precision")
    text = mixed if run.precision == mixed else f"{mixed} {run.precision}"
    if run.value("fallback_reason"):
        text += f" (instead of {run.value('requested_recipe')})"
    return f"{text}{' (emulated)' if run.emulated else ''}, {run.layers} layers"


def _scaling(run: RunRecord, runs: list[RunRecord]) -> float | None:
    """Return tokens/s per GPU relative to the only one-GPU run of the same work."""
    single = [other for other in runs if other.gpus == 1 and other.work == run.work]
    if run.gpus < 2 or len(single) != 1 or not run.tokens_per_gpu or not single[0].tokens_per_gpu:
        return None
    return run.tokens_per_gpu / single[0].tokens_per_gpu


def metric_columns(*names: str) -> Columns:
    """Return the columns of metrics' summary values."""
    return {METRICS[name].label: _value(summary_name(name), METRICS[name].format) for name in names}


RUNS: Columns = {
    "precision": (_precision, "{}"),
    **metric_columns("train/loss"),
    "train loss, mean of last 10 %": _value("train_loss_tail_mean", "{:.4f}"),
    **metric_columns("eval/loss", "eval/perplexity", "eval/token_accuracy", "perf/tokens_per_second"),
    "tokens/s per GPU": (lambda run, _: run.tokens_per_gpu, "{:,.0f}"),
    "scaling": (_scaling, "{:.1%}"),
    **metric_columns("perf/mfu_bf16", "perf/mfu_fp8", "perf/model_tflops_per_gpu", "perf/peak_memory_gb"),
    "GPU-hours": _value("gpu_hours", "{:.2f}"),
    "steps": _value("steps", "{:,}"),
    "GPUs": (lambda run, _: run.gpus or None, "{}"),
    "mode": (lambda run, _: run.mode, "{}"),
    "model": _value("model_name", "{}"),
}


def _hours(run: RunRecord, _: list[RunRecord]) -> float | None:
    seconds = run.value("runtime_seconds")
    return None if seconds is None else seconds / 3600


HOURS: Columns = {
    "runtime, hours": (_hours, "{:,.3f}"),
    "nodes": (lambda run, _: run.nodes, "{}"),
    "GPUs": (lambda run, _: run.gpus, "{}"),
    "node-hours": _value("node_hours", "{:,.3f}"),
    "GPU-hours": _value("gpu_hours", "{:,.3f}"),
}
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "maximum": max,
    "minimum": min,
    "mean": fmean,
    "final": lambda values: values[-1],
    "standard deviation": pstdev,
    "mean of last 10 %": tail_mean,
}


def statistics(metric: str) -> Columns:
    """Return the columns of a metric's statistics over its finite values, and how many there are."""

    def column(
        reduce: Callable[[list[float]], float],
    ) -> Callable[[RunRecord, list[RunRecord]], float | None]:
        return lambda run, _: reduce(values) if (values := [v for _, v in run.series(metric)]) else None

    columns: Columns = {name: (column(reduce), "{:.4f}") for name, reduce in STATISTICS.items()}
    return columns | {
        "values": (lambda run, _: len(run.series(metric)), "{:,}"),
        "not finite": (lambda run, _: len(run.logged(metric)) - len(run.series(metric)), "{}"),
    }


def coverage(runs: list[RunRecord]) -> Columns:
    """Return one column per precision: its share of a step's GEMM FLOPs."""
    kinds = dict.fromkeys(kind for run in runs for kind in run.coverage)
    return {kind: (lambda run, _, kind=kind: run.coverage.get(kind), "{:.1%}") for kind in kinds}


def values(columns: Columns, runs: list[RunRecord]) -> dict[str, list[Any]]:
    """Return {heading: a value per run}, without columns that no run has."""
    found = {name: [value(run, runs) for run in runs] for name, (value, _) in columns.items()}
    return {name: line for name, line in found.items() if any(value is not None for value in line)}


def cells(columns: Columns, runs: list[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and a line of text per run, with a dash for missing values."""
    found = values(columns, runs)
    text = [
        ["-" if value is None else columns[name][1].format(value) for value in line]
        for name, line in found.items()
    ]
    return list(found), [list(line) for line in zip(*text, strict=True)] or [[] for _ in runs]


def labels(runs: list[RunRecord]) -> list[str]:
    """Return a name per run: its folder's, or the path as given where two share it."""
    names = [run.name for run in runs]
    return [n if names.count(n) == 1 else str(run.folder) for n, run in zip(names, runs, strict=True)]


def provenance(run: RunRecord, *, date: bool = True) -> str:
    """Return GPUs, date, versions and commit of a run in one line."""
    environment = run.environment
    if not environment:
        return "stopped before its environment was recorded"
    versions, git = environment.get("versions") or {}, environment.get("git")
    machine = environment.get("gpu_name") or "CPU"
    parts = [f"{run.gpus} x {machine}" if run.gpus else machine]
    parts += [environment.get("date", "no date")[:10]] if date else []
    parts += [f"{name} {versions[name]}" for name in PACKAGES if versions.get(name)]
    if git:
        parts.append(f"commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}")
    return ", ".join(parts)


def settings(run: RunRecord) -> dict[str, Any]:
    """Return the settings of a run, and the machine and software that it ran on."""
    environment = run.environment
    git = environment.get("git") or {}
    return (
        redacted(run.config)
        | {name: environment.get(name) for name in MACHINE}
        | {f"version of {name}": version for name, version in (environment.get("versions") or {}).items()}
        | {"commit": git.get("commit"), "commit with changes": git.get("dirty")}
    )
