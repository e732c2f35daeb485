"""Figures of a report: speed-ups, losses, gaps and FP8 statistics."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from statistics import quantiles
from typing import Any, NamedTuple

from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.benchmarks.report.gaps import loss_gap, smoothed
from fp8_suite.benchmarks.report.judge import Judgement, Result
from fp8_suite.benchmarks.report.tables import labels
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

# The colour-blind-safe palette of Okabe and Ito; violet replaces its yellow, which is too light on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7a5195")
DASHES = ("-", "--", "-.", ":")  # the first seven curves are solid, the next seven dashed, ...
STYLE = {
    "axes.grid": True,
    "grid.alpha": 0.3,
    "text.parse_math": False,  # folder names may contain $
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
}
LABEL_WIDTH = 44  # characters per line of a label

FP8_METRIC = re.compile(r"fp8/(?:.*\.)?layers\.(\d+)\.(.+)/(activation|weight|gradient)/(\w+)")
SHARES = ("underflow", "overflow")  # drawn on a linear colour scale, other statistics on a logarithmic one

CastValues = dict[tuple[str, int], float]  # ("module tensor", layer) -> value


class Drawn(NamedTuple):
    """A figure and where the page shows it."""

    section: str  # id of the section in page.html.j2
    caption: str
    figure: Figure


def draw_all(runs: list[RunRecord], results: list[Result]) -> dict[str, Drawn]:
    """Draw everything that the runs logged; return the figures by file name without suffix."""
    drawn = {}
    if results:
        caption = "Mean gap of the training loss in the last 10 % of steps. Lines: its one-sided 95 % bounds."
        drawn["overview"] = Drawn("overview", caption, draw_overview(results))
        caption = "Gap of the smoothed training loss to the baseline's. The axis may clip start and spikes."
        drawn["gap"] = Drawn("gap", caption, draw_gap(runs, results))
    if any(run.series("train/loss") or run.series("eval/loss") for run in runs):
        caption = "Training loss: logged (pale), moving average over 5 % of the run (bold). Dots: evaluation."
        drawn["loss"] = Drawn("losses", caption, draw_losses(runs))
    for number, (run, label) in enumerate(labels(runs).items(), 1):
        if casts := last_casts(run.records):
            name = "fp8_stats" if len(runs) == 1 else f"fp8_stats_{number}_{run.name}"
            caption = f"{label}: FP8 statistics at step {casts[0]:,}."
            drawn[name] = Drawn("fp8", caption, draw_casts(run.name, *casts))
    return drawn


def style(number: int) -> dict[str, Any]:
    """Return colour, dashes and markers of a curve: a single point has no line."""
    dashes = DASHES[number // len(PALETTE) % len(DASHES)]
    return {"color": PALETTE[number % len(PALETTE)], "linestyle": dashes, "marker": ".", "markersize": 3}


def _step_axes(names: list[str], title: str) -> tuple[Figure, Axes]:
    """Return a figure over optimizer steps, with space for a legend of `names`."""
    figure = Figure(figsize=(9, 5.5 + 0.12 * _lines(names)), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="optimizer step", ylabel=title)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    return figure, axes


def _lines(names: list[str]) -> int:
    return sum(1 + name.count("\n") for name in names)


def _names(labels: Iterable[str]) -> list[str]:
    """Wrap labels for a legend. A leading space keeps matplotlib from hiding labels that start with "_"."""
    return [" " * text.startswith("_") + textwrap.fill(text, LABEL_WIDTH) for text in labels]


def _add_legend(figure: Figure, axes: Axes) -> Figure:
    handles, texts = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, texts, loc="outside lower left", ncols=2, fontsize=8)
    return figure


def draw_overview(results: list[Result]) -> Figure:
    """Draw speed, if a run has any, and the mean loss gap of every result, with its 95 % bounds."""
    judged = {result.run: result for result in results}
    baselines = {result.baseline: result.baseline_name for result in results}
    shown = [run for run in baselines if run not in judged] + list(judged)
    names = baselines | {run: result.name for run, result in judged.items()}
    texts = [textwrap.fill(names[run], LABEL_WIDTH // 2) for run in shown]
    colors = ["0.6" if run in baselines else PALETTE[0] for run in shown]
    rates = [run.tokens_per_gpu for run in shown]
    figure = Figure(figsize=(9, 1 + 0.3 * max(3, _lines(texts))), layout="constrained")
    *left, right = figure.subplots(1, 1 + any(rates), sharey=True, squeeze=False)[0]
    for axes in left:
        factors = [judged[run].speedup if run in judged else None for run in shown]
        factors = [f" ({factor:.2f}x)" if factor else "" for factor in factors]
        speeds = [f"{rate:,.0f}{x}" if rate else "-" for rate, x in zip(rates, factors, strict=True)]
        draw_bars(axes, texts, [rate or 0 for rate in rates], speeds, colors)
        axes.set_xlabel("tokens/s per GPU" if any(run.gpus > 1 for run in shown) else "tokens/s")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.margins(x=0.45)
    draw_gaps(right, texts, [judged[run].training if run in judged else None for run in shown], colors)
    return figure


def draw_gaps(
    axes: Axes, names: Sequence[str], judgements: list[Judgement | None], colors: Sequence[str]
) -> None:
    """Draw the mean gaps in percent, with their 95 % bounds; None is a baseline."""
    means = [judgement and judgement.mean for judgement in judgements]
    texts = ["none" if mean is None else f"{mean:+.2f} %" for mean in means]
    texts = ["baseline" if j is None else text for j, text in zip(judgements, texts, strict=True)]
    axes.use_sticky_edges = False  # texts need space on both sides of 0
    draw_bars(axes, names, [mean or 0 for mean in means], texts, colors)
    for row, judgement in enumerate(judgements):
        if judgement and judgement.bounds:
            axes.plot(judgement.bounds, [row, row], color="black", linewidth=1, marker="|")
    axes.axvline(0.0, color="black", linewidth=1)
    axes.set_xlabel("training loss relative to the baseline, %")


def draw_bars(
    axes: Axes, names: Sequence[str], values: list[float], texts: list[str], colors: Sequence[str]
) -> None:
    """Draw horizontal bars with texts at their ends, the first at the top."""
    bars = axes.barh(range(len(names)), values, color=colors, tick_label=names)
    axes.bar_label(bars, texts, padding=3)
    axes.yaxis.set_inverted(True)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.margins(x=0.3)


def draw_losses(runs: list[RunRecord]) -> Figure:
    """Draw logged and smoothed training losses, and evaluation losses, of all runs."""
    names = _names(labels(runs).values())
    figure, axes = _step_axes(names, "loss (nats per label token)")
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        train, evaluation = run.series("train/loss"), run.series("eval/loss")
        if train:
            axes.plot(*zip(*train, strict=True), color=style(i)["color"], alpha=0.25, linewidth=1)
            axes.plot(*zip(*smoothed(run).items(), strict=True), **style(i), label=name)
        if evaluation:
            label = None if train else name
            dots = {"color": style(i)["color"], "markersize": 5, "label": label}
            axes.plot(*zip(*evaluation, strict=True), "o", **dots)
    return _add_legend(figure, axes)


def draw_gap(runs: list[RunRecord], results: list[Result]) -> Figure:
    """Draw the gaps of the smoothed training losses to the baselines'; colours as in the other figures."""
    baselines = dict(pair for result in results for pair in result.pairs)
    names = _names(labels(runs).values())
    figure, axes = _step_axes(names, "loss relative to the baseline")
    settled = [0.0]  # gaps after the first tenth of the steps, where losses fall fast
    axes.axhline(0.0, color="black", linewidth=1)
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        if run in baselines and (gap := loss_gap(run, baselines[run])):
            axes.plot(*zip(*gap, strict=True), **style(i), label=name)
            settled += [value for _, value in gap[len(gap) // 10 :]]
    low, *_, high = quantiles(settled * 2, n=100)
    margin = 0.3 * (high - low) or 1e-4  # the axis clips spikes
    axes.set_ylim(min(low, 0.0) - margin, max(high, 0.0) + margin)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return _add_legend(figure, axes)


def last_casts(records: list[dict[str, Any]]) -> tuple[int, dict[str, CastValues]] | None:
    """Return the last step that logged FP8 statistics, and its values by statistic; None without any."""
    for record in reversed(records):
        statistics: dict[str, CastValues] = {}
        for name, value in record.items():
            if match := FP8_METRIC.fullmatch(name):
                layer, module, tensor, statistic = match.groups()
                statistics.setdefault(statistic, {})[f"{module} {tensor}", int(layer)] = value
        if statistics:
            return record["step"], statistics
    return None


def draw_casts(name: str, step: int, statistics: dict[str, CastValues]) -> Figure:
    """Draw a heatmap per statistic, layers by tensors; missing and non-finite values are blank."""
    layers = 1 + max(layer for values in statistics.values() for _, layer in values)
    figure = Figure(figsize=(5 * len(statistics), min(8.0, 4 + layers / 6)), layout="constrained")
    figure.suptitle(f"{name}: FP8 statistics at step {step:,}")
    panels = figure.subplots(1, len(statistics), squeeze=False)[0]
    for axes, (statistic, values) in zip(panels, statistics.items(), strict=True):
        _draw_heatmap(figure, axes, statistic, values)
    return figure


def _draw_heatmap(figure: Figure, axes: Axes, statistic: str, values: CastValues) -> None:
    tensors = sorted({tensor for tensor, _ in values})
    layers = range(1 + max(layer for _, layer in values))
    grid = [[values.get((tensor, layer), math.nan) for tensor in tensors] for layer in layers]
    positive = [value for value in values.values() if math.isfinite(value) and value > 0]
    norm = Normalize(0.0, max(positive, default=1.0))
    if statistic not in SHARES and positive:
        norm = LogNorm(min(positive), max(positive) * 1.001)  # LogNorm needs a range
    figure.colorbar(axes.imshow(grid, aspect="auto", interpolation="none", norm=norm), ax=axes)
    axes.set(title=statistic, ylabel="layer", xticks=range(len(tensors)))
    axes.set_xticklabels(tensors, rotation=90, fontsize=7)
    axes.grid(False)
    axes.yaxis.get_major_locator().set_params(integer=True)
