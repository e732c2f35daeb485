"""The report as one HTML file that loads nothing: tables and figures filled into page.html.j2."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure

from benchmarks.records.runs import RunRecord
from benchmarks.report import gaps, tables, verdict
from benchmarks.report.figures import Drawn

Table = tuple[list[str], list[list[str]]]  # headings, rows


def render(
    runs: list[RunRecord],
    reference: RunRecord,
    figures: dict[str, Drawn],
    result: verdict.Verdict | None = None,
) -> str:
    """Return the page; a comparison's verdict comes first."""
    names = tables.labels(runs)
    losses = {
        title: by_run(tables.statistics(metric), runs) if any(run.logged(metric) for run in runs) else None
        for title, metric in tables.LOSSES.items()
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(
        title=f"Training report: {names[0] if len(runs) == 1 else f'{len(runs)} runs'}",
        emulated=[name for name, run in zip(names, runs, strict=True) if run.emulated],
        verdict=result,
        verdict_table=verdict.cells(result.rows) if result else None,
        runs=by_run(tables.RUNS, runs),
        origins=dict(zip(tables.labels(runs), map(tables.provenance, runs), strict=True)),
        figures=[(drawn.section, drawn.caption, data_uri(drawn.figure)) for drawn in figures.values()],
        gap=gap_section(runs, reference, result.baselines if result else {}),
        losses=losses,
        coverage=by_run(tables.coverage(runs), runs) if any(run.coverage for run in runs) else None,
        hours=by_run(tables.HOURS, runs),
        settings=settings_section(runs, reference),
    )


def by_run(columns: tables.Columns, runs: list[RunRecord]) -> Table:
    """Return a table with a row per run."""
    headings, lines = tables.cells(columns, runs)
    return ["run", *headings], [[name, *line] for name, line in zip(_tagged(runs), lines, strict=True)]


def _tagged(runs: list[RunRecord]) -> list[str]:
    names = tables.labels(runs)
    return [name + " (unfinished)" * (run.summary is None) for name, run in zip(names, runs, strict=True)]


def data_uri(figure: Figure) -> str:
    """Return a figure as an SVG that an <img> shows without loading anything."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def gap_section(
    runs: list[RunRecord], reference: RunRecord, baselines: dict[Path, RunRecord | None]
) -> dict[str, Any]:
    """Return reference, noise, rows and the reasons for runs left out."""
    names = dict(zip(map(id, runs), tables.labels(runs), strict=True))
    against = gaps.comparison(runs, reference, baselines)
    headings = ["run", "against", "gap of the mean of the last 10 % of common steps"]
    headings.append("other settings than precision that differ")
    rows = [
        [
            names[id(run)],
            names[id(baseline)],
            _gap_text(run, baseline),
            ", ".join(gaps.other_settings(run, baseline)) or "none",
        ]
        for run, baseline in against.pairs
    ]
    return {
        "reference": names[id(reference)],
        "seeds": [names[id(run)] for run in against.family],
        "noise": gaps.tail_noise(against.family),
        "table": (headings, rows) if rows else None,
        "left_out": against.left_out,
    }


def _gap_text(run: RunRecord, baseline: RunRecord) -> str:
    if not gaps.ends_finite(run):
        return "none: it does not end finite"
    if not gaps.ends_finite(baseline):
        return "none: its baseline does not end finite"
    gap = gaps.tail_gap(run, baseline)
    return "none: no common step, or a baseline of 0" if gap is None else f"{gap:+.3%}"


def settings_section(runs: list[RunRecord], reference: RunRecord) -> dict[str, Any]:
    """Return settings that differ, with True on those other than the reference's, and equal ones."""
    found, base = [tables.settings(run) for run in runs], tables.settings(reference)
    names = list(dict.fromkeys(name for values in found for name in values))
    differing = [name for name in names if any(values.get(name) != found[0].get(name) for values in found)]
    return {
        "runs": _tagged(runs),
        "differing": {
            name: [(_text(values.get(name)), values.get(name) != base.get(name)) for values in found]
            for name in differing
        },
        "equal": {name: _text(found[0].get(name)) for name in names if name not in differing},
    }


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
