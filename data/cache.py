"""The folder that rows and their tokens are stored in, and what to say where it cannot be written or read."""

from __future__ import annotations

import errno
import logging
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from datasets import Dataset, IterableDataset
from huggingface_hub.constants import HF_HUB_CACHE

from core.errors import first_line, origins, raise_interrupt
from data.settings import DataConfig

FULL = {errno.ENOSPC, errno.EDQUOT}
CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}
END = b"\xff\xff\xff\xff\0\0\0\0"  # of an Arrow stream that was closed

logger = logging.getLogger(__name__)


def cache_folder(cfg: DataConfig) -> Path:
    return Path(cfg.data_cache_dir or datasets.config.HF_DATASETS_CACHE)


def check_cache(cfg: DataConfig) -> None:
    """ValueError if the folder cannot be made, or no file in it."""
    folder = cache_folder(cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(_cannot_write(cfg, error)) from None


class NotStored(RuntimeError):
    """Rows that the cache cannot take, or has lost."""


def why_not_stored(cfg: DataConfig, error: BaseException) -> NotStored | None:
    """What to raise for an error of the cache: full, read-only, or rows cut off there; None for any other."""
    folder = str(cache_folder(cfg))
    for origin in origins(error):
        if not isinstance(origin, OSError):
            continue
        if _is_full(origin) and origin.filename and folder not in str(origin):  # semaphores', say
            return NotStored(f"{first_line(origin)}; make room there")
        if _is_full(origin) or (origin.errno in CLOSED and folder in str(origin)):
            return NotStored(_cannot_write(cfg, origin))
    return _why_cut_off(_files_read(error))


def refuse_cut_off(rows: Dataset | IterableDataset) -> None:
    """NotStored if rows that are read from the cache are not whole."""
    if isinstance(rows, Dataset) and (
        reason := _why_cut_off(Path(file["filename"]) for file in rows.cache_files)
    ):
        raise reason


def _why_cut_off(files: Iterable[Path]) -> NotStored | None:
    for file in files:
        if not is_whole(file):
            return NotStored(
                f"{file}: stored rows that are cut off or missing; delete the folder {file.parent}, and they "
                "are prepared again"
            )
    return None


def is_whole(file: Path) -> bool:
    """Whether an Arrow file is there to its end; cut between two batches it is read without an error."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - len(END)))
        return opened.read() == END


def delete_cut_off(folder: Path) -> None:
    """Delete those files of tokens in `folder` that are not whole, so that they are made again."""
    for file in folder.glob("cache-*.arrow"):
        if not is_whole(file):
            logger.warning("%s: is cut off; deleted, and its rows are tokenised again", file)
            file.unlink(missing_ok=True)


@contextmanager
def storing(cfg: DataConfig) -> Iterator[None]:
    """Inside, `datasets` may write to the cache: NotStored if it cannot; an interrupt stays one."""
    try:
        yield
    except Exception as error:
        raise_interrupt(error)
        if (reason := why_not_stored(cfg, error)) is not None:
            raise reason from error
        raise


def _files_read(error: BaseException) -> Iterator[Path]:
    """The Arrow files that `datasets` was reading when an error came, which does not name them itself."""
    for origin in origins(error):
        for frame, _ in traceback.walk_tb(origin.__traceback__):
            name = frame.f_locals.get("filename")
            if isinstance(name, str) and name.endswith(".arrow"):
                yield Path(name)


def _is_full(error: OSError) -> bool:
    """Whether writing met a full disk or quota, or `datasets` refused to begin."""
    return error.errno in FULL or str(error).startswith("Not enough disk space")


def _cannot_write(cfg: DataConfig, error: OSError) -> str:
    reason = f"{error.strerror or first_line(error)}; {'make room there, or ' if _is_full(error) else ''}"
    frames = traceback.extract_tb(error.__traceback__)
    if any("huggingface_hub" in Path(frame.filename).parts for frame in frames):  # it has one folder for all
        return f"the download cache {HF_HUB_CACHE}: {reason}set HF_HUB_CACHE to a folder you can write to"
    if cfg.data_cache_dir is None:
        folder = cache_folder(cfg)
        return f"the Hugging Face cache {folder}: {reason}give --data_cache_dir a folder you can write to"
    return f"--data_cache_dir {cfg.data_cache_dir}: {reason}choose a folder you can write to"
