"""The run folder: config.json, env.json, metrics.jsonl, checkpoints/, export/, summary.json."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from training.config import Config, changed_settings


def open_run_folder(cfg: Config, model_name: str, recipe: str) -> tuple[Path, FileLock]:
    """Make or reopen the run folder, lock it for this process and write config.json.

    ValueError if it cannot be written to or holds a run of other settings, RuntimeError if another process
    is writing to it.
    """
    given = cfg.checkpoint.output_dir
    stem = f"{model_name}-{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(given) if given else _unused(Path("runs") / stem)
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        _refuse_other_run(cfg, folder)
        write_json(folder / "config.json", cfg.to_dict())
    except Timeout:
        raise RuntimeError(
            f"--output_dir {folder}: another run is writing to it; wait for it, or choose another folder"
        ) from None
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder}: {error.strerror}; choose a folder you can write to"
        ) from None
    return folder, lock


def _refuse_other_run(cfg: Config, folder: Path) -> None:
    # Before its first logged line or checkpoint there is no run to protect, only a command that was refused.
    if not any((folder / name).exists() for name in ("checkpoints", "metrics.jsonl")):
        return
    saved = folder / "config.json"
    try:
        old = json.loads(saved.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"--output_dir {folder}: its config.json is broken ({error}); choose another folder, "
            f"with --resume {folder} to go on from its checkpoints"
        ) from None
    if changed := changed_settings(old, cfg):
        raise ValueError(
            f"--output_dir {folder}: holds another run ({describe_changes(changed)}); "
            "choose another folder, or give the settings it was started with to resume it"
        )
    if cfg.checkpoint.resume == "none":
        raise ValueError(f"--resume none --output_dir {folder}: holds a run already; choose another folder")


def _unused(folder: Path) -> Path:
    names = [folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, 100))]
    return next(name for name in names if not name.exists())


def describe_changes(changed: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"--{name} {old} there, {new} here" for name, (old, new) in changed.items())


def check_resume(meta: dict, cfg: Config, recipe: str, path: Path) -> None:
    """ValueError if the checkpoint belongs to a run of other settings or of another effective recipe."""
    changed = changed_settings(meta["config"], cfg)
    if meta["recipe"] != recipe:
        changed["fp8_scenario"] = (meta["recipe"], recipe)
    if changed:
        raise ValueError(
            f"--resume {path}: was saved with other settings ({describe_changes(changed)}); "
            "give the same ones, or start a new run from its exported model"
        )


def write_json(path: Path, values: dict) -> None:
    """Replace `path` at once, so that a crash leaves the old file or the new one."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")
    aside.replace(path)


def train_losses(folder: Path) -> list[float]:
    """The logged training losses of the whole run, non-finite ones left out."""
    log = folder / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    )
    return [line["train/loss"] for line in lines if isinstance(line.get("train/loss"), float)]
