"""Logging of a run's metrics: to metrics.jsonl always, to TensorBoard and W&B on request."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from core.errors import UserError
from core.redact import redact
from training.tracking.settings import LogConfig
from training.tracking.wandb_writer import WandbWriter, call_with_timeout
from training.tracking.writers import JsonlWriter, Metrics, TensorBoardWriter

FAILED_RUN_SECONDS = 5.0  # for a failed run's uploads; below the watchdog's GRACE_SECONDS


class Tracker:
    """Logs to `record`, the run's own files, and to `mirrors`, services whose failure must not stop the run.

    Each is a writer with log(step, metrics), summary(values) and finish(exit_code). The first error of a
    mirror is reported and disables it. Without a record nothing is written, as on every rank but 0.
    """

    def __init__(self, record: Any = None, mirrors: dict[str, Any] | None = None) -> None:
        self._record, self._mirrors = record, mirrors or {}

    def log(self, step: int, metrics: Metrics) -> None:
        """Record `metrics` at an optimizer step. UserError if metrics.jsonl cannot be written."""
        self._write("log", step, metrics)

    def summary(self, values: dict[str, Any]) -> None:
        """Write the run's final values: summary.json and the summaries of the services."""
        self._write("summary", values)

    def finish(self, exit_code: int = 0) -> None:
        """Close all writers; a non-zero `exit_code` marks the W&B run as failed. Safe to call twice."""
        self._write("finish", exit_code)
        self._record, self._mirrors = None, {}

    def give_up(self, exit_code: int) -> None:
        """`finish` within seconds, for a failed run: it still holds its GPUs, and maybe other ranks."""
        with suppress(Exception):
            call_with_timeout(FAILED_RUN_SECONDS, self.finish, exit_code)

    def _write(self, method: str, *args: Any) -> None:
        if self._record is None:
            return
        getattr(self._record, method)(*args)
        for name, mirror in list(self._mirrors.items()):
            try:
                getattr(mirror, method)(*args)
            except Exception as error:  # of any library
                del self._mirrors[name]
                _warn_disabled(name, error)


def _warn_disabled(name: str, error: Exception) -> None:
    reason = redact(" ".join(f"{type(error).__name__}: {error}".split()))
    text = f"WARNING: {name} failed and is disabled. Training continues; metrics.jsonl has everything."
    tqdm.write("\n".join(["!" * 100, text, reason, "!" * 100]), file=sys.stderr)


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
    """Open the run's writers; nothing is written unless `enabled`, as on every rank but 0.

    `config` and `tags` go to W&B. `resume_step` is the step of the checkpoint that the run resumes from, or
    None: later lines of metrics.jsonl move to metrics.discarded.jsonl, and with `evaluates_again` also that
    step's evaluation. UserError if a requested service is not installed; one that fails is disabled.
    """
    if not enabled:
        return Tracker()
    if cfg.use_wandb:
        _require("--use_wandb", "wandb", "wandb", "init")
    if cfg.log_dir:
        _require(f"--log_dir {cfg.log_dir}", "tensorboard", "torch.utils.tensorboard", "SummaryWriter")
    new = replaces_finished_run(run_folder, resume_step)
    purge_step = resume_step + 1 if resume_step is not None else None
    if resume_step is None and (run_folder / "metrics.jsonl").exists():
        purge_step = 0  # hides an earlier launch; without one, other runs may log to the same folder
    record = JsonlWriter(run_folder, resume_step, evaluates_again=evaluates_again)
    services = {  # closed in this order: W&B's uploads may be given up
        "TensorBoard": (cfg.log_dir, lambda: TensorBoardWriter(cfg.log_dir, purge_step)),
        "W&B": (cfg.use_wandb, lambda: WandbWriter(cfg, run_folder, config, tags, new=new)),
    }
    mirrors = {}
    for name, (requested, build) in services.items():
        if requested:
            try:
                mirrors[name] = build()
            except Exception as error:  # of any library
                _warn_disabled(name, error)
    return Tracker(record, mirrors)


def _require(flag: str, package: str, module: str, attribute: str) -> None:
    try:
        # A stray folder of the package's name imports too (W&B creates one), hence the attribute.
        getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{flag}: {package} is not usable ({error}); run: pip install {package}") from None
