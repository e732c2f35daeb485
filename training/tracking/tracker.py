"""Logging of metrics to metrics.jsonl and, if enabled, to TensorBoard and W&B."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from core.errors import bad_setting
from core.packages import version
from core.redact import redact
from training.tracking.settings import LogConfig
from training.tracking.wandb_writer import WandbWriter, call_with_timeout
from training.tracking.writers import JsonlWriter, TensorBoardWriter

FAILED_RUN_SECONDS = 5.0  # upload timeout of a failed run; less than the watchdog's GRACE_SECONDS


class Tracker:
    """Logs to `record` (the run's files) and to services, whose failures do not stop the run.

    All are writers with log(step, metrics), summary(values) and finish(exit_code). Without `record`, as on
    all ranks but 0, nothing is written.
    """

    def __init__(self, record: Any = None) -> None:
        self._record, self._services = record, {}

    def add_service(self, name: str, build: Callable[[], Any]) -> None:
        """Also log to the writer that `build` returns. After an error it is disabled with a warning."""
        self._guard(name, lambda: self._services.update({name: build()}))

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Log `metrics` of an optimizer step. UserError if metrics.jsonl cannot be written."""
        self._write("log", step, metrics)

    def summary(self, values: dict[str, Any]) -> None:
        """Write the run's final values: summary.json and the summaries of the services."""
        self._write("summary", values)

    def finish(self, exit_code: int = 0) -> None:
        """Close all writers; a non-zero `exit_code` marks the W&B run as failed. Safe to call twice."""
        self._write("finish", exit_code)
        self._record, self._services = None, {}

    def give_up(self, exit_code: int) -> None:
        """Call `finish` with a short timeout, since a failed run still occupies its GPUs."""
        with suppress(Exception):
            call_with_timeout(FAILED_RUN_SECONDS, lambda: self.finish(exit_code))

    def _write(self, method: str, *args: Any) -> None:
        if self._record is not None:
            getattr(self._record, method)(*args)
            for name, writer in list(self._services.items()):
                self._guard(name, partial(getattr(writer, method), *args))

    def _guard(self, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # libraries raise anything
            self._services.pop(name, None)
            text = f"WARNING: {name} failed and is disabled; training continues, metrics.jsonl has everything"
            reason = redact(" ".join(f"{type(error).__name__}: {error}".split()))
            tqdm.write(f"{text} ({reason})", file=sys.stderr)


def replaces_finished_run(run_folder: Path, resume_step: int | None) -> bool:
    """True if this is a new run in a folder that already contains a finished one."""
    return resume_step is None and (run_folder / "summary.json").exists()


def build_tracker(
    cfg: LogConfig,
    run_folder: Path,
    *,
    config: dict[str, Any],
    tags: list[str],
    resume_step: int | None,
    evaluates_again: bool = False,
    enabled: bool = True,
) -> Tracker:
    """Open the run's writers. If not `enabled`, as on all ranks but 0, nothing is written.

    `config` and `tags` go to W&B. `resume_step` is the step of the checkpoint to resume from, or None. Later
    lines of metrics.jsonl move to metrics.discarded.jsonl; with `evaluates_again` so does the evaluation of
    that step. A service that fails is disabled with a warning. UserError if it is not installed.
    """
    if not enabled:
        return Tracker()
    for name, package in (("use_wandb", "wandb"), ("log_dir", "tensorboard")):
        if (value := getattr(cfg, name)) and version(package) is None:
            raise bad_setting(f"{package} is not installed; pip install {package}", **{name: value})
    new = replaces_finished_run(run_folder, resume_step)
    tracker = Tracker(JsonlWriter(run_folder, resume_step, evaluates_again=evaluates_again))
    if cfg.log_dir:  # first, because closing W&B may time out in a failed run
        tracker.add_service("TensorBoard", lambda: TensorBoardWriter(cfg.log_dir, resume_step))
    if cfg.use_wandb:
        tracker.add_service("W&B", lambda: WandbWriter(cfg, run_folder, config, tags, new=new))
    return tracker
