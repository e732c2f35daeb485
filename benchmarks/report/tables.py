"""The tables of a report: what they hold of each run, for the terminal, the page and W&B alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.records.runs import STATISTICS, RunRecord

# Heading -> value of a run beside all runs of the report, None for what it lacks, and its format.
Columns = dict[str, tuple[Callable[[RunRecord, list[RunRecord]], Any], str]]
Rows = dict[str, list[str]]  # {heading: a cell of each run}, as the reader sees them


def _value(name: str, form: str) -> tuple[Callable[[RunRecord, list[RunRecord]], Any], str]:
    return lambda run, _: run.value(name), form


def _precision(run: RunRecord, _: list[RunRecord]) -> str:
    mixed = run.value("mixed_precision")
    text = mixed if run.precision == mixed else f"{mixed} {run.precision}"
    if run.value("fallback_reason"):
        text += f" (asked for {run.value('requested_recipe')})"
    if run.value("emulated"):
        text += " (emulated)"
    return f"{text}, {'TE' if run.value('use_te') else 'HF'} layers"


def _scaling(run: RunRecord, runs: list[RunRecord]) -> float | None:
    """Tokens/s per GPU against the one-GPU run of the same work; None unless there is exactly one."""
    alone = [other for other in runs if other.gpus == 1 and other.work == run.work]
    if run.gpus < 2 or len(alone) != 1 or not run.tokens_per_gpu or not alone[0].tokens_per_gpu:
        return None
    return run.tokens_per_gpu / alone[0].tokens_per_gpu


RUNS: Columns = {
    "precision": (_precision, "{}"),
    "train loss": _value("train_loss", "{:.4f}"),
    "train loss, mean of last 10 %": _value("train_loss_tail_mean", "{:.4f}"),
    "eval loss": _value("eval_loss", "{:.4f}"),
    "perplexity": _value("eval_perplexity", "{:.2f}"),
    "token accuracy": _value("eval_token_accuracy", "{:.2%}"),
    "tokens/s": _value("tokens_per_second", "{:,.0f}"),
    "tokens/s per GPU": (lambda run, _: run.tokens_per_gpu, "{:,.0f}"),
    "scaling": (_scaling, "{:.1%}"),
    "MFU (utilisation) of BF16 peak": _value("mfu_bf16", "{:.1%}"),
    "MFU of FP8 peak": _value("mfu_fp8", "{:.1%}"),
    "TFLOP/s per GPU": _value("model_tflops_per_gpu", "{:,.1f}"),
    "peak GB": _value("peak_memory_gb", "{:.1f}"),
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


def statistics(metric: str) -> Columns:
    """Of the finite values of one metric; how many there are, and how many others."""

    def of(reduce: Callable[[list[float]], float]) -> Callable[[RunRecord, list[RunRecord]], float | None]:
        return lambda run, _: reduce(found) if (found := finite(run)) else None

    def finite(run: RunRecord) -> list[float]:
        return [value for _, value in run.series(metric)]

    def others(run: RunRecord, _: list[RunRecord]) -> int:
        return sum(metric in record for record in run.records) - len(finite(run))

    columns: Columns = {name: (of(reduce), "{:.4f}") for name, reduce in STATISTICS.items()}
    counts = {"values": (lambda run, _: len(finite(run)), "{:,}"), "not finite": (others, "{}")}
    return columns | counts


def values(columns: Columns, runs: list[RunRecord]) -> dict[str, list[Any]]:
    """{heading: a value of each run}, without what no run has."""
    found = {name: [value(run, runs) for run in runs] for name, (value, _) in columns.items()}
    return {name: line for name, line in found.items() if any(value is not None for value in line)}


def shown(columns: Columns, runs: list[RunRecord]) -> Rows:
    """The same as text, with a dash for what a run lacks."""
    return {
        name: ["-" if value is None else columns[name][1].format(value) for value in line]
        for name, line in values(columns, runs).items()
    }
