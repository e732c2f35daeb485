"""Render page.html.j2 to report.html, a file that loads nothing else."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any, NamedTuple

from fp8_suite.benchmarks.records.runs import RunRecord
from fp8_suite.benchmarks.report import gaps
from fp8_suite.benchmarks.report.figures import Drawn
from fp8_suite.benchmarks.report.tables import Table, labels, provenance, settings, tagged
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure


class Verdict(NamedTuple):
    """Verdict of a comparison, as shown at the top of its report."""

    table: Table
    limit: str  # definition of PASS
    notes: list[str]
    baselines: dict[Path, RunRecord | None]  # by run folder, for `gaps.compare_losses`


def render(
    runs: list[RunRecord],
    tables: dict[str, Table],
    figures: dict[str, Drawn],
    losses: gaps.Comparison,
    verdict: Verdict | None = None,
) -> str:
    """Return the HTML page."""
    names = labels(runs)
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
        verdict=verdict,
        tables=tables,
        origins=dict(zip(names, map(provenance, runs), strict=True)),
        figures=[(drawn.section, drawn.caption, data_uri(drawn.figure)) for drawn in figures.values()],
        gap=gap_section(runs, losses),
        settings=settings_section(runs, losses.reference),
    )


def data_uri(figure: Figure) -> str:
    """Return a figure as the data URI of an SVG image."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def gap_section(runs: list[RunRecord], losses: gaps.Comparison) -> dict[str, Any]:
    """Return the content of the section on loss gaps."""
    names = dict(zip(map(id, runs), labels(runs), strict=True))
    rows = []
    for run, baseline in losses.pairs:
        others = ", ".join(gaps.other_settings(run, baseline)) or "none"
        rows.append([names[id(run)], names[id(baseline)], _gap_text(run, baseline), others])
    return {
        "reference": names[id(losses.reference)],
        "headings": [
            *("run", "baseline", "gap of the mean loss over the last 10 % of common steps"),
            "differing settings other than precision",
        ],
        "rows": rows,
        "left_out": losses.left_out,
    }


def _gap_text(run: RunRecord, baseline: RunRecord) -> str:
    for name, record in (("run", run), ("baseline", baseline)):
        if not gaps.ends_finite(record):
            return f"none: the last loss of the {name} is not finite"
    gap = gaps.tail_gap(run, baseline)
    return "none: no common step, or a loss of 0" if gap is None else f"{gap:+.3%}"


def settings_section(runs: list[RunRecord], reference: RunRecord) -> dict[str, Any]:
    """Return equal settings, and differing ones as (text, True if it differs from the reference's)."""
    found, base = [settings(run) for run in runs], settings(reference)
    differing, equal = {}, {}
    for name in dict.fromkeys(name for values in found for name in values):
        values = [each.get(name) for each in found]
        if all(value == values[0] for value in values):
            equal[name] = _text(values[0])
        else:
            differing[name] = [(_text(value), value != base.get(name)) for value in values]
    return {"runs": tagged(runs), "differing": differing, "equal": equal}


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
