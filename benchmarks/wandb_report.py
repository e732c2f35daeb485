"""What a comparison came to, as a W&B run of its own beside the runs it compares: table, figures, page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.config import LogConfig
from training.trackers import mode_within_reach, wandb_id, wandb_settings

COLUMNS = ("variant", "status", "against", "reason")


def upload(folder: Path, cfg: LogConfig, rows: Sequence[Any], config: dict[str, Any]) -> bool:
    """Log the verdict's rows, and the PNGs and report.html of `folder`; False, with a warning, if W&B fails.

    The run has the job type `report` and the group of the compared ones; of a folder there is one.
    """
    import wandb

    try:
        mode = mode_within_reach(cfg, folder)
        run = wandb.init(
            project=cfg.wandb_project,
            name=f"{folder.resolve().name}-verdict",
            id=wandb_id(folder)[0],
            resume="allow",
            group=cfg.wandb_group,
            job_type="report",
            mode=mode,
            config=config,
            dir=str(folder),
            settings=wandb_settings(),
        )
        values = list(dict.fromkeys(name for row in rows for name in row.values))
        table = wandb.Table(columns=[*COLUMNS, *values])
        for row in rows:
            table.add_data(*(getattr(row, name) for name in COLUMNS), *(row.values.get(v) for v in values))
        logged: dict[str, Any] = {"report/verdict": table}
        logged |= {f"report/{path.stem}": wandb.Image(str(path)) for path in sorted(folder.glob("*.png"))}
        if (page := folder / "report.html").exists():
            logged["report/page"] = wandb.Html(page.read_text(encoding="utf-8"))
        run.log(logged)
        run.finish()
    except Exception as error:  # the verdict stands on disk; whatever W&B raises must not lose it
        print(f"WARNING: W&B has no report of this comparison ({error})", file=sys.stderr)
        return False
    return True
