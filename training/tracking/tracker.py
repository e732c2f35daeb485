"""Logging of metrics to metrics.jsonl and summary.json and, if enabled, to TensorBoard and W&B."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fp8_suite.core.errors import bad_setting
from fp8_suite.core.files import explaining_write_errors, replace_file, to_json
from fp8_suite.core.packages import version
from fp8_suite.core.readers import parse_json, read_record
from fp8_suite.core.redact import redact
from fp8_suite.training.tracking.settings import LogConfig
from fp8_suite.training.tracking.wandb_writer import WandbWriter, call_with_timeout

FAILED_RUN_SECONDS = 5.0  # upload timeout of a failed run; less than the watchdog's GRACE_SECONDS


class Tracker:
    """Logs to `record` (the run's files) and to services, whose failures do not stop the run.

    Each is a writer with log(step, metrics), summary(values) and finish(exit_code). Without `record`, as on
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
            print(f"{text} ({reason})", file=sys.stderr, flush=True)


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
) -> Tracker:
    """Open the run's writers. Call on rank 0.

    `config` and `tags` go to W&B. `resume_step` is the step of the checkpoint to resume from, or None. Later
    lines of metrics.jsonl move to metrics.discarded.jsonl; with `evaluates_again` so does the evaluation of
    that step. A service that fails is disabled with a warning. UserError if it is not installed.
    """
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


class JsonlWriter:
    """Writer of metrics.jsonl and summary.json. A line is an object: step, time (Unix seconds), metrics."""

    def __init__(self, run_folder: Path, resume_step: int | None, *, evaluates_again: bool = False) -> None:
        self._path, self._summary_path = run_folder / "metrics.jsonl", run_folder / "summary.json"
        with explaining_write_errors(self._path):
            run_folder.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            step = -1 if resume_step is None else resume_step
            _discard_after(self._path, step, evaluation=evaluates_again)
            if self._summary_path.exists():  # a stale summary must not look like this launch's
                self._summary_path.replace(run_folder / "summary.previous.json")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        line = to_json({"step": step, "time": round(time.time(), 3), **metrics}) + b"\n"
        with explaining_write_errors(self._path), self._path.open("ab") as file:
            file.write(line)

    def summary(self, values: dict[str, Any]) -> None:
        with explaining_write_errors(self._summary_path):
            replace_file(self._summary_path, to_json(values, indent=2) + b"\n")

    def finish(self, exit_code: int) -> None: ...


def amend_summary(run_folder: Path, values: dict[str, Any]) -> None:
    """Add values to the summary.json of a finished run."""
    path = run_folder / "summary.json"
    with explaining_write_errors(path):
        replace_file(path, to_json(read_record(path) | values, indent=2) + b"\n")


def train_losses(run_folder: Path) -> list[float]:
    """Return the finite training losses logged so far, over all launches."""
    losses = (record.get("train/loss") for _, record in read_lines(run_folder / "metrics.jsonl"))
    return [loss for loss in losses if isinstance(loss, float)]


def _discard_after(path: Path, step: int, *, evaluation: bool) -> None:
    """Move lines after `step` to metrics.discarded.jsonl; with `evaluation` also the eval of `step`.

    They are copied before they are removed, so that a kill loses none.
    """
    kept, discarded = [], []
    for line, record in read_lines(path):
        repeated = evaluation and record["step"] == step and "eval/loss" in record
        (discarded if repeated or record["step"] > step else kept).append(line)
    if discarded:
        with path.with_name("metrics.discarded.jsonl").open("ab") as file:
            file.writelines(discarded)
    if (content := b"".join(kept)) != path.read_bytes():
        replace_file(path, content)


def read_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return (line, record) pairs of a metrics.jsonl, [] without one.

    Skips other lines, such as those cut by a killed process or a full disk.
    """
    complete = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            record = parse_json(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                complete.append((line + b"\n", record))
    return complete


class TensorBoardWriter:
    """Writer of TensorBoard event files. A resume hides earlier events after `resume_step`."""

    def __init__(self, log_dir: str, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir, purge_step=None if resume_step is None else resume_step + 1)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def summary(self, values: dict[str, Any]) -> None:
        self._writer.add_text("summary", "\n".join(f"    {key}: {value}" for key, value in values.items()))

    def finish(self, exit_code: int) -> None:
        self._writer.close()
