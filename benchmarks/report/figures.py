"""Figures of a report."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from benchmarks.records.runs import DEFAULT, WORK, RunRecord, Series
from benchmarks.report.fp8_heatmap import draw_casts, last_casts
from benchmarks.report.gaps import Comparison, comparison, loss_gap, noise_band, smooth
from benchmarks.report.tables import labels
from training.tracking.metrics import METRICS, summary_name

# Colours by Okabe and Ito, distinct to most colour-blind people, without the yellow, too light on paper.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195")
DASHES = ("-", "--", "-.", ":")  # the first seven curves are solid, the next seven dashed, ..
STYLE = {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "text.parse_math": False,  # a $ in a folder's name is a $
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
}
POINTS = 800  # per raw curve: more fit no screen
LABEL_WIDTH = 44  # characters per line of a label
FEW = 10  # points that a line without markers would not show
SPIKE = 10  # times the size that three quarters of the widest curve keep within: larger gaps are cut off


class Drawn(NamedTuple):
    section: str
    caption: str
    figure: Figure


def draw_all(
    runs: list[RunRecord], reference: RunRecord, baselines: dict[Path, RunRecord | None]
) -> dict[str, Drawn]:
    """Return the figures of everything that the runs have logged, by file name without suffix."""
    found = {}
    if any(run.series("train/loss") or run.series("eval/loss") for run in runs):
        caption = (
            "Loss: as logged (pale), moving mean over about 5 % of the values (strong), evaluations (dots)."
        )
        found["loss"] = Drawn("losses", caption, draw_losses(runs))
        found["loss_log"] = Drawn("losses", "The same, on a logarithmic scale.", draw_losses(runs, log=True))
    against = comparison(runs, reference, baselines)
    if against.pairs:
        caption = (
            "Smoothed training loss relative to that of the baseline. The axis may cut off the first tenth "
        )
        caption += "of the steps, and spikes far beyond all other gaps."
        found["gap"] = Drawn("gap", caption, draw_gap(runs, against))
    for axis in AXES:
        if lines := scaling(runs, axis):
            name = f"speed_by_{axis.replace(' ', '_').lower()}"
            found[name] = Drawn("speed", f"Speed and memory by {axis}.", draw_scaling(lines, axis))
    if any(run.coverage for run in runs):
        found["coverage"] = Drawn(
            "coverage", "Share of a step's GEMM FLOPs by precision.", draw_coverage(runs)
        )
    for number, (run, label) in enumerate(zip(runs, labels(runs), strict=True), 1):
        if casts := last_casts(run.records):
            name = "fp8_stats" if len(runs) == 1 else f"fp8_stats_{number}_{run.name}"
            found[name] = Drawn(
                "fp8", f"{label}: FP8 casts of step {casts[0]:,}", draw_casts(run.name, *casts)
            )
    return found


def style(number: int) -> dict[str, Any]:
    """Return colour and dashes of a curve."""
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": DASHES[number // len(PALETTE) % len(DASHES)],
    }


def thin(series: Series) -> Series:
    """Return at most about POINTS points: the smallest and the largest value of each stretch."""
    size = -(-len(series) // (POINTS // 2))
    if size <= 2:
        return series
    kept = []
    for start in range(0, len(series), size):
        stretch = series[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def draw_losses(runs: list[RunRecord], *, log: bool = False) -> Figure:
    """Draw training losses, raw and smoothed, and evaluation losses of all runs on shared axes."""
    names = _names(runs)
    figure, axes = _axes(_lines(names))
    drawn = []
    for i, (run, label) in enumerate(zip(runs, names, strict=True)):
        series = {name: run.series(name) for name in ("train/loss", "eval/loss")}
        train, evaluation = ([p for p in points if p[1] > 0 or not log] for points in series.values())
        if train:
            steps, losses = zip(*train, strict=True)
            axes.plot(*zip(*thin(train), strict=True), color=style(i)["color"], alpha=0.25, linewidth=1)
            even = thin(list(zip(steps, smooth(list(losses)), strict=True)))
            axes.plot(*zip(*even, strict=True), **style(i), label=_named(label))
        if evaluation:
            dots = {"color": style(i)["color"], "markersize": 5}
            axes.plot(*zip(*evaluation, strict=True), "o", **dots, label=None if train else _named(label))
        drawn += [loss for _, loss in train + evaluation]
    if log:
        axes.set_yscale("log")
        narrow = not drawn or max(drawn) < 30 * min(drawn)
        axes.yaxis.set_major_locator(MaxNLocator(7) if narrow else LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    _label_steps(axes)
    axes.set_ylabel("loss (nats per label token)")
    _add_legend(figure, axes)
    return figure


def draw_gap(runs: list[RunRecord], against: Comparison) -> Figure:
    """Draw smoothed training losses relative to their baselines', over the noise band of the seeds.

    A run has its colour among all `runs`. The axis ignores the first tenth of the steps, where losses fall
    fast, the last twentieth, where few steps are left to smooth over, and spikes (SPIKE).
    """
    names, baselines = _names(runs), {id(run): baseline for run, baseline in against.pairs}
    figure, axes = _axes(1 + _lines([n for run, n in zip(runs, names, strict=True) if id(run) in baselines]))
    curves = []
    if band := noise_band(against.family):
        steps, widths = zip(*band, strict=True)
        label = f"spread of {len(against.family)} seeds"
        axes.fill_between(
            steps, [-w for w in widths], widths, color="0.5", alpha=0.25, linewidth=0, label=label
        )
        curves += [_settled(band), [-width for width in _settled(band)]]
    axes.axhline(0.0, color="black", linewidth=1)
    for i, (run, label) in enumerate(zip(runs, names, strict=True)):
        gap = loss_gap(run, baselines[id(run)]) if id(run) in baselines else []
        if gap:
            dots = {"marker": "o", "markersize": 4} if len(gap) < FEW else {}
            axes.plot(*zip(*thin(gap), strict=True), **style(i), **dots, label=_named(label))
            curves.append(_settled(gap))
    cut = _fit_gaps(axes, [curve for curve in curves if curve])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _label_steps(axes)
    own = any(baseline is not against.reference for baseline in baselines.values())
    axes.set_ylabel(f"loss against {'its baseline' if own else 'the reference'}{' (spikes cut off)' * cut}")
    _add_legend(figure, axes)
    return figure


def _settled(series: Series) -> list[float]:
    return [value for _, value in series[len(series) // 10 : len(series) - len(series) // 20]]


def _fit_gaps(axes: Axes, curves: list[list[float]]) -> bool:
    """Set the y axis to the curves and 0; True if a spike is cut off."""
    gaps = [gap for curve in curves for gap in curve]
    if not gaps:
        return False
    sizes = (sorted(map(abs, curve)) for curve in curves)
    most = SPIKE * max(size[3 * len(size) // 4] for size in sizes) or math.inf
    low, high = min(0, *(max(gap, -most) for gap in gaps)), max(0, *(min(gap, most) for gap in gaps))
    margin = 0.08 * (high - low) or 1e-4
    axes.set_ylim(low - margin, high + margin)
    return max(map(abs, gaps)) > most


Value = Callable[[RunRecord], float | None]


def _metric(name: str) -> tuple[str, Value, str]:
    return METRICS[name].label, lambda run: run.value(summary_name(name)), METRICS[name].format


# Panels of the scaling figures: (title, value of a run, format).
RATES: tuple[tuple[str, Value, str], ...] = (
    _metric("perf/tokens_per_second"),
    ("tokens/s per GPU", lambda run: run.tokens_per_gpu, "{:,.0f}"),
    _metric("perf/mfu_bf16"),
    _metric("perf/peak_memory_gb"),
)
# x axis -> (value of a run, the other axis in a line's name, settings that may vary along a line).
AXES: dict[str, tuple[Callable[[RunRecord], int], Callable[[RunRecord], str], tuple[str, ...]]] = {
    "sequence length": (
        lambda run: run.config["max_seq_length"],
        lambda run: f"{run.gpus} GPU{'s' if run.gpus > 1 else ''}",
        ("max_seq_length", "batch_size"),  # often as many tokens of each length
    ),
    "GPUs": (
        lambda run: run.gpus,
        lambda run: f"{run.config['max_seq_length']:,} tokens",
        ("max_seq_length",),
    ),
}


def scaling(runs: list[RunRecord], axis: str) -> dict[str, list[tuple[int, RunRecord]]]:
    """Return {line: [(x, run), ..]}: runs on GPUs that differ in x and share their work.

    Sharding modes may differ along a line, since one GPU has none. The line's name has other differences
    in work from the default.
    """
    x, rest, along = AXES[axis]
    named: dict[str, list[RunRecord]] = {}
    for run in runs:
        if run.gpus and not run.emulated:
            model = str(run.value("model_name")).rpartition("/")[2]
            named.setdefault(f"{model}, {run.precision} ({run.layers}), {rest(run)}", []).append(run)
    lines: dict[str, list[tuple[int, RunRecord]]] = {}
    for name, members in named.items():
        works = [run.work for run in members]
        varying = [n for n in WORK if n not in along and any(work[n] != works[0][n] for work in works)]
        for run, work in zip(members, works, strict=True):
            own = [f"{n}={work[n]}" for n in varying if work[n] != DEFAULT[n]]
            lines.setdefault(", ".join([name, *own]), []).append((x(run), run))
    several = {line: points for line, points in lines.items() if len({at for at, _ in points}) > 1}
    return {line: sorted(points, key=lambda point: point[0]) for line, points in sorted(several.items())}


def draw_scaling(lines: dict[str, list[tuple[int, RunRecord]]], axis: str) -> Figure:
    """Draw one panel per rate against `axis`. A line joins the largest value of each x."""
    figure = Figure(figsize=(9, 7 + 0.12 * len(lines)), layout="constrained")
    for axes, (title, value, form) in zip(figure.subplots(2, 2).flat, RATES, strict=True):
        for i, (line, points) in enumerate(lines.items()):
            known = [(x, y) for x, run in points if (y := value(run)) is not None]
            largest = dict(sorted(known))
            axes.plot(
                *zip(*known, strict=True) if known else ([], []), "o", color=style(i)["color"], markersize=5
            )
            axes.plot(list(largest), list(largest.values()), **style(i), label=line)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter(form.replace("{", "{x")))
        axes.set(xlabel=axis, ylabel=title)
        axes.set_ylim(bottom=0)
    _add_legend(figure, axes)
    return figure


def draw_coverage(runs: list[RunRecord]) -> Figure:
    """Draw one bar per run: shares of its GEMM FLOPs by precision."""
    names, kinds = _names(runs), list(dict.fromkeys(kind for run in runs for kind in run.coverage))
    figure = Figure(figsize=(9, 1.5 + 0.35 * _lines(names)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(runs)
    for i, kind in enumerate(kinds):
        widths = [run.coverage.get(kind, 0.0) for run in runs]
        axes.barh(range(len(runs)), widths, left=left, color=style(i)["color"], label=_named(kind))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(runs)), names)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of GEMM FLOPs")
    _add_legend(figure, axes)
    return figure


def _axes(lines: int) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 5.5 + 0.12 * lines), layout="constrained")
    return figure, figure.subplots()


def _label_steps(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _names(runs: list[RunRecord]) -> list[str]:
    return [textwrap.fill(label, LABEL_WIDTH) for label in labels(runs)]


def _lines(names: list[str]) -> int:
    return sum(1 + name.count("\n") for name in names)


def _named(label: str) -> str:
    """Return a label that matplotlib shows: it hides those that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label


def _add_legend(figure: Figure, axes: Axes) -> None:
    handles, texts = axes.get_legend_handles_labels()
    if handles:
        columns = 1 if max(len(line) for text in texts for line in text.split("\n")) > LABEL_WIDTH + 1 else 2
        figure.legend(handles, texts, loc="outside lower left", ncols=columns, fontsize=8)
