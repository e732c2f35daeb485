"""The run folder: config.json, env.json, metrics.jsonl, wall_time.json, checkpoints/, export/, summary.json.

wall_time.json has what the run cost in all its starts, of one that was killed up to its last log lines.
"""

from __future__ import annotations

import errno
import json
import math
import platform
import time
import uuid
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from core.errors import EXIT_IN_USE, UserError
from core.files import read_record, write_json
from training.config import Config, all_settings, changed_settings
from training.parallel import ranks


def open_run_folder(cfg: Config, model_name: str, recipe: str) -> tuple[Path, FileLock]:
    """Make or reopen the run folder and lock it for this process.

    ValueError if it cannot be written to or holds a run of other settings, UserError with EXIT_IN_USE if
    another process is writing to it.
    """
    given = cfg.checkpoint.output_dir
    stem = f"{model_name}-{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(given) if given else _unused(Path("runs") / stem)
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        _refuse_other_run(cfg, folder)
    except Timeout:
        raise UserError(
            f"--output_dir {folder}: another run is writing to it; wait for it, or choose another folder",
            exit_code=EXIT_IN_USE,
        ) from None
    except OSError as error:
        raise _unwritable("output_dir", folder, error) from None
    if cfg.log.log_dir:  # its writer opens it late, and must not fail a run
        try:
            Path(cfg.log.log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable("log_dir", cfg.log.log_dir, error) from None
    return folder, lock


FOLDER_SECONDS = 5.0  # for a network file system to show what another node wrote


def see_folder(folder: Path) -> None:
    """ValueError where a rank does not see rank 0's folder, but none or another of the same name."""

    def leave() -> str:
        name = f".seen.{uuid.uuid4().hex}"
        (folder / name).touch()
        return name

    mark = folder / ranks.run_on_rank0(leave)

    def look() -> None:
        deadline = time.monotonic() + FOLDER_SECONDS
        while not mark.exists():
            if time.monotonic() > deadline:
                raise ValueError(
                    f"--output_dir {folder}: on {platform.node()} it is not the first rank's; every "
                    "node must reach the same one, so choose a folder on a shared file system, by its "
                    "whole path"
                )
            time.sleep(0.1)

    try:
        ranks.run_on_all_ranks(look)
    finally:
        if ranks.rank() == 0:
            mark.unlink()


def write_config(cfg: Config, folder: Path) -> None:
    """Write config.json, once nothing stands against the run. ValueError if it cannot be written.

    It names the folder, so that a command with this file goes on with the run.
    """
    try:
        write_json(folder / "config.json", cfg.to_dict() | {"output_dir": str(folder)})
    except OSError as error:
        raise _unwritable("output_dir", folder, error) from None


def _unwritable(flag: str, folder: Path | str, error: OSError) -> ValueError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    way = "make room, or choose a folder on another disk" if full else "choose a folder you can write to"
    return ValueError(f"--{flag} {folder}: {error.strerror}; {way}")


def _refuse_other_run(cfg: Config, folder: Path) -> None:
    # Before its first logged line or checkpoint there is no run to protect, only a command that failed.
    log = folder / "metrics.jsonl"
    if not (folder / "checkpoints").exists() and not (log.exists() and log.stat().st_size):
        return
    saved = folder / "config.json"
    try:
        old = json.loads(saved.read_text(encoding="utf-8"))
        if not isinstance(old, dict):
            raise ValueError("it holds no object")
    except (FileNotFoundError, ValueError) as error:
        broken = "is missing" if isinstance(error, FileNotFoundError) else f"is broken ({error})"
        raise ValueError(
            f"--output_dir {folder}: its config.json {broken}; choose another folder, "
            f"with --resume {folder} to go on from its checkpoints"
        ) from None
    _refuse_newer(old, f"--output_dir {folder}")
    changed = changed_settings(old, cfg)
    if (folder / "checkpoints").exists():  # then `check_resume` knows on how many ranks it ran
        changed = {name: values for name, values in changed.items() if name not in SPLIT}
    if changed:
        raise ValueError(
            f"--output_dir {folder}: holds another run ({describe_changes(changed)}); "
            "choose another folder, or give the settings it was started with to resume it"
        )
    if cfg.checkpoint.resume == "none":
        raise ValueError(f"--resume none --output_dir {folder}: holds a run already; choose another folder")


def _refuse_newer(settings: dict[str, Any], where: str) -> None:
    if strange := sorted(settings.keys() - all_settings().keys()):
        raise ValueError(
            f"{where}: was written by another version of this suite, with settings that this one does not "
            f"have ({', '.join(strange)}); go on with that version, or start a new run from its export"
        )


def _unused(folder: Path) -> Path:
    names = [folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, 100))]
    return next(name for name in names if not name.exists())


