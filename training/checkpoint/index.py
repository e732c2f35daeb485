"""Index of a run's checkpoints: steps on disk, the latest, the best, and deletion of old ones.

    checkpoints/index.json    latest, best, best_eval_loss; steps in the order they were saved

Hidden folders are not checkpoints: `.step_N.partial` is being written, `.step_N.replaced` is the old version
of a step that is being saved again, `.step_N.pruned` is being deleted.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from fp8_suite.core.files import explaining_write_errors, hidden, recover, write_json
from fp8_suite.core.readers import read_json

INDEX = "index.json"
MANIFEST = "manifest.json"  # written last, so a folder with it is a complete checkpoint
STEP = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None."""
    match = STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a folder by step."""
    paths = [path.parent for path in folder.glob(f"step_*/{MANIFEST}")]
    return {step: path for path in paths if (step := step_of(path)) is not None}


@dataclass(frozen=True)
class Index:
    """Content of index.json."""

    steps: list[int]  # in the order they were saved
    eval_losses: dict[int, float]
    rolled_back_to: int | None = None  # step of the last rollback

    @property
    def best(self) -> int | None:
        finite = {step: loss for step, loss in self.eval_losses.items() if math.isfinite(loss)}
        return min(finite, key=finite.__getitem__, default=None)


def read_index(folder: Path) -> Index:
    """Return the index of the checkpoints on disk. UnreadableFile if index.json is damaged."""
    for replaced in folder.glob(".step_*.replaced"):  # from a save that was killed before publishing
        recover(folder / replaced.name[1 : -len(".replaced")])
    steps, losses, rolled_back_to = [], {}, None
    if (folder / INDEX).exists():
        content = read_json(folder / INDEX)
        steps, rolled_back_to = content["steps"], content["rolled_back_to"]
        losses = {int(step): float(loss) for step, loss in content["eval_losses"].items()}
    folders = step_folders(folder)  # read after the index, so a concurrent save only adds newer ones
    # A folder that is not in the index is the newest: its save was killed before the index update.
    steps = [step for step in steps if step in folders] + sorted(folders.keys() - set(steps))
    return Index(steps, {step: loss for step, loss in losses.items() if step in folders}, rolled_back_to)


def write_index(folder: Path, index: Index) -> None:
    """Write index.json. UserError if the disk is full."""
    best = index.best
    content = {
        "latest": step_name(index.steps[-1]),
        "best": None if best is None else step_name(best),
        "best_eval_loss": index.eval_losses.get(best),
        "steps": index.steps,
        "eval_losses": {str(step): loss for step, loss in index.eval_losses.items()},
        "rolled_back_to": index.rolled_back_to,
    }
    with explaining_write_errors(folder / INDEX):
        write_json(folder / INDEX, content)


def latest(folder: Path) -> Path | None:
    """Return the last saved step folder, not verified, or None."""
    steps = read_index(folder).steps
    return folder / step_name(steps[-1]) if steps else None


def prune(folder: Path, index: Index, keep_last: int) -> Index:
    """Delete all but the newest `keep_last` checkpoints and the best one. Return the new index.

    A folder is renamed before deletion, so that no reader sees a half-deleted checkpoint.
    """
    kept = {*index.steps[-keep_last:], index.best}
    for step in index.steps:
        if step not in kept:
            path = folder / step_name(step)
            try:
                os.rename(path, hidden(path, "pruned"))
            except OSError as error:  # training goes on
                warnings.warn(f"cannot delete an old checkpoint: {error}", stacklevel=2)
                kept.add(step)
            shutil.rmtree(hidden(path, "pruned"), ignore_errors=True)  # retried by the next save
    losses = {step: loss for step, loss in index.eval_losses.items() if step in kept}
    return replace(index, steps=[step for step in index.steps if step in kept], eval_losses=losses)
