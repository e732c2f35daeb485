"""The folder that keeps rows and their tokens between runs, and errors of writing to it."""

from __future__ import annotations

import errno
import logging
import tempfile
from pathlib import Path

import datasets
from huggingface_hub.constants import HF_HUB_CACHE

from core.errors import UserError, bad_setting, origins
from data.settings import DataConfig

FULL = {errno.ENOSPC, errno.EDQUOT}
CLOSED = {errno.EROFS, errno.EACCES, errno.EPERM}
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # last bytes of an Arrow stream that was closed

logger = logging.getLogger(__name__)


def cache_folder(cfg: DataConfig) -> Path:
    return Path(cfg.data_cache_dir or datasets.config.HF_DATASETS_CACHE)


def check_cache(cfg: DataConfig) -> None:
    """Raise UserError if no file can be written to the cache."""
    folder = cache_folder(cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = f"{error.strerror}; choose a folder you can write to"
        raise bad_setting(reason, data_cache_dir=folder) from None


def storage_error(cfg: DataConfig, error: BaseException) -> UserError | None:
    """Return the error to raise for a full disk or a read-only cache; None for other errors."""
    folder = cache_folder(cfg)
    for origin in origins(error):
        if not isinstance(origin, OSError):
            continue
        reason = f"{origin.filename or folder}: {origin.strerror}"
        if origin.errno in FULL:
            return UserError(
                f"{reason}; make room there, or choose other folders: --data_cache_dir ({folder}), and "
                f"HF_HUB_CACHE for downloads ({HF_HUB_CACHE})"
            )
        if origin.errno in CLOSED and str(folder) in str(origin.filename):
            return UserError(f"{reason}; choose a --data_cache_dir you can write to")
    return None


def delete_truncated(folder: Path) -> None:
    """Delete truncated Arrow files: one cut at a batch boundary would load silently with rows missing."""
    for path in folder.glob("*.arrow"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - len(END_OF_STREAM)))
            is_whole = file.read() == END_OF_STREAM
        if not is_whole:
            logger.warning("%s: truncated; deleted, its rows are tokenised again", path)
            path.unlink(missing_ok=True)