def describe_changes(changed: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"--{name} {old} there, {new} here" for name, (old, new) in changed.items())


# How a global batch is split may change with the number of ranks, its size only then.
SPLIT = ("batch_size", "gradient_accumulation_steps")


def global_batch(settings: dict[str, Any], world_size: int) -> int:
    """Sequences per optimizer step."""
    return settings["batch_size"] * settings["gradient_accumulation_steps"] * world_size


# A start from another run's checkpoint may choose these anew, after a loss that was not finite, say.
CHOSEN_ANEW = ("learning_rate", "lr_scheduler", "min_lr_ratio", "weight_decay", "max_grad_norm")


def check_resume(
    meta: dict, cfg: Config, recipe: str, path: Path, world_size: int, *, of_another_run: bool = False
) -> str | None:
    """ValueError if the checkpoint belongs to a run of other settings or of another effective recipe.

    Returns what the user should know of a global batch that changes with the number of ranks, and of other
    settings that are allowed.
    """
    if "total_steps" not in meta:
        raise ValueError(
            f"--resume {path}: an older version of this suite saved it; start from that run's export"
        )
    _refuse_newer(meta["config"], f"--resume {path}")
    changed, anew = changed_settings(meta["config"], cfg), {}
    if of_another_run:
        anew = {name: changed.pop(name) for name in CHOSEN_ANEW if name in changed}
    old, new = global_batch(meta["config"], meta["world_size"]), global_batch(cfg.to_dict(), world_size)
    split = {name: changed.pop(name) for name in SPLIT if name in changed}
    if old != new and (split or meta["world_size"] == world_size):
        changed |= split
    if meta["recipe"] != recipe:
        changed["fp8_scenario"] = (meta["recipe"], recipe)
    if changed:
        raise ValueError(
            f"--resume {path}: was saved with other settings ({describe_changes(changed)}); "
            "give the same ones, or start a new run in another --output_dir from the model that the old "
            f"settings with --max_steps {meta['progress']['step']} export"
        )
    notice = [f"from {path} on with other settings: {describe_changes(anew)}"] if anew else []
    if old != new:
        notice.append(
            f"WARNING: saved on {meta['world_size']} ranks with a global batch of {old} sequences, which is "
            f"{new} on {world_size}: steps and learning rate follow the new one. To keep {old}, change "
            "--gradient_accumulation_steps or --batch_size"
        )
    return "\n".join(notice) or None


def train_losses(folder: Path) -> list[float]:
    """The logged training losses of the whole run, non-finite ones left out."""
    log = folder / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    )
    return [line["train/loss"] for line in lines if isinstance(line.get("train/loss"), float)]


KEEP_SECONDS = 30.0  # at least, between two log lines that wait for the wall time to be on disk


class WallTime:
    """What a run costs, added up in a trainer's `progress` and in the folder, over all its starts.

    GPUs and nodes may be others after a resume, so their hours add up here too.
    """

    SUMS = ("wall_seconds", "gpu_seconds", "node_seconds")

    def __init__(self, folder: Path, progress: Any, started: float, *, gpus: int, nodes: int):
        self.path, self.progress, self.counted = folder / "wall_time.json", progress, started
        self.gpus, self.nodes = gpus, nodes
        self.kept = -math.inf

    def take(self) -> None:
        """Raise what `progress` has from a checkpoint; as sums over all starts none counts twice."""
        kept = read_record(self.path)
        for name in self.SUMS:
            before = kept.get(name)
            if isinstance(before, int | float):
                setattr(self.progress, name, max(before, getattr(self.progress, name)))

    def count(self, *, keep: bool = True) -> None:
        """Up to now; the folder gets it for the next start: at once if told to `keep` it, or now and then."""
        now = time.perf_counter()
        seconds, self.counted = now - self.counted, now
        self.progress.wall_seconds += seconds
        self.progress.gpu_seconds += seconds * self.gpus
        self.progress.node_seconds += seconds * self.nodes
        if ranks.rank() == 0 and (keep or now - self.kept > KEEP_SECONDS):
            self.kept = now
            with suppress(OSError):  # a disk that is full is told of by what must be written
                write_json(self.path, {name: getattr(self.progress, name) for name in self.SUMS})
