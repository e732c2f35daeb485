"""Index of a run's checkpoints: steps on disk, the latest, the best, and deletion of old ones.

    checkpoints/index.json    latest, best, best_eval_loss; steps in the order they were saved

Hidden folders are not checkpoints: `.step_N.partial` is being written, `.step_N.replaced` is the old version
of a step that is being saved again, `.step_N.pruned` is being deleted.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from fp8_suite.core.files import explaining_write_errors, hidden, recover, write_json
from fp8_suite.core.readers import UnreadableFile, read_json
from fp8_suite.training.checkpoint.manifest import MANIFEST, DamagedCheckpoint, verify_files

INDEX = "index.json"
STEP = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint folder's name, or None."""
    match = STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> dict[int, Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {step: path for path in paths if (step := step_of(path)) is not None and path.is_dir()}


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


def read_index(folder: Path, *, rebuild: bool = False) -> Index:
    """Return the index of the checkpoints on disk.

    DamagedCheckpoint if index.json is unreadable; with `rebuild` only a warning, since a save must not fail.
    """
    for replaced in folder.glob(".step_*.replaced"):  # from a save that was killed before publishing
        recover(folder / replaced.name[1 : -len(".replaced")])
    path = folder / INDEX
    steps, losses, rolled_back_to = [], {}, None
    try:
        if path.exists():
            content = read_json(path)
            steps = [int(step) for step in content["steps"]]
            losses = {int(step): float(loss) for step, loss in content["eval_losses"].items()}
            rolled_back_to = content["rolled_back_to"]
    except (UnreadableFile, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = getattr(error, "reason", f"{type(error).__name__}: {error}")
        if not rebuild:
            remedy = "delete it to continue from the last step, without its earlier eval losses"
            raise DamagedCheckpoint(f"{path}: unreadable ({reason}); {remedy}") from None
        problem = f"{path}: unreadable ({reason}); rebuilt from the folders, without eval losses"
        warnings.warn(problem, stacklevel=2)
        steps, losses = [], {}
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

    Incomplete checkpoints count as the oldest. A folder is renamed before deletion, so that no reader sees a
    half-deleted checkpoint.
    """
    steps = sorted(index.steps, key=lambda step: (folder / step_name(step) / MANIFEST).is_file())
    kept = {*steps[-keep_last:], index.best}
    for step in steps:
        if step not in kept:
            path = folder / step_name(step)
            try:
                os.rename(path, hidden(path, "pruned"))
            except OSError as error:
                warnings.warn(f"cannot delete an old checkpoint: {error}", stacklevel=2)
                kept.add(step)
            shutil.rmtree(hidden(path, "pruned"), ignore_errors=True)  # retried by the next save
    losses = {step: loss for step, loss in index.eval_losses.items() if step in kept}
    return replace(index, steps=[step for step in steps if step in kept], eval_losses=losses)


def verify(path: Path, names: Iterable[str] | None = None) -> dict:
    """Call `verify_files` on a checkpoint. Its error names an intact checkpoint to resume from.

    Suggests the newest intact one older than `path`, else the newest after it.
    """
    try:
        return verify_files(path, names)
    except DamagedCheckpoint as error:
        folders, limit = step_folders(path.parent), step_of(path) or math.inf
        for step in sorted(folders, key=lambda step: (step < limit, step), reverse=True):
            if folders[step] != path and is_intact(folders[step]):
                raise DamagedCheckpoint(f"{error}; intact: `--resume {folders[step]}`") from None
        raise DamagedCheckpoint(f"{error}; no intact checkpoint is left in {path.parent}") from None


def is_intact(path: Path) -> bool:
    """True if every file of the checkpoint matches its manifest."""
    with contextlib.suppress(DamagedCheckpoint):
        return bool(verify_files(path))
    return False
