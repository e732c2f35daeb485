"""Results of evaluations, and their table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from fp8_suite.benchmarks.report.tables import Columns, Table, make_table


@dataclass(frozen=True)
class Result:
    """One measure of one model."""

    measure: str
    value: float
    stderr: float | None  # standard error of the value
    samples: int
    data: str  # equal for models measured on the same samples in the same way
    higher_is_better: bool = True
    note: str | None = None
    scores: tuple[float, ...] = ()  # by sample, for paired differences
    model: str = ""
    export: str = ""  # name of the export in its run folder; "" for other models
    weights: str = ""

    def difference(self, first: Result) -> tuple[float, float] | None:
        """Return the difference to another model's result and its standard error, paired where possible."""
        if self is first or self.stderr is None or first.stderr is None:
            return None
        if self.data == first.data and len(self.scores) > 1:
            gaps = [a - b for a, b in zip(self.scores, first.scores, strict=True)]
            return fmean(gaps), stdev(gaps) / math.sqrt(len(gaps))
        return self.value - first.value, math.hypot(self.stderr, first.stderr)


def results_table(results: list[Result]) -> Table:
    """Return a table of all results, sorted by measure."""
    first = {result.measure: result for result in reversed(results)}
    measures = list(dict.fromkeys(result.measure for result in results))
    columns: Columns = {
        "measure": (lambda result: result.measure, "{}"),
        "model": (lambda result: result.model, "{}"),
        "weights": (lambda result: result.weights, "{}"),
        "value": (lambda result: result.value, "{:.4f}"),
        "standard error": (lambda result: result.stderr, "{:.4f}"),
        "samples": (lambda result: result.samples, "{:,}"),
        "to the first": (
            lambda result: result.difference(first[result.measure]),
            "{0[0]:+.4f} +- {0[1]:.4f}",
        ),
        "note": (lambda result: result.note, "{}"),
    }
    return make_table(columns, sorted(results, key=lambda result: measures.index(result.measure)))
