"""Runs of a comparison or sweep: checked before the first one starts, then trained one after another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8_suite.benchmarks.launch.process import Outcome, is_finished, launch
from fp8_suite.core.errors import EXIT_FAILED, UserError
from fp8_suite.training.config import Config, config_from_dict
from fp8_suite.training.estimate.sizes import check_number_of_ranks, with_data_ranks
from fp8_suite.training.launch import require_inputs

Failures = dict[str, Outcome]  # by name of the run


@dataclass(frozen=True, kw_only=True)
class GridRun:
    """One run of a comparison or sweep."""

    name: str
    cfg: Config
    gpus: int = 1

    @property
    def folder(self) -> Path:
        return Path(self.cfg.checkpoint.output_dir)


def run_config(name: str, settings: dict[str, Any], gpus: int, folder: Path) -> Config:
    """Return the configuration of a run; `folder` is DIR/runs/NAME. UserError, with `name`, if it cannot be.

    On W&B the run is NAME, unless the settings name another.
    """
    tracking = {"wandb_run_name": folder.name} if settings.get("use_wandb") else {}
    try:
        cfg = config_from_dict(tracking | settings | {"output_dir": str(folder)})
        check_number_of_ranks(*with_data_ranks(cfg, gpus))
    except UserError as error:
        raise UserError(f"{name}: {error}", flags=error.flags, exit_code=error.exit_code) from None
    return cfg


def require_all_inputs(runs: Iterable[GridRun]) -> None:
    """Raise UserError if a run lacks its model or data, or if its folder holds a run with other settings."""
    for run in runs:
        if not is_finished(run.cfg):
            require_inputs(run.cfg)


def train_all(
    runs: list[GridRun], folder: Path, why_skip: Callable[[GridRun, Failures], str | None]
) -> Failures:
    """Train all runs that are not finished or skipped; return the outcomes of those that did not finish."""
    os.environ.setdefault("WANDB_RUN_GROUP", folder.resolve().name)
    failures: Failures = {}
    for number, run in enumerate(runs, 1):
        title = f"[{number}/{len(runs)}] {run.name}"
        if is_finished(run.cfg):
            print(f"{title}: finished before", flush=True)
        elif reason := why_skip(run, failures):
            failures[run.name] = Outcome(EXIT_FAILED, run.folder, reason)
            print(f"{title}: skipped, {reason}", flush=True)
        else:
            print(f"{title}: {run.folder}", flush=True)
            outcome = launch(run.cfg, gpus=run.gpus, log=folder / "logs" / f"{run.folder.name}.log")
            failures |= {run.name: outcome} if outcome.code else {}
    return failures
