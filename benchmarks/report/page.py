"""Render page.html.j2 to report.html, a file that loads nothing else."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.benchmarks.report.figures import Drawn
from fp8_suite.benchmarks.report.judge import Verdict, verdict_table
from fp8_suite.benchmarks.report.tables import Table, labels, provenance, settings, tagged
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure


def render(
    runs: list[RunRecord], tables: dict[str, Table], figures: dict[str, Drawn], verdict: Verdict
) -> str:
    """Return the HTML page. The verdict's answer is at its top."""
    names = labels(runs)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(
        title=f"Training report: {names[runs[0]] if len(runs) == 1 else f'{len(runs)} runs'}",
        emulated=[name for run, name in names.items() if run.emulated],
        verdict=verdict,
        reference=names[verdict.reference],
        verdicts=verdict_table(verdict.results),
        tables=tables,
        origins={name: provenance(run) for run, name in names.items()},
        figures=[(drawn.section, drawn.caption, data_uri(drawn.figure)) for drawn in figures.values()],
        settings=settings_section(runs, verdict.reference),
    )


def data_uri(figure: Figure) -> str:
    """Return a figure as the data URI of an SVG image."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def settings_section(runs: list[RunRecord], reference: RunRecord) -> dict[str, Any]:
    """Return equal settings, and differing ones as (text, True if it differs from the reference's)."""
    rows, base = [settings(run) for run in runs], settings(reference)
    differing, equal = {}, {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if all(value == values[0] for value in values):
            equal[name] = _text(values[0])
        else:
            differing[name] = [(_text(value), value != base.get(name)) for value in values]
    return {"runs": list(tagged(runs).values()), "differing": differing, "equal": equal}


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
