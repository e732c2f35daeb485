"""The run folder: creation, lock, check that all nodes share it, and settings.json."""

from __future__ import annotations

import math
import platform
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout
from fp8_suite.core.errors import EXIT_BAD_SETTING, EXIT_IN_USE, UserError, bad_setting
from fp8_suite.core.files import explaining_write_errors, write_json, write_remedy
from fp8_suite.training.checkpoint.resume import check_folder
from fp8_suite.training.checkpoint.settings import parse_save_interval
from fp8_suite.training.config import Config
from fp8_suite.training.parallel import ranks
from fp8_suite.training.parallel.ranks import print_rank0

SHARED_FOLDER_SECONDS = 5.0  # visibility delay of network file systems


def open_run_folder(cfg: Config, model_name: str, recipe: str) -> tuple[Path, FileLock]:
    """Create or reopen the run folder and lock it for this process.

    UserError if it is not writable, is in use by another process, or holds what `check_folder` refuses.
    """
    stem = f"{model_name}-{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = Path(cfg.checkpoint.output_dir or _first_free(Path("runs") / stem))
    lock = FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        check_folder(cfg, folder, ranks.world_size())
    except Timeout:
        reason = "another run is writing to it; wait for it, or choose another folder"
        message = f"--output_dir {folder}: {reason}"
        raise UserError(message, flags=["output_dir"], exit_code=EXIT_IN_USE) from None
    except OSError as error:
        reason = f"{error.strerror}; {write_remedy(error)}, or choose another folder"
        raise bad_setting(reason, output_dir=folder) from None
    return folder, lock


@contextmanager
def discarded_if_refused(folder: Path, *, is_new: bool) -> Iterator[None]:
    """Delete a new run folder if the run's settings are refused inside."""
    try:
        yield
    except UserError as error:
        if is_new and error.exit_code == EXIT_BAD_SETTING and ranks.rank() == 0:
            for name in ("settings.json", ".lock"):
                (folder / name).unlink(missing_ok=True)
            with suppress(OSError):  # it holds other files
                folder.rmdir()
        raise


def _first_free(folder: Path) -> Path:
    names = [folder, *(folder.with_name(f"{folder.name}-{n}") for n in range(2, 100))]
    return next(name for name in names if not name.exists())


def check_space(folder: Path, size: float, cfg: Config) -> None:
    """Warn if the disk has no room for the run's checkpoints of `size` bytes. UserError if none for one."""
    free, total = shutil.disk_usage(folder).free, cfg.optim.max_steps
    number = cfg.checkpoint.keep_last + 1  # a save needs its room before it deletes the oldest checkpoint
    steps, seconds = parse_save_interval(cfg.checkpoint.save_interval)
    if not seconds and (total or not steps):
        number = min(number, math.ceil(total / steps) if steps else 1)
    if size > free:
        reason = f"a checkpoint takes {size / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free"
        raise bad_setting(f"{reason}; choose another disk, or --no_save_checkpoints", output_dir=folder)
    if number * size > free:
        print_rank0(
            f"WARNING: --keep_last {cfg.checkpoint.keep_last}: the disk of --output_dir has "
            f"{free / 1e9:.1f} GB free; {number} checkpoints of {size / 1e9:.1f} GB do not fit"
        )


def check_shared(folder: Path) -> None:
    """UserError if --output_dir is a different directory on another node. Collective."""
    marker = folder / f".seen.{ranks.run_on_rank0(lambda: uuid.uuid4().hex)}"
    ranks.run_on_rank0(marker.touch)

    def wait_for_marker() -> None:
        deadline = time.monotonic() + SHARED_FOLDER_SECONDS
        while not marker.exists():
            if time.monotonic() > deadline:
                reason = f"not shared with node {platform.node()}; use an absolute path on a shared disk"
                raise bad_setting(reason, output_dir=folder)
            time.sleep(0.1)

    try:
        ranks.run_on_all_ranks(wait_for_marker)
    finally:
        if ranks.rank() == 0:
            marker.unlink()


def write_config(cfg: Config, folder: Path) -> None:
    """Write settings.json with --output_dir set, so that `--config settings.json` resumes the run."""
    with explaining_write_errors(folder / "settings.json"):
        write_json(folder / "settings.json", cfg.to_dict() | {"output_dir": str(folder)})
