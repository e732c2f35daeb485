"""Steps in a run's checkpoints folder: which exist, which is the latest and the best, which to delete.

    checkpoints/index.json    latest, best, best_eval_loss; steps in the order they were saved

A hidden folder is never a checkpoint: `.step_N.partial` is being written, `.step_N.replaced` is the earlier
version of a step that is saved again, `.step_N.pruned` is being deleted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from core.files import hidden, recover, write_json
from training.checkpoint.manifest import MANIFEST, DamagedCheckpoint, verify_files

INDEX = "index.json"
STEP = re.compile(r"step_(\d{6,})")


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """Step of a checkpoint by its folder's name, or None."""
    match = STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path) -> dict[int, Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {step: path for path in paths if (step := step_of(path)) is not None and path.is_dir()}


@dataclass(frozen=True)
class Index:
    """Content of index.json."""

    steps: list[int] = field(default_factory=list)  # in the order they were saved
    eval_losses: dict[int, float] = field(default_factory=dict)
    went_back: int | None = None  # step that a launch last rolled back to

    @property
    def best(self) -> int | None:
        finite = {step: loss for step, loss in self.eval_losses.items() if math.isfinite(loss)}
        return min(finite, key=finite.__getitem__, default=None)


def read_index(folder: Path) -> Index:
    """Read index.json, empty if there is none; DamagedCheckpoint if it is unreadable."""
    path = folder / INDEX
    if not path.exists():
        return Index()
    try:
        index = json.loads(path.read_bytes())
        losses = {int(step): float(loss) for step, loss in index["eval_losses"].items()}
        return Index([int(step) for step in index["steps"]], losses, index.get("went_back"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path}: unreadable ({type(error).__name__}: {error})") from None


def write_index(folder: Path, index: Index) -> None:
    best = index.best
    content = {
        "latest": step_name(index.steps[-1]),
        "best": None if best is None else step_name(best),
        "best_eval_loss": index.eval_losses.get(best),
        "steps": index.steps,
        "eval_losses": {str(step): loss for step, loss in index.eval_losses.items() if step in index.steps},
        "went_back": index.went_back,
    }
    write_json(folder / INDEX, content)


def index_on_disk(folder: Path) -> Index:
    """Return the index restricted to what is on disk; an unreadable one is rebuilt, with a warning.

    Folders without a manifest sort first, so that they are pruned first.
    """
    try:
        index = read_index(folder)
    except DamagedCheckpoint as error:
        warnings.warn(f"{error}; rebuilt from the folders, earlier eval losses are lost", stacklevel=2)
        index = Index()
    folders = step_folders(folder)
    steps = [step for step in index.steps if step in folders]
    steps += sorted(folders.keys() - set(steps))
    steps.sort(key=lambda step: (folders[step] / MANIFEST).is_file())
    losses = {step: loss for step, loss in index.eval_losses.items() if step in folders}
    return replace(index, steps=steps, eval_losses=losses)


def latest(folder: Path) -> Path | None:
    """Return the step folder saved last, or None; DamagedCheckpoint if the index is unreadable."""
    recover_replaced(folder)
    with suggesting_intact(folder):
        steps = read_index(folder).steps
    folders = step_folders(folder)  # read after the index: a save running meanwhile adds newer ones only
    # A folder missing from the index: the save was killed after publishing it, before updating the index.
    if unknown := folders.keys() - set(steps):
        return folders[max(unknown)]
    return folder / step_name(steps[-1]) if steps else None


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` and the best; renamed first, so none is seen half deleted."""
    index = index_on_disk(folder)
    kept = {*index.steps[-keep_last:], index.best}
    pruned = [folder / step_name(step) for step in index.steps if step not in kept]
    try:
        for path in pruned:
            os.rename(path, hidden(path, "pruned"))
        if pruned:
            write_index(folder, replace(index, steps=[step for step in index.steps if step in kept]))
        for path in pruned:
            shutil.rmtree(hidden(path, "pruned"))
    except OSError as error:
        warnings.warn(f"{folder}: cannot delete an old checkpoint: {error}", stacklevel=2)


def recover_replaced(folder: Path) -> None:
    """Restore the earlier version of a step if a save was killed before publishing the new one."""
    for replaced in folder.glob(".step_*.replaced"):
        recover(folder / replaced.name[1 : -len(".replaced")])


@contextlib.contextmanager
def suggesting_intact(folder: Path, *, other_than: Path | None = None) -> Iterator[None]:
    """Complete a DamagedCheckpoint with the newest intact checkpoint of `folder`, older ones first."""
    try:
        yield
    except DamagedCheckpoint as error:
        intact = _newest_intact(folder, other_than)
        way_out = f"intact: `--resume {intact}`" if intact else f"no intact one is left in {folder}"
        raise DamagedCheckpoint(f"{error}; {way_out}", intact) from None


def _newest_intact(folder: Path, other_than: Path | None) -> Path | None:
    """Newest checkpoint before `other_than` that verifies, else the newest after it."""
    limit = step_of(other_than) if other_than else None
    folders = step_folders(folder)
    for step in sorted(folders, key=lambda step: (limit is None or step < limit, step), reverse=True):
        with contextlib.suppress(DamagedCheckpoint):
            if folders[step] != other_than:
                verify_files(folders[step])
                return folders[step]
    return None
