"""Writers of metrics to metrics.jsonl with summary.json, and to TensorBoard.

Reports read metrics.jsonl.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.files import explaining_write_errors, replace_file, to_json


class JsonlWriter:
    """Writer of metrics.jsonl and summary.json. A line is an object: step, time (Unix seconds), metrics."""

    def __init__(self, run_folder: Path, resume_step: int | None, *, evaluates_again: bool = False) -> None:
        self._path, self._summary_path = run_folder / "metrics.jsonl", run_folder / "summary.json"
        with explaining_write_errors(self._path):
            run_folder.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            _discard_after(self._path, -1 if resume_step is None else resume_step, evaluation=evaluates_again)
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


def _discard_after(path: Path, step: int, *, evaluation: bool) -> None:
    """Move lines after `step` to metrics.discarded.jsonl; with `evaluation` also the eval of `step`.

    They are copied before they are removed, so that a kill loses none.
    """
    kept, discarded = [], []
    for line, record in _complete_lines(path):
        repeated = evaluation and record["step"] == step and "eval/loss" in record
        (discarded if repeated or record["step"] > step else kept).append(line)
    if discarded:
        with path.with_name("metrics.discarded.jsonl").open("ab") as file:
            file.writelines(discarded)
    if (content := b"".join(kept)) != path.read_bytes():
        replace_file(path, content)


def _complete_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Return (line, object) pairs. Skip partial lines, left by a killed process or a full disk."""
    complete = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            complete.append((line + b"\n", json.loads(line)))
    return complete


class TensorBoardWriter:
    """Writer of TensorBoard event files. A resume hides earlier events after `resume_step`."""

    def __init__(self, log_dir: str, resume_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir, purge_step=None if resume_step is None else resume_step + 1)

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)

    def summary(self, values: dict[str, Any]) -> None:
        self._writer.add_text("summary", "\n".join(f"    {key}: {value}" for key, value in values.items()))

    def finish(self, exit_code: int) -> None:
        self._writer.close()
