"""The record of a measurement: a table, and record.json, which benchmarks.records.add takes."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.records.runs import read_run
from fp8_suite.benchmarks.records.table import ENVIRONMENT, RECORD
from fp8_suite.benchmarks.report.tables import Columns, make_table, markdown, provenance
from fp8_suite.core.files import write_json

COLUMNS: Columns = {
    "saves": ("kind", "{}"),
    "GB": ("gb", "{:.2f}"),
    "s to publish": ("published", "{:.2f}"),
    "GB/s": ("gb_per_second", "{:.2f}"),
    "of direct": ("share_of_direct", "{:.0%}"),
    "s added": ("added", "{:.2f}"),
    "host waits, s": ("blocked", "{:.2f}"),
    "s added, first": ("added_first", "{:.2f}"),
    "steps beside a save": ("slowdown", "{:+.1%}"),
    "step, s": ("step_seconds", "{:.4f}"),
    "steps a save": ("steps", "{}"),
}


class Row(dict):
    """A row of results, as `make_table` reads it."""

    value = dict.get


def write_record(folder: Path, disk: dict[str, float | None], results: list[dict[str, Any]]) -> str:
    """Write record.json of the run in `folder`, and return its text."""
    run = read_run(folder)
    direct = disk["direct"] and disk["direct"] / 1e9
    for row in results:
        row["share_of_direct"] = direct and row["gb_per_second"] / direct
    arguments = shlex.split(run.environment["command"])[1:]
    table = make_table(COLUMNS, [Row(row) for row in results])
    rates = f"direct writes {direct:.2f} GB/s" if direct else "no direct writes"
    text = "\n".join(
        [
            f"$ python -m benchmarks.saves {shlex.join(arguments)}",
            f"{provenance(run)}, {run.environment['platform']}, {run.environment['cpu_count']} CPUs",
            f"disk: {rates}, buffered writes with fsync {disk['buffered'] / 1e9:.2f} GB/s",
            f"{run.value('model_name')}, {run.precision}, {run.value('optimizer')}, {run.mode}",
            "",
            markdown(table.headings, table.texts),
        ]
    )
    environment = {
        name: run.environment[name]
        for name in ("platform", "cpu_count", *ENVIRONMENT)
        if name in run.environment and name not in ("coverage", "data")
    }
    record = {"text": text, "disk_bytes_per_second": disk, "saves": results, "environment": environment}
    write_json(folder / RECORD, record)
    return text
