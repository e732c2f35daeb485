"""A report on W&B: its tables, figures and page as a run of the job type `report`."""

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
    """Log tables, figures, and report.html of `folder` to the group of `cfg`; numbers stay numbers.

    A folder has one such W&B run. If W&B fails, the report on disk remains: returns False after a warning.
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
            if name != "coverage"  # the figure has that key
        }
        logged |= {f"report/{path.stem}": wandb.Image(str(path)) for path in figures}
        logged["report/page"] = wandb.Html((folder / "report.html").read_text(encoding="utf-8"))
        run.log(logged)
        run.finish()
    except Exception as error:
        print(f"WARNING: W&B has no report of {folder} ({error})", file=sys.stderr)
        return False
    return True
