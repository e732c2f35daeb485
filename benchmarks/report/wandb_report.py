"""Upload a report to W&B as a run with the job type `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.report.tables import Table
from training.tracking.settings import LogConfig
from training.tracking.wandb_writer import start_wandb, wandb_id


def upload(
    folder: Path,
    cfg: LogConfig,
    tables: dict[str, Table],
    figures: list[Path],
    config: dict[str, Any] | None = None,
) -> bool:
    """Log tables, figures and report.html of `folder` to the W&B group of `cfg`.

    Uploading again updates the same W&B run. If W&B fails, print a warning and return False; the report on
    disk is complete.
    """
    try:
        import wandb

        run = start_wandb(
            cfg,
            folder,
            name=f"{folder.resolve().name}-{'verdict' if 'verdict' in tables else 'report'}",
            id=wandb_id(folder, name="wandb_report_id.txt")[0],
            resume="allow",
            job_type="report",
            config=config,
        )
        logged: dict[str, Any] = {
            f"report/{name}": wandb.Table(columns=table.headings, data=table.rows)
            for name, table in tables.items()
            if name != "coverage"  # the coverage figure uses this key
        }
        logged |= {f"report/{path.stem}": wandb.Image(str(path)) for path in figures}
        logged["report/page"] = wandb.Html((folder / "report.html").read_text(encoding="utf-8"))
        run.log(logged)
        run.finish()
    except Exception as error:
        print(f"WARNING: W&B has no report of {folder} ({error})", file=sys.stderr)
        return False
    return True
