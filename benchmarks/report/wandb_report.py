"""A report on W&B: its tables, figures and page as a run of the job type `report`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.records.runs import RunRecord
from benchmarks.report import tables
from benchmarks.report.verdict import Row
from training.tracking.settings import LogConfig
from training.tracking.wandb_writer import start_wandb, wandb_id

COLUMNS = ("variant", "status", "against", "reason")


def upload(
    folder: Path,
    cfg: LogConfig,
    runs: list[RunRecord],
    figures: list[Path],
    rows: Sequence[Row] = (),
    config: dict[str, Any] | None = None,
) -> bool:
    """Log tables, the verdict's rows, figures, and report.html of `folder` to the group of `cfg`.

    A folder has one such W&B run. If W&B fails, the report on disk remains: returns False after a warning.
    """
    try:
        import wandb

        run = start_wandb(
            cfg,
            folder,
            name=f"{folder.resolve().name}-{'verdict' if rows else 'report'}",
            id=wandb_id(folder, name="wandb_report_id.txt")[0],
            resume="allow",
            job_type="report",
            config=config,
        )
        logged: dict[str, Any] = {
            f"report/{name}": wandb.Table(columns=columns, data=data)
            for name, (columns, data) in _tables(runs, rows).items()
        }
        logged |= {f"report/{path.stem}": wandb.Image(str(path)) for path in figures}
        if (page := folder / "report.html").exists():
            logged["report/page"] = wandb.Html(page.read_text(encoding="utf-8"))
        run.log(logged)
        run.finish()
    except Exception as error:
        print(f"WARNING: W&B has no report of {folder} ({error})", file=sys.stderr)
        return False
    return True


def _tables(runs: list[RunRecord], rows: Sequence[Row]) -> dict[str, tuple[list[str], list[list[Any]]]]:
    """Return {name: (headings, lines)}, numbers as numbers, so that W&B can sort and plot them."""
    named = {"runs": tables.RUNS, "hours": tables.HOURS}
    named |= {f"{title}_loss": tables.statistics(metric) for title, metric in tables.LOSSES.items()}
    found = {}
    for name, columns in named.items():
        values = {"run": tables.labels(runs)} | tables.values(columns, runs)
        found[name] = list(values), [list(line) for line in zip(*values.values(), strict=True)]
    if rows:
        names = list(dict.fromkeys(name for row in rows for name in row.values))
        lines = [[*(getattr(r, c) for c in COLUMNS), *(r.values.get(n) for n in names)] for r in rows]
        found["verdict"] = [*COLUMNS, *names], lines
    return found
