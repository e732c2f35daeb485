"""Cache folder for rows and tokens: checks, errors and repair."""

from __future__ import annotations

import logging
from pathlib import Path

import datasets
from fp8_suite.core.errors import UserError, causes
from fp8_suite.core.files import DISK_FULL, NOT_WRITABLE
from huggingface_hub.constants import HF_HUB_CACHE

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # last bytes of a complete Arrow stream

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE)


def storage_error(error: BaseException) -> UserError | None:
    """Return a UserError if the cause is a full disk or a read-only cache; None for other errors."""
    folder = cache_folder()
    for origin in causes(error):
        if not isinstance(origin, OSError):
            continue
        reason = f"{origin.filename or folder}: {origin.strerror}"
        if origin.errno in DISK_FULL:
            return UserError(
                f"{reason}; free disk space, or set HF_DATASETS_CACHE (now {folder}) and, for downloads, "
                f"HF_HUB_CACHE (now {HF_HUB_CACHE}) to folders with more space"
            )
        if origin.errno in NOT_WRITABLE and str(folder) in str(origin.filename):
            return UserError(f"{reason}; set HF_DATASETS_CACHE to a writable folder")
    return None


def delete_truncated(folder: Path) -> None:
    """Delete truncated Arrow files: a file cut at a batch boundary would load without an error."""
    for path in folder.glob("*.arrow"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - len(END_OF_STREAM)))
            is_whole = file.read() == END_OF_STREAM
        if not is_whole:
            logger.warning("%s: truncated, deleting it; its rows are tokenized again", path)
            path.unlink(missing_ok=True)
