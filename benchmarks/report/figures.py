"""The figures of a report, for paper (PNG) and for a page in light and dark (SVG)."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from benchmarks.records.runs import DEFAULT, WORK, RunRecord, Series, short_labels, smooth
from benchmarks.report.gaps import Comparison, loss_gap, noise_band

# Okabe and Ito's colours, which most colour-blind people tell apart; without the yellow, too light on paper.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195")
DASHES = ("-", "--", "-.", ":")  # of the first, second .. seven curves
MARKERS = ("o", "s", "^", "D")  # of their evaluations
PAPER = {"axes.prop_cycle": matplotlib.cycler(color=PALETTE), "axes.grid": True, "grid.alpha": 0.3}

# An SVG in a page takes its colours from the page's variables: `to_svg` puts them in for these stand-ins.
INK, GRID = "#010203", "#010204"
STAND_INS = {INK: "var(--ink)", GRID: "var(--line)"}
STAND_INS |= {f"#0103{i:02x}": f"var(--run{i})" for i in range(len(PALETTE))}
PAGE = PAPER | {
    "axes.prop_cycle": matplotlib.cycler(color=[key for key in STAND_INS if key not in (INK, GRID)]),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
    "grid.alpha": 1.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 11,
    "svg.fonttype": "none",
}
POINTS = 800  # of a raw curve at most, since more fit no screen
LABEL_WIDTH = 44  # characters of a line in a legend or beside a bar
LEGEND_WIDTH = 65  # of a label, for two columns of a legend to fit
FEW = 10  # points that a line alone would not show
SPIKE = 10  # times the size that three quarters of the widest curve keep within: what is beyond is cut off


def style(number: int) -> dict[str, Any]:
    """Colour and dashes of the curve of that number."""
    return {
        "color": f"C{number % len(PALETTE)}",
        "linestyle": DASHES[number // len(PALETTE) % len(DASHES)],
    }


def to_svg(figure: Figure, name: str) -> str:
    """The figure as one <svg> element for a page; `name` is unique in it and keeps its ids apart."""
    file = io.StringIO()
    with matplotlib.rc_context(PAGE | {"svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for stand_in, variable in STAND_INS.items():
        text = text.replace(stand_in, variable)
    return text.strip()


def thin(series: Series) -> Series:
    """At most about `POINTS` points: the smallest and the largest value of each stretch."""
    size = -(-len(series) // (POINTS // 2))
    if size <= 2:
        return series
    kept = []
    for start in range(0, len(series), size):
        stretch = series[start : start + size]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


def draw_losses(runs: list[RunRecord], *, log: bool = False, legend: bool = True) -> Figure:
    """Training loss, raw and smoothed, and evaluation loss of all runs on shared axes."""
    names = _names(runs)
    figure, axes = _axes(legend, lines=2 * _lines(names))
    drawn = []
    for i, (run, label) in enumerate(zip(runs, names, strict=True)):
        if train := _positive(run.series("train/loss"), log):
            steps, losses = zip(*train, strict=True)
            axes.plot(*zip(*thin(train), strict=True), color=style(i)["color"], alpha=0.25, linewidth=1)
            even = thin(list(zip(steps, smooth(list(losses)), strict=True)))
            axes.plot(*zip(*even, strict=True), **style(i), label=_named(f"{label}: training, smoothed"))
            drawn += losses
        if evaluation := _positive(run.series("eval/loss"), log):
            points = {"color": style(i)["color"], "label": _named(f"{label}: evaluation"), "markersize": 5}
            marker = MARKERS[i // len(PALETTE) % len(MARKERS)]
            axes.plot(*zip(*evaluation, strict=True), marker, **points)
            drawn += [loss for _, loss in evaluation]
    if log:
        axes.set_yscale("log")
        narrow = not drawn or max(drawn) < 30 * min(drawn)
        axes.yaxis.set_major_locator(MaxNLocator(7) if narrow else LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    _steps(axes)
    axes.set_ylabel("loss (nats per label token)")
    _legend(figure, axes, legend)
    return figure


def _positive(series: Series, log: bool) -> Series:
    return [point for point in series if point[1] > 0] if log else series


def draw_gap(runs: list[RunRecord], against: Comparison, *, legend: bool = True) -> Figure:
    """Smoothed training losses against the baselines', over the noise band of the reference's seeds.

    A run has the same colour as among all `runs`. The axis fits neither the first tenth of the steps, where
    losses fall fast and a gap says little, nor the last twentieth, where few steps are left to smooth over,
    nor a spike (SPIKE), beside which nothing else could be read.
    """
    names, baselines = _names(runs), {id(run): baseline for run, baseline in against.pairs}
    drawn = [name for run, name in zip(runs, names, strict=True) if id(run) in baselines]
    figure, axes = _axes(legend, lines=1 + _lines(drawn))
    curves, band = [], noise_band(against.family)
    if band:
        steps, widths = zip(*band, strict=True)
        label = f"spread of {len(against.family)} seeds"
        axes.fill_between(
            steps, [-w for w in widths], widths, color=_ink(), alpha=0.15, linewidth=0, label=label
        )
        curves += [_settled(band), [-width for width in _settled(band)]]
    axes.axhline(0.0, color=_ink(), linewidth=1)
    for i, (run, label) in enumerate(zip(runs, names, strict=True)):
        gap = loss_gap(run, baselines[id(run)]) if id(run) in baselines else []
        if gap:
            dots = {"marker": "o", "markersize": 4} if len(gap) < FEW else {}
            axes.plot(*zip(*thin(gap), strict=True), **style(i), **dots, label=_named(label))
            curves.append(_settled(gap))
    cut = False
    if found := [value for curve in curves for value in curve]:
        sizes = (sorted(map(abs, curve)) for curve in curves if curve)
        most = SPIKE * max(size[3 * len(size) // 4] for size in sizes) or math.inf
        cut = max(map(abs, found)) > most
        low, high = max(min(found), -most), min(max(found), most)
        margin = 0.08 * (high - low) or 1e-4
        axes.set_ylim(min(low, 0) - margin, max(high, 0) + margin)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _steps(axes)
    own = any(baseline is not against.reference for baseline in baselines.values())
    axes.set_ylabel(
        f"loss against {'its baseline' if own else 'the reference'}{' (spikes cut off)' if cut else ''}"
    )
    _legend(figure, axes, legend)
    return figure


def _settled(series: Series) -> list[float]:
    return [value for _, value in series[len(series) // 10 : len(series) - len(series) // 20]]


# What `scaling` draws: title -> value of a run, its format, and a word for a file's name.
RATES: dict[str, tuple[Callable[[RunRecord], float | None], str, str]] = {
    "tokens/s": (lambda run: run.value("tokens_per_second"), "{x:,.0f}", "tokens_per_second"),
    "tokens/s per GPU": (lambda run: run.tokens_per_gpu, "{x:,.0f}", "tokens_per_second_per_gpu"),
    "MFU (of BF16 peak)": (lambda run: run.value("mfu_bf16"), "{x:.0%}", "mfu"),
    "peak memory, GB per GPU": (lambda run: run.value("peak_memory_gb"), "{x:,.0f}", "memory"),
}
# What they are drawn against: title -> value of a run, what else names its line, what may differ along it.
AXES: dict[str, tuple[Callable[[RunRecord], Any], Callable[[RunRecord], str], tuple[str, ...]]] = {
    "sequence length": (
        lambda run: run.config.get("max_seq_length"),
        lambda run: f"{run.gpus} GPU{'s' if run.gpus > 1 else ''}",
        ("max_seq_length", "batch_size"),  # often as many tokens of each length
    ),
    "GPUs": (
        lambda run: run.gpus,
        lambda run: f"{run.config.get('max_seq_length'):,} tokens",
        ("max_seq_length",),
    ),
}


def scaling(runs: list[RunRecord], axis: str) -> dict[str, list[tuple[int, RunRecord]]]:
    """{line: its runs by x}: one line for each work of which native GPU runs differ in x.

    Emulated runs and runs on a CPU have no place in it. Modes belong to a point, not to a line: one GPU has
    none, and a line from 1 GPU to several is what is asked for. What else of the work is not the same in all
    runs of a name stands in the name, less what is the default.
    """
    x, rest, along = AXES[axis]
    named: dict[str, list[RunRecord]] = {}
    for run in runs:
        if run.gpus and not run.emulated and x(run):
            layers = "TE" if run.value("use_te") else "HF"
            model = str(run.value("model_name")).rpartition("/")[2]
            named.setdefault(f"{model}, {run.precision} ({layers}), {rest(run)}", []).append(run)
    lines: dict[str, list[tuple[int, RunRecord]]] = {}
    for name, members in named.items():
        works = [run.work for run in members]
        other = [n for n in WORK if n not in along and any(work[n] != works[0][n] for work in works)]
        for run, work in zip(members, works, strict=True):
            own = [n for n in other if work[n] != DEFAULT[n]]
            line = ", ".join([name, *(f"{n}={work[n]}" for n in own)])
            lines.setdefault(line, []).append((x(run), run))
    several = {line: points for line, points in lines.items() if len({at for at, _ in points}) > 1}
    return {line: sorted(points, key=lambda point: point[0]) for line, points in sorted(several.items())}


def draw_scaling(
    lines: dict[str, list[tuple[int, RunRecord]]], axis: str, rate: str, *, legend: bool = True
) -> Figure | None:
    """One of RATES against one of AXES; None where no run has told it. A line joins the largest of each x."""
    value, form, _ = RATES[rate]
    figure, axes = _axes(legend, lines=len(lines))
    seen = set()
    for i, (line, points) in enumerate(lines.items()):
        known = [(x, value(run)) for x, run in points if value(run) is not None]
        if known:
            largest = {x: max(y for at, y in known if at == x) for x, _ in known}
            axes.plot(*zip(*known, strict=True), "o", color=style(i)["color"], markersize=5)
            axes.plot(*zip(*largest.items(), strict=True), **style(i), label=line)
            seen |= set(largest)
    if not seen:
        return None
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(seen))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_major_formatter(StrMethodFormatter(form))
    axes.set(xlabel=axis, ylabel=rate)
    axes.set_ylim(bottom=0)
    _legend(figure, axes, legend)
    return figure


def precisions(runs: Iterable[RunRecord]) -> list[str]:
    """Every precision that a GEMM ran in, in the order of first use."""
    return list(dict.fromkeys(precision for run in runs for precision in run.covered))


def draw_coverage(runs: list[RunRecord]) -> Figure:
    """One bar a run: what share of its GEMM FLOPs ran in which precision."""
    names = _names(runs)
    figure = Figure(figsize=(9, 1.5 + 0.35 * _lines(names)), layout="constrained")
    axes = figure.subplots()
    for i, precision in enumerate(precisions(runs)):
        widths = [run.covered.get(precision, 0.0) for run in runs]
        before = [sum(run.covered.get(p, 0.0) for p in precisions(runs)[:i]) for run in runs]
        axes.barh(range(len(runs)), widths, left=before, color=style(i)["color"], label=precision)
    axes.set_yticks(range(len(runs)), names, parse_math=False)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("share of GEMM FLOPs")
    _legend(figure, axes, True)
    return figure


def _axes(legend: bool, lines: int) -> tuple[Figure, Axes]:
    size = (9, 5.5 + 0.12 * lines) if legend else (5.6, 3.5)
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _steps(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _names(runs: list[RunRecord]) -> list[str]:
    """Labels of runs, long ones in several lines, broken where their parts are joined if there is a place."""
    names = []
    for label in short_labels(runs):
        lines = [""]
        for part in re.findall(rf"[+-]?[^+-]{{0,{LABEL_WIDTH - 1}}}", label):
            if lines[-1] and len(lines[-1]) + len(part) > LABEL_WIDTH:
                lines.append("")
            lines[-1] += part
        names.append("\n".join(lines))
    return names


def _lines(names: list[str]) -> int:
    return sum(1 + name.count("\n") for name in names)


def _named(label: str) -> str:
    """matplotlib leaves labels that begin with an underscore out of legends."""
    return f" {label}" if label.startswith("_") else label


def _ink() -> str:
    return matplotlib.rcParams["text.color"]


def _legend(figure: Figure, axes: Axes, wanted: bool) -> None:
    handles = [artist for artist in axes.get_legend_handles_labels()[0] if wanted]
    if handles:
        columns = 1 if max(len(artist.get_label()) for artist in handles) > LEGEND_WIDTH else 2
        shown = figure.legend(handles=handles, loc="outside lower left", ncols=columns, fontsize=8)
        for text in shown.get_texts():
            text.set_parse_math(False)  # a $ in a folder's name is a $
