"""The run folder: config.json, env.json, metrics.jsonl, checkpoints/, export/, summary.json."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from training.config import Config, changed_settings


def open_run_folder(cfg: Config, model_name: str, recipe: str) -> Path:
    """Make or reopen the run folder and write config.json.

    ValueError if it cannot be written to, or holds a run of other settings.
    """
    given = cfg.checkpoint.output_dir
    stem = f"{model_name.rstrip('/').split('/')[-1]}-{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(given) if given else _unused(Path("runs") / stem)
    saved = folder / "config.json"
    if saved.exists():
        old = json.loads(saved.read_text(encoding="utf-8"))
        if changed := changed_settings(old, cfg):
            raise ValueError(
                f"--output_dir {folder}: holds another run ({describe_changes(changed)}); "
                "choose another folder, or give the settings it was started with to resume it"
            )
        if cfg.checkpoint.resume == "none":
            raise ValueError(
                f"--resume none --output_dir {folder}: holds a run already; choose another folder"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cfg.save(saved)
    except OSError as error:
        raise ValueError(
            f"--output_dir {folder}: {error.strerror}; choose a folder you can write to"
        ) from None
    return folder


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
    path.write_text(json.dumps(values, indent=2, default=str) + "\n", encoding="utf-8")


def train_losses(folder: Path) -> list[float]:
    """The logged training losses of the whole run, non-finite ones left out."""
    log = folder / "metrics.jsonl"
    lines = (
        [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []
    )
    return [line["train/loss"] for line in lines if isinstance(line.get("train/loss"), float)]
