"""Heatmaps of FP8 tensor statistics, layers by tensors, one per statistic."""

from __future__ import annotations

import math
import re
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

METRIC = re.compile(r"fp8/(?:.*\.)?layers\.(\d+)\.(.+)/(activation|weight|gradient)/(\w+)")
SHARES = ("underflow", "overflow")  # linear colour scale; other statistics have a logarithmic one

Values = dict[tuple[str, int], float]  # ("module tensor", layer) -> value


def last_casts(records: list[dict[str, Any]]) -> tuple[int, dict[str, Values]] | None:
    """Return the last step with FP8 statistics, and their values by statistic; None if never logged."""
    for record in reversed(records):
        found: dict[str, Values] = {}
        for name, value in record.items():
            if match := METRIC.fullmatch(name):
                layer, module, tensor, statistic = match.groups()
                found.setdefault(statistic, {})[f"{module} {tensor}", int(layer)] = value
        if found:
            return record["step"], found
    return None


def draw_casts(name: str, step: int, statistics: dict[str, Values]) -> Figure:
    """Draw one heatmap per statistic; missing and non-finite values stay blank."""
    layers = 1 + max(layer for values in statistics.values() for _, layer in values)
    figure = Figure(figsize=(5 * len(statistics), min(8.0, 4 + layers / 6)), layout="constrained")
    figure.suptitle(f"{name}: FP8 casts of step {step:,}")
    panels = figure.subplots(1, len(statistics), squeeze=False)[0]
    for axes, (statistic, values) in zip(panels, statistics.items(), strict=True):
        _draw(figure, axes, statistic, values)
    return figure


def _draw(figure: Figure, axes: Axes, statistic: str, values: Values) -> None:
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
